"""FRL: few-round learning with global prototype-assisted learning (GPAL).

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Algorithm 1 and Eqs 1 to 5.
Preparation (the paper's meta-training) learns a model φ. From it, any later group of clients gets a good global model
in R rounds, even for unseen classes. An episode simulates such a group: R rounds on the support sets of K clients,
then a meta-update of φ by the gradient of their query loss after those rounds (first order). `rounds` counts
communication rounds: an episode has R + 1.

`head` is how a group's model classifies: `linear`, `distance` (to prototypes, the mean features of each class) or
`gpal`. GPAL also classifies by distance; from the second round on, clients also learn from the global prototypes Γ of
the round before (Eq 3).

Departures:
- Eq 2 sums over c′ ≠ c, which has no lower bound and is log 0 for a client with one class. Here the sum includes the
  true class, so the loss is the cross-entropy of a softmax over −‖g(x) − Γ(c)‖².
- Line 14, read literally, shrinks a prototype that some clients do not hold. Here Γ(c) is the mean over the clients
  that hold c, weighted by their samples of c.
- Local prototypes carry gradient; global ones are constants.
- γ = 5/6 equals the L_local + 0.2 L_aux of the paper's released code, up to the learning rate.
- A step on a batch of the support set uses the local prototypes of that batch.
- In line 19 a client sends the gradient and the server takes the step. The result is the same, and the client does not
  need θ⁰. The server uses Adam with lasting moments by default; plain gradient descent (`optimizer = sgd`) needs the
  paper's thousands of episodes.
- A linear head is redrawn (Xavier) for each episode and each group, over the classes that the group holds, so
  preparation matches deployment. To learn these classes, a group with a linear head starts with one extra exchange of
  class numbers only (`hold_out_classes`).
- Batch norm uses the statistics of the batch, also for predictions. Its weights are averaged like all others.
- A support set that is not larger than a batch has one step in an epoch. `local_steps` sets the steps of a round.

Options of the released code that the paper does not mention:
- `meta_steps`: a client's steps in the meta-update. The first moves φ by the gradient at θ^R (line 19), the others are
  ordinary steps from φ, each on a batch of queries. The server weighs clients by size (line 21); the released code does
  not.
- `weight_decay` of all steps, `crop` (random crops in training), average pooling of conv4's features (`average`).

Beyond both: `temperature` divides the squared distances. With many features they are large: the softmax of a new net is
close to 0 or 1, and its gradient is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.episodes import split_support_query
from fewer.errors import SettingError
from fewer.learning.adam import adam_step
from fewer.learning.adapt import trainable_weights
from fewer.learning.group_model import compute_features, use_batch_statistics
from fewer.learning.prototypes import Prototypes, merge_prototypes
from fewer.methods import MAX_SAMPLES, Client, Context, Scores, SearchSpace, Server, StateT
from fewer.methods.capabilities import Artifact, Embedding
from fewer.methods.fedavg import average_field
from fewer.methods.few_rounds import HEAD, LRS, NEUTRAL, FewRounds, GroupState, pair_prototypes
from fewer.methods.groups import EvaluatedOnGroups
from fewer.models import Task, Weights, load_weights
from fewer.models.artifact import vocabulary_checksum
from fewer.registry import METHODS
from fewer.runtime import Clients, Unable, on_client, stream
from fewer.wire import Number


class PreparingMethod(EvaluatedOnGroups[StateT], FewRounds[StateT]):
    """A method that prepares a model φ, evaluated by the models that groups train from φ in R rounds."""

    group_rounds: PositiveInt = 3
    """Rounds of a group (R)."""
    deploy_rounds: PositiveInt | None = None
    """Rounds of the groups it is evaluated on. [default: group_rounds]"""

    def group_model(self, server: Server, model: Weights, supports: Sequence[Samples], number: int) -> nn.Module:
        """The model of a group after its rounds (Section 2.3)."""
        net, group = self.simulate_group(server, model, supports, number, self.deploy_rounds or self.group_rounds)
        return self.group_predictor(net, group.classes, group.means, group.num_classes)

    def simulate_group(
        self, server: Server, model: Weights, supports: Sequence[Samples], number: int, rounds: int
    ) -> tuple[nn.Module, GroupState]:
        """Runs all rounds of a group on the server, one support set per client; returns a net with θ, and the state."""
        group = self.start_group(self.empty_group(server.task), model, stream(server.seed, "head", number))
        if self.head == "linear":
            group = replace(group, classes=torch.unique(torch.cat([support.labels for support in supports])))
        net, initial = self.build_net(server, group.model), server.task.initial_weights(server.seed)
        updates: list[dict[str, Any]] = []
        for round in range(1, rounds + 1):
            global_prototypes = pair_prototypes(**self.prototype_payload(group))
            upload = self.uploads_prototypes(last=round == rounds)
            updates = []
            for member, support in enumerate(supports):
                load_weights(net, {**initial, **group.model})
                generator = stream(server.seed, "group", number, round, member)
                updates.append(self.fit_support(net, support, global_prototypes, upload, generator))
            group = self.aggregate(group, updates)
        final = {**initial, **group.model}
        if self.head == "fedcof" and rounds:
            final = self.fit_head(final, updates, group.num_classes)
        load_weights(net, final)
        return net, group

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """Raises: a prepared model cannot predict before a group has trained it."""
        raise SettingError(f"{self.name} prepares a model for groups; run `fewer deploy` to train one that predicts")

    def artifact(self, state: StateT, task: Task, data: Data) -> Artifact:
        """The prepared encoder, from which `frl-deploy` starts."""
        options = {name: getattr(self, name) for name in FewRounds.model_fields if name not in ("rounds", "cohort")}
        facts = {"input": list(task.shape), "vocabulary": vocabulary_checksum(data.tokens)}
        encoder = {name: tensor for name, tensor in state.shared.items() if not name.startswith(HEAD)}
        return Artifact(encoder, "frl-deploy", self.deploy_rounds or self.group_rounds, options, facts)

    def embedding(self, server: Server, state: StateT, data: Data, group: int = 0, member: int = 0) -> Embedding | None:
        """The features of a group's queries by one member's model, before the last round is averaged."""
        if self.head == "linear":
            return None
        drawn = self.draw_group(server.global_test, *self.unseen_labels(data, server.seed), server.seed, group)
        rounds, supports = self.deploy_rounds or self.group_rounds, drawn.supports
        _, final = self.simulate_group(server, state.shared, supports, group, rounds)
        net, previous = self.simulate_group(server, state.shared, supports, group, rounds - 1)
        prototypes = pair_prototypes(**self.prototype_payload(previous))
        self.fit_support(net, supports[member], prototypes, False, stream(server.seed, "embedding"))
        use_batch_statistics(net)
        (x, y), (own_x, own_y) = drawn.queries.all(), supports[member].all()
        with torch.no_grad():
            features, own_features = compute_features(net, x), compute_features(net, own_x)
        return Embedding(features, y, own_features, own_y, final.means, final.classes)


@dataclass(frozen=True)
class FRLState(GroupState):
    """The prepared model φ, and the group of the current episode."""

    initial: Weights = field(default_factory=dict)
    """The prepared model (φ)."""
    cohort: list[int] = field(default_factory=list)
    """The clients of the current episode (A_t); empty between episodes."""
    first_moment: Weights = field(default_factory=dict)
    """Adam's first moment of every weight that is meta-learned."""
    second_moment: Weights = field(default_factory=dict)
    episodes: int = 0
    """Episodes completed (t)."""

    @property
    def shared(self) -> Weights:
        """φ"""
        return self.initial


