"""A frozen encoder: its features are computed once and cached, and only the head is trained and sent.

The data then has features as inputs, and the task's net is the head alone. So methods, codecs and runtimes need not
know about the encoder.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewer.data import Samples
from fewer.data.cache import load_or_build
from fewer.models.split import feature_width, find_activation_builder, split_net
from fewer.models.task import Task
from fewer.models.weights import load_weights

BATCH_SIZE = 100
"""Samples that are encoded at once."""
PROBES = 16
"""Samples whose features are part of the key of a cache, because weights do not tell what the encoder's code does."""
HEAD = "head."
"""Names of the head's weights begin with this."""


class HeadNet(nn.Module):
    """The head of a net, for features as inputs. Its encoder is the identity."""

    def __init__(self, head: nn.Module, feature_activation: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.encoder = nn.Identity()
        self.head = head
        self.feature_activation = feature_activation

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of features."""
        scores: Tensor = self.head(x)
        return scores


@dataclass(frozen=True, eq=False)
class HeadBuilder:
    """Builds heads with random weights. It avoids to build the encoder, which may be large and read from a file."""

    build_net: Callable[[], nn.Module]
    """Builds the whole net."""
    template: nn.Module
    """A head."""
    feature_activation: Callable[[], nn.Module] | None = None
    """The activation that bounds the features of the encoder."""

    def __call__(self) -> HeadNet:
        """A new head. If a layer cannot draw new weights, the whole net is built for it."""
        layers = [module for module in self.template.modules() if module._parameters or module._buffers]
        if not all(hasattr(layer, "reset_parameters") for layer in layers):
            return HeadNet(split_net(self.build_net())[1], self.feature_activation)
        head = copy.deepcopy(self.template)
        for layer in head.modules():
            reset: Any = getattr(layer, "reset_parameters", None)
            if reset is not None:
                reset()
        return HeadNet(head, self.feature_activation)


@dataclass(frozen=True, eq=False)
class FrozenEncoder:
    """An encoder that never changes. Calling it returns the features of samples, from a cache if they are there."""

    module: nn.Module
    device: torch.device
    folder: Path | None = None
    """Where features are cached; None for the cache of all runs ($FEWER_CACHE)."""

    @property
    def digest(self) -> str:
        """A hash of the encoder's structure and weights."""
        return hash_module(self.module)

    def __call__(self, samples: Samples) -> Tensor:
        """The features of all rows of `samples.x`, whichever rows belong to the samples."""
        content = hashlib.sha256(self.digest.encode())
        content.update(repr((tuple(samples.x.shape), str(samples.x.dtype), samples.is_text)).encode())
        for scaling in (samples.shift, samples.scale):
            content.update(repr(scaling.tolist() if isinstance(scaling, Tensor) else scaling).encode())
        content.update(_bytes_of(samples.x))
        probes = replace(samples, x=samples.x[:: math.ceil(len(samples.x) / PROBES)])
        content.update(_bytes_of(self.encode(probes).half()))
        name = f"features-{content.hexdigest()[:16]}"
        arrays = load_or_build(name, lambda: {"features": self.encode(samples).numpy()}, self.folder)
        return torch.from_numpy(arrays["features"])

    @torch.no_grad()
    def encode(self, samples: Samples) -> Tensor:
        """Computes the features of all rows of `samples.x`."""
        rows = replace(samples, rows=None, y=torch.zeros(len(samples.x), dtype=torch.int64))
        module = self.module.to(self.device).eval()
        return torch.cat([module(x.to(self.device)).float().cpu() for x, _ in rows.chunks(BATCH_SIZE)])


def hash_module(module: nn.Module, frozen_only: bool = False) -> str:
    """A hash of a module's structure, parameters and buffers; or only of what its state dict leaves out."""
    content = hashlib.sha256(repr(module).encode())
    sent = module.state_dict().keys() if frozen_only else ()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in sent:
            continue
        content.update(name.encode())
        content.update(_bytes_of(tensor.detach()))
    return content.hexdigest()[:16]


def hash_frozen(task: Task) -> str:
    """A hash of the weights that are never sent, which server and clients must share; "" if there are none."""
    if task.encoder is not None:
        return hash_module(task.encoder)
    return hash_module(task.net(), frozen_only=True) if task.partial else ""


def freeze_encoder(task: Task, seed: int, folder: Path | None = None) -> tuple[Task, FrozenEncoder]:
    """The task of training the head on features, and the encoder with the weights that training would start from."""
    net = task.net()
    load_weights(net, task.initial_weights(seed))
    module = split_net(net)[0].eval().requires_grad_(False)
    width = feature_width(task, net)
    pretrained = task.pretrained and {name: t for name, t in task.pretrained.items() if name.startswith(HEAD)}
    build_net = HeadBuilder(task.build_net, split_net(net)[1], find_activation_builder(task, net))
    encoder = FrozenEncoder(module, task.device, folder)
    return replace(task, shape=(width,), build_net=build_net, pretrained=pretrained, encoder=module), encoder


def has_random_encoder(task: Task, seed: int) -> bool:
    """Whether most weights of the encoder depend on the seed, so that they are not pretrained."""
    if task.pretrained is not None:
        return False
    parts = []
    for number in (seed + 1, seed):  # the task caches the last one: that of the run
        net = task.net()
        load_weights(net, task.initial_weights(number))
        parts.append([parameter.detach() for parameter in split_net(net)[0].parameters()])
    random = sum(int((a != b).sum()) for a, b in zip(*parts, strict=True))
    return 2 * random > sum(parameter.numel() for parameter in parts[0])


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
