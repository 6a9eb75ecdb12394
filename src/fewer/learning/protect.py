"""Differential privacy of records on a client: samples that only noisy sums can be computed from.

`ProtectedSamples` takes the place of a client's samples. A method can do two things with it. Anything else raises
NotCovered, so that no method needs to declare whether it is covered.

- Gradient steps (`sgd` on `batches`): Abadi et al.: Deep Learning with Differential Privacy, CCS 2016, Algorithm 1.
  Each sample is in a batch with probability q, independent of all others. A step uses

      (Σ clip(∇ℓᵢ, C) + z · C · ξ) / (q · n)        with standard normal ξ

- Class sums (`release_class_sums`): the sum of vectors vᵢ by class, and the number of samples by class,

      Σ onehot(yᵢ) ⊗ (clip(vᵢ, C), C / 4) + z · S C · ξ        with S = √(1 + 1/16)

  A record changes one row by at most (C, C / 4), which has length S C. The last column, divided by C / 4, has the
  counts. They are large compared with their noise, so most of the guarantee is spent on the vectors.

z is the noise multiplier, C the clipping norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fewer.data import Samples
from fewer.privacy import TOO_MANY, NotCovered, PrivacySettings, Protection
from fewer.runtime.noise import NoiseStream

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
CHUNK = 256
"""Samples whose gradients or vectors are computed at once."""
COUNT_WEIGHT = 0.25
"""What a record adds to the count of its class, relative to C."""
SENSITIVITY = math.hypot(1, COUNT_WEIGHT)
"""S: how much a record changes class sums and counts together, relative to C."""


class ClassSums(NamedTuple):
    """Noisy sums of vectors by class."""

    sums: Tensor
    """Classes × width."""
    counts: Tensor
    """Noisy numbers of samples by class."""
    deviation: float
    """The standard deviation of the noise of a count. That of a sum is `COUNT_WEIGHT` · C times as large."""


@dataclass
class RecordGuard:
    """The noise of one client in one call of a handler, and all releases so far."""

    protection: Protection
    stream: Callable[[str], NoiseStream]
    handler: str
    shares: int
    """The number of shares that make up the noise of a distributed sum."""
    releases: list[tuple[float, float, int]] = field(default_factory=list)
    """Sampling rate, noise multiplier, and number of releases."""

    @property
    def settings(self) -> PrivacySettings:
        """What `--dp` asks for."""
        return self.protection.settings

    def open_release(self, rate: float, count: int) -> tuple[float, NoiseStream]:
        """Records releases; returns their noise multiplier, and a stream that no other release uses."""
        if self.releases and self.protection.noise is None:
            raise NotCovered(f"dp: this method {TOO_MANY} ('{self.handler}')")
        noise = self.protection.choose_noise(rate, count)
        stream = self.stream(f"privacy {self.handler} {len(self.releases)}")
        self.releases.append((rate, noise, count))
        return noise, stream

    def refuse(self, problem: str) -> NoReturn:
        """Stops the run: what the method does with samples is not protected."""
        raise NotCovered(f"dp = record does not cover this method: {problem} ('{self.handler}')")


class ProtectedSamples:
    """Samples of which only the number, noisy gradients and noisy class sums are visible."""

    def __init__(self, samples: Samples, guard: RecordGuard) -> None:
        self._samples, self._guard = samples, guard

    def __len__(self) -> int:
        return len(self._samples)

    def __getattr__(self, name: str) -> Any:
        guard = self.__dict__.get("_guard")
        if guard is None or name.startswith("__"):
            raise AttributeError(name)
        guard.refuse(f"its clients use '{name}' of samples other than in gradient steps and class sums")

    def __getitem__(self, index: int) -> NoReturn:
        self._guard.refuse("its clients read single samples")

    def batches(self, indices: Tensor) -> ProtectedBatches:
        """As many Poisson samples as `indices` has rows, with its row length as their mean size."""
        return ProtectedBatches(self._samples, self._guard, *indices.shape)

    def release_class_sums(self, encode: Callable[[Tensor], Tensor], classes: int) -> ClassSums:
        """Noisy sums of encode(x), clipped to C, by class, and noisy counts."""
        guard, clip = self._guard, self._guard.settings.clip
        noise, stream = guard.open_release(1.0, 1)
        exact = clipped_class_sums(self._samples, encode, classes, clip)
        share = 1 / math.sqrt(guard.shares) if guard.settings.distributed else 1.0
        noisy = add_noise(exact, share * noise * SENSITIVITY * clip, stream)
        counts = noisy[:, -1] / (COUNT_WEIGHT * clip)
        return ClassSums(noisy[:, :-1].float(), counts.float(), share * noise * SENSITIVITY / COUNT_WEIGHT)


class ProtectedBatches:
    """Batches for `sgd`. Only their noisy gradients are visible."""

    def __init__(self, samples: Samples, guard: RecordGuard, steps: int, batch_size: int) -> None:
        self.samples, self.guard, self.steps = samples, guard, steps
        self.rate = min(1.0, batch_size / len(samples))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.guard.refuse("its clients read batches other than in gradient steps")

    def noisy_gradients(self, net: nn.Module, loss: Loss) -> Iterator[tuple[Tensor, ...]]:
        """Yields the noisy gradient of each step, at the parameters that the net then has."""
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in net.modules()):
            raise NotCovered(
                "dp = record needs the gradients of single samples, which batch norm mixes: set norm = group"
            )
        settings = self.guard.settings
        if settings.distributed:
            self.guard.refuse("distributed noise protects sums of statistics, and not models trained by several steps")
        noise, stream = self.guard.open_release(self.rate, self.steps)
        for _ in range(self.steps):
            chosen = stream.uniform(len(self.samples)) < self.rate
            x, y = self.samples.pick(chosen.nonzero().squeeze(1))
            total = sum_clipped_gradients(net, loss, x, y, settings.clip)
            expected = self.rate * len(self.samples)
            yield tuple(add_noise(part, noise * settings.clip, stream) / expected for part in total)


def clipped_class_sums(samples: Samples, encode: Callable[[Tensor], Tensor], classes: int, clip: float) -> Tensor:
    """Σ onehot(yᵢ) ⊗ (clip(vᵢ, C), `COUNT_WEIGHT` · C), in float64 (classes × (width + 1))."""
    total = torch.zeros(0)
    for x, y in samples.chunks(CHUNK):
        vectors = clip_rows(encode(x).double(), clip)
        rows = torch.cat([vectors, torch.full_like(vectors[:, :1], COUNT_WEIGHT * clip)], dim=1)
        if not len(total):
            total = rows.new_zeros(classes, rows.shape[1])
        total.index_add_(0, y, rows)
    return total


def clip_rows(rows: Tensor, clip: float) -> Tensor:
    """Each row scaled down to length C if it is longer. A row that is not finite becomes 0."""
    rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    clipped: Tensor = rows * (clip / lengths.clamp_min(1e-30)).clamp_max(1.0)
    return clipped


def add_noise(tensor: Tensor, deviation: float, stream: NoiseStream) -> Tensor:
    """The tensor plus Gaussian noise, drawn in float64."""
    return tensor + (deviation * stream.normal(tensor.shape)).to(tensor)


class _LossOf(nn.Module):
    """A net and its loss as one module, so that `functional_call` can replace the net's parameters."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one sample."""
        return self.loss(self.net, x[None], y[None])


def sum_clipped_gradients(net: nn.Module, loss: Loss, x: Tensor, y: Tensor, clip: float) -> list[Tensor]:
    """Σᵢ clip(∇ℓᵢ, C) for all trainable parameters. The length is that over all of them."""
    module = _LossOf(net, loss)
    weights = {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}

    def sample_loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = functional_call(module, weights, (x, y))
        return value

    gradient_of = grad(sample_loss)
    total = [torch.zeros_like(weight) for weight in weights.values()]
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK], y[start : start + CHUNK]
        try:
            gradients = vmap(gradient_of, (None, 0, 0), randomness="different")(weights, *chunk)
        except RuntimeError as error:  # also if a layer or a loss keeps something of the samples
            raise NotCovered(
                "dp = record does not cover this model and method: torch.func cannot compute their gradient sample by "
                f"sample ({str(error).splitlines()[0][:100]})"
            ) from error
        flat = clip_rows(torch.cat([gradients[name].flatten(1) for name in weights], dim=1), clip).sum(0)
        for part, piece in zip(total, torch.split(flat, [part.numel() for part in total]), strict=True):
            part.add_(piece.view_as(part))
    return total
