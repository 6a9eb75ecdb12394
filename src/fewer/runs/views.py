"""Results that show themselves, in a notebook or as a figure.

How they look is the business of the report, which lies above this floor: it is found by name, in the entry-point group
`fewer.views`, when something is to be shown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fewer.errors import SettingError
from fewer.registry import VIEWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["round", "megabytes", "seconds", "client"]


class Shown(ABC):
    """What can show itself."""

    view: ClassVar[str]
    """The name of what shows it."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The figures as plain rows, which `to_pandas` puts into a table."""

    def plot(self, by: By = "round") -> Figure:
        """A figure of the accuracy by round, by megabytes sent, by seconds or by client."""
        figure: Figure = self._view().plot(by)
        return figure

    def to_pandas(self) -> Any:
        """The figures as a pandas DataFrame."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise SettingError("to_pandas needs pandas: pip install 'fewer[notebook]'") from None
        return DataFrame(self.records())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        text: str = self._view().html()
        return text

    def _view(self) -> Any:
        return VIEWS[self.view](self)
