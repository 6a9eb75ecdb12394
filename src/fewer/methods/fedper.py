"""FedPer: FedAvg with a personal head.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, arXiv 1912.00818, 2019,
Algorithms 1 and 2. The server averages the encoder (the base layers). Each client keeps its own head (the
personalization layer) and trains both together.

Departures: those of FedAvg. The personalization layer is the head of the net, one layer.
"""

from __future__ import annotations

from torch import nn

from fewer.methods.personal_parts import PersonalParts, part_names
from fewer.models.split import split_net
from fewer.registry import METHODS


@METHODS.register("fedper")
class FedPer(PersonalParts):
    """FedAvg on the encoder; each client keeps its own head."""

    def shared_names(self, net: nn.Module) -> set[str]:
        """The weights of the encoder."""
        split_net(net)
        return part_names(net, "encoder")
