"""FRL: few-round learning with global prototype-assisted learning (GPAL).

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Algorithm 1 and Eqs 1 to 5.
Preparation looks for a model φ from which any later group of clients, with classes never met, gets a good global model
in R rounds. An episode plays such a group: R rounds on the support of K clients, then φ moves by the gradient of their
query loss at the end of those rounds (first order). `rounds` counts communication rounds: an episode has R + 1 of them.

The head of a group's model is `linear`, `distance` (to prototypes, the mean features of each class) or `gpal`: by
distance too, but from the second round on clients also learn from the global prototypes Γ of the round before (Eq 3).

Departures. Eq 2 sums over c' ≠ c, which has no lower bound and is log 0 for a client with one class: here the true class
is in the sum, which makes it the cross-entropy of a softmax over −‖g(x) − Γ(c)‖². Line 14 read literally would shrink a
prototype that some do not hold: Γ(c) is the mean over those who hold c, by their samples of c. Local prototypes carry
gradient, global ones are constants. γ = 5/6 is the paper's released L_local + 0.2 L_aux up to the rate. In a step on
part of the support the local prototypes are those of that part. A client sends the gradient of line 19 and the
server takes the step, which is the same and spares it θ⁰; by default that is a step of Adam, whose moments last,
since plain descent (`optimizer = sgd`) needs the paper's thousands of episodes. A linear head is drawn anew (Xavier)
for each episode as for each group, over the classes that the group holds, so that preparation is like what follows; to
learn which these are, a group with a linear head begins with one exchange more, of class numbers alone (`holds`).
Batch norm uses the statistics of the batch, also to answer queries; of its weights the mean is taken like of all
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Data, Samples
from fewer.data.episodes import support_query
from fewer.errors import DataError, QuorumLost, SettingError
from fewer.learning import score, sgd, weighted_mean
from fewer.learning.adam import adam
from fewer.learning.adapt import learnable
from fewer.learning.prototypes import Prototypes, distance_loss, merged, nearness, places, prototypes
from fewer.learning.sgd import epochs
from fewer.methods.base import CHUNK, MAX_SIZE, Client, Context, Method, Scores, Server
from fewer.methods.groups import OnGroups
from fewer.models import Task, Weights, load_weights, parts_of, weights_of
from fewer.models.split import feature_width
from fewer.registry import METHODS
from fewer.runtime import Absent, Answer, Clients, Unable, on_client, stream
from fewer.wire import Codec, Coded, Number, Shaped

HEAD = "head."
"""How the names of a head's weights begin."""
ClassPrototypes = tuple[Tensor, Tensor]
"""Classes and their global prototypes; of a linear head, the classes of the group."""
AnyGroup = TypeVar("AnyGroup", bound="GroupState")
LRS = 0.001, 0.003, 0.01
"""Step sizes (α) to choose from where classes are told apart by distance; for a linear head, ten times as much."""
GAMMAS = 0.5, 5 / 6
"""Shares of the local loss (γ) to choose from with GPAL."""
HELD = 0.2
"""Share of its support that a client of one-shot FL holds out to judge its own model."""


@dataclass(frozen=True)
class GroupState:
    """What the server of a group has after some of its rounds."""

    model: Weights
    """θ"""
    classes: Tensor
    """The classes that Γ has; of a linear head, those that the group holds."""
    means: Tensor
    """Γ (classes × features); of a linear head, without width."""
    total: int
    """Classes that there are at all."""
    done: int = 0
    """Rounds so far (r)."""


# --- R rounds of a group: lines 4 to 15 ------------------------------------------------------------------------


