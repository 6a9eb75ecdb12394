"""FedProx: FedAvg with a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.
A round is one of FedAvg, except that client k starts from the global model w^t and minimizes

    h_k(w; w^t) = F_k(w) + (μ / 2) ‖w − w^t‖²        (Eq 2)

Departures:

- Those of FedAvg. All clients take the same number of steps; the paper also lets slow clients do less work.
- Clients are sampled uniformly and averaged by size, as in FedAvg. Algorithm 2 samples by size and averages equally.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from fewer.methods import Client, Group, SearchSpace
from fewer.methods.fedavg import FedAvg
from fewer.registry import METHODS


@METHODS.register("fedprox")
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps local models near the global one."""

    group: ClassVar[Group] = "drift correction"

    tunable: ClassVar[SearchSpace] = {**FedAvg.tunable, "mu": (0.001, 0.01, 0.1, 1.0)}

    mu: NonNegativeFloat = 0.01
    """Weight of the proximal term (μ)."""

    def fit(self, net: nn.Module, client: Client) -> None:
        """w_k^{t+1} ≈ argmin_w h_k(w; w^t): for each batch, w ← w − η (∇F_k(w) + μ (w − w^t)), in place."""
        w_t = [parameter.detach().clone() for parameter in net.parameters() if parameter.requires_grad]

        def add_proximal_gradient(w: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
            """∇h_k(w; w^t) = ∇F_k(w) + μ (w − w^t)"""
            torch._foreach_add_(gradients, torch._foreach_sub(w, w_t), alpha=self.mu)

        self.train_net(net, client, modify_gradients=add_proximal_gradient)
