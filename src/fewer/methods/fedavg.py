"""FedAvg: federated averaging.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, Algorithm 1. Departures: a party takes a fixed number of steps on batches drawn with
replacement, not epochs, so that parties of all sizes do the same work; the mean goes over those that answered.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.learning import draw_batches, sgd, weighted_mean
from fewer.learning.augment import draw_moves, move
from fewer.methods.base import MAX_SIZE, Method, ModelState, Party
from fewer.models import Task, Weights, weights_of
from fewer.runtime import Parties, on_party
from fewer.wire import Codec, Coded, Number


class FedAvg(Method):
    """Parties train the global model on their own data; the coordinator averages what they send by size."""

    name: ClassVar[str] = "fedavg"
    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"rate": (0.01, 0.03, 0.1, 0.3)}

    rate: PositiveFloat = 0.1
    """Step size of local training (η)."""
    steps: PositiveInt = 20
    """Local steps in a round."""
    batch: PositiveInt = 32
    """Samples in a step."""
    codec: Codec = "float32"
    """How models are written on the wire."""

    def start(self, task: Task, seed: int) -> ModelState:
        """The initial model."""
        return ModelState(task.initial(seed))

    def round(self, state: ModelState, parties: Parties) -> ModelState:
        """w ← Σ (n_k / n) w_k over the parties that answered."""
        return ModelState(weighted_mean(*self.collect(state, parties)))

    def collect(self, state: ModelState, parties: Parties) -> tuple[list[Weights], list[int]]:
        """Models and sizes of the active parties that answered."""
        answers = parties.ask(
            self.choose(parties),
            self.train,
            model=Coded(state.model, self.codec),
            returns={"model": state.model, "size": Number(int, 1, MAX_SIZE)},
        )
        return [answer["model"] for answer in answers], [answer["size"] for answer in answers]

    @on_party
    def train(self, me: Party, model: Weights) -> dict[str, Any]:
        """Some steps of SGD from the global model."""
        net = me.net(model)
        self.descend(net, me)
        return {"model": Coded(weights_of(net), self.codec), "size": len(me.train)}

    def descend(self, net: nn.Module, me: Party) -> None:
        """Local training, in place: what relatives of FedAvg change."""
        sgd(net, me.train.batches(self.numbers(me)), self.rate)

    def numbers(self, me: Party) -> Tensor:
        """Which samples each step uses (steps × batch)."""
        return draw_batches(len(me.train), self.steps, self.batch, me.stream("batches"))


class FedAvgMoved(FedAvg):
    """FedAvg on images that are turned and shifted a little: what augmentation, which FedMK uses, is worth alone."""

    name: ClassVar[str] = "fedavg-moved"

    def start(self, task: Task, seed: int) -> ModelState:
        """The initial model."""
        if len(task.shape) != 3:
            raise SettingError(f"fedavg-moved moves images, and samples here have the shape {task.shape}")
        return super().start(task, seed)

    def descend(self, net: nn.Module, me: Party) -> None:
        """Local training; each image is moved by its own random move each time."""
        stream = me.stream("moves")
        batches = me.train.batches(self.numbers(me))
        sgd(net, ((move(x, draw_moves(len(x), stream)), y) for x, y in batches), self.rate)
