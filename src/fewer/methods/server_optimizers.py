"""FedOpt: FedAvg with an optimizer on the server, as FedAvgM, FedAdam, FedYogi and FedAdagrad.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
Algorithm 2. FedAvgM is that of Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification, arXiv 1909.06335, 2019. A round is one of FedAvg, except that the server treats the mean change
of the clients' models, Δ_t, as a negative gradient of the global model x_t:

    Δ_t = Σ_i p_i (x_i − x_t)
    m_t = β_1 m_{t−1} + (1 − β_1) Δ_t
    v_t = v_{t−1} + Δ_t²                                     (FedAdagrad)
    v_t = v_{t−1} − (1 − β_2) Δ_t² sign(v_{t−1} − Δ_t²)      (FedYogi)
    v_t = β_2 v_{t−1} + (1 − β_2) Δ_t²                       (FedAdam)
    x_{t+1} = x_t + η m_t / (√v_t + τ)

FedAvgM has m_t = β_1 m_{t−1} + Δ_t and x_{t+1} = x_t + η m_t.

Departures:

- Those of FedAvg. Clients are weighted by size, as in the paper's experiments; Algorithm 2 weights them equally.
- Buffers, such as the running statistics of batch norm, are averaged as in FedAvg: they have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat

from fewer.methods import Group, ModelState, SearchSpace
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.models import Task, Weights, split_buffers
from fewer.registry import METHODS
from fewer.runtime import Clients

Decay = Annotated[float, Field(ge=0, lt=1)]
_LOCAL = LocalTraining.tunable


@dataclass(frozen=True)
class ServerOptimizerState(ModelState):
    """The global model x_t and both moments of its parameters."""

    first_moment: Weights
    """m_t"""
    second_moment: Weights
    """v_t"""


@METHODS.register("fedopt")
class FedOpt(LocalTraining[ServerOptimizerState]):
    """FedAvg whose server takes an optimizer's step along the mean change of the clients' models."""

    group: ClassVar[Group] = "server optimizers"

    server_optimizer: Literal["momentum", "adam", "yogi", "adagrad"] = "adam"
    """The optimizer of the server."""
    server_lr: PositiveFloat = 0.01
    """Learning rate of the server (η)."""
    beta1: Decay = 0.9
    """Decay of the first moment (β_1)."""
    beta2: Decay = 0.99
    """Decay of the second moment (β_2), for adam and yogi."""
    tau: PositiveFloat = 1e-3
    """Adaptivity (τ): added to the root of the second moment, which starts at τ²."""

    def init(self, task: Task, seed: int) -> ServerOptimizerState:
        """x_0 at random, m_{−1} = 0 and v_{−1} = τ²."""
        model = task.initial_weights(seed)
        parameters, _ = split_buffers(task.net(), model)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        adaptive = self.server_optimizer != "momentum"
        v = {name: zero + self.tau**2 for name, zero in zeros.items()} if adaptive else {}
        return ServerOptimizerState(model, zeros, v)

    def round(self, state: ServerOptimizerState, clients: Clients) -> ServerOptimizerState:
        """One step of the server's optimizer along Δ_t."""
        answers = train_models(clients, self.sample_cohort(clients), self.local_train, state.model)
        model, m, v = average_by_size(answers), {}, {}
        for name, old in state.first_moment.items():
            delta = model[name] - state.model[name]
            if self.server_optimizer == "momentum":
                m[name] = self.beta1 * old + delta
                step = m[name]
            else:
                m[name] = self.beta1 * old + (1 - self.beta1) * delta
                v[name] = self._second_moment(state.second_moment[name], delta.square())
                step = m[name] / (v[name].sqrt() + self.tau)
            model[name] = state.model[name] + self.server_lr * step
        return ServerOptimizerState(model, m, v)

    def _second_moment(self, v: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        """v_t, from v_{t−1} and Δ_t²."""
        if self.server_optimizer == "adagrad":
            return v + squared
        if self.server_optimizer == "yogi":
            return v - (1 - self.beta2) * squared * torch.sign(v - squared)
        return self.beta2 * v + (1 - self.beta2) * squared


@METHODS.register("fedavgm")
class FedAvgM(FedOpt):
    """FedAvg with momentum on the server."""

    tunable: ClassVar[SearchSpace] = {**_LOCAL, "server_lr": (0.1, 0.3, 1.0)}

    server_optimizer: Literal["momentum", "adam", "yogi", "adagrad"] = "momentum"
    server_lr: PositiveFloat = 1.0


@METHODS.register("fedadam")
class FedAdam(FedOpt):
    """FedAvg with Adam on the server."""

    tunable: ClassVar[SearchSpace] = {**_LOCAL, "server_lr": (0.003, 0.01, 0.03, 0.1)}


@METHODS.register("fedyogi")
class FedYogi(FedOpt):
    """FedAvg with Yogi on the server."""

    tunable: ClassVar[SearchSpace] = {**_LOCAL, "server_lr": (0.003, 0.01, 0.03, 0.1)}

    server_optimizer: Literal["momentum", "adam", "yogi", "adagrad"] = "yogi"


@METHODS.register("fedadagrad")
class FedAdagrad(FedOpt):
    """FedAvg with Adagrad on the server."""

    tunable: ClassVar[SearchSpace] = {**_LOCAL, "server_lr": (0.01, 0.03, 0.1)}

    server_optimizer: Literal["momentum", "adam", "yogi", "adagrad"] = "adagrad"
    beta1: Decay = 0.0
