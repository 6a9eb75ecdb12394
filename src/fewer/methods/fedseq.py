"""FedSeq: one model travels from client to client and trains at each.

Chang, Balachandar, Lam, Yi, Brown, Beers, Rosen, Rubin, Kalpathy-Cramer: Distributed Deep Learning Networks among
Institutions for Medical Imaging, JAMIA 2018 (cyclical weight transfer); Li, Lyu: Convergence Analysis of Sequential
Federated Learning on Heterogeneous Data, NeurIPS 2023, Algorithm 1. A round is one pass: client π_m starts from the
model of client π_{m−1}, and nothing is averaged. With one round, this is one-shot sequential learning.

Departures:

- A client takes a fixed number of local steps on batches drawn with replacement, as in FedAvg.
- The server passes the model on, so it sees every model. MetaFed's ring passes models sealed.
- The order π is drawn anew in each round, as by Li and Lyu. Cyclical weight transfer has a fixed order.
- The pass skips a client that does not answer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar

from pydantic import PositiveInt

from fewer.errors import QuorumLost
from fewer.methods import Group, ModelState
from fewer.methods.fedavg import FedAvg, train_models
from fewer.registry import METHODS
from fewer.runtime import Clients


@METHODS.register("fedseq")
class FedSeq(FedAvg):
    """One model passes through the clients. Each trains it and hands it to the next; nothing is averaged."""

    group: ClassVar[Group] = "sequential"

    rounds: PositiveInt = 1
    """Number of passes."""
    cohort: PositiveInt | None = None
    """Clients of a pass, drawn anew each time. [default: all]"""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """x_{m+1} ← ClientUpdate(π_m, x_m), for all clients π_m of the pass."""
        order = clients.sample(len(clients) if self.cohort is None else self.cohort)  # π
        model, trained = state.model, 0
        for client in order:
            with suppress(QuorumLost):  # the next client continues from the same model
                (answer,) = train_models(clients, [client], self.local_train, model)
                model, trained = answer["model"], trained + 1
        if trained < (needed := clients.rules.min_answers(len(order))):
            text = f"{trained} of {len(order)} clients trained the model, {needed} needed"
            raise QuorumLost(f"round {clients.round}: {text} (quorum {clients.rules.quorum:g})")
        return ModelState(model)
