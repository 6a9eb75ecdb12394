"""Self-contained HTML pages: light and dark, for phones and for print, and accessible."""

from __future__ import annotations

import csv
import io
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from fewer.report.style import COLORS, DARK, FAINT, INK, png, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SVG_BYTES = 150_000
"""Pictures up to this size are embedded as SVG, larger ones as PNG."""
MAX_CSV_BYTES = 20_000
"""Tables up to this size are embedded for download."""


class Table(NamedTuple):
    """Rows of values with column heads."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def csv(self) -> bytes:
        """The table as CSV."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.heads, *self.rows])
        return file.getvalue().encode()


@dataclass(frozen=True)
class Picture:
    """A plot with its caption, its text alternative and the values that it shows."""

    name: str
    figure: Figure
    caption: str
    alt: str
    table: Table | None = None

    @cached_property
    def png(self) -> bytes:
        """The picture as PNG."""
        return png(self.figure)

    @cached_property
    def svg(self) -> bytes:
        """The picture as SVG."""
        return svg(self.figure)

    @cached_property
    def csv(self) -> bytes:
        """Its values as CSV; empty if it has none."""
        return self.table.csv() if self.table else b""

    def files(self, folder: str) -> dict[str, bytes]:
        """All files of the picture, by path."""
        contents = {"png": self.png, "svg": self.svg} | ({"csv": self.csv} if self.csv else {})
        return {f"{folder}/{self.name}.{kind}": content for kind, content in contents.items()}


