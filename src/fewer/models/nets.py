"""Builds nets for given data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from fewer.errors import SettingError, unknown_option
from fewer.models.images import AlexNet, Conv4, FemnistCNN, LeNet5, ResNet12, SensorCNN, SmallCNN
from fewer.models.sequences import CharLSTM, SentimentLSTM, TextBiLSTM

_IMAGES, _WINDOWS, _TEXT = (3, "images (channels, height, width)"), (2, "windows (channels, time)"), (1, "text")
_INPUTS: dict[object, tuple[int, str]] = {
    **dict.fromkeys((SmallCNN, LeNet5, Conv4, ResNet12, FemnistCNN, AlexNet), _IMAGES),
    **dict.fromkeys((CharLSTM, TextBiLSTM, SentimentLSTM), _TEXT),
    SensorCNN: _WINDOWS,
}
"""Number of input dimensions, and a description for errors."""


def net_factory(
    model: Callable[..., nn.Module], data_facts: Mapping[str, Any], options: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """Binds a model to its data and options. The result builds one net per call.

    `data_facts` are facts about the data: `shape`, `classes`, `vocabulary`, … The model gets those in its signature.
    """
    parameters = inspect.signature(model).parameters
    for name in options:
        if name not in parameters:
            allowed = [key for key in parameters if key not in data_facts]
            raise unknown_option(f"model {getattr(model, '__name__', model)}", name, allowed)
    dimensions, inputs = _INPUTS.get(model, (None, ""))
    if dimensions is not None and len(data_facts["shape"]) != dimensions:
        raise SettingError(f"model {model.__name__} takes {inputs}, but inputs have shape {data_facts['shape']}")
    if "vocabulary" in parameters and data_facts.get("vocabulary") is None:
        raise SettingError(f"model {model.__name__} takes text, but the data has no vocabulary")
    arguments = {name: value for name, value in data_facts.items() if name in parameters and value is not None}
    return partial(model, **arguments, **options)