class FewRounds(Method):
    """R rounds in a group of clients, from a model that is given."""

    head: Literal["linear", "distance", "gpal"] = "gpal"
    """How classes are told apart: by a linear layer, by distance to prototypes, or by that with GPAL."""
    lr: PositiveFloat = 0.003
    """Step size of local training (α); a linear head needs a larger one."""
    epochs: PositiveInt = 1
    """Passes over the support in a round (E)."""
    batch_size: PositiveInt | None = 60
    """Samples in a step; none for all of the support at once, as in Algorithm 1."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 5 / 6
    """With GPAL: share of the loss by local prototypes beside that by global ones (γ)."""
    prototypes_from: Literal["before", "after"] = "before"
    """Whether prototypes are those before local training (Algorithm 1) or after it."""
    keep_best: PositiveInt | None = None
    """One-shot FL: average at most so many models, those that do best on samples that their clients held out."""
    codec: Codec = "float32"
    """How models and prototypes are written on the wire."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """A linear head learns with larger steps; GPAL has its γ besides."""
        own: dict[str, Sequence[float]] = {}
        if self.head == "linear":
            own["lr"] = [10 * lr for lr in LRS]
        if self.head == "gpal":
            own["gamma"] = GAMMAS
        return {**self.tunable, **own}

    def nobody(self, task: Task) -> GroupState:
        """A group before it begins."""
        none = torch.zeros(0, dtype=torch.int64, device=task.device)
        width = 0 if self.head == "linear" else feature_width(task)
        return GroupState({}, none, torch.zeros(0, width, device=task.device), task.classes)

    def begin(self, group: AnyGroup, model: Weights, draw: torch.Generator | None) -> AnyGroup:
        """Line 4: θ⁰, with a linear head drawn anew if there is one to draw by. Nothing is known of classes yet."""
        first = new_head(model, draw) if self.head == "linear" and draw is not None else model
        return replace(group, model=self.sent_weights(first), classes=group.classes[:0], means=group.means[:0], done=0)

    def play(self, group: AnyGroup, who: Sequence[int], clients: Clients, last: bool) -> AnyGroup:
        """Lines 6 to 14: one round of the group. Prototypes are needed for GPAL, and in the end to answer with."""
        some = Shaped((range(1, group.total + 1),), torch.int64)
        if self.head == "linear" and not group.done:
            told = fitting(clients.ask(who, self.holds, returns={"classes": some}), clients, group.total, "holds")
            group = replace(group, classes=torch.unique(torch.cat([answer["classes"] for answer in told])))
        fields: dict[str, Any] = {"model": Coded(group.model, self.codec), **self.known(group)}
        wanted = self.wanted(last)
        returns: dict[str, Any] = {"model": group.model, "size": Number(int, 1, MAX_SIZE)}
        if wanted:
            returns |= {"classes": some, "means": Shaped((some.shape[0], group.means.shape[1])), "counts": some}
        if self.keep_best is not None:
            returns["score"] = Number(float, 0, 1)
        answers = clients.ask(who, self.learn, wanted=wanted, returns=returns, **fields)
        return self.merge(group, [answer.fields for answer in fitting(answers, clients, group.total, "learn")])

    def tells(self, group: GroupState) -> bool:
        """Whether clients are told what is known of the group's classes."""
        return self.head == "linear" or (self.head == "gpal" and group.done > 0)

    def known(self, group: GroupState) -> dict[str, Any]:
        """What they are told."""
        return {"classes": group.classes, "means": Coded(group.means, self.codec)} if self.tells(group) else {}

    def wanted(self, last: bool) -> bool:
        """Whether clients send prototypes in this round."""
        return self.head == "gpal" or (self.head == "distance" and last)

    def merge(self, group: AnyGroup, found: Sequence[Mapping[str, Any]]) -> AnyGroup:
        """Lines 13 and 14: the mean of models by size of support, of prototypes over those who hold the class."""
        if self.keep_best is not None:
            found = sorted(found, key=lambda one: -one["score"])[: self.keep_best]
        model = weighted_mean([one["model"] for one in found], [one["size"] for one in found])
        group = replace(group, model=model, done=group.done + 1)
        if "means" not in found[0]:
            return group
        new = merged([Prototypes(one["classes"], one["means"], one["counts"]) for one in found])
        return replace(group, classes=new.classes, means=new.means)

    def sent_weights(self, model: Weights) -> Weights:
        """What of a model travels: all but a head that is not used."""
        return {name: model[name] for name in model if self.head == "linear" or not name.startswith(HEAD)}

    def net(self, context: Context, model: Weights) -> nn.Module:
        """A net with what travelled."""
        return context.net({**context.task.initial(context.seed), **model})

    def support(self, client: Client) -> Samples:
        """What a client learns from."""
        return client.train

    @on_client
    def holds(self, client: Client) -> dict[str, Any]:
        """Which classes the client has: a linear head needs to know before it begins."""
        return {"classes": torch.unique(self.support(client).labels)}

    @on_client
    def learn(
        self, client: Client, model: Weights, wanted: bool, classes: Tensor | None = None, means: Tensor | None = None
    ) -> dict[str, Any]:
        """Lines 7 to 11 at a client."""
        known = known_of(classes, means)
        answer = self.update(self.net(client, model), self.support(client), known, wanted, client.stream("batches"))
        sent = ("model", "means") if wanted else ("model",)
        return {**answer, **{name: Coded(answer[name], self.codec) for name in sent}}

    def update(
        self, net: nn.Module, support: Samples, known: ClassPrototypes | None, wanted: bool, draw: torch.Generator
    ) -> dict[str, Any]:
        """Lines 8 to 11, E times: local training in place, and what the client sends."""
        held = support
        if self.keep_best is not None and len(support) > 1:
            held, support = support_query(support, HELD, draw)
        first: list[Prototypes] = []

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            found, own = self.loss(net, x, y, known)
            if wanted and not first:
                first.append(Prototypes(own.classes, own.means.detach(), own.counts))
            return found

        if (
            wanted
            and self.prototypes_from == "before"
            and self.batch_size is not None
            and self.batch_size < len(support)
        ):
            first.append(embed(net, support))  # else the first step passes over all of the support anyway
        sgd(net, epochs(support, self.epochs, self.batch_size, draw), self.lr, loss=loss)
        answer: dict[str, Any] = {"model": self.sent_weights(weights_of(net)), "size": len(support)}
        if wanted:
            answer |= (first[0] if self.prototypes_from == "before" else embed(net, support))._asdict()
        if self.keep_best is not None:
            answer["score"] = self.own_score(net, support, held, known)
        return answer

    def loss(
        self, net: nn.Module, x: Tensor, y: Tensor, known: ClassPrototypes | None, own: Prototypes | None = None
    ) -> tuple[Tensor, Prototypes]:
        """f of Eq 3: L_local (Eq 2) and from the second round on L_aux; and the local prototypes, of the same pass."""
        features = features_of(net, x)
        own = own or prototypes(features, y)
        if self.head == "linear":
            assert known
            place, there = places(known[0], y)
            scores = parts_of(net)[1](features)[:, known[0]]
            return F.cross_entropy(scores[there], place[there], reduction="sum") / len(y), own
        local = distance_loss(features, y, own.classes, own.means)
        if known is None:
            return local, own
        return self.gamma * local + (1 - self.gamma) * distance_loss(features, y, *known), own

    def own_score(self, net: nn.Module, support: Samples, held: Samples, known: ClassPrototypes | None) -> float:
        """The accuracy of a client's model on samples that it held out."""
        classes, means = known if known and self.head == "linear" else embed(net, support)[:2]
        total = int(torch.cat([classes, held.labels]).max()) + 1
        counts = score(Answering(net, classes, means, total), held.chunks(CHUNK))
        return counts.correct / counts.total


