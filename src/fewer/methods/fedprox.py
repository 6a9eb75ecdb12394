"""FedProx: FedAvg with a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.
Client k minimizes, from the global model w_t of its round,

    h_k(w; w_t) = F_k(w) + (μ / 2) ‖w − w_t‖²        (Eq 2)

Departures: those of FedAvg. All clients of the cohort do the same work, so the paper's partial work does not arise.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from fewer.learning import sgd
from fewer.methods.base import Client
from fewer.methods.fedavg import FedAvg
from fewer.registry import METHODS


@METHODS.register("fedprox")
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps local models near the global one."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {**FedAvg.tunable, "mu": (0.001, 0.01, 0.1, 1.0)}

    mu: NonNegativeFloat = 0.01
    """Weight of the proximal term (μ)."""

    def fit(self, net: nn.Module, client: Client) -> None:
        """w ← w − η (∇F_k(w) + μ (w − w_t)) for each batch, in place: SGD on Eq 2."""
        global_weights = [parameter.detach().clone() for parameter in net.parameters() if parameter.requires_grad]

        def add_proximal_gradient(weights: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
            """∇ (μ / 2) ‖w − w_t‖² = μ (w − w_t)"""
            torch._foreach_add_(gradients, torch._foreach_sub(weights, global_weights), alpha=self.mu)

        batches = client.train.batches(self.batch_indices(client))
        sgd(net, batches, self.lr, modify_gradients=add_proximal_gradient)
