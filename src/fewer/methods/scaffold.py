"""SCAFFOLD: local training with control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020, Algorithm 1 with option II. x is the global model, c the server's control variate and c_i that of client i,
an estimate of its gradient. Client i starts from y = x and takes K steps

    y ← y − η_l (g_i(y) − c_i + c)
    c_i⁺ = c_i − c + (x − y) / (K η_l),    which is the mean of its gradients g_i(y)

The server then moves by the mean over the clients S that answered, of all N clients:

    x ← x + η_g / |S| Σ (y_i − x)          c ← c + 1 / N Σ (c_i⁺ − c_i)

A message has the size of two models in both directions.

Departures:

- A fixed number of local steps on batches drawn with replacement, as in FedAvg.
- c_i⁺ is computed as the mean of the gradients. With plain SGD that is option II; with momentum or
  `clip_norm` it stays a gradient.
- A client whose answer was lost returns to its old c_i (confirmed.py). Otherwise c would not be the mean of all c_i.
- Buffers are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from fewer.methods import Client, Group, ModelState, SearchSpace
from fewer.methods.confirmed import (
    count_answers,
    last_counted,
    load_confirmed,
    store_unconfirmed,
    zeros_like_parameters,
)
from fewer.methods.fedavg import LocalTraining, average_equally, average_field
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client


@dataclass(frozen=True)
class ScaffoldState(ModelState):
    """The global model x and the server's control variate c."""

    control: Weights
    """c"""
    counted: dict[str, int]
    """The last round in which each client's answer was counted."""


@METHODS.register("scaffold")
class Scaffold(LocalTraining[ScaffoldState]):
    """FedAvg whose clients correct their drift with control variates."""

    group: ClassVar[Group] = "drift correction"

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "server_lr": (0.3, 1.0)}

    server_lr: PositiveFloat = 1.0
    """Learning rate of the server (η_g)."""

    def init(self, task: Task, seed: int) -> ScaffoldState:
        """x at random and c = 0."""
        model = task.initial_weights(seed)
        return ScaffoldState(model, zeros_like_parameters(task.net(), model), {})

    def round(self, state: ScaffoldState, clients: Clients) -> ScaffoldState:
        """Moves x and c by the mean changes of the clients that answered."""
        cohort = self.sample_cohort(clients)
        answers = clients.ask(
            cohort,
            self.train_with_control,
            model=state.model,
            control=state.control,
            counted=last_counted(state.counted, cohort),
            returns={"model": state.model, "change": state.control},
        )
        model = average_equally(answers)
        change = average_field(answers, "change")
        for name in state.control:
            model[name] = state.model[name] + self.server_lr * (model[name] - state.model[name])
        share = len(answers) / len(clients)  # |S| / N
        control = {name: c + share * change[name] for name, c in state.control.items()}
        return ScaffoldState(model, control, count_answers(state.counted, answers, clients.round))

    @on_client(stream="train")
    def train_with_control(self, client: Client, model: Weights, control: Weights, counted: int) -> dict[str, Any]:
        """Trains y from x; returns y and c_i⁺ − c_i."""
        net = client.net(model)
        c_i = load_confirmed(client, counted, control.items())
        names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        correction = [control[name] - c_i[name] for name in names]
        sums = [torch.zeros_like(tensor) for tensor in correction]

        def correct(_: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
            """g_i(y) − c_i + c"""
            torch._foreach_add_(sums, gradients)
            torch._foreach_add_(gradients, correction)

        self.train_net(net, client, modify_gradients=correct)
        c_plus = {**c_i, **{name: total / self.local_steps for name, total in zip(names, sums, strict=True)}}
        store_unconfirmed(client, c_i, c_plus)
        return {"model": get_weights(net), "change": {name: c_plus[name] - c_i[name] for name in control}}