def fitting(answers: Sequence[Answer], clients: Clients, total: int, handler: str) -> list[Answer]:
    """The answers whose classes are classes, each once and with one prototype; the others count as refused."""
    good = []
    for answer in answers:
        if "classes" in answer.fields:
            classes = answer["classes"]
            lengths = {len(answer[name]) for name in ("classes", "means", "counts") if name in answer.fields}
            counts = answer.fields.get("counts", classes.new_ones(1))
            rising = bool((classes.diff() > 0).all() and classes[0] >= 0 and classes[-1] < total)
            if len(lengths) > 1 or not rising or int(counts.min()) < 1 or int(counts.max()) > MAX_SIZE:
                clients.on_absent(Absent(answer.client, "refused", "its classes and prototypes do not fit"), handler)
                continue
        good.append(answer)
    if not good:
        raise QuorumLost(f"round {clients.round}: no client sent classes and prototypes that fit")
    return good


def known_of(classes: Tensor | None, means: Tensor | None) -> ClassPrototypes | None:
    """What a client was told of the group's classes, if anything."""
    return None if classes is None or means is None else (classes, means)


def new_head(model: Weights, draw: torch.Generator) -> Weights:
    """The model with a head drawn anew: matrices by Xavier, biases 0."""
    fresh = dict(model)
    for name, tensor in model.items():
        if name.startswith(HEAD):
            drawn = torch.zeros(tensor.shape)
            if drawn.ndim > 1:
                nn.init.xavier_uniform_(drawn, generator=draw)
            fresh[name] = drawn.to(tensor)
    return fresh


