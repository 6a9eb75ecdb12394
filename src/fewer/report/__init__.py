"""Reports: pictures and one page, read from runs and data. Nothing here computes a run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewer.report.audit import write_audit as write_audit
    from fewer.report.charts import client_picture as client_picture
    from fewer.report.charts import curve_picture as curve_picture
    from fewer.report.page import write_report as write_report
    from fewer.report.pictures import partition_picture as partition_picture
    from fewer.report.pictures import sheet_picture as sheet_picture
    from fewer.report.style import png as png
    from fewer.report.tables import recipe_picture as recipe_picture
    from fewer.report.tables import write_study as write_study

_HOMES = {
    "write_audit": "audit",
    "curve_picture": "charts",
    "client_picture": "charts",
    "write_report": "page",
    "partition_picture": "pictures",
    "sheet_picture": "pictures",
    "png": "style",
    "recipe_picture": "tables",
    "write_study": "tables",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:  # how methods look must not wait for torch
    if name not in _HOMES:
        raise AttributeError(f"module 'fewer.report' has no attribute '{name}'")
    return getattr(import_module(f"fewer.report.{_HOMES[name]}"), name)
