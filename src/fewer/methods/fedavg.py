"""FedAvg: federated averaging.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, Algorithm 1. Departures: a client takes a fixed number of steps on batches drawn with
replacement, not epochs, so that clients of all sizes do the same work; the mean goes over those that answered.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.learning import draw_batches, sgd, weighted_mean
from fewer.learning.augment import draw_moves, move
from fewer.methods.base import MAX_SIZE, Client, Method, ModelState
from fewer.models import Task, Weights, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Codec, Coded, Number


@METHODS.register("fedavg")
class FedAvg(Method):
    """Clients train the global model on their own data; the server averages what they send by size."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"lr": (0.01, 0.03, 0.1, 0.3)}

    lr: PositiveFloat = 0.1
    """Step size of local training (η)."""
    local_steps: PositiveInt = 20
    """Local steps in a round."""
    batch_size: PositiveInt = 32
    """Samples in a step."""
    codec: Codec = "float32"
    """How models are written on the wire."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial model."""
        return ModelState(task.initial(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """w ← Σ (n_k / n) w_k over the clients that answered."""
        return ModelState(weighted_mean(*self.collect(state, clients)))

    def collect(self, state: ModelState, clients: Clients) -> tuple[list[Weights], list[int]]:
        """Models and sizes of the active clients that answered."""
        answers = clients.ask(
            self.sample_cohort(clients),
            self.local_train,
            model=Coded(state.model, self.codec),
            returns={"model": state.model, "size": Number(int, 1, MAX_SIZE)},
        )
        return [answer["model"] for answer in answers], [answer["size"] for answer in answers]

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Some steps of SGD from the global model."""
        net = client.net(model)
        self.fit(net, client)
        return {"model": Coded(weights_of(net), self.codec), "size": len(client.train)}

    def fit(self, net: nn.Module, client: Client) -> None:
        """Local training, in place: what relatives of FedAvg change."""
        sgd(net, client.train.batches(self.batch_indices(client)), self.lr)

    def batch_indices(self, client: Client) -> Tensor:
        """Which samples each step uses (steps × batch)."""
        return draw_batches(len(client.train), self.local_steps, self.batch_size, client.stream("batches"))


@METHODS.register("fedavg-augmented")
class FedAvgAugmented(FedAvg):
    """FedAvg on images that are turned and shifted a little: what augmentation, which FedMK uses, is worth alone."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial model."""
        if len(task.shape) != 3:
            raise SettingError(f"fedavg-augmented moves images, and samples here have the shape {task.shape}")
        return super().init(task, seed)

    def fit(self, net: nn.Module, client: Client) -> None:
        """Local training; each image is moved by its own random move each time."""
        stream = client.stream("moves")
        batches = client.train.batches(self.batch_indices(client))
        sgd(net, ((move(x, draw_moves(len(x), stream)), y) for x, y in batches), self.lr)
