"""FedProx: FedAvg with a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq 2: a
client minimizes its loss + ½ μ ‖w − w_g‖², which keeps it near the global model w_g. Departures: as FedAvg; all active
clients do the same work, so the paper's partial work does not arise.
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
    """FedAvg whose clients are held near the global model while they train."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {**FedAvg.tunable, "mu": (0.001, 0.01, 0.1, 1.0)}

    mu: NonNegativeFloat = 0.01
    """Strength of the proximal term (μ)."""

    def fit(self, net: nn.Module, client: Client) -> None:
        """Local training with the gradient of ½ μ ‖w − w_g‖² added, which is μ (w − w_g)."""
        anchor = [parameter.detach().clone() for parameter in net.parameters() if parameter.requires_grad]

        def pull(parameters: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
            torch._foreach_add_(gradients, torch._foreach_sub(parameters, anchor), alpha=self.mu)

        sgd(net, client.train.batches(self.batch_indices(client)), self.lr, pull)
