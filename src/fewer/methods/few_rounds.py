"""Few-round training of a group: R rounds of FRL's Algorithm 1, and the group's model.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, lines 4 to 15 and Section 2.3.
Preparation (frl.py) simulates these rounds; a deployed group (frl_deploy.py) runs them. frl.py lists the departures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.data.episodes import split_support_query
from fewer.errors import QuorumLost, SettingError
from fewer.learning import evaluate_net, sgd
from fewer.learning.aggregate import combine
from fewer.learning.augment import random_crop
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.learning.group_model import GroupModel, compute_features, compute_prototypes
from fewer.learning.prototypes import (
    Prototypes,
    class_positions,
    class_prototypes,
    discriminant_weights,
    distance_loss,
    merge_prototypes,
    split_classes,
)
from fewer.learning.sgd import LocalOptimizer, epoch_batches
from fewer.methods import MAX_SAMPLES, Client, Context, Group, Method, Needs, SearchSpace, State, StateT
from fewer.methods.fedavg import average_by_size, train_models
from fewer.methods.head_only import Head, initial_head, merge_rows, write_head
from fewer.methods.private_prototypes import private_prototypes
from fewer.models import Task, Weights, get_weights, split_net
from fewer.models.split import feature_width
from fewer.runtime import Absent, Aggregation, Answer, Clients, on_client
from fewer.wire import Number, Shaped

HEAD = "head."
"""Prefix of the names of a head's weights."""
GlobalPrototypes = tuple[Tensor, Tensor]
"""Classes and their global prototypes Γ. With a linear head: the classes of the group, and prototypes of width 0."""
Fraction = Annotated[float, Field(ge=0, le=1)]
AnyGroup = TypeVar("AnyGroup", bound="GroupState")
LRS = 0.001, 0.003, 0.01
"""Learning rates (α) to tune over with prototypes at temperature 1. A linear head uses ten times these."""
GAMMAS = 0.5, 5 / 6
"""Weights of the local loss (γ) to tune over with GPAL."""
SHRINKAGES = 0.1, 1.0, 10.0
"""Relative variances that FedCOF adds, to tune over."""
GPAL_HEADS = "gpal", "fedncm", "fedcof"
"""Heads whose clients learn from global prototypes, from the second round on."""
HELD_OUT_FRACTION = 0.2
"""One-shot FL: fraction of its support set on which a client evaluates its own model."""


@dataclass(frozen=True)
class GroupState(State):
    """The server's state of a group between its rounds."""

    model: Weights
    """The global model (θ)."""
    classes: Tensor
    """The classes of the global prototypes. With a linear head: the classes that the group holds."""
    means: Tensor
    """The global prototypes Γ (classes × features). With a linear head, their width is 0."""
    num_classes: int
    """Number of classes of the task."""
    rounds_done: int = 0
    """Rounds completed (r)."""


NEUTRAL: dict[str, Any] = {"neutral": True}
"""Marks an option that changes nothing at its default."""


