"""Intervals and numbers in text."""

import math

import pytest

from fewer.runs.statistics import format_number, half_width


def test_half_width_by_arithmetic() -> None:
    assert half_width([0.5]) is None
    # mean 2, standard deviation 1, t(2 degrees, 97.5 %) = 4.30265
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)


def test_amounts_have_three_digits_and_no_exponent() -> None:
    assert [format_number(value) for value in (0, 2.756, 10.64, 999.4, 999.7, 1293.28)] == [
        "0",
        "2.76",
        "10.6",
        "999",
        "1,000",
        "1,293",
    ]
