"""Confidence intervals, and how numbers are formatted. scipy.stats is imported on first use: it takes a second."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95
"""Confidence level of all intervals."""


class Interval(NamedTuple):
    """A mean and the half-width of its 95 % confidence interval (Student's t); None for a single value."""

    mean: float
    half: float | None


def interval(values: Sequence[float]) -> Interval:
    """Mean and confidence interval of the values."""
    return Interval(statistics.fmean(values), half_width(values))


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the confidence interval of the mean (Student's t); None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Confidence interval of the proportion `count / total`, assuming independent draws (Wilson, JASA 1927)."""
    from scipy.stats import binomtest

    ends = binomtest(count, total).proportion_ci(LEVEL, method="wilson")
    return float(ends.low), float(ends.high)


def format_interval(value: Interval | None, digits: int = 2, scale: float = 100) -> str:
    """Formats a mean with its confidence interval, by default in %; a dash for None."""
    if value is None:
        return "–"
    return f"{scale * value.mean:.{digits}f}" + ("" if value.half is None else f" ± {scale * value.half:.{digits}f}")


def format_number(value: float) -> str:
    """Formats a number with three significant digits; large numbers keep all integer digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def format_megabytes(count: float) -> str:
    """Formats bytes as MB with three significant digits."""
    return f"{count / 1e6:.3g} MB" if count < 1e9 else f"{count / 1e6:,.0f} MB"


def format_duration(seconds: float) -> str:
    """Formats seconds as hours, minutes or seconds."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"
