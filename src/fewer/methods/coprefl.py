"""CoPreFL: collaborative pre-training that also evens out the clients' losses. A rival of FRL.

Chu, Han, Hosseinalipour, Brinton: Rethinking the Starting Point: Collaborative Pre-Training for Federated Downstream
Tasks, AAAI 2025, the scenario without data on the server. Each client j of a cohort of m splits its samples into a
support set S_j and a query set Q_j. One round of FedAvg on the support sets gives Φ̄. The clients then send the loss
L_j = L(Φ̄, Q_j) of their queries and its gradient, and the server takes a meta-step:

    Φ̄ = Σ_j (n_j / n) Φ_j                          with Φ_j trained from Φ on S_j
    Φ ← Φ̄ − ζ ∇ [γ mean_j L_j + (1 − γ) Var_j L_j]    at Φ̄ (first order)

∇ Var_j L_j = (2 / m) Σ_j (L_j − mean L) ∇L_j. As in FRL, `rounds` counts communication rounds; a meta-step has two.
The result is evaluated as FRL is: later groups train their own model from Φ in a few rounds, with any `head`.

Departures:

- The loss of queries is a mean over clients; with a sum, γ would depend on the size of the cohort.
- Preparation trains a classifier of all training classes. Batch norm uses the statistics of the batch, as in FRL.
- Clients are weighted by all their samples in Φ̄, not by those of their support sets.
- `--aggregate` replaces the mean of the gradients. The gradient of the variance stays a plain sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt

from fewer.data import Samples
from fewer.data.episodes import split_support_query
from fewer.errors import SettingError
from fewer.learning.adapt import trainable_weights
from fewer.methods import Client, ModelState, SearchSpace
from fewer.methods.fedavg import average_field
from fewer.methods.few_rounds import LRS, Fraction
from fewer.methods.frl_baselines import Pretraining, classifier_loss
from fewer.models import Task, Weights, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, Unable, on_client, stream
from fewer.wire import Number

MAX_LOSS = 1e6
"""The largest loss that a client can report."""


@dataclass(frozen=True)
class CoPreFLState(ModelState):
    """The model: Φ, or Φ̄ between the two rounds of a meta-step."""

    cohort: list[int] = field(default_factory=list)
    """The clients that trained Φ̄; empty after the meta-step."""
    learned: list[str] = field(default_factory=list)
    """Names of the weights with a gradient: all but the running statistics of batch norm."""


@METHODS.register("coprefl")
class CoPreFL(Pretraining[CoPreFLState]):
    """FRL's rival: pretraining whose meta-step lowers the mean and the variance of the clients' query losses."""

    tunable: ClassVar[SearchSpace] = {"pretrain_lr": (0.03, 0.1, 0.3), "meta_lr": (0.01, 0.03, 0.1), "lr": LRS}

    rounds: PositiveInt = 80
    """Rounds of preparation. A meta-step has two."""
    meta_lr: PositiveFloat = 0.03
    """Learning rate of the meta-step (ζ)."""
    balance: Fraction = 0.5
    """Weight of the mean query loss in the meta-step (γ). The variance has weight 1 − γ."""

    def init(self, task: Task, seed: int) -> CoPreFLState:
        """A random model."""
        if self.rounds % 2:
            raise SettingError(f"rounds must be a multiple of 2 (a meta-step), got {self.rounds}")
        split_net(task.net())  # fails early if the net has no encoder and head
        self.empty_group(task)
        return CoPreFLState(task.initial_weights(seed), learned=list(trainable_weights(task.net())))

    def why_not_extend(self, done: int, planned: int, unscheduled: bool) -> str:
        """A run can be extended: `init` checks the number of rounds, and no meta-step depends on it."""
        return ""

    def round(self, state: CoPreFLState, clients: Clients) -> CoPreFLState:
        """Φ̄ by a round of FedAvg on support sets, or the meta-step."""
        if state.cohort:
            return replace(state, model=self.meta_step(state, clients), cohort=[])
        cohort = self.sample_cohort(clients)
        return replace(state, model=self.pretrain_round(state.model, clients, cohort), cohort=cohort)

    def meta_step(self, state: CoPreFLState, clients: Clients) -> Weights:
        """Φ ← Φ̄ − ζ ∇ [γ mean_j L_j + (1 − γ) Var_j L_j]"""
        learned = {name: state.model[name] for name in state.learned}
        answers = clients.ask(
            state.cohort,
            self.answer_queries,
            model=state.model,
            returns={"gradient": learned, "loss": Number(float, 0, MAX_LOSS)},
        )
        losses = torch.tensor([answer["loss"] for answer in answers], dtype=torch.float64)
        deviations = (2 / len(losses) * (losses - losses.mean())).tolist()
        mean, model = average_field(answers, "gradient"), dict(state.model)
        for name in learned:
            variance = sum(
                share * answer["gradient"][name].double() for share, answer in zip(deviations, answers, strict=True)
            )
            gradient = self.balance * mean[name].double() + (1 - self.balance) * variance
            model[name] = (model[name].double() - self.meta_lr * gradient).to(model[name].dtype)
        return model

    def pretraining_samples(self, client: Client) -> Samples:
        """S_j"""
        return self.support_and_query(client)[0]

    @on_client(stream="answer")
    def answer_queries(self, client: Client, model: Weights) -> dict[str, Any]:
        """L_j and its gradient, at Φ̄ on all queries."""
        queries = self.support_and_query(client)[1]
        if not len(queries):
            raise Unable("no class with two samples: all are in the support set, and the query set is empty")
        net = client.net(model).train()
        loss = classifier_loss(net, *queries.all())
        learned = trainable_weights(net)
        gradients = torch.autograd.grad(loss, [dict(net.named_parameters())[name] for name in learned])
        return {"gradient": dict(zip(learned, gradients, strict=True)), "loss": float(loss.detach())}

    def support_and_query(self, client: Client) -> tuple[Samples, Samples]:
        """Splits D_j into S_j and Q_j, the same in both rounds of a meta-step."""
        step = (client.round - 1) // 2
        generator = None if client.time_ordered else stream(client.seed, client.id, step, "division")
        return split_support_query(client.train, self.support_fraction, generator, by_class=True)
