"""FedAvg: federated averaging.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, Algorithm 1. Docstrings quote its lines: w_t is the global model in round t, and client k has n_k
samples.

Departures:

- A client takes a fixed number of local steps on batches drawn with replacement, instead of E epochs. Clients of all
  sizes do the same work.
- n counts the samples of the clients that answered, not of all clients.
- `cohort` is the number of clients m; the paper sets it by a fraction C.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.learning import draw_batches, sgd, weighted_mean
from fewer.learning.augment import apply_affine, draw_affine
from fewer.methods.base import MAX_SAMPLES, Client, Method, ModelState
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Number


@METHODS.register("fedavg")
class FedAvg(Method):
    """Clients train the global model on their own data; the server averages their models, weighted by data size."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"lr": (0.01, 0.03, 0.1, 0.3)}

    lr: PositiveFloat = 0.1
    """Learning rate of local training (η)."""
    local_steps: PositiveInt = 20
    """Local steps per round."""
    batch_size: PositiveInt = 32
    """Samples per local step (B)."""

    # Server executes:

    def init(self, task: Task, seed: int) -> ModelState:
        """Initializes w_0."""
        return ModelState(task.initial_weights(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """w_{t+1} ← Σ_k (n_k / n) w_{t+1}^k, over the clients that answered."""
        models, sizes = self.train_cohort(state, clients)
        return ModelState(weighted_mean(models, sizes))

    def train_cohort(self, state: ModelState, clients: Clients) -> tuple[list[Weights], list[int]]:
        """Runs w_{t+1}^k ← ClientUpdate(k, w_t) on each client k ∈ S_t in parallel; returns all w_{t+1}^k and n_k."""
        answers = clients.ask(
            self.sample_cohort(clients),  # S_t ← (random set of m clients)
            self.local_train,
            model=state.model,
            returns={"model": state.model, "size": Number(int, 1, MAX_SAMPLES)},  # the form of a valid answer
        )
        return [answer["model"] for answer in answers], [answer["size"] for answer in answers]

    # Run on client k:

    @on_client(stream="train")  # the key of its random numbers
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """ClientUpdate(k, w): trains the global model on the client's samples; returns w and n_k to the server."""
        net = client.net(model)
        self.fit(net, client)
        return {"model": get_weights(net), "size": len(client.train)}

    def fit(self, net: nn.Module, client: Client) -> None:
        """w ← w − η ∇ℓ(w; b) for each batch b, in place. Override this to change local training."""
        sgd(net, client.train.batches(self.batch_indices(client)), self.lr)

    def batch_indices(self, client: Client) -> Tensor:
        """The sample indices of all batches b (local steps × batch size)."""
        return draw_batches(len(client.train), self.local_steps, self.batch_size, client.stream("batches"))


@METHODS.register("fedavg-augmented")
class FedAvgAugmented(FedAvg):
    """FedAvg on randomly rotated, scaled and shifted images, as an ablation of FedMK's augmentation (fedmk.py)."""

    def init(self, task: Task, seed: int) -> ModelState:
        """Checks that inputs are images, and returns the initial model."""
        if len(task.shape) != 3:
            raise SettingError(f"fedavg-augmented needs images, but inputs have shape {task.shape}")
        return super().init(task, seed)

    def fit(self, net: nn.Module, client: Client) -> None:
        """Trains as FedAvg does, in place, with a new random affine map for each image in each step."""
        stream = client.stream("moves")
        batches = client.train.batches(self.batch_indices(client))
        sgd(net, ((apply_affine(x, draw_affine(len(x), stream)), y) for x, y in batches), self.lr)
