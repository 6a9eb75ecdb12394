"""Self-contained HTML pages from templates: light and dark, for phones and for print, and accessible."""

from __future__ import annotations

import csv
import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fewer.report.style import DARK, png, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SVG_BYTES = 150_000
"""Pictures up to this size are embedded as SVG, larger ones as PNG."""
MAX_CSV_BYTES = 20_000
"""Tables up to this size are embedded for download."""
MEDIA_TYPES = {"png": "image/png", "svg": "image/svg+xml", "csv": "text/csv"}
_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"


class Table(NamedTuple):
    """Rows of values with column heads. The name is read aloud; the row with index `best` is highlighted."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    name: str = "Table"
    best: int | None = None


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
        if self.table is None:
            return b""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.table.heads, *self.table.rows])
        return file.getvalue().encode()

    def files(self, folder: str) -> dict[str, bytes]:
        """All files of the picture, by path."""
        contents = {kind: getattr(self, kind) for kind in MEDIA_TYPES}
        return {f"{folder}/{self.name}.{kind}": content for kind, content in contents.items() if content}

    def data_url(self, kind: str) -> str:
        """The picture or its values as a URL that contains them."""
        return f"data:{MEDIA_TYPES[kind]};base64,{b64encode(getattr(self, kind)).decode()}"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in CSS pixels."""
        width, height = self.figure.get_size_inches()
        return round(96 * width), round(96 * height)

    @property
    def is_bitmap(self) -> bool:
        """True if a page shows the picture as PNG."""
        return any(axes.images for axes in self.figure.axes) or len(self.svg) > MAX_SVG_BYTES

    @property
    def downloadable(self) -> bool:
        """True if a page contains the values."""
        return 0 < len(self.csv) <= MAX_CSV_BYTES

    @property
    def inline_svg(self) -> Markup:
        """The SVG as a part of a page, with unique ids and with colors that follow the theme."""
        root = ElementTree.fromstring(self.svg)
        root.attrib = {"role": "img", "aria-label": self.alt, "viewBox": root.attrib["viewBox"]}
        root.attrib |= dict(zip(("width", "height"), map(str, self.size), strict=True))
        for parent in list(root.iter()):
            for child in [child for child in parent if child.tag in (f"{_SVG}metadata", f"{_SVG}style")]:
                parent.remove(child)
        for element in root.iter():
            element.tag = element.tag.removeprefix(_SVG)
            element.text, element.tail = (element.text if element.tag == "text" else None), None
            if element.tag == "g":
                element.attrib.pop("id", None)  # names of parts, which nothing refers to
            adapted = {name.removeprefix(_XLINK): value for name, value in element.items()}
            element.attrib = {name: self._adapt(name, value) for name, value in adapted.items()}
        return Markup(ElementTree.tostring(root, "unicode"))

    def _adapt(self, attribute: str, value: str) -> str:
        """Makes an attribute of the SVG fit for a page."""
        if attribute == "id":
            return f"{self.name}-{value}"
        if attribute == "style":
            value = "; ".join(part for part in value.split("; ") if not part.startswith("font-family"))
            for color in DARK:
                value = value.replace(color.lower(), f"var({_variable(color)})")
            return value
        return value.replace("#", f"#{self.name}-")  # references: href and clip-path


def render(template: str, **values: Any) -> str:
    """Renders a template."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fewer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colors"] = {_variable(light): (light, dark) for light, dark in DARK.items()}
    return environment


def _variable(color: str) -> str:
    """The CSS variable of a color that differs between light and dark pages."""
    return f"--{color.lstrip('#').lower()}"
