"""How pictures look: one theme, readable at small sizes, and a line style for each method.

Colors are from the color-blind-safe palette of Okabe and Ito, without yellow (too pale on white) and with `INK` for
black. `DARK` replaces some of them on dark pages. matplotlib is imported only when a picture is drawn; its global
settings do not change.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200
SIZE = (4.8, 3.2)
"""Size of a plain chart in inches. It is small, so that its text stays large on a page."""
INK, FAINT = "#222222", "#d8d8d8"
BLUE = "#0072B2"
ORANGE, GREEN, PINK, RED, SKY = "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"

COLORS = (BLUE, ORANGE, GREEN, PINK, RED, SKY, INK)
DARK = {INK: "#e8e8e8", FAINT: "#45494b", BLUE: "#4da3d9", RED: "#ee7722", "#ffffff": "#181a1b"}
"""Replacement colors for dark pages; the other colors work on both."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")

_THEME = Path(__file__).with_name("templates") / "theme.mplstyle"


class LineStyle(NamedTuple):
    """Color, marker and dash pattern of a line."""

    color: str
    marker: str
    dash: str


def assign_styles(methods: Iterable[str], known: Mapping[str, LineStyle] | None = None) -> dict[str, LineStyle]:
    """Gives each method its own line style, in addition to the `known` ones.

    A hash of the name picks the color, or the next one that is free. After every seven methods, all colors are in use;
    the next seven get another dash pattern and marker.
    """
    styles = dict(known or {})
    for method in methods:
        if method in styles:
            continue
        cycle = len(styles) // len(COLORS)
        used = {style.color for style in list(styles.values())[cycle * len(COLORS) :]}
        start = crc32(method.encode())
        index = next(i % len(COLORS) for i in range(start, start + len(COLORS)) if COLORS[i % len(COLORS)] not in used)
        styles[method] = LineStyle(COLORS[index], MARKERS[(index + cycle) % len(MARKERS)], DASHES[cycle % len(DASHES)])
    return styles


def assign_label_styles(
    methods: Mapping[str, str], known: Mapping[str, LineStyle] | None = None
) -> dict[str, LineStyle]:
    """Gives each label a line style, given its method.

    The first label of a method has the method's style. Its other labels keep the color and get a dash pattern and a
    marker that are still free, or another color if there are none left. Styles repeat only after all 196.
    """
    by_method = assign_styles(methods.values(), known)
    used = {by_method[method] for method in methods.values()}
    styles: dict[str, LineStyle] = {}
    for label, method in methods.items():
        style = by_method[method]
        if method in [methods[other] for other in styles]:
            colors = (style.color, *COLORS)
            variants = [variant for color in colors for variant in _variants(style._replace(color=color))]
            free = (variant for variant in variants if variant not in used)
            style = next(free, variants[len(styles) % len(variants)])
            used.add(style)
        styles[label] = style
    return styles


def _variants(style: LineStyle) -> list[LineStyle]:
    """All other styles of the same color; neighbors differ in both dash pattern and marker."""
    marker, dash = MARKERS.index(style.marker), DASHES.index(style.dash)
    return [
        LineStyle(style.color, MARKERS[(marker + step) % len(MARKERS)], DASHES[(dash + step) % len(DASHES)])
        for step in range(1, len(MARKERS) * len(DASHES))
    ]


def text_color(value: float) -> str:
    """Returns the text color on a viridis background, from 0 (dark) to 1 (light); the same in both themes."""
    return "#000000" if value > 0.55 else "#fefefe"


def theme() -> AbstractContextManager[None]:
    """Draws in our theme, then restores the user's matplotlib settings."""
    from matplotlib import style

    return style.context(_THEME, after_reset=True)


def png(figure: Figure) -> bytes:
    """Renders a picture as PNG; the same picture gives the same bytes."""
    return _save(figure, "png", {"Software": None})


def svg(figure: Figure) -> bytes:
    """Renders a picture as SVG; the same picture gives the same bytes."""
    return _save(figure, "svg", {"Date": None, "Creator": None})


def _save(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    file = io.BytesIO()
    with theme():
        if figure.get_layout_engine():  # computes the layout once instead of for every file
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
    return file.getvalue()
