"""Injected lies: some clients of a simulation send plausible, finite, wrong answers.

The kinds, for a liar that got `start`, would honestly send `start` + change, and sends something else:

- `sign-flip`: start − change.
- `scale`: start + 10 · change.
- `noise`: start + Gaussian noise that is ten times as long as the change.
- `label-flip`: an honest answer, but trained on labels c − 1 − y. The data floor mislabels (`Samples.flip_labels`).
- `ipm`: start − 0.5 · (mean change of the honest clients). Xie, Koyejo, Gupta: Fall of Empires, UAI 2019.
- `alie`: start + mean − z · (standard deviation) of the honest changes. Baruch, Baruch, Goldberg: A Little Is Enough,
  NeurIPS 2019, with their z.

Liars of the last two kinds know all honest answers. Numbers and integer tensors, such as sizes, stay honest. A field
that the clients did not get, such as a gradient, is a change itself. The same clients lie in all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fewer.choices import LieKind
from fewer.errors import SettingError
from fewer.runtime.streams import seed_of

FACTOR = 10.0
"""How much longer than an honest change a scaled change and noise are."""
IPM_FACTOR = 0.5
COLLUDING = ("ipm", "alie")
"""Kinds of lies that need the honest answers."""


@dataclass(frozen=True)
class Lies:
    """The kind of lie, and the share of all clients that tell it."""

    kind: LieKind
    share: float

    @classmethod
    def parse(cls, text: str) -> Lies:
        """Reads KIND:SHARE, such as sign-flip:0.2."""
        kind, _, number = text.partition(":")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if kind not in get_args(LieKind) or not 0 <= share <= 1:
            kinds = ", ".join(get_args(LieKind))
            raise SettingError(f"lie must be KIND:SHARE with a share from 0 to 1 (kinds: {kinds}), got {text!r}")
        return cls(kind, share)  # type: ignore[arg-type]

    def liars(self, population: int, seed: int) -> frozenset[int]:
        """The clients that lie: the share of all clients, rounded, drawn by the seed."""
        rng = np.random.default_rng(seed_of(seed, "liars"))
        count = math.floor(self.share * population + 0.5)
        return frozenset(rng.choice(population, count, replace=False).tolist())

    def falsify(
        self,
        answer: Mapping[str, Any],
        sent: Mapping[str, Any],
        generator: torch.Generator,
        honest: Sequence[Mapping[str, Any]] = (),
        asked: int = 0,
    ) -> dict[str, Any]:
        """The answer that a liar sends in place of an honest one. `honest` are the answers of all others."""
        if self.kind == "label-flip":
            return dict(answer)

        def lie(value: Tensor, start: Any, others: Sequence[Any]) -> Tensor:
            if not value.dtype.is_floating_point:
                return value
            center = start.double() if _same_shape(start, value) else torch.zeros_like(value, dtype=torch.float64)
            known = [other.double() - center for other in others if _same_shape(other, value)]
            change = self._false_change(value.double() - center, known, asked, generator)
            return (center + change).to(value.dtype)

        return {
            name: _map_tensors(lie, value, sent.get(name), [o.get(name) for o in honest])
            for name, value in answer.items()
        }

    def _false_change(self, change: Tensor, honest: Sequence[Tensor], asked: int, generator: torch.Generator) -> Tensor:
        if self.kind == "scale":
            return FACTOR * change
        if self.kind == "noise":
            noise = torch.randn(change.shape, generator=generator, dtype=torch.float64).to(change.device)
            return noise * float(FACTOR * change.norm() / noise.norm().clamp(min=1e-30))
        if self.kind == "ipm" and honest:
            return -IPM_FACTOR * torch.stack(list(honest)).mean(0)
        if self.kind == "alie" and honest:
            changes = torch.stack(list(honest))
            return changes.mean(0) - alie_factor(asked, asked - len(honest)) * changes.std(0, correction=0)
        return -change  # sign-flip, and any liar that sees no honest answer


def alie_factor(clients: int, liars: int) -> float:
    """z of ALIE: enough honest clients are more distant from the mean to make a majority with the liars."""
    supporters = clients // 2 + 1 - liars
    honest = clients - liars
    share = min(max((honest - supporters) / honest, 0.5), 1 - 1 / (2 * honest))
    return NormalDist().inv_cdf(share)


def _map_tensors(lie: Callable[..., Tensor], value: Any, start: Any, honest: Sequence[Any]) -> Any:
    """Applies a lie to a tensor, or to each tensor of a dict. Other values stay."""
    if isinstance(value, Tensor):
        return lie(value, start, honest)
    if not isinstance(value, Mapping):
        return value
    starts = start if isinstance(start, Mapping) else {}
    trees = [other for other in honest if isinstance(other, Mapping)]
    return {name: lie(part, starts.get(name), [tree.get(name) for tree in trees]) for name, part in value.items()}


def _same_shape(other: Any, value: Tensor) -> bool:
    return isinstance(other, Tensor) and other.shape == value.shape
