"""Confidence intervals, and how numbers are formatted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % confidence interval of the mean (Student's t); None for a single value."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def format_number(value: float) -> str:
    """Formats a number with three significant digits; large numbers keep all integer digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
