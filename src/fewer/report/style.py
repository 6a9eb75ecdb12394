"""How all pictures look: one style, readable when small, and for each method a look of its own, the same everywhere.

Colors are those of Okabe and Ito, which people with color-blindness can tell apart, without the yellow that is lost
on white, and with the color of the ink for black. On a dark page `DARK` has another for some of them. matplotlib is
imported when a picture is drawn; its global settings stay as they are.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200
SIZE = (4.8, 3.2)
"""Of a plain chart, in inches: small, so that its letters are large where it is shown."""
INK, FAINT = "#222222", "#d8d8d8"
BLUE = "#0072B2"

ORANGE, GREEN, PINK, RED, SKY = "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"

COLORS = (BLUE, ORANGE, GREEN, PINK, RED, SKY, INK)
DARK = {INK: "#e8e8e8", FAINT: "#45494b", BLUE: "#4da3d9", RED: "#ee7722", "#ffffff": "#181a1b"}
"""What takes the place of a color where the page is dark; the others do on both."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("--", ":", "-.")
_SOLID = ("fedavg", "fedprox", "fedbn", "metafed", "fedmk", "fedgen", "local")
"""Methods that are often compared: each has a color that none of the others has, and a whole line."""

_SETTINGS: Any = {
    "figure.dpi": DPI,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # names may contain dollars
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.fontsize": 9,
    "legend.handlelength": 2.8,
    "legend.columnspacing": 1.5,
    "svg.fonttype": "none",  # letters stay letters, which can be read, found and scaled
    "svg.hashsalt": "fewer",
}


class Look(NamedTuple):
    """By what a method is known in a picture."""

    color: str
    marker: str
    dash: str


_DASHED = {
    "fedavg-moved": Look(BLUE, "o", "--"),
    "fedmk-paper": Look(INK, "X", "--"),
    "feddistill": Look(GREEN, "^", "--"),
    "feddistill-logits": Look(SKY, "P", "-."),
    "fedensemble": Look(PINK, "D", "-."),
    "fedmeta": Look(RED, "v", "--"),
    "fedavg-meta": Look(SKY, "P", "--"),
    "reptile": Look(GREEN, "^", "-."),
    "per-fedavg": Look(ORANGE, "s", "--"),
    "alone": Look(INK, "X", ":"),
    "frl": Look(RED, "v", "-."),
    "frl-deploy": Look(PINK, "D", "--"),
    "frl-scratch": Look(INK, "X", "-."),
    "frl-fine-tuning": Look(BLUE, "o", "-."),
    "frl-per-fedavg": Look(ORANGE, "s", "-."),
    "frl-lasting": Look(PINK, "v", "-."),
    "frl-warm": Look(GREEN, "P", "-."),
    "f2l": Look(RED, "v", ":"),
    "fl-maml": Look(ORANGE, "s", ":"),
    "fl-proto": Look(GREEN, "^", ":"),
    "fedfsl": Look(BLUE, "o", ":"),
    "local-maml": Look(SKY, "P", ":"),
    "local-proto": Look(PINK, "D", ":"),
}
"""The others that come with the package: those that are compared with each other have colors of their own."""


def look(method: str) -> Look:
    """The look of a method, which depends on its name alone."""
    if method in _SOLID:
        place = _SOLID.index(method)
        return Look(COLORS[place], MARKERS[place], "-")
    if method in _DASHED:
        return _DASHED[method]
    number, color = divmod(crc32(method.encode()), len(COLORS))
    number, dash = divmod(number, len(DASHES))
    return Look(COLORS[color], MARKERS[number % len(MARKERS)], DASHES[dash])


def looks(methods: Mapping[str, str]) -> dict[str, Look]:
    """A look for each label, given its method: the method's own for the first of its labels.

    Further labels of it keep the color, and have a line and a marker that the first has not.
    """
    found: dict[str, Look] = {}
    for label, method in methods.items():
        color, marker, dash = look(method)
        again = sum(other == method for other in list(methods.values())[: len(found)])
        lines = ["-", *DASHES]
        dash = lines[(lines.index(dash) + again) % len(lines)]
        marker = MARKERS[(MARKERS.index(marker) + again) % len(MARKERS)]
        found[label] = Look(color, marker, dash)
    return found


def on_fill(share: float) -> str:
    """The color of letters on a field of viridis, 0 dark to 1 light; it does not change with that of the page."""
    return "#000000" if share > 0.55 else "#fefefe"


@contextmanager
def style() -> Iterator[None]:
    """Draw in our style, whatever the user's own is; that one is back afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def png(figure: Figure) -> bytes:
    """A picture as a PNG file; the same picture gives the same bytes."""
    file = io.BytesIO()
    with style():
        _settle(figure)
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def svg(figure: Figure) -> bytes:
    """A picture as an SVG file; the same picture gives the same bytes."""
    file = io.BytesIO()
    with style():
        _settle(figure)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _settle(figure: Figure) -> None:
    """Find out once where everything goes, not for every file anew."""
    if figure.get_layout_engine():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