def features_of(net: nn.Module, x: Tensor) -> Tensor:
    """g(x). Images lie with their channels last, which halves the time that pools and batch norm take."""
    features: Tensor = parts_of(net)[0](x.to(memory_format=torch.channels_last) if x.ndim == 4 else x)
    return features


def batch_statistics(net: nn.Module) -> None:
    """Evaluation mode, but for batch norm, which goes on to use the statistics of the batch."""
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()


@torch.no_grad()
def embed(net: nn.Module, samples: Samples) -> Prototypes:
    """The prototypes of some samples under a net (line 9), without gradient."""
    batch_statistics(net)
    found = [(features_of(net, x), y) for x, y in samples.chunks(CHUNK)]
    return prototypes(torch.cat([x for x, _ in found]), torch.cat([y for _, y in found]))


class Answering(nn.Module):
    """A group's model (Section 2.3): scores by distance to Γ, or by the linear head where Γ has no width.

    Classes that nobody in the group holds get −∞.
    """

    def __init__(self, net: nn.Module, classes: Tensor, means: Tensor, total: int) -> None:
        super().__init__()
        self.net, self.total = net, total
        self.register_buffer("classes", classes)
        self.register_buffer("means", means)

    def train(self, mode: bool = True) -> Answering:
        """Batch norm uses the statistics of the batch in evaluation too."""
        super().train(mode)
        if not mode:
            batch_statistics(self.net)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Scores of all classes."""
        classes, means = self.get_buffer("classes"), self.get_buffer("means")
        try:
            features = features_of(self.net, x)
        except ValueError as error:  # of batch norm without height and width
            if len(x) > 1:
                raise
            raise DataError("batch norm needs two samples or more to answer; prepare with --norm group") from error
        scores = nearness(features, means) if means.shape[1] else parts_of(self.net)[1](features)[:, classes]
        return scores.new_full((x.shape[0], self.total), -torch.inf).index_copy(1, classes, scores)


# --- preparation: lines 1 to 4 and 16 to 22 --------------------------------------------------------------------


class Prepared(OnGroups, FewRounds):
    """A method that prepares a model φ for groups, and is judged by what groups make of it in R rounds."""

    group_rounds: PositiveInt = 3
    """Rounds of a group (R)."""
    deploy_rounds: PositiveInt | None = None
    """Rounds of the groups that it is judged on; by default R."""

    def group_model(self, server: Server, model: Weights, supports: Sequence[Samples], number: int) -> nn.Module:
        """The model of a group after its rounds (Section 2.3)."""
        net, group = self.played(server, model, supports, number, self.deploy_rounds or self.group_rounds)
        return Answering(net, group.classes, group.means, group.total)

    def played(
        self, server: Server, model: Weights, supports: Sequence[Samples], number: int, rounds: int
    ) -> tuple[nn.Module, GroupState]:
        """A net with θ after so many rounds of a group, and the group; all its members are played here."""
        group = self.begin(self.nobody(server.task), model, stream(server.seed, "head", number))
        if self.head == "linear":
            group = replace(group, classes=torch.unique(torch.cat([support.labels for support in supports])))
        net, first = self.net(server, group.model), server.task.initial(server.seed)
        for turn in range(1, rounds + 1):
            known = (group.classes, group.means) if self.tells(group) else None
            found = []
            for place, support in enumerate(supports):
                load_weights(net, {**first, **group.model})
                draw = stream(server.seed, "group", number, turn, place)
                found.append(self.update(net, support, known, self.wanted(turn == rounds), draw))
            group = self.merge(group, found)
        load_weights(net, {**first, **group.model})
        return net, group

    def build_model(self, net: Callable[[Weights], nn.Module], weights: Weights) -> nn.Module:
        """There is nothing to answer with before a group has made its own model."""
        raise SettingError(f"{self.name} prepares a model for groups; fewer deploy makes one of it that can be used")


@dataclass(frozen=True)
class FRLState(GroupState):
    """The episode that is under way, and φ."""

    initial: Weights = field(default_factory=dict)
    """φ"""
    who: list[int] = field(default_factory=list)
    """The clients of the episode."""
    first: Weights = field(default_factory=dict)
    """Adam's first moment, of all weights that learn and last longer than an episode."""
    second: Weights = field(default_factory=dict)
    episodes: int = 0
    """How many there were."""


