"""Reports: plots and pages, made from runs and data. Nothing here trains."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewer.report.audit import write_audit as write_audit
    from fewer.report.charts import plot_clients as plot_clients
    from fewer.report.charts import plot_curves as plot_curves
    from fewer.report.page import write_report as write_report
    from fewer.report.pictures import plot_examples as plot_examples
    from fewer.report.pictures import plot_partition as plot_partition
    from fewer.report.style import png as png
    from fewer.report.tables import plot_recipe as plot_recipe
    from fewer.report.tables import write_study as write_study

_MODULES = {
    "write_audit": "audit",
    "plot_curves": "charts",
    "plot_clients": "charts",
    "write_report": "page",
    "plot_partition": "pictures",
    "plot_examples": "pictures",
    "png": "style",
    "plot_recipe": "tables",
    "write_study": "tables",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:  # lazy: the dashboard needs line styles, but not torch
    if name not in _MODULES:
        raise AttributeError(f"module 'fewer.report' has no attribute '{name}'")
    return getattr(import_module(f"fewer.report.{_MODULES[name]}"), name)
