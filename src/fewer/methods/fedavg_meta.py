"""FedAvg(Meta): FedAvg whose model a new client fine-tunes on its support set. The baseline of FedMeta.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Section 4.1.
Training uses all samples of the training clients. With `adapt_steps = 0` it is plain FedAvg, evaluated on new clients.

Departures:
- Those of FedAvg.
- Local training is SGD by default; the paper uses Adam (`optimizer = adam`).
- Fine-tuning is plain gradient descent on the full support set.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat
from torch import nn

from fewer.data import Samples
from fewer.methods import Client, SearchSpace
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.methods.new_clients import CountingModelState, NewClients, adapt_in_place, full_batches
from fewer.models import Task, Weights
from fewer.registry import METHODS
from fewer.runtime import Answers, Clients, on_client
from fewer.runtime.flops import MAX_FLOPS
from fewer.wire import Number


@METHODS.register("fedavg-meta")
class FedAvgMeta(NewClients[CountingModelState], LocalTraining[CountingModelState]):
    """FedAvg whose model a new client fine-tunes on its support set (`adapt_steps = 0`: no fine-tuning)."""

    tunable: ClassVar[SearchSpace] = {"lr": (0.03, 0.1, 0.3, 1.0), "adapt_lr": (0.01, 0.03, 0.1, 0.3)}

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"  # not neutral: it is older than the option of other methods
    adapt_steps: NonNegativeInt = 1
    """Fine-tuning steps of a new client, each on its full support set."""
    adapt_lr: PositiveFloat = 0.1
    """Learning rate of fine-tuning."""

    def search_space(self) -> SearchSpace:
        """Tunes `adapt_lr` only if new clients fine-tune."""
        return {name: grid for name, grid in self.tunable.items() if self.adapt_steps or name != "adapt_lr"}

    def init(self, task: Task, seed: int) -> CountingModelState:
        """Initializes w_0."""
        return CountingModelState(task.initial_weights(seed))

    def round(self, state: CountingModelState, clients: Clients) -> CountingModelState:
        """w_{t+1} ← Σ_k (n_k / n) w_{t+1}^k, over the clients that answered."""
        cohort, counted = self.sample_cohort(clients), {"flops": Number(int, 0, MAX_FLOPS)}
        answers = train_models(clients, cohort, self.local_train, state.model, counted)
        flops = state.flops + sum(answer["flops"] for answer in answers)
        return CountingModelState(self.aggregate(state.model, answers), flops)

    def aggregate(self, model: Weights, answers: Answers) -> Weights:
        """Computes the new global model from the old one and the clients' models. Override this to change it."""
        return average_by_size(answers)

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """ClientUpdate of FedAvg, on all samples of the client."""
        with self.count_flops_of(client) as counter:
            answer = super().local_train(client, model)
        return {**answer, "flops": counter.flops}

    def training_samples(self, client: Client) -> Samples:
        """At most `max_samples`."""
        return self.client_samples(client)

    # A new client.

    def initialization(self, shared: Weights) -> Weights:
        """The global model."""
        return shared

    def adapt(self, net: nn.Module, support: Samples, shared: Weights, task: Task) -> None:
        """Fine-tunes on the support set."""
        adapt_in_place(net, full_batches(support, self.adapt_steps), self.adapt_lr, task.loss)
