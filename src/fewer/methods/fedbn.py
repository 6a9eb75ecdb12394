"""FedBN: FedAvg with local normalisation.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
Algorithm 1: everything is averaged but the normalisation layers, which stay with their party. Departures: as FedAvg;
any kind of normalisation layer counts, not only batch norm.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fewer.errors import SettingError
from fewer.methods.base import ModelState, Party, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, is_norm, weights_of
from fewer.runtime import on_party
from fewer.wire import Coded


class FedBN(PersonalMethod, FedAvg):
    """FedAvg in which each party keeps its own normalisation layers, so that each ends with a model of its own."""

    name: ClassVar[str] = "fedbn"

    def start(self, task: Task, seed: int) -> ModelState:
        """The initial model without its normalisation layers."""
        norms = is_norm(task.net())
        if not norms:
            raise SettingError("fedbn needs a model with normalisation layers (norm = batch or group)")
        return ModelState({name: tensor for name, tensor in task.initial(seed).items() if name not in norms})

    @on_party
    def train(self, me: Party, model: Weights) -> dict[str, Any]:
        """Train the shared part together with the party's own norms; keep the norms, send the rest."""
        net = self.personal(me, model)
        self.descend(net, me)
        weights = weights_of(net)
        me.store.put("norms", {name: tensor for name, tensor in weights.items() if name not in model})
        shared = {name: weights[name] for name in model}
        return {"model": Coded(shared, self.codec), "size": len(me.train)}

    def personal(self, me: Party, model: Weights) -> nn.Module:
        """The shared part with the party's own norms; before its first round, the initial ones."""
        return me.net({**me.initial(), **(me.store.get("norms") or {}), **model})
