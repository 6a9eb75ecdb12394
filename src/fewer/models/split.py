"""Nets in two parts: an encoder from inputs to features, and a head from features to class scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.models.task import Task

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Relu": nn.ReLU,
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
    "Softplus": nn.Softplus,
    "Elu": nn.ELU,
    "Gelu": nn.GELU,
    "Silu": nn.SiLU,
}
"""Activations that bound their outputs, by the name that autograd gives the operation."""
_KEEP_RANGE = (
    *("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "Clone"),
    *("ToCopy", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Mean", "Amax"),
)
"""Operations whose outputs are inputs or means of inputs."""


class EncoderHead(nn.Module):
    """A net that computes `head(encoder(x))`. Methods that work on features use the two parts."""

    feature_activation: Callable[[], nn.Module] | None = None
    """The activation that bounds the features; None if the last operations of the encoder tell."""

    def __init__(self, encoder: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        scores: Tensor = self.head(self.encoder(x))
        return scores


def split_net(net: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The encoder and the head of a net. Raises `SettingError` if the net lacks one of them."""
    if missing := _missing_parts(net):
        raise SettingError(
            f"this method works on features, but model {type(net).__name__} has no {' and no '.join(missing)}; "
            "use an nn.Module with attributes encoder and head that computes head(encoder(x))"
        )
    return net.encoder, net.head  # type: ignore[return-value]


def _missing_parts(net: nn.Module) -> list[str]:
    return [name for name in ("encoder", "head") if not isinstance(getattr(net, name, None), nn.Module)]


def find_head(task: Task, net: nn.Module) -> tuple[nn.Module, int]:
    """The head of a net and its number of inputs. A net without encoder and head may end in a Linear layer instead."""
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    if _missing_parts(net) and layers and _is_output(layers[-1], task, net):
        return layers[-1], layers[-1].in_features
    return split_net(net)[1], feature_width(task, net)


def _is_output(layer: nn.Module, task: Task, net: nn.Module) -> bool:
    """Returns True if the layer's output is the output of the net."""
    outputs: list[Tensor] = []
    with layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output)):
        scores = _probe(net, task)
    return bool(outputs) and outputs[-1].ndim == 2 and torch.equal(outputs[-1], scores)


def feature_width(task: Task, net: nn.Module | None = None) -> int:
    """The number of features that the encoder of `net` (by default the task's net) outputs."""
    shape = _probe(split_net(net or task.net())[0], task).shape
    if len(shape) != 2:
        raise SettingError(
            f"this method needs an encoder that outputs one vector per sample, got outputs of shape {[*shape[1:]]}"
        )
    return int(shape[1])


def find_activation(task: Task, net: nn.Module) -> nn.Module:
    """The activation that bounds the inputs of the head; the identity if they may be any number."""
    build = find_activation_builder(task, net)
    return nn.Identity() if build is None else build()


def find_activation_builder(task: Task, net: nn.Module) -> Callable[[], nn.Module] | None:
    """Builds the activation that bounds the inputs of the head; None if they may be any number.

    It is the net's `feature_activation`, or the last operation before the head that is not a pool or a reshape.
    """
    if declared := getattr(net, "feature_activation", None):
        build: Callable[[], nn.Module] = declared
        return build
    inputs: list[Tensor] = []
    with find_head(task, net)[0].register_forward_pre_hook(lambda head, args: inputs.append(args[0])):
        _probe(net, task)
    return _bound_of(inputs[-1].grad_fn)


def _bound_of(node: Any) -> Callable[[], nn.Module] | None:
    """The activation after which a tensor was computed, by its node in autograd's graph."""
    while node is not None:
        operation = type(node).__name__.partition("Backward")[0]  # ReluBackward0 is the node of a ReLU
        if operation in ACTIVATIONS:
            return ACTIVATIONS[operation]
        if operation == "Hardtanh":  # also ReLU6
            return partial(nn.Hardtanh, node._saved_min_val, node._saved_max_val)
        if operation in ("Clamp", "ClampMin") and node._saved_min == 0:
            return nn.ReLU
        if operation == "Cat":
            bounds = {_bound_of(part) for part, _ in node.next_functions}
            return bounds.pop() if len(bounds) == 1 else None
        node = node.next_functions[0][0] if operation.startswith(_KEEP_RANGE) else None
    return None


@torch.enable_grad()
def _probe(module: nn.Module, task: Task) -> Tensor:
    """The output for an input of zeros, in evaluation mode. Autograd records its operations."""
    training, zeros = module.training, torch.zeros(1, *task.shape, device=task.device).requires_grad_().clone()
    try:
        output: Tensor = module.eval()(zeros)
    except (RuntimeError, IndexError):  # an embedding or a table of word vectors takes integer tokens
        output = module(zeros.long())
    finally:
        module.train(training)
    return output
