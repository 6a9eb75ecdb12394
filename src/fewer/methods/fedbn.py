"""FedBN: FedAvg with local normalization layers.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
Algorithm 1. The server averages all layers except normalization layers, which stay on their client.

Departures: those of FedAvg. All kinds of normalization layers are local, not only batch norm.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fewer.errors import SettingError
from fewer.methods import Client, ModelState, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, get_weights, norm_weight_names
from fewer.registry import METHODS
from fewer.runtime import on_client


@METHODS.register("fedbn")
class FedBN(PersonalMethod[ModelState], FedAvg):
    """FedAvg in which each client keeps its own normalization layers, and so a personal model."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial model without its normalization layers."""
        norm_names = norm_weight_names(task.net())
        if not norm_names:
            raise SettingError("fedbn needs a model with normalization layers; set norm = batch or group")
        weights = task.initial_weights(seed)
        return ModelState({name: tensor for name, tensor in weights.items() if name not in norm_names})

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains the shared layers with the client's own norms; stores the norms and returns the rest."""
        net = self.personal_model(model, client)
        self.fit(net, client)
        weights = get_weights(net)
        client.store.put("norms", {name: tensor for name, tensor in weights.items() if name not in model})
        shared = {name: weights[name] for name in model}
        return {"model": shared, "size": len(client.train)}

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The shared layers with the client's own norms; before its first round, with the initial ones."""
        return client.net({**client.initial_weights(), **(client.store.get("norms") or {}), **shared})
