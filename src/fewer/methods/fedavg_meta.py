"""FedAvg(Meta): FedAvg whose model a new party fine-tunes on its support. FedMeta's baseline.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Section 4.1:
training uses all samples of the training parties; with `adapt_steps = 0` it is plain FedAvg, judged on new parties.
Departures: as FedAvg; local training is SGD where the paper has Adam (`optimiser = adam`: this too); fine-tuning is
plain gradient descent on the whole support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.learning import draw_batches, sgd, weighted_mean
from fewer.learning.flops import MAX_FLOPS
from fewer.methods.base import MAX_SIZE, Party
from fewer.methods.newparties import NewParties, descend, everything
from fewer.models import Task, Weights, weights_of
from fewer.runtime import Parties, on_party
from fewer.wire import Codec, Coded, Number


@dataclass(frozen=True)
class State:
    """The global model, and what it has cost."""

    model: Weights
    flops: int


class FedAvgMeta(NewParties):
    """FedAvg on some parties' data; a new party fine-tunes the global model on its support (adapt_steps = 0: not)."""

    name: ClassVar[str] = "fedavg-meta"
    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "rate": (0.03, 0.1, 0.3, 1.0),
        "adapt_rate": (0.01, 0.03, 0.1, 0.3),
    }

    rate: PositiveFloat = 0.1
    """Step size of local training (η)."""
    steps: PositiveInt = 20
    """Local steps in a round."""
    batch: PositiveInt = 32
    """Samples in a step."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """Of local training; Adam begins anew in each round."""
    adapt_steps: NonNegativeInt = 1
    """Steps of gradient descent that a new party takes on its support."""
    adapt_rate: PositiveFloat = 0.1
    """Their step size."""
    codec: Codec = "float32"
    """How models are written on the wire."""

    def grids(self) -> Mapping[str, Sequence[float]]:
        """There is nothing to choose for a fine-tuning that does not happen."""
        return {name: grid for name, grid in self.tunable.items() if self.adapt_steps or name != "adapt_rate"}

    def start(self, task: Task, seed: int) -> State:
        """The initial model."""
        return State(task.initial(seed), 0)

    def round(self, state: State, parties: Parties) -> State:
        """w ← Σ (n_k / n) w_k over the parties that answered."""
        answers = parties.ask(
            self.choose(parties),
            self.train,
            model=Coded(state.model, self.codec),
            returns={"model": state.model, "size": Number(int, 1, MAX_SIZE), "flops": Number(int, 0, MAX_FLOPS)},
        )
        flops = state.flops + sum(answer["flops"] for answer in answers)
        return State(self.merge(state.model, [(answer["model"], answer["size"]) for answer in answers]), flops)

    def merge(self, model: Weights, found: Sequence[tuple[Weights, int]]) -> Weights:
        """The new global model from parties' models and sizes: what relatives change."""
        return weighted_mean([theirs for theirs, _ in found], [size for _, size in found])

    @on_party
    def train(self, me: Party, model: Weights) -> dict[str, Any]:
        """Local training on all samples of the party."""
        net = me.net(model)
        with self.tally(me) as tally:
            self.learn(net, me)
        return {"model": Coded(weights_of(net), self.codec), "size": len(self.samples(me)), "flops": tally.flops}

    def learn(self, net: nn.Module, me: Party) -> None:
        """Some steps of SGD or Adam, in place: what relatives change."""
        samples = self.samples(me)
        batches = samples.batches(draw_batches(len(samples), self.steps, self.batch, me.stream("batches")))
        if self.optimiser == "sgd":
            sgd(net, batches, self.rate)
            return
        optimiser = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=self.rate)
        for x, y in batches:
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    # A new party.

    def initialisation(self, shared: Weights) -> Weights:
        """The global model."""
        return shared

    def adapt(self, net: nn.Module, support: Samples, shared: Weights) -> None:
        """Fine-tuning."""
        descend(net, everything(support, self.adapt_steps), self.adapt_rate)