@METHODS.register("frl")
class FRL(PreparingMethod[FRLState]):
    """Prepares a model from which any group, even with unseen classes, gets a good global model in a few rounds."""

    tunable: ClassVar[SearchSpace] = {"meta_lr": (0.003, 0.01, 0.03), "lr": LRS}
    meta_head: ClassVar[bool] = False
    """True if a linear head is part of φ; False if it is redrawn for each episode and each group."""

    rounds: PositiveInt = 80
    """Rounds of preparation. An episode has R + 1."""
    meta_lr: PositiveFloat = 0.003
    """Learning rate of the meta-update (β)."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the meta-update. The paper uses plain gradient descent, which needs far more episodes."""
    queries: PositiveInt | None = None
    """Queries of a client in a meta-update (|D|). [default: all]"""
    meta_steps: PositiveInt = Field(default=1, json_schema_extra=NEUTRAL)
    """Steps of a client in a meta-update. The first takes the gradient at θ^R, the others continue from φ, each on a
    batch of queries. The authors ran 5. With 1, the gradient is over all queries."""
    query_prototypes: Literal["queries", "support"] = "queries"
    """Local prototypes of the meta-update: of the queries (line 18), or the last ones of the support set."""

    def search_space(self) -> SearchSpace:
        """Tunes far larger `meta_lr` for plain gradient descent than for Adam."""
        return {**super().search_space(), **({"meta_lr": (0.1, 0.3, 1.0)} if self.optimizer == "sgd" else {})}

    # The server.

    def init(self, task: Task, seed: int) -> FRLState:
        """Input: the initialized model φ⁰, before the first episode."""
        episode_rounds = self.group_rounds + 1
        if self.rounds % episode_rounds:
            raise SettingError(
                f"rounds must be a multiple of {episode_rounds} (group_rounds + 1, an episode), got {self.rounds}"
            )
        if self.meta_steps > 1 and self.head == "linear":
            raise SettingError(f"meta_steps = {self.meta_steps} needs head = distance or gpal, got linear")
        learned = self.meta_learned(trainable_weights(task.net()))
        zeros = {name: torch.zeros_like(tensor) for name, tensor in learned.items()}
        group = vars(self.empty_group(task))
        return FRLState(**group, initial=task.initial_weights(seed), first_moment=zeros, second_moment=zeros)

    def why_not_extend(self, done: int, planned: int, unscheduled: bool) -> str:
        """A run can be extended: `init` checks the number of rounds, and no episode depends on it."""
        return ""

    def round(self, state: FRLState, clients: Clients) -> FRLState:
        """Lines 2 to 21, one communication round per call: R rounds of the group, then the meta-update."""
        if not state.cohort:  # lines 2 to 4: a new episode
            generator = None if self.meta_head else clients.stream("head")
            group = self.start_group(state, state.initial, generator)
            state = replace(group, cohort=self.sample_cohort(clients))
            clients.forget_draw()  # the cohort answers in all rounds of the episode
        if state.rounds_done == self.group_rounds:
            return self.meta_update(state, clients)
        return self.group_round(state, state.cohort, clients, last=False)

    def meta_learned(self, weights: Mapping[str, Tensor]) -> Weights:
        """All weights except a head that is redrawn or unused."""
        return {name: tensor for name, tensor in weights.items() if self.meta_head or not name.startswith(HEAD)}

    def meta_update(self, state: FRLState, clients: Clients) -> FRLState:
        """Lines 16 to 21: φ ← θ⁰ − β Σ_k μ_k ∇f(θ^R, Q_k) with μ_k the relative data size, or a step of Adam."""
        phi, first, second, episodes = state.initial, state.first_moment, state.second_moment, state.episodes + 1
        answers = clients.ask(
            state.cohort,
            self.answer_queries,
            model=state.model,
            returns={"gradient": state.first_moment, "size": Number(int, 1, MAX_SAMPLES)},
            **({"initial": self.sent_weights(phi)} if self.meta_steps > 1 else {}),
            **self.prototype_payload(state),
        )
        sizes = None if answers.private else [answer["size"] for answer in answers]
        gradient = average_field(answers, "gradient", sizes)
        if self.weight_decay and self.meta_steps == 1:
            gradient = {name: tensor + self.weight_decay * phi[name] for name, tensor in gradient.items()}
        if self.optimizer == "sgd":
            phi = phi | {name: phi[name] - self.meta_lr * tensor for name, tensor in gradient.items()}
        else:
            phi, first, second = adam_step(phi, gradient, first, second, episodes, self.meta_lr)
        # The running statistics of batch norm have no gradient; they are those after the episode.
        unlearned = (name for name in state.model if name not in gradient and not name.startswith(HEAD))
        phi = phi | {name: state.model[name] for name in unlearned}
        return replace(state, initial=phi, first_moment=first, second_moment=second, episodes=episodes, cohort=[])

    # A client.

    @on_client(stream="learn")
    def local_train(
        self, client: Client, model: Weights, upload: bool, classes: Tensor | None = None, means: Tensor | None = None
    ) -> dict[str, Any]:
        """Trains as in any group; stores the last prototypes if the client needs them for the meta-update."""
        last = client.round % (self.group_rounds + 1) == self.group_rounds
        store = last and self.query_prototypes == "support" and self.head != "linear"
        update = super().local_train(client, model, upload or store, classes, means)
        if store:
            tensors = [update["classes"], update["means"], update["counts"]]
            if self.subsets > 1:
                tensors = list(merge_prototypes([Prototypes(*tensors)]))
            client.store.put("prototypes", {"episode": self.episode_index(client), "prototypes": tensors})
        return {name: value for name, value in update.items() if upload or name not in Prototypes._fields}

    def stored_prototypes(self, client: Client) -> Prototypes | None:
        """The prototypes that the client stored in this episode; None if there are none or they are not needed."""
        stored: Any = client.store.get("prototypes") if self.query_prototypes == "support" else None
        return Prototypes(*stored["prototypes"]) if stored and stored["episode"] == self.episode_index(client) else None

    @on_client
    def answer_queries(
        self,
        client: Client,
        model: Weights,
        initial: Weights | None = None,
        classes: Tensor | None = None,
        means: Tensor | None = None,
    ) -> dict[str, Any]:
        """Lines 17 to 19: returns ∇f(θ^R, Q_k), the gradient of the query loss, or (φ − φ_k) / β after several steps.

        With M = `meta_steps` > 1 and `initial` = φ, the steps on batches Q_1, Q_2, … of the queries are
        φ_k ← φ − β (∇f(θ^R, Q_1) + λφ), then φ_k ← φ_k − β (∇f(φ_k, Q_m) + λφ_k), with weight decay λ.
        """
        queries = self.support_and_query(client)[1]
        if not len(queries):
            raise Unable("no class with two samples: all are in the support set, and the query set is empty")
        generator, global_prototypes = client.stream("queries"), pair_prototypes(classes, means)
        if self.queries is not None and self.queries < len(queries):
            queries = queries.select(torch.randperm(len(queries), generator=generator)[: self.queries])

        def gradient_at(weights: Weights, x: Tensor, y: Tensor) -> Weights:
            net = self.build_net(client, weights)
            loss, _ = self.loss(net, x, y, global_prototypes, self.stored_prototypes(client))
            trainable = {name: tensor for name, tensor in net.named_parameters() if tensor.requires_grad}
            parameters = self.meta_learned(trainable)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
            return dict(zip(parameters, gradients, strict=True))

        if initial is None:
            x, y = queries.all()
            gradient = gradient_at(model, self.crop_images(x, queries, generator), y)
        else:
            phi, weights = initial, model  # the first gradient is at θ^R
            for batch in self.training_batches(queries, generator, self.meta_steps):
                gradient = gradient_at(weights, *batch)  # of trained weights only: not of running statistics
                weights = phi = phi | {
                    name: phi[name] - self.meta_lr * (tensor + self.weight_decay * phi[name])
                    for name, tensor in gradient.items()
                }
            gradient = {name: (initial[name] - phi[name]) / self.meta_lr for name in gradient}
        return {"gradient": gradient, "size": len(client.train)}

    def support_set(self, client: Client) -> Samples:
        """S_k"""
        return self.support_and_query(client)[0]

    def support_and_query(self, client: Client) -> tuple[Samples, Samples]:
        """Line 3: splits D_k into S_k and Q_k, the same in all rounds of an episode."""
        episode = self.episode_index(client)
        generator = None if client.time_ordered else stream(client.seed, client.id, episode, "division")
        return split_support_query(client.train, self.support_fraction, generator, by_class=True)

    def episode_index(self, client: Client) -> int:
        """The index t of the current episode."""
        return (client.round - 1) // (self.group_rounds + 1)

    # Evaluation.

    def evaluate(self, state: FRLState, clients: Clients, data: Data) -> Scores:
        """Evaluates at the end of an episode; φ does not change within one."""
        return Scores({}) if state.cohort else super().evaluate(state, clients, data)
