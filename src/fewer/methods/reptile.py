"""Reptile over clients.

Nichol, Achiam, Schulman: On First-Order Meta-Learning Algorithms, 2018, Algorithm 2 (batched). Each client u takes SGD
steps from θ to θ_u, and θ ← θ + ε (1/n) Σ_u (θ_u − θ). With ε = 1 it is FedAvg with equal weights.

Departures:
- The cohort of a round is the batch of tasks.
- A client trains on all its samples.
- ε is constant.
- Running statistics of batch norm move like weights.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveFloat

from fewer.methods import SearchSpace
from fewer.methods.fedavg import average_equally
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime import Answers


@METHODS.register("reptile")
class Reptile(FedAvgMeta):
    """Clients train the initialization on their own data; the server moves it toward the mean of the results."""

    tunable: ClassVar[SearchSpace] = {**FedAvgMeta.tunable, "outer_lr": (0.25, 0.5, 1.0)}

    outer_lr: PositiveFloat = 0.5
    """Step size of the server toward the clients' mean (ε)."""

    def aggregate(self, model: Weights, answers: Answers) -> Weights:
        """θ ← θ + ε (1/n) Σ_u (θ_u − θ)"""
        mean = average_equally(answers)
        return {
            name: theta + self.outer_lr * (mean[name] - theta) if theta.dtype.is_floating_point else mean[name]
            for name, theta in model.items()
        }
