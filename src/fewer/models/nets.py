"""Nets by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from fewer.errors import SettingError, unknown
from fewer.models.images import AlexNet, Conv4, FemnistCNN, LeNet5, ResNet12, SensorCNN, SmallCNN
from fewer.models.sequences import CharLSTM, SentimentLSTM, TextBiLSTM

_NEEDS = {
    SensorCNN: (2, "windows (channels, time)"),
    CharLSTM: (1, "text"),
    TextBiLSTM: (1, "text"),
    SentimentLSTM: (1, "text"),
}
_NEEDS |= dict.fromkeys(
    (SmallCNN, LeNet5, Conv4, ResNet12, FemnistCNN, AlexNet), (3, "images (channels, height, width)")
)


def maker(
    factory: Callable[..., nn.Module], facts: Mapping[str, Any], options: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """Makes a net from what it wants to know of the data (`shape`, `classes`, `vocabulary` …) and its own options."""
    wanted = inspect.signature(factory).parameters
    for name in options:
        if name not in wanted:
            allowed = [key for key in wanted if key not in facts]
            raise unknown(f"option of model {getattr(factory, '__name__', factory)}", name, allowed)
    dimensions, what = _NEEDS.get(factory, (None, ""))  # type: ignore[call-overload]
    if dimensions is not None and len(facts["shape"]) != dimensions:
        raise SettingError(f"model {factory.__name__} takes {what}, but inputs have shape {facts['shape']}")
    if "vocabulary" in wanted and facts.get("vocabulary") is None:
        raise SettingError(f"model {factory.__name__} takes text, but the data has no vocabulary")
    given = {name: value for name, value in facts.items() if name in wanted and value is not None}
    return partial(factory, **given, **options)
