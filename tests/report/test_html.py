"""Text in HTML is escaped."""

from fewer.report.charts import plot_bars
from fewer.report.html import Picture, Table, render
from fewer.report.style import assign_label_styles
from fewer.statistics import Interval


def test_captions_and_alt_texts_are_escaped() -> None:
    drawn = plot_bars({"a": Interval(0.5, None), "b": Interval(0.4, None)}, assign_label_styles({"a": "a", "b": "b"}))
    picture = Picture("bars", drawn, "<script>", '"><script>')
    table = Table(["<script>"], [("<script>", "<script>")], "<script>")
    page = render("result.html", title="<script>", table=table, pictures=[picture])
    assert page.count("<script>") == 1 and page.count("&lt;script&gt;") == 8