def render_page(title: str, parts: Iterable[str]) -> str:
    """Renders a self-contained page with its title as the first heading."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return _TEMPLATE.format(title=escape(title), style=_STYLE, script=_SCRIPT, body=body)


def render_note(text: str) -> str:
    """Renders a highlighted note."""
    return f'<p class="note">{escape(text)}</p>'


def render_figure(picture: Picture) -> str:
    """Renders a picture with its caption, and a link to its values if they are small enough to embed."""
    width, height = _size(picture)
    size = f'width="{width}" height="{height}"'
    if any(axes.images for axes in picture.figure.axes) or len(picture.svg) > MAX_SVG_BYTES:
        content = b64encode(picture.png).decode()
        image = f'<img src="data:image/png;base64,{content}" alt="{escape(picture.alt)}" {size}>'
    else:
        image = _inline_svg(picture.svg.decode(), picture, size)
    link = ""
    if 0 < len(picture.csv) <= MAX_CSV_BYTES:
        file = escape(f"{picture.name}.csv")
        data = f"data:text/csv;base64,{b64encode(picture.csv).decode()}"
        link = f' <a href="{data}" download="{file}" aria-label="Save {file}">CSV</a>'
    return (
        f"<figure{' class=wide' if width > 700 else ''}>{_wrap_scrollable(image, picture.name)}"
        f"<figcaption>{escape(picture.caption)}{link}</figcaption></figure>"
    )


def _size(picture: Picture) -> tuple[int, int]:
    """Width and height in CSS pixels."""
    width, height = picture.figure.get_size_inches()
    return round(96 * width), round(96 * height)


def render_image(picture: Picture) -> str:
    """Renders a picture for another page, such as a notebook, on a white background."""
    content = b64encode(picture.svg).decode()
    width, height = _size(picture)
    return (
        f'<img src="data:image/svg+xml;base64,{content}" alt="{escape(picture.alt)}" width="{width}" height="{height}">'
    )


def render_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], bold: Sequence[int] = (), name: str = "Table"
) -> str:
    """Renders a table; the rows with an index in `bold` are highlighted."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f"<tr{' class=best' if index in bold else ''}>"
        + f'<th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for index, (first, *cells) in enumerate(rows)
    )
    return _wrap_scrollable(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", name)


def render_details(title: str, content: str) -> str:
    """Renders content that is collapsed at first."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _wrap_scrollable(content: str, name: str) -> str:
    """Wraps content that may be wider than the page, so that it can be scrolled with the keyboard."""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(name)}">{content}</div>'


def _inline_svg(text: str, picture: Picture, size: str) -> str:
    """Turns an SVG file into a part of the page, with unique ids and colors that follow the theme."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;\"]*;? ?", "", text, flags=re.S)
    text = re.sub(r"\s*\n\s*", " ", text).replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{picture.name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{picture.name}-", text)
    for color in (*COLORS, FAINT, "#ffffff"):
        text = re.sub(rf"(fill|stroke): {color}\b", rf"\1: {_color_variable(color)}", text, flags=re.I)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box
    alt = escape(picture.alt)
    return re.sub(r"<svg[^>]*>", lambda _: f'<svg role="img" aria-label="{alt}" {size} {box[0]}>', text, count=1)


def _color_variable(color: str) -> str:
    return f"var(--{color.lstrip('#').lower()})" if color in DARK else color


def _css_colors(dark: bool) -> str:
    page = {"faint": "#9aa0a3", "link": "#7db8f0"} if dark else {"faint": "#5f6366", "link": "#0b5cad"}
    pictures = {key.lstrip("#").lower(): value if dark else key for key, value in DARK.items()}
    return " ".join(f"--{name}: {value};" for name, value in {**page, **pictures}.items())


_STYLE = (
    f"""
:root {{ color-scheme: light; {_css_colors(False)} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ color-scheme: dark; {_css_colors(True)} }} }}
:root[data-theme=dark] {{ color-scheme: dark; {_css_colors(True)} }}
:root {{ --ink: {_color_variable(INK)}; --line: {_color_variable(FAINT)}; --paper: {_color_variable("#ffffff")}; }}
"""
    + """
body { margin: 0 auto; padding: 1rem; max-width: 64rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; padding-right: 4.5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
a { color: var(--link); }
#theme { position: absolute; top: 1rem; right: max(1rem, calc(50vw - 31rem)); font: inherit; font-size: .875rem;
  color: var(--ink); background: none; border: 1px solid var(--faint); border-radius: .4rem; padding: .25rem .6rem;
  cursor: pointer; }
.verdict { border: 1px solid var(--line); border-radius: .5rem; padding: .25rem 1rem; margin: 1rem 0; }
.verdict p { margin: .6rem 0; }
.verdict p:first-child { font-size: 1.1rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--faint); font-weight: normal; }
th:first-child { text-align: left; }
tbody th { font-weight: normal; white-space: normal; }
.best > * { font-weight: bold; }
details td, details th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .3rem 0; }
.small, figcaption { color: var(--faint); font-size: .875rem; }
.note { border-left: 3px solid #d55e00; padding-left: .75rem; overflow-wrap: anywhere; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: start; margin: 1rem 0; }
figure { margin: 0; flex: 0 1 30rem; min-width: 0; }
figure.wide { flex-basis: 100%; }
img, svg { display: block; max-width: 100%; height: auto; border-radius: .4rem; }
img { background: #fff; }
svg { font-family: system-ui, "DejaVu Sans", sans-serif; stroke-linejoin: round; }
figcaption { margin-top: .4rem; }
@media (max-width: 40rem) {
  th, td { padding-right: .6rem; font-size: .9rem; }
  .wide img, .wide svg { max-width: none; width: 45rem; }
}
@media print {
  body { max-width: none; padding: 0; }
  #theme { display: none; }
  figure, tr, .verdict { break-inside: avoid; }
  h2 { break-after: avoid; }
  .scroll { overflow: visible; }
  th, td { white-space: normal; }
  figcaption a { display: none; }
  figure { flex-basis: 45%; }
}
"""
)

_SCRIPT = """
const root = document.documentElement, button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const showTheme = () => { button.textContent = dark() ? "Light" : "Dark"; };
button.hidden = false;
button.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; showTheme(); };
let before, closed = [];
addEventListener("beforeprint", () => {
  before = root.dataset.theme;
  root.dataset.theme = "light";
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const details of closed) details.open = true;
});
addEventListener("afterprint", () => {
  before ? root.dataset.theme = before : delete root.dataset.theme;
  for (const details of closed) details.open = false;
});
showTheme();
"""

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<button id="theme" type="button" hidden>Dark</button>
<script>{script}</script>
</body>
</html>
"""
