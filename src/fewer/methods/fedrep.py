"""FedRep: a shared encoder, and a head that each client fits to it first.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021, Algorithm 1. In a round, a client first takes steps on its own head h with the received encoder φ frozen,
and then steps on φ with h frozen. It returns φ, and the server averages the encoders.

Departures: those of FedAvg. `local_steps` counts the steps on φ; `head_steps` those on h before. The paper takes ten
epochs for the head and one to five for φ.
"""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from fewer.learning import draw_batches
from fewer.methods.context import Client
from fewer.methods.fedper import FedPer
from fewer.methods.personal_parts import frozen
from fewer.models.split import split_net
from fewer.registry import METHODS


@METHODS.register("fedrep")
class FedRep(FedPer):
    """FedPer that trains the head first, with the encoder frozen, and then the encoder, with the head frozen."""

    head_steps: PositiveInt = 20
    """Steps on the head before those on the encoder."""

    def fit(self, net: nn.Module, client: Client) -> None:
        """h ← steps on h; φ ← steps on φ; in place."""
        encoder, head = split_net(net)
        samples = self.training_samples(client)
        indices = draw_batches(len(samples), self.head_steps, self.batch_size, client.stream("head batches"))
        with frozen(encoder):
            self.train_net(net, client, samples.batches(indices))
        with frozen(head):
            self.train_net(net, client)
