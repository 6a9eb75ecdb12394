"""Text in HTML is escaped."""

from fewer.report.charts import plot_bars
from fewer.report.html import Picture, render_figure
from fewer.report.metrics import Interval
from fewer.report.style import assign_label_styles


def test_captions_and_alt_texts_are_escaped() -> None:
    drawn = plot_bars({"a": Interval(0.5, None), "b": Interval(0.4, None)}, assign_label_styles({"a": "a", "b": "b"}))
    page = render_figure(Picture("bars", drawn, "<script>", '"><script>'))
    assert "<script>" not in page and page.count("&lt;script&gt;") == 2
