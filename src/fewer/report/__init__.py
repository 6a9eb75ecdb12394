"""Reports: pictures and one page, read from runs and data. Nothing here computes a run."""

from fewer.report.audit import write_audit
from fewer.report.charts import curve_picture, party_picture
from fewer.report.page import write_report
from fewer.report.pictures import partition_picture, sheet_picture
from fewer.report.style import png
from fewer.report.tables import recipe_picture, write_study

__all__ = [
    "curve_picture",
    "partition_picture",
    "party_picture",
    "png",
    "recipe_picture",
    "sheet_picture",
    "write_audit",
    "write_report",
    "write_study",
]
