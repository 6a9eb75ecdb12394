"""The primary metric of a run: its name, which direction is better, and how people read it. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fewer.statistics import Interval, format_interval


@dataclass(frozen=True)
class PrimaryMetric:
    """The metric that ranks runs. settings.json records it; runs without a record have accuracy."""

    name: str = "accuracy"
    higher_is_better: bool = True
    percent: bool = True
    """True if values are fractions, which people read in percent."""

    @property
    def scale(self) -> float:
        """Factor of values in tables and plots."""
        return 100 if self.percent else 1

    @property
    def unit(self) -> str:
        """What follows a number: " %", or nothing."""
        return " %" if self.percent else ""

    @property
    def label(self) -> str:
        """The name with its unit, for axes and the heads of tables."""
        return self.name + self.unit

    @property
    def title(self) -> str:
        """The name at the start of a sentence."""
        return self.name.capitalize() if self.percent else self.name

    @property
    def best(self) -> str:
        """Which value is best: highest or lowest."""
        return "highest" if self.higher_is_better else "lowest"

    def rank(self, value: float) -> float:
        """A number that is higher for better values."""
        return value if self.higher_is_better else -value

    def format(self, value: float, digits: int = 2) -> str:
        """A value with its unit: 93.40% or 0.1234."""
        return f"{value:.{digits}%}" if self.percent else f"{value:.4g}"

    def format_interval(self, value: Interval | None, digits: int = 2) -> str:
        """A mean with its confidence interval, without unit; a dash for None."""
        if value is None or self.percent:
            return format_interval(value, digits)
        return f"{value.mean:.4g}" + ("" if value.half is None else f" ± {value.half:.2g}")


ACCURACY = PrimaryMetric()
