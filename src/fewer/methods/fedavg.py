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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic

from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.data import Samples
from fewer.errors import SettingError
from fewer.learning import LocalOptimizer, draw_batches, sgd, task_loss
from fewer.learning.aggregate import apply_change, combine, flat_change, private_mean
from fewer.learning.augment import apply_affine, draw_affine
from fewer.learning.sgd import GradientHook, Loss
from fewer.methods import MAX_SAMPLES, Client, Method, ModelState, SearchSpace, StateT
from fewer.models import Task, Weights, get_weights
from fewer.privacy import NotCovered
from fewer.registry import METHODS
from fewer.runtime import Answers, Clients, Unable, on_client
from fewer.runtime.clients import PrivateSum, reveal
from fewer.runtime.secure_sum import SecureSum
from fewer.wire import Number


class LocalTraining(LocalOptimizer, Method[StateT], Generic[StateT]):
    """ClientUpdate: a client trains the model that it receives. Many methods build on it."""

    tunable: ClassVar[SearchSpace] = {"lr": (0.01, 0.03, 0.1, 0.3)}

    lr: PositiveFloat = 0.1
    """Learning rate of local training (η)."""
    local_steps: PositiveInt = 20
    """Local steps per round."""
    batch_size: PositiveInt = 32
    """Samples per local step (B)."""
    augment: bool = Field(default=False, json_schema_extra={"neutral": True})
    """Whether images are randomly rotated, scaled and shifted in each local step."""

    @on_client(stream="train")  # the key of its random numbers
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """ClientUpdate(k, w): trains the global model on the client's samples; returns w and n_k to the server."""
        net = client.net(model)
        self.fit(net, client)
        return {"model": get_weights(net), "size": len(self.training_samples(client))}

    def fit(self, net: nn.Module, client: Client) -> None:
        """w ← w − η ∇ℓ(w; b) for each batch b, in place. Override this to change local training."""
        self.train_net(net, client)

    def train_net(
        self,
        net: nn.Module,
        client: Client,
        batches: Iterable[tuple[Tensor, Tensor]] | None = None,
        loss: Loss | None = None,
        modify_gradients: GradientHook | None = None,
    ) -> None:
        """Takes one local step per batch, in place. Default: the client's own batches, and the loss of the task."""
        if batches is None:
            batches = self.training_samples(client).batches(self.batch_indices(client))
        batches = self.augmented(batches, client)
        sgd(net, batches, self.lr, modify_gradients, loss or task_loss(client.task), optimizer=self)

    def augmented(self, batches: Iterable[tuple[Tensor, Tensor]], client: Client) -> Iterable[tuple[Tensor, Tensor]]:
        """The batches; with `augment`, its own random affine map transforms each image."""
        if not self.augment:
            return batches
        if len(client.task.shape) != 3:
            raise Unable(f"augment = true needs images, but inputs have shape {client.task.shape}; set augment = false")
        stream = client.stream("moves")
        return ((apply_affine(x, draw_affine(len(x), stream)), y) for x, y in batches)

    def training_samples(self, client: Client) -> Samples:
        """The samples that a client trains on: by default all."""
        return client.train

    def batch_indices(self, client: Client) -> Tensor:
        """The sample indices of all batches b (local steps × batch size)."""
        count = len(self.training_samples(client))
        return draw_batches(count, self.local_steps, self.batch_size, client.stream("batches"))


@METHODS.register("fedavg")
class FedAvg(LocalTraining[ModelState]):
    """Clients train the global model on their own data; the server averages their models, weighted by data size."""

    def init(self, task: Task, seed: int) -> ModelState:
        """Initializes w_0."""
        return ModelState(task.initial_weights(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """w_{t+1} ← Σ_k (n_k / n) w_{t+1}^k, over the clients that answered."""
        cohort = self.sample_cohort(clients)  # S_t ← (random set of m clients)
        answers = train_models(clients, cohort, self.local_train, state.model)  # w_{t+1}^k ← ClientUpdate(k, w_t)
        return ModelState(average_by_size(answers))


def train_models(
    clients: Clients,
    cohort: Sequence[int],
    handler: Callable[..., Any],
    model: Weights,
    extra: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Answers:
    """Sends a model to the cohort. Each answer has the trained `model`, the number of samples `size`, and `extra`."""
    return clients.ask(cohort, handler, model=model, returns=model_schema(model) | dict(extra or {}), **fields)


def model_schema(model: Weights) -> dict[str, Any]:
    """The form of a valid answer: a model and its number of samples."""
    return {"model": model, "size": Number(int, 1, MAX_SAMPLES)}


def average_equally(answers: Answers) -> Weights:
    """The mean of the clients' models, with equal weights."""
    return average_field(answers, "model")


def average_by_size(answers: Answers) -> Weights:
    """Σ_k (n_k / n) w_k, over the clients that answered."""
    if answers.private:  # sizes are private, too
        return average_field(answers, "model")
    if answers.secure:
        return answers.secure.mean("model", weight="size")
    return average_field(answers, "model", [answer["size"] for answer in answers])


def average_field(answers: Answers, name: str, shares: Sequence[float] | None = None) -> Weights:
    """The mean of one field of the answers, with these shares or equal ones; or what the run makes of it.

    `--aggregate` replaces the mean by a robust rule, `--dp` by the noisy mean of clipped changes. With `--secure-sum`,
    clients sum up what they keep. If the clients got a field of this name, they changed it. Otherwise they send a
    change, such as a gradient.
    """
    if answers.secure and not answers.private:
        return answers.secure.mean(name)
    if private := answers.private:
        if private.ledger.settings.level == "record":
            raise NotCovered(f"dp = record with distributed noise protects only sums of statistics, not '{name}'")
        if answers.secure:
            return average_shares(answers.secure, private, name, answers.sent.get(name))
        updates = [reveal(answer, name) for answer in answers]
        if not updates[0]:  # clients keep their models
            return {}
        start, stream = answers.sent.get(name), private.noise_stream(updates)
        private.ledger.record(private.asked, private.drawn_from, private.round)
        return private_mean(updates, start, updates[0], private.ledger, private.asked, stream)
    shares = [1] * len(answers) if shares is None else shares
    return combine([answer[name] for answer in answers], shares, answers.aggregation, answers.sent.get(name))


def average_shares(secure: SecureSum, private: PrivateSum, name: str, start: Weights | None) -> Weights:
    """start + Σ (clip(changeᵢ) + noiseᵢ) / asked: the server learns the sum only, and adds no noise that it knows."""
    mean, count = secure.mean_and_weight(name)
    if not mean:  # clients keep their models
        return {}
    private.ledger.record(private.asked, private.drawn_from, private.round, count / private.shares)
    names = [name for name, tensor in mean.items() if tensor.dtype.is_floating_point]
    return apply_change(flat_change(mean, start, names) * count / private.asked, start, mean, names)


@METHODS.register("fedavg-augmented")
class FedAvgAugmented(FedAvg):
    """FedAvg with `augment`: on randomly rotated, scaled and shifted images, as FedMK's are (fedmk.py)."""

    augment: bool = Field(default=True, json_schema_extra={"neutral": True})

    def init(self, task: Task, seed: int) -> ModelState:
        """Checks that inputs are images, and returns the initial model."""
        if len(task.shape) != 3:
            raise SettingError(f"fedavg-augmented needs images, but inputs have shape {task.shape}")
        return super().init(task, seed)
