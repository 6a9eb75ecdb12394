"""Builds nets for given data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer

from fewer.errors import SettingError, unknown_option
from fewer.models.images import AlexNet, Conv4, FemnistCNN, LeNet5, ResNet12, SensorCNN, SmallCNN
from fewer.models.sequences import CharLSTM, EmbeddingBag, SentimentLSTM, TextBiLSTM

_IMAGES, _WINDOWS, _TEXT = (3, "images (channels, height, width)"), (2, "windows (channels, time)"), (1, "text")
_INPUTS: dict[object, tuple[int, str]] = {
    **dict.fromkeys((SmallCNN, LeNet5, Conv4, ResNet12, FemnistCNN, AlexNet), _IMAGES),
    **dict.fromkeys((CharLSTM, EmbeddingBag, TextBiLSTM, SentimentLSTM), _TEXT),
    SensorCNN: _WINDOWS,
}
"""Number of input dimensions, and a description for errors."""


def default_model(shape: tuple[int, ...], vocabulary: int | None = None, next_token: bool = False) -> str:
    """The name of the model for data without a chosen one: for text, images, windows of sensor readings, or features.

    `next_token` is True if the task is to predict the next token of a text.
    """
    if vocabulary is not None:
        return "char-lstm" if next_token else "embedding-bag"
    if len(shape) == 3:
        return "cnn"
    return "sensor-cnn" if len(shape) == 2 and shape[1] >= 4 else "mlp"


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
        suitable = default_model(data_facts["shape"], data_facts.get("vocabulary"))
        problem = f"model {model.__name__} takes {inputs}, but inputs have shape {data_facts['shape']}"
        raise SettingError(f"{problem}; {suitable} fits")
    if "vocabulary" in parameters and data_facts.get("vocabulary") is None:
        raise SettingError(f"model {model.__name__} takes text, but the data has no vocabulary")
    arguments = {name: value for name, value in data_facts.items() if name in parameters and value is not None}
    return partial(model, **arguments, **options)


def is_lazy(net: nn.Module) -> bool:
    """True if a layer such as `nn.LazyLinear` has no weights yet, because it has not seen an input."""
    return any(isinstance(module, LazyModuleMixin) and module.has_uninitialized_params() for module in net.modules())


def copy_net(net: nn.Module) -> nn.Module:
    """A copy of the net, which may be lazy."""
    copies: dict[int, Any] = {}  # of buffers that torch itself cannot copy
    for buffer in net.buffers():
        if isinstance(buffer, UninitializedBuffer):
            kind: Any = UninitializedBuffer
            copies[id(buffer)] = kind(device=buffer.device, dtype=buffer.dtype)
    return copy.deepcopy(net, copies)


def materialize(build: Callable[[], nn.Module], zeros: Tensor) -> nn.Module:
    """Builds a net. Its lazy layers get their weights by a forward pass of `zeros` in evaluation mode.

    If all layers are lazy, the weights are those of the same net without lazy layers.
    """
    net = build()
    if isinstance(net, nn.Module) and is_lazy(net):
        training = {module: module.training for module in net.modules()}
        with torch.no_grad():
            net.eval()(zeros)
        for module, mode in training.items():
            module.training = mode
    return net
