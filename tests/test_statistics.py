"""Intervals and formats of numbers."""

from __future__ import annotations

import math

import pytest

from fewer.statistics import Interval, format_interval, format_number, half_width, interval, wilson_interval


def test_intervals_of_means_are_students_t() -> None:
    values = [0.2, 0.4, 0.6]  # standard deviation 0.2; t with 2 degrees of freedom: 4.3027 (tables)
    assert half_width(values) == pytest.approx(4.302653 * 0.2 / math.sqrt(3), rel=1e-6)
    assert interval(values) == pytest.approx((0.4, half_width(values))) and interval([0.3]) == (0.3, None)


def test_the_wilson_interval_of_a_textbook_example() -> None:
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, Table I
    assert wilson_interval(0, 20)[0] == 0


@pytest.mark.parametrize(
    ("value", "arguments", "text"),
    [
        (None, (), "–"),
        (Interval(0.5, None), (), "50.00"),
        (Interval(0.51234, 0.0123), (), "51.23 ± 1.23"),
        (Interval(0.51234, 0.0123), (1,), "51.2 ± 1.2"),
        (Interval(0.51234, 0.0123), (3, 1), "0.512 ± 0.012"),
    ],
)
def test_an_interval_is_formatted_with_its_half_width(
    value: Interval | None, arguments: tuple[int, ...], text: str
) -> None:
    assert format_interval(value, *arguments) == text


def test_amounts_have_three_digits_and_no_exponent() -> None:
    texts = [format_number(value) for value in (0, 2.756, 10.64, 999.4, 999.7, 1293.28)]
    assert texts == ["0", "2.76", "10.6", "999", "1,000", "1,293"]
