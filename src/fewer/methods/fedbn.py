"""FedBN: FedAvg with local normalization layers.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
Algorithm 1. The server averages all layers except normalization layers, which stay on their client.

Departures: those of FedAvg. All kinds of normalization layers are local, not only batch norm.
"""

from __future__ import annotations

from torch import nn

from fewer.errors import SettingError
from fewer.methods.personal_parts import PersonalParts
from fewer.models import norm_weight_names
from fewer.registry import METHODS


@METHODS.register("fedbn")
class FedBN(PersonalParts):
    """FedAvg in which each client keeps its own normalization layers, and so a personal model."""

    def shared_names(self, net: nn.Module) -> set[str]:
        """All weights except those of normalization layers."""
        norm_names = norm_weight_names(net)
        if not norm_names:
            raise SettingError("fedbn needs a model with normalization layers; set norm = batch or group")
        return net.state_dict().keys() - norm_names
