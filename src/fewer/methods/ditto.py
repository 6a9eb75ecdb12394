"""Ditto: a personal model next to the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1. The
global model w is FedAvg's. Each client k of the cohort also trains its own model v_k near w:

    v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w))

Departures:

- Those of FedAvg. Both models take the same number of steps on the same batches, with the same learning rate.
- A client that was never in a cohort has no v_k and uses w.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from fewer.methods import Client, ModelState, PersonalMethod, SearchSpace
from fewer.methods.fedavg import FedAvg
from fewer.models import Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import on_client


@METHODS.register("ditto")
class Ditto(PersonalMethod[ModelState], FedAvg):
    """FedAvg in which each client also trains a personal model that stays near the global one."""

    has_global_model: ClassVar[bool] = True

    tunable: ClassVar[SearchSpace] = {**FedAvg.tunable, "lam": (0.1, 0.3, 1.0)}

    lam: NonNegativeFloat = 0.3
    """Weight of the distance to the global model (λ)."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains the personal model v_k near w and stores it; then trains w as FedAvg does."""
        net = self.personal_model(model, client)
        w = [model[name] for name, parameter in net.named_parameters() if parameter.requires_grad]

        def pull_to_global(v: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
            """∇F_k(v_k) + λ (v_k − w)"""
            torch._foreach_add_(gradients, torch._foreach_sub(v, w), alpha=self.lam)

        self.train_net(net, client, modify_gradients=pull_to_global)
        client.store.put("personal", get_weights(net))
        return super().local_train(client, model)

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """v_k, or w before the client's first round."""
        return client.net(client.store.get("personal") or shared)
