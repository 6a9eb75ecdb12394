"""FedBN: FedAvg with local normalization.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
Algorithm 1: everything is averaged but the normalization layers, which stay with their client. Departures: as FedAvg;
any kind of normalization layer counts, not only batch norm.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fewer.errors import SettingError
from fewer.methods.base import Client, ModelState, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, is_norm, weights_of
from fewer.registry import METHODS
from fewer.runtime import on_client
from fewer.wire import Coded


@METHODS.register("fedbn")
class FedBN(PersonalMethod, FedAvg):
    """FedAvg in which each client keeps its own normalization layers, so that each ends with a model of its own."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial model without its normalization layers."""
        norms = is_norm(task.net())
        if not norms:
            raise SettingError("fedbn needs a model with normalization layers (norm = batch or group)")
        return ModelState({name: tensor for name, tensor in task.initial(seed).items() if name not in norms})

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Train the shared part together with the client's own norms; keep the norms, send the rest."""
        net = self.personal_model(client, model)
        self.fit(net, client)
        weights = weights_of(net)
        client.store.put("norms", {name: tensor for name, tensor in weights.items() if name not in model})
        shared = {name: weights[name] for name in model}
        return {"model": Coded(shared, self.codec), "size": len(client.train)}

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The shared part with the client's own norms; before its first round, the initial ones."""
        return client.net({**client.initial(), **(client.store.get("norms") or {}), **model})
