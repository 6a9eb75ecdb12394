"""Results that display themselves, in a notebook or as a figure.

The views are in `fewer.report`, a higher layer, so they are looked up by name when a result is displayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fewer.errors import SettingError
from fewer.registry import VIEWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["round", "megabytes", "seconds", "client"]


class Viewable(ABC):
    """A result that can display itself."""

    view: ClassVar[str]
    """The name of its view."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The metrics as plain rows, one dict per row of `to_pandas`."""

    def plot(self, by: By = "round") -> Figure:
        """A figure of the accuracy by round, by megabytes sent, by seconds, or by client."""
        figure: Figure = self._view().plot(by)
        return figure

    def to_pandas(self) -> Any:
        """The metrics as a pandas DataFrame."""
        return to_data_frame(self.records())

    def report(self, out: str | Path = "report") -> Path:
        """Writes an HTML report to the directory `out` and returns the path of the page."""
        page: Path = self._view().report(Path(out))
        return page

    def _repr_html_(self) -> str:
        """What a notebook displays."""
        text: str = self._view().html()
        return text

    def _view(self) -> Any:
        return VIEWS[self.view](self)


def to_data_frame(records: list[dict[str, Any]]) -> Any:
    """Rows as a pandas DataFrame; SettingError if pandas is not installed."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise SettingError("to_pandas needs pandas: pip install 'fewer[notebook]'") from None
    frame = DataFrame(records)
    for name in frame.columns:  # a count that some rows lack stays a whole number
        values = [record[name] for record in records if name in record]
        if len(values) < len(records) and all(type(value) is int for value in values):
            frame[name] = frame[name].astype("Int64")
    return frame