@METHODS.register("frl")
class FRL(Prepared):
    """Prepares a model from which any group, with classes never met, gets a good global model in a few rounds."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "meta_lr": (0.003, 0.01, 0.03),
        "lr": LRS,
    }
    meta_head: ClassVar[bool] = False
    """Whether a linear head is a part of φ, or drawn anew for each episode as it is for each group."""

    rounds: PositiveInt = 80
    """Rounds of preparation: each episode has R + 1."""
    meta_lr: PositiveFloat = 0.003
    """Step size of the meta-update (β)."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Of the meta-update; the paper has plain gradient descent, which needs far more episodes."""
    queries: PositiveInt | None = None
    """Queries of a client in a meta-update (|D|); by default all."""
    query_prototypes: Literal["queries", "support"] = "queries"
    """Local prototypes of the meta-update: of the queries (line 18), or the last ones of the support."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """Plain descent needs far larger steps than Adam."""
        return {**super().search_space(), **({"meta_lr": (0.1, 0.3, 1.0)} if self.optimizer == "sgd" else {})}

    def init(self, task: Task, seed: int) -> FRLState:
        """φ⁰, and no episode yet."""
        if self.rounds % (self.group_rounds + 1):
            each = self.group_rounds + 1
            raise SettingError(f"rounds = {self.rounds} (allowed: multiples of {each}, the rounds of an episode)")
        learns = {name: weights for name, weights in learnable(task.net()).items() if self.lasts(name)}
        nothing = {name: torch.zeros_like(weights) for name, weights in learns.items()}
        return FRLState(**vars(self.nobody(task)), initial=task.initial(seed), first=nothing, second=nothing)

    def round(self, state: FRLState, clients: Clients) -> FRLState:
        """Lines 2 to 21, one communication round at a time: R of the group's own, then the meta-update."""
        if not state.who:
            draw = None if self.meta_head else clients.stream("head")
            state = replace(self.begin(state, state.initial, draw), who=self.sample_cohort(clients))
        if state.done == self.group_rounds:
            return self.meta_update(state, clients)
        return self.play(state, state.who, clients, last=False)

    def lasts(self, name: str) -> bool:
        """Whether these weights are prepared: all of φ, but for a head that is drawn anew or not used."""
        return not name.startswith(HEAD) or self.meta_head

    def meta_update(self, state: FRLState, clients: Clients) -> FRLState:
        """Lines 16 to 21: φ ← θ⁰ − β Σ μ_k ∇f(θ^R, Q_k), the mean of what each client would make of θ⁰; or by Adam."""
        answers = clients.ask(
            state.who,
            self.answer_queries,
            model=Coded(state.model, self.codec),
            returns={"slopes": state.first, "size": Number(int, 1, MAX_SIZE)},
            **self.known(state),
        )
        slopes = weighted_mean([answer["slopes"] for answer in answers], [answer["size"] for answer in answers])
        number, phi, first, second = state.episodes + 1, state.initial, state.first, state.second
        if self.optimizer == "sgd":
            phi = phi | {name: phi[name] - self.meta_lr * slope for name, slope in slopes.items()}
        else:
            phi, first, second = adam(phi, slopes, first, second, number, self.meta_lr)
        return replace(state, initial=phi | self.buffers(state), first=first, second=second, episodes=number, who=[])

    def buffers(self, state: FRLState) -> Weights:
        """Running statistics of batch norm, which have no gradient, as the episode left them."""
        return {n: t for n, t in state.model.items() if n not in state.first and not n.startswith(HEAD)}

    @on_client
    def learn(
        self, client: Client, model: Weights, wanted: bool, classes: Tensor | None = None, means: Tensor | None = None
    ) -> dict[str, Any]:
        """As in any group; the prototypes of the last round may be needed in the meta-update, by the client alone."""
        last = client.round % (self.group_rounds + 1) == self.group_rounds
        kept = last and self.query_prototypes == "support" and self.head != "linear"
        answer = super().learn(client, model, wanted or kept, classes, means)
        if kept:
            found = [answer["classes"], answer["means"].value, answer["counts"]]
            client.store.put("prototypes", {"episode": self.episode(client), "found": found})
        return {n: value for n, value in answer.items() if wanted or n not in Prototypes._fields}

    def last_prototypes(self, client: Client) -> Prototypes | None:
        """Those that a client kept of this episode; none where it learned in none of its last rounds, or has no use."""
        kept: Any = client.store.get("prototypes") if self.query_prototypes == "support" else None
        return Prototypes(*kept["found"]) if kept and kept["episode"] == self.episode(client) else None

    @on_client
    def answer_queries(
        self, client: Client, model: Weights, classes: Tensor | None = None, means: Tensor | None = None
    ) -> dict[str, Any]:
        """Lines 17 to 19: the gradient of the query loss at θ^R."""
        queries = self.halves(client)[1]
        if not len(queries):
            raise Unable("no class with two samples: all are support, no queries are left")
        x, y = queries.slice(0, len(queries))
        if self.queries is not None and self.queries < len(queries):
            x, y = queries.pick(torch.randperm(len(queries), generator=client.stream("queries"))[: self.queries])
        net = self.net(client, model)
        loss, _ = self.loss(net, x, y, known_of(classes, means), self.last_prototypes(client))
        parameters = {name: tensor for name, tensor in net.named_parameters() if self.lasts(name)}
        learns = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        slopes = torch.autograd.grad(loss, list(learns.values()), allow_unused=True, materialize_grads=True)
        return {"slopes": Coded(dict(zip(learns, slopes, strict=True)), self.codec), "size": len(client.train)}

    def support(self, client: Client) -> Samples:
        """S_k"""
        return self.halves(client)[0]

    def halves(self, client: Client) -> tuple[Samples, Samples]:
        """Line 3: S_k and Q_k, the same in all rounds of an episode."""
        draw = None if client.in_time else stream(client.seed, client.id, self.episode(client), "division")
        return support_query(client.train, self.support_fraction, draw, by_class=True)

    def episode(self, client: Client) -> int:
        """The number of the episode under way."""
        return (client.round - 1) // (self.group_rounds + 1)

    def broadcast(self, state: FRLState) -> Weights:
        """φ"""
        return state.initial

    def evaluate(self, state: FRLState, clients: Clients, data: Data) -> Scores:
        """At the end of an episode; within one φ stands still."""
        return {} if state.who else super().evaluate(state, clients, data)


