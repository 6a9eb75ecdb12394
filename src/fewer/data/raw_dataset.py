"""Data as a source has it, before it is divided among clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Inputs = Array | Tensor | list[str]
"""Images as bytes, features or series as floats, token numbers as integers, or texts."""


@dataclass(frozen=True)
class RawDataset:
    """Inputs and class numbers, and what a source knows besides."""

    x: Inputs
    """Images as bytes, features or series as floats, token numbers as integers, or texts."""
    y: Array
    """Class numbers from 0 on."""
    test: tuple[Inputs, Array] | None = None
    """Inputs and labels for testing; None where the source has no such division."""
    client_ids: Array | None = None
    """Whom each training sample belongs to (names or numbers; of windows of a long text, -1 is nobody's)."""
    test_client_ids: Array | None = None
    """Whom each test sample belongs to."""
    names: tuple[str, ...] = ()
    """What the classes are called."""
    tokens: tuple[str, ...] = ()
    """The vocabulary, where inputs are token numbers; token 0 fills up short texts or stands for unknown ones."""
    normal: tuple[float, float] | None = None
    """Mean and deviation of pixels in 0 … 1, where they are known."""
    in_time: bool = False
    """Whether the samples of a client are in the order of time, and so to be split in time."""
    split: tuple[int, int, int] | None = None
    """How many of the classes are base, validation and novel ones, in this order, where they are divided so."""
