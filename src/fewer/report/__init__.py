"""Reports: plots and pages, made from runs and data. Nothing here trains."""
