"""Baselines of FRL: other models that a group can start its few rounds from.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Section 4, "Comparison schemes".
All are evaluated on the same groups as FRL, with any head. Each round of preparation is one communication round, so
equal `rounds` mean equal effort.

- `frl-scratch`: FedAvg from a random model.
- `frl-fine-tuning`: FedAvg pretrains a classifier of all training classes, and groups fine-tune it. With `keep_best`
  (and twice the `group_size`) groups average only the models that do best on held-out samples: one-shot FL (Guha,
  Talwalkar, Smith, 2019).
- `frl-per-fedavg`: pretraining by Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020), which prepares for a step of
  each client alone.
- `frl-warm-start` (not in the paper): FRL whose first rounds are the pretraining of `frl-fine-tuning`.
- `frl-meta-head`: FRL with one linear head for all training classes, another reading of the paper's "as in other
  baselines".

Departures:
- Per-FedAvg is first order, as FRL is.
- Models are averaged by size.
- One-shot FL averages weights, since a group needs one global model. A client evaluates its own model on a fifth of
  its support set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.data.episodes import split_support_query
from fewer.errors import SettingError
from fewer.learning import sgd
from fewer.learning.group_model import compute_features
from fewer.methods import Client, ModelState, SearchSpace, StateT
from fewer.methods.fedavg import average_by_size, train_models
from fewer.methods.few_rounds import LRS
from fewer.methods.frl import FRL, FRLState, PreparingMethod
from fewer.models import Task, Weights, get_weights, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, Unable, on_client


@METHODS.register("frl-scratch")
class FRLScratch(PreparingMethod[ModelState]):
    """FRL baseline: no preparation; a group starts from a random model."""

    tunable: ClassVar[SearchSpace] = {"lr": LRS}

    rounds: PositiveInt = 1
    """Number of rounds; nothing happens in them."""

    def init(self, task: Task, seed: int) -> ModelState:
        """A random model."""
        split_net(task.net())  # fails early if the net has no encoder and head
        self.empty_group(task)
        return ModelState(task.initial_weights(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """Does nothing."""
        return state


class Pretraining(PreparingMethod[StateT]):
    """Rounds of FedAvg that pretrain a classifier of all training classes."""

    pretrain_lr: PositiveFloat = 0.1
    """Learning rate of local training in preparation."""

    def pretrain_round(self, model: Weights, clients: Clients, cohort: Sequence[int] | None = None) -> Weights:
        """One round of FedAvg, with a new cohort or the given one."""
        cohort = self.sample_cohort(clients) if cohort is None else cohort
        return average_by_size(train_models(clients, cohort, self.local_pretrain, model))

    @on_client(stream="prepare")
    def local_pretrain(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains on the samples of the client."""
        net = client.net(model)
        self.fit(net, client)
        return {"model": get_weights(net), "size": len(client.train)}

    def fit(self, net: nn.Module, client: Client) -> None:
        """Trains a classifier of all training classes for E epochs, in place. Subclasses override it."""
        batches = self.training_batches(self.pretraining_samples(client), client.stream("batches"))
        sgd(net, batches, self.pretrain_lr, loss=classifier_loss, optimizer=self.local_optimizer())

    def pretraining_samples(self, client: Client) -> Samples:
        """The samples that a client pretrains on: by default all."""
        return client.train


def classifier_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of the net's own head, which classifies all training classes."""
    return F.cross_entropy(split_net(net)[1](compute_features(net, x)), y)


@METHODS.register("frl-fine-tuning")
class FRLFineTuning(Pretraining[ModelState], FRLScratch):
    """FRL baseline: a group fine-tunes a model pretrained by FedAvg; one-shot FL with `keep_best`."""

    tunable: ClassVar[SearchSpace] = {"pretrain_lr": (0.03, 0.1, 0.3), **FRLScratch.tunable}

    rounds: PositiveInt = 80
    """Rounds of preparation."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """One round of FedAvg."""
        return ModelState(self.pretrain_round(state.model, clients))


@METHODS.register("frl-per-fedavg")
class FRLPerFedAvg(FRLFineTuning):
    """FRL baseline: a group starts from the model of Per-FedAvg, which prepares for a step of each client alone."""

    def fit(self, net: nn.Module, client: Client) -> None:
        """Takes steps w ← w − β ∇f(w − α ∇f(w; D); D′), in place, with D and D′ from disjoint parts of the samples."""
        generator = client.stream("batches")
        support, queries = split_support_query(client.train, self.support_fraction, generator, by_class=True)
        if not len(queries):
            raise Unable("no class with two samples: the query set is empty")
        classes = torch.arange(client.task.classes, device=client.train.y.device)
        global_prototypes = (classes, torch.zeros(len(classes), 0)) if self.head == "linear" else None
        parameters: list[Tensor] = [tensor for tensor in net.parameters() if tensor.requires_grad]
        net.train()
        for inner, outer in zip(
            self.training_batches(support, generator),
            self.training_batches(queries, generator),
            strict=False,
        ):
            start = [tensor.detach().clone() for tensor in parameters]
            for batch, lr in ((inner, self.lr), (outer, self.pretrain_lr)):
                loss, _ = self.loss(net, *batch, global_prototypes)
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
                with torch.no_grad():
                    if batch is outer:  # the gradient at w − α ∇f(w; D) moves w
                        torch._foreach_copy_(parameters, start)
                    self.local_optimizer().make_step(parameters, lr, 1)(gradients)


@METHODS.register("frl-meta-head")
class FRLMetaHead(FRL):
    """FRL whose linear head for all training classes is meta-learned instead of redrawn for each episode.

    The loss of an episode is over the classes that its clients hold, as with a redrawn head.
    """

    meta_head: ClassVar[bool] = True

    head: Literal["linear"] = "linear"
    """Classify by a linear layer. Each later group redraws it."""
    lr: PositiveFloat = 0.03
    """Learning rate of local training (α)."""


@METHODS.register("frl-warm-start")
class FRLWarmStart(FRL, Pretraining[FRLState]):
    """FRL that first pretrains by FedAvg for some of its rounds. Not in the paper."""

    tunable: ClassVar[SearchSpace] = {"meta_lr": (0.0003, 0.001, 0.003), "lr": LRS}

    meta_lr: PositiveFloat = 0.001
    """Learning rate of the meta-update (β): smaller than for FRL, since the model is already good."""
    warmup_rounds: PositiveInt = 40
    """Rounds of FedAvg before the first episode."""

    def init(self, task: Task, seed: int) -> FRLState:
        """As FRL; episodes start after the warm-up."""
        episode_rounds = self.group_rounds + 1
        if self.warmup_rounds % episode_rounds or self.warmup_rounds >= self.rounds:
            raise SettingError(
                f"warmup_rounds must be a multiple of {episode_rounds} (an episode) below rounds = {self.rounds}, "
                f"got {self.warmup_rounds}"
            )
        return super().init(task, seed)

    def round(self, state: FRLState, clients: Clients) -> FRLState:
        """One round of FedAvg, or one of an episode."""
        if clients.round <= self.warmup_rounds:
            return replace(state, initial=self.pretrain_round(state.initial, clients))
        return super().round(state, clients)