# --- Theorem 1 --------------------------------------------------------------------------------------------------


def settles_at(
    meta_lr: float,
    rounds: int,
    batch_size: int,
    clients: int,
    *,
    smoothness: float,
    sample_variance: float,
    client_variance: float,
) -> float:
    """ε(β, R, |D|, K) of Theorem 1: the mean squared gradient norm that preparation surely settles below.

    β L 2^(R+2) (V_d / |D| + V_p / K), for losses that are L-smooth, with gradients that vary by V_d over the samples
    of a client and by V_p over clients, and α of at most 1 / L.
    """
    if min(batch_size, clients) < 1:
        raise SettingError(f"batch_size = {batch_size}, clients = {clients} (allowed: 1 and more)")
    return meta_lr * smoothness * 2.0 ** (rounds + 2) * (sample_variance / batch_size + client_variance / clients)


def bound(episodes: int, gap: float, meta_lr: float, error: float) -> float:
    """Eq 5: what the mean over T episodes of E‖∇F(φ)‖² is at most, with F(φ⁰) − F(φ*) = `gap` and ε = `error`."""
    if episodes < 1 or meta_lr <= 0:
        raise SettingError(f"episodes = {episodes}, meta_rate = {meta_lr:g} (allowed: 1 and more, above 0)")
    return 4 * gap / (meta_lr * episodes) + error
