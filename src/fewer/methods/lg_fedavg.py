"""LG-FedAvg: FedAvg with a personal encoder.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations, arXiv 2001.01523, 2020, Algorithm 1. Each client keeps its own encoder (the local
representation); the server averages the head only, so messages are small.

Departures:

- Those of FedAvg.
- The encoders start at random. The authors' experiments start from a model that FedAvg has trained; pass it as `model`.
"""

from __future__ import annotations

from torch import nn

from fewer.methods.personal_parts import PersonalParts, part_names
from fewer.models.split import split_net
from fewer.registry import METHODS


@METHODS.register("lg-fedavg")
class LGFedAvg(PersonalParts):
    """FedAvg on the head; each client keeps its own encoder."""

    def shared_names(self, net: nn.Module) -> set[str]:
        """The weights of the head."""
        split_net(net)
        return part_names(net, "head")
