"""What FRL is compared with: other models to begin a group's few rounds from.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Section 4, "Comparison schemes". All
are judged on the same groups as FRL, each with any head; each round of preparation is one of communication, so that
equal `rounds` are equal effort. `frl-scratch` is FedAvg from a random model. `frl-fine-tuning` is pretrained by FedAvg
as a classifier of all training classes; with `keep` (and twice the members) its groups average only the models that do
best on samples held out, one-shot FL (Guha, Talwalkar, Smith, 2019). `frl-per-fedavg` begins from the model of Per-
FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020), which is geared to a step at each client alone. `frl-warm`, which the
paper does not have, is FRL from what the pretraining of `frl-fine-tuning` gave in the first of its rounds.
`frl-lasting` is another reading of FRL with a linear head, which the paper has "as in other baselines": one for all
training classes.

Departures: Per-FedAvg is its first-order variant, as FRL is; the mean goes by size; one-shot FL averages weights, as a
group needs one global model, and a client judges its own model on a fifth of its support.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data.episodes import support_query
from fewer.errors import SettingError
from fewer.learning import sgd, weighted_mean
from fewer.learning.sgd import epochs
from fewer.methods.base import MAX_SIZE, Client, ModelState
from fewer.methods.frl import FRL, LRS, FRLState, Prepared, features_of
from fewer.models import Task, Weights, parts_of, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, Unable, on_client
from fewer.wire import Coded, Number


@METHODS.register("frl-scratch")
class FRLScratch(Prepared):
    """FRL's baseline: no preparation, a group begins from a random model."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"lr": LRS}

    rounds: PositiveInt = 1
    """Rounds in which nothing happens."""

    def init(self, task: Task, seed: int) -> ModelState:
        """A random model."""
        parts_of(task.net())
        return ModelState(task.initial(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """Nothing."""
        return state


@METHODS.register("frl-fine-tuning")
class FRLFineTuning(FRLScratch):
    """FRL's baseline: a group fine-tunes what FedAvg learned of the training classes; one-shot FL with `keep`."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"pretrain_lr": (0.03, 0.1, 0.3), **FRLScratch.tunable}

    rounds: PositiveInt = 80
    """Rounds of preparation."""
    pretrain_lr: PositiveFloat = 0.1
    """Step size of local training in preparation."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """A round of FedAvg."""
        return ModelState(self.averaged(state.model, clients))

    def averaged(self, model: Weights, clients: Clients) -> Weights:
        """What some clients make of a model, by size."""
        answers = clients.ask(
            self.sample_cohort(clients),
            self.prepare,
            model=Coded(model, self.codec),
            returns={"model": model, "size": Number(int, 1, MAX_SIZE)},
        )
        return weighted_mean([answer["model"] for answer in answers], [answer["size"] for answer in answers])

    @on_client
    def prepare(self, client: Client, model: Weights) -> dict[str, Any]:
        """Local training on all samples of the client."""
        net = client.net(model)
        self.pretrain(net, client)
        return {"model": Coded(weights_of(net), self.codec), "size": len(client.train)}

    def pretrain(self, net: nn.Module, client: Client) -> None:
        """Some passes over all samples, in place: what relatives change."""

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(parts_of(net)[1](features_of(net, x)), y)

        sgd(
            net,
            epochs(client.train, self.epochs, self.batch_size, client.stream("batches")),
            self.pretrain_lr,
            loss=loss,
        )


@METHODS.register("frl-per-fedavg")
class FRLPerFedAvg(FRLFineTuning):
    """FRL's baseline: a group begins from the model of Per-FedAvg, geared to a step at each client alone."""

    def pretrain(self, net: nn.Module, client: Client) -> None:
        """Steps w ← w − β ∇f(w − α ∇f(w; D); D′) in place, D and D′ from halves of the samples."""
        draw = client.stream("batches")
        inner, outer = support_query(client.train, self.support_fraction, draw, by_class=True)
        if not len(outer):
            raise Unable("no class with two samples: no half is left to answer")
        every = torch.arange(client.task.classes, device=client.train.y.device)
        known = (every, torch.zeros(len(every), 0)) if self.head == "linear" else None
        parameters: list[Tensor] = [tensor for tensor in net.parameters() if tensor.requires_grad]
        net.train()
        for there, back in zip(
            epochs(inner, self.epochs, self.batch_size, draw),
            epochs(outer, self.epochs, self.batch_size, draw),
            strict=False,
        ):
            first = [tensor.detach().clone() for tensor in parameters]
            for batch, lr in ((there, self.lr), (back, self.pretrain_lr)):
                loss, _ = self.loss(net, *batch, known)
                slopes = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
                with torch.no_grad():
                    if batch is back:
                        torch._foreach_copy_(parameters, first)
                    torch._foreach_add_(parameters, slopes, alpha=-lr)


@METHODS.register("frl-meta-head")
class FRLMetaHead(FRL):
    """FRL with one linear head for all training classes that is prepared too, not drawn anew for each episode.

    The loss of an episode is over the classes that its clients hold, as with a head that is drawn.
    """

    meta_head: ClassVar[bool] = True

    head: Literal["linear"] = "linear"
    """How classes are told apart: by a linear layer. Each group that comes later has its own, drawn anew."""
    lr: PositiveFloat = 0.03
    """Step size of local training (α)."""


@METHODS.register("frl-warm-start")
class FRLWarmStart(FRL, FRLFineTuning):
    """FRL that begins from what FedAvg learned of the training classes in the first of its rounds: not in the paper."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"meta_lr": (0.0003, 0.001, 0.003), "lr": LRS}

    meta_lr: PositiveFloat = 0.001
    """Step size of the meta-update (β): smaller than FRL's, as the model is good already."""
    warmup_rounds: PositiveInt = 40
    """Rounds of FedAvg before the first episode."""

    def init(self, task: Task, seed: int) -> FRLState:  # type: ignore[override]
        """As FRL; whole episodes begin after the rounds of FedAvg."""
        each = self.group_rounds + 1
        if self.warmup_rounds % each or self.warmup_rounds >= self.rounds:
            raise SettingError(
                f"warm = {self.warmup_rounds} (allowed: multiples of {each} below {self.rounds}, the rounds)"
            )
        return super().init(task, seed)

    def round(self, state: FRLState, clients: Clients) -> FRLState:  # type: ignore[override]
        """A round of FedAvg, or one of an episode."""
        if clients.round <= self.warmup_rounds:
            return replace(state, initial=self.averaged(state.initial, clients))
        return FRL.round(self, state, clients)