class FewRounds(Method[StateT]):
    """R rounds of a group of clients, starting from a given model."""

    group: ClassVar[Group] = "later groups"

    needs: ClassVar[Needs] = "classes"

    head: Literal["linear", "distance", "gpal", "fedncm", "fedcof"] = "gpal"
    """Classify by a linear layer, by distance to prototypes, or by distance with GPAL. `fedncm` and `fedcof` train as
    `gpal` does (`gamma` = 1: as `distance`). They classify by the cosine to prototypes, or by FedCOF's linear head."""
    lr: PositiveFloat = 0.003
    """Learning rate of local training (α). A linear head needs a larger one."""
    epochs: PositiveInt = 1
    """Local epochs over the support set in a round (E)."""
    batch_size: PositiveInt | None = 60
    """Samples in a local step. `null`: the full support set, as in Algorithm 1. A support set that is not larger than
    a batch has one step in an epoch."""
    local_steps: PositiveInt | None = Field(default=None, json_schema_extra=NEUTRAL)
    """Local steps in a round, over as many epochs as they need. [default: one for each batch of E epochs]"""
    weight_decay: NonNegativeFloat = Field(default=0.0, json_schema_extra=NEUTRAL)
    """Weight decay (an L2 penalty) of all steps. The authors ran 0.0005."""
    crop: NonNegativeInt = Field(default=0, json_schema_extra=NEUTRAL)
    """Train on random crops of images with a border of this many pixels. The authors ran 3."""
    temperature: PositiveFloat = Field(default=1.0, json_schema_extra=NEUTRAL)
    """Divides the squared distances in the softmax over prototypes."""
    gamma: Fraction = 5 / 6
    """GPAL: weight of the local loss (γ). The loss by global prototypes has weight 1 − γ."""
    prototypes_from: Literal["before", "after"] = "before"
    """Upload the prototypes from before local training (Algorithm 1) or after it."""
    shrinkage: PositiveFloat = Field(default=1.0, json_schema_extra=NEUTRAL)
    """`head` = fedcof: variance added to each feature, relative to the mean variance within classes."""
    subsets: PositiveInt = Field(default=1, json_schema_extra=NEUTRAL)
    """Random subsets of a client's samples of a class whose means are uploaded. More help FedCOF if clients are few."""
    keep_best: PositiveInt | None = None
    """One-shot FL: average at most this many models, those best on samples their clients held out."""

    def search_space(self) -> SearchSpace:
        """Tunes larger learning rates for a linear head and at a temperature, and γ for GPAL."""
        search_space: dict[str, Sequence[float]] = dict(self.tunable)
        # A temperature divides gradients, so it multiplies learning rates.
        search_space["lr"] = tuple((10 if self.head == "linear" else self.temperature) * lr for lr in LRS)
        if self.head in GPAL_HEADS:
            search_space["gamma"] = GAMMAS
        if self.head == "fedcof":
            search_space["shrinkage"] = SHRINKAGES
        return search_space

    # The server.

    def empty_group(self, task: Task) -> GroupState:
        """The state of a group before it starts."""
        if self.crop and len(task.shape) != 3:
            raise SettingError(f"crop = {self.crop} needs images, but inputs have shape {task.shape}")
        if self.head == "fedcof":
            initial_head(task, seed=0)  # fails early if the head is not one linear layer
        classes = torch.zeros(0, dtype=torch.int64, device=task.device)
        width = 0 if self.head == "linear" else feature_width(task)
        return GroupState({}, classes, torch.zeros(0, width, device=task.device), task.classes)

    def start_group(self, group: AnyGroup, model: Weights, generator: torch.Generator | None) -> AnyGroup:
        """Line 4: θ⁰ ← φ, with a linear head redrawn by `generator`, if given. There are no prototypes yet."""
        if self.head == "linear" and generator is not None:
            model = redraw_head(model, generator)
        model = self.sent_weights(model)
        return replace(group, model=model, classes=group.classes[:0], means=group.means[:0], rounds_done=0)

    def group_round(self, group: AnyGroup, cohort: Sequence[int], clients: Clients, last: bool) -> AnyGroup:
        """Lines 6 to 14: one round of the group."""
        per_class_schema = Shaped((range(1, group.num_classes + 1),), torch.int64)
        if self.head == "linear" and not group.rounds_done:
            answers = clients.ask(cohort, self.hold_out_classes, returns={"classes": per_class_schema})
            valid = valid_answers(answers, clients, group.num_classes, "hold_out_classes")
            group = replace(group, classes=torch.unique(torch.cat([answer["classes"] for answer in valid])))
        fields: dict[str, Any] = {"upload": self.uploads_prototypes(last), **self.prototype_payload(group)}
        extra: dict[str, Any] = {}
        if fields["upload"]:
            rows = range(1, self.subsets * group.num_classes + 1)
            per_row = Shaped((rows,), torch.int64)
            extra |= {"classes": per_row, "means": Shaped((rows, group.means.shape[1])), "counts": per_row}
        if self.keep_best is not None:
            extra["score"] = Number(float, 0, 1)
        answers = train_models(clients, cohort, self.local_train, group.model, extra, **fields)
        if answers.private and self.keep_best is None:
            group = replace(group, model=average_by_size(answers), rounds_done=group.rounds_done + 1)
            if not fields["upload"]:
                return group
            if self.head == "fedcof":
                raise SettingError("head = fedcof needs the class means of each client; with dp, use head = fedncm")
            classes, means, _ = private_prototypes(answers, group.num_classes, group.means.shape[1])
            return replace(group, classes=classes, means=means)
        valid = valid_answers(answers, clients, group.num_classes, "local_train", repeated=self.subsets > 1)
        return self.aggregate(group, [answer.fields for answer in valid], answers.aggregation)

    def prototype_payload(self, group: GroupState) -> dict[str, Tensor]:
        """Line 7: Γ, if clients download it in this round (with a linear head: the group's classes)."""
        downloads = self.head == "linear" or (self.head in GPAL_HEADS and group.rounds_done > 0)
        return {"classes": group.classes, "means": group.means} if downloads else {}

    def uploads_prototypes(self, last: bool) -> bool:
        """True if clients upload prototypes: always with GPAL, with `distance` in the last round to predict with."""
        return self.head in GPAL_HEADS or (self.head == "distance" and last)

    def aggregate(
        self,
        group: AnyGroup,
        updates: Sequence[Mapping[str, Any]],
        aggregation: Aggregation = Aggregation(),  # noqa: B008
    ) -> AnyGroup:
        """Lines 13 and 14: θ ← Σ_k λ_k θ_k with λ_k the relative support set size, and Γ(c) over the holders of c."""
        if self.keep_best is not None:
            updates = sorted(updates, key=lambda update: -update["score"])[: self.keep_best]
        models, sizes = [update["model"] for update in updates], [update["size"] for update in updates]
        model = combine(models, sizes, aggregation, group.model)
        group = replace(group, model=model, rounds_done=group.rounds_done + 1)
        if "means" not in updates[0]:
            return group
        local = [Prototypes(update["classes"], update["means"], update["counts"]) for update in updates]
        classes, means, _ = merge_prototypes(local, aggregation)
        return replace(group, classes=classes, means=means)

    def fit_head(self, weights: Weights, updates: Sequence[Mapping[str, Any]], num_classes: int) -> Weights:
        """The weights with FedCOF's linear head, from the class means that the clients uploaded."""
        rows = merge_rows([{name: update[name] for name in Prototypes._fields} for update in updates])
        discriminant = discriminant_weights(rows["classes"], rows["means"], rows["counts"], num_classes, self.shrinkage)
        seen = torch.isin(torch.arange(num_classes, device=discriminant.device), rows["classes"])
        return write_head(weights, Head(discriminant, torch.zeros_like(discriminant[:, 0]), seen))

    def group_predictor(self, net: nn.Module, classes: Tensor, means: Tensor, num_classes: int) -> GroupModel:
        """The group's model, which classifies by its `head`."""
        means = means[:, :0] if self.head == "fedcof" else means  # by the net's linear head
        return GroupModel(net, classes, means, num_classes, self.temperature, cosine=self.head == "fedncm")

    def sent_weights(self, model: Weights) -> Weights:
        """The weights that are sent: all but an unused head."""
        return {name: model[name] for name in model if self.head == "linear" or not name.startswith(HEAD)}

    # A client.

    def build_net(self, context: Context, model: Weights) -> nn.Module:
        """Builds a net with the sent weights."""
        return context.net({**context.task.initial_weights(context.seed), **model})

    def support_set(self, client: Client) -> Samples:
        """The samples that a client trains on (S_k): by default all."""
        return client.train

    @on_client(stream="holds")
    def hold_out_classes(self, client: Client) -> dict[str, Any]:
        """Returns the classes of the support set; a linear head needs them before the first round."""
        return {"classes": torch.unique(self.support_set(client).labels)}

    @on_client(stream="learn")
    def local_train(
        self, client: Client, model: Weights, upload: bool, classes: Tensor | None = None, means: Tensor | None = None
    ) -> dict[str, Any]:
        """Lines 7 to 11: downloads θ and Γ, trains on the support set S_k, uploads θ_k and, with `upload`, Γ_k."""
        net, support, generator = self.build_net(client, model), self.support_set(client), client.stream("batches")
        return self.fit_support(net, support, pair_prototypes(classes, means), upload, generator)

    def fit_support(
        self,
        net: nn.Module,
        support: Samples,
        global_prototypes: GlobalPrototypes | None,
        upload: bool,
        generator: torch.Generator,
    ) -> dict[str, Any]:
        """Lines 8 to 11, E times: θ_k ← θ − α ∇f(θ, S_k), in place. Returns what the client uploads."""
        held_out = support
        if self.keep_best is not None and len(support) > 1:
            held_out, support = split_support_query(support, HELD_OUT_FRACTION, generator)
        before: list[Prototypes] = []

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            value, local = self.loss(net, x, y, global_prototypes)
            if upload and not before:
                before.append(Prototypes(local.classes, local.means.detach(), local.counts))
            return value

        partial = self.crop > 0 or (self.batch_size is not None and self.batch_size < len(support))
        if upload and self.prototypes_from == "before" and (partial or self.subsets > 1):
            before.append(self.upload_prototypes(net, support, generator))  # otherwise, the first step computes them
        sgd(net, self.training_batches(support, generator), self.lr, loss=loss, optimizer=self.local_optimizer())
        update: dict[str, Any] = {"model": self.sent_weights(get_weights(net)), "size": len(support)}
        if upload:
            after = self.prototypes_from == "after"
            update |= (self.upload_prototypes(net, support, generator) if after else before[0])._asdict()
        if self.keep_best is not None:
            update["score"] = self.held_out_accuracy(net, support, held_out, global_prototypes)
        return update

    def upload_prototypes(self, net: nn.Module, support: Samples, generator: torch.Generator) -> Prototypes:
        """Γ_k: the mean features of each class of the support set, or of `subsets` random subsets of each."""
        if self.subsets == 1:
            return compute_prototypes(net, support)
        labels = split_classes(support.labels, self.subsets, generator)
        rows, means, counts = compute_prototypes(net, support, labels)
        return Prototypes(rows.div(self.subsets, rounding_mode="floor"), means, counts)

    def training_batches(
        self, samples: Samples, generator: torch.Generator, steps: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of E epochs, or of `steps` (by default `local_steps`) steps."""
        steps = steps or self.local_steps
        for x, y in islice(epoch_batches(samples, steps or self.epochs, self.batch_size, generator), steps):
            yield self.crop_images(x, samples, generator), y

    def crop_images(self, x: Tensor, samples: Samples, generator: torch.Generator) -> Tensor:
        """Crops at random, with a black border, if `crop` is set."""
        return random_crop(x, self.crop, float(-samples.shift * samples.scale), generator) if self.crop else x

    def local_optimizer(self) -> LocalOptimizer:
        """Plain SGD with weight decay."""
        return LocalOptimizer(weight_decay=self.weight_decay)

    def loss(
        self,
        net: nn.Module,
        x: Tensor,
        y: Tensor,
        global_prototypes: GlobalPrototypes | None,
        local_prototypes: Prototypes | None = None,
    ) -> tuple[Tensor, Prototypes]:
        """Eq 3: f = γ L_local + (1 − γ) L_aux, without L_aux in the first round. Also returns the local prototypes."""
        features = compute_features(net, x)
        local_prototypes = local_prototypes or class_prototypes(features, y)
        if self.head == "linear":
            assert global_prototypes
            position, held = class_positions(global_prototypes[0], y)
            logits = split_net(net)[1](features)[:, global_prototypes[0]]
            return F.cross_entropy(logits[held], position[held], reduction="sum") / len(y), local_prototypes
        local_loss = distance_loss(features, y, *local_prototypes[:2], self.temperature)
        if global_prototypes is None:
            return local_loss, local_prototypes
        aux_loss = distance_loss(features, y, *global_prototypes, self.temperature)
        return self.gamma * local_loss + (1 - self.gamma) * aux_loss, local_prototypes

    def held_out_accuracy(
        self, net: nn.Module, support: Samples, held_out: Samples, global_prototypes: GlobalPrototypes | None
    ) -> float:
        """The accuracy of a client's model on the samples it held out."""
        if global_prototypes and self.head == "linear":
            classes, means = global_prototypes
        else:
            classes, means = compute_prototypes(net, support)[:2]
        num_classes = int(torch.cat([classes, held_out.labels]).max()) + 1
        group_model = GroupModel(net, classes, means, num_classes)
        return evaluate_net(group_model, held_out.chunks(EVAL_BATCH_SIZE)).accuracy


def valid_answers(
    answers: Sequence[Answer], clients: Clients, num_classes: int, handler: str, repeated: bool = False
) -> list[Answer]:
    """The answers with valid classes and one prototype for each; the others count as refused.

    Valid classes are in ascending order, from 0 to `num_classes` − 1, without duplicates unless `repeated`.
    """
    valid = []
    for answer in answers:
        if "classes" in answer.fields:
            classes = answer["classes"]
            lengths = {len(answer[name]) for name in ("classes", "means", "counts") if name in answer.fields}
            counts = answer.fields.get("counts", classes.new_ones(1))
            ascending = bool(
                (classes.diff() >= (0 if repeated else 1)).all() and classes[0] >= 0 and classes[-1] < num_classes
            )
            if len(lengths) > 1 or not ascending or int(counts.min()) < 1 or int(counts.max()) > MAX_SAMPLES:
                clients.on_absent(Absent(answer.client, "refused", "invalid classes or prototypes"), handler)
                continue
        valid.append(answer)
    if not valid:
        raise QuorumLost(f"round {clients.round}: no client sent valid classes and prototypes")
    return valid


def pair_prototypes(classes: Tensor | None = None, means: Tensor | None = None) -> GlobalPrototypes | None:
    """The global prototypes that a client downloaded, or None."""
    return None if classes is None or means is None else (classes, means)


def redraw_head(model: Weights, generator: torch.Generator) -> Weights:
    """The model with a new head: Xavier for matrices, 0 for biases."""
    redrawn = dict(model)
    for name, tensor in model.items():
        if name.startswith(HEAD):
            fresh = torch.zeros(tensor.shape)
            if fresh.ndim > 1:
                nn.init.xavier_uniform_(fresh, generator=generator)
            redrawn[name] = fresh.to(tensor)
    return redrawn
