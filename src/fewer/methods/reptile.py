"""Reptile over clients.

Nichol, Achiam, Schulman: On First-Order Meta-Learning Algorithms, 2018, Algorithm 2 (batched): each client takes some
steps of SGD from θ to θ_u, and θ ← θ + ε (1/n) Σ (θ_u − θ). With ε = 1 it is FedAvg with equal shares. Departures: the
clients of a round are the batch; a client trains on all its samples; ε is constant; running statistics of batch norm are
moved like weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import PositiveFloat

from fewer.learning import weighted_mean
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import Weights
from fewer.registry import METHODS


@METHODS.register("reptile")
class Reptile(FedAvgMeta):
    """Clients train the initialization on their own data; it moves some way towards where they end."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {**FedAvgMeta.tunable, "outer_lr": (0.25, 0.5, 1.0)}

    outer_lr: PositiveFloat = 0.5
    """How far the initialization moves (ε)."""

    def merge(self, model: Weights, found: Sequence[tuple[Weights, int]]) -> Weights:
        """θ + ε (1/n) Σ (θ_u − θ)"""
        ends = weighted_mean([theirs for theirs, _ in found], [1] * len(found))
        return {
            name: here + self.outer_lr * (ends[name] - here) if here.dtype.is_floating_point else ends[name]
            for name, here in model.items()
        }
