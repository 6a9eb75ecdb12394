"""FedNova: normalized averaging of clients that take different numbers of local steps.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020, Eq 6. Client i passes over its n_i samples in `local_epochs` epochs, so large clients take more steps τ_i.
Plain averaging then favors them twice. FedNova divides the change of a client's model by its steps:

    d_i = (x − x_i) / (η ‖a_i‖₁)           x ← x − τ_eff η Σ_i p_i d_i,    τ_eff = Σ_i p_i ‖a_i‖₁,    p_i = n_i / n

With plain SGD ‖a_i‖₁ = τ_i. With momentum ρ it is (τ_i − ρ (1 − ρ^τ_i) / (1 − ρ)) / (1 − ρ).

Departures:

- n counts the samples of the clients that answered.
- Buffers are averaged by size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pydantic import PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from fewer.learning.aggregate import combine
from fewer.learning.sgd import epoch_batches
from fewer.methods import Client, Group, ModelState
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.models import Task, Weights, get_weights, split_buffers
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Number

MAX_STEPS = 10**9
"""The largest number of local steps that a client may report."""


@dataclass(frozen=True)
class FedNovaState(ModelState):
    """The global model x, and the names of its parameters; all other weights are buffers."""

    parameters: list[str]


@METHODS.register("fednova")
class FedNova(LocalTraining[FedNovaState]):
    """FedAvg by epochs, with each client's change divided by its number of steps."""

    group: ClassVar[Group] = "drift correction"

    local_epochs: PositiveInt = 1
    """Passes of a client over its samples in each round; they take the place of `local_steps`."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer != "sgd" or self.lr_schedule != "constant":
            raise PydanticCustomError("optimizer", "fednova needs optimizer = sgd and lr_schedule = constant")
        return self

    def init(self, task: Task, seed: int) -> FedNovaState:
        """Initializes x."""
        model = task.initial_weights(seed)
        return FedNovaState(model, list(split_buffers(task.net(), model)[0]))

    def round(self, state: FedNovaState, clients: Clients) -> FedNovaState:
        """x ← x − τ_eff η Σ_i p_i d_i"""
        extra = {"steps": Number(int, 1, MAX_STEPS)}
        answers = train_models(clients, self.sample_cohort(clients), self.local_train, state.model, extra)
        sizes = [answer["size"] for answer in answers]
        norms = [self._norm(answer["steps"]) for answer in answers]  # ‖a_i‖₁
        effective = sum(size * norm for size, norm in zip(sizes, norms, strict=True)) / sum(sizes)  # τ_eff
        changes = [
            {name: (state.model[name] - answer["model"][name]) / norm for name in state.parameters}
            for answer, norm in zip(answers, norms, strict=True)
        ]  # η d_i
        mean = combine(changes, sizes, answers.aggregation)
        moved = {name: state.model[name] - effective * mean[name] for name in state.parameters}
        return replace(state, model={**average_by_size(answers), **moved})

    def _norm(self, steps: int) -> float:
        """‖a_i‖₁ of SGD with momentum ρ."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains for `local_epochs` epochs; returns the model, n_i and τ_i."""
        net = client.net(model)
        batches = list(epoch_batches(client.train, self.local_epochs, self.batch_size, client.stream("batches")))
        self.train_net(net, client, batches)
        return {"model": get_weights(net), "size": len(client.train), "steps": len(batches)}
