"""F2L: federated few-shot learning with a private client model.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning, KDD 2023, Algorithm 1 and Eqs 2 to 22. A server model φ
(encoder and a head for all base classes) is shared and averaged; a client model ψ (a Transformer over the features of a
whole support, and a head for the N classes of a task) stays with its client. In each task

    ψ̃ = ψ − α_ft ∇_ψ CE(S)                                        (3)
    φ ← φ − α_φ ∇_φ [(1 − λ_MI) CE(S) + λ_MI L_MI]                 (5, 13, 14)
    ψ ← ψ − α_ψ ∇_ψ [(1 − λ_KD) CE(Q) + λ_KD L_KD] at ψ̃            (4, 16 to 20)

What ψ knows goes to φ by L_MI, what φ knows goes to ψ by L_KD; nothing of ψ is ever sent. A task of novel classes is
answered by ψ, fine-tuned on its support.

h_ψ = q_ψ̃(h_φ) (Eq 22) depends on φ, and Eqs 5, 6 and 12 take the gradient of all of it by φ: so do we.

Departures: the first line of Eq 13 lost its minus, which its second line has. h_ψ and p_ψ in L_MI are those of ψ̃, as
Section 3.2.2 says (Eq 5 writes ψ); p_ψ, a weight in the words after Eq 13, is taken as given. With K = 1 each class has
one sample, the softmax of Eq 10 has one term and L_MI is 0; `mi = across` takes it over the samples of all classes.
Queries see the support and themselves in the Transformer, not each other (`transductive`: they do). ψ begins as a mere
normalization with a head of zeros, so that one step of fine-tuning gives each class the mean of its features. The head
is at zero before each task: classes come in any order, and the mean of Eq 4 over all orders leaves it there (`zero_head
= false`: it steps by the orders drawn). Dropout is in the Transformer and, as DropBlock, in ResNet-12. Adam begins anew
for φ in each round, which is another φ; for ψ it goes on. The paper's ablations are settings: `decoupled = false`
(without M), `mi_weight = 0` (without T) and `kd_weight = 0` (without A).

Beyond the paper: with `learn_from = task` the server model learns from the queries too, of which the paper makes no use
there: from one shot that is six times as much, and mutual information within a class is no longer 0. Eq 10 has a
softmax of numbers between -1 and 1, whose slope is small; `mi_temperature` below 1 makes it steeper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data.episodes import Episode
from fewer.learning.adapt import adapted, learnable, meta_gradient
from fewer.methods.base import Client
from fewer.methods.fewshot import FewShotState, FineTuned, blank, logistic_regression
from fewer.models import Split, Task, Weights, load_weights, parts_of, weights_of
from fewer.models.sets import SetEncoder
from fewer.models.split import feature_width
from fewer.registry import METHODS
from fewer.runtime.streams import global_streams

CLIENT = "ψ "
"""Before the name of a weight of the client model, where it is shared."""
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass
class Pair:
    """Both models at a client: φ as a net, ψ as a net to run and as weights, with what Adam remembers of it."""

    server_model: nn.Module
    client_model: Split
    own: dict[str, Any]
    """`weights` of ψ, `first` and `second` moment and the `step` of its Adam."""


@METHODS.register("f2l")
class F2L(FineTuned):
    """Few-shot learning with a shared server model and a client model that never leaves its client."""

    predictors: ClassVar[tuple[str, ...]] = ("client", "server")

    predictor: Literal["client", "server"] = "client"
    """Who answers a task: the fine-tuned client model, or logistic regression on features of the server model."""
    zero_head: bool = True
    """Whether the head of the client model begins each task at zero. If not it takes meta-steps too; classes come in
    any order, and over all orders their mean is 0."""
    client_lr: PositiveFloat | None = None
    """Step size of the client model's Adam (α_ψ); by default `rate`, which is that of the server model (α_φ)."""
    mi_scope: Literal["within", "across"] = "within"
    """Whether the softmax of the mutual information goes over the samples of a class or of all classes of the task."""
    learn_from: Literal["support", "task"] = "support"
    """What the server model learns from: the support of a task, as in the paper, or its queries too."""
    mi_weight: Share = 0.5
    """Weight of the mutual information in what the server model learns (λ_MI)."""
    mi_temperature: PositiveFloat = 1.0
    """Temperature of the softmax of the mutual information; likeness lies between -1 and 1, so that 1 is mild."""
    kd_weight: Share = 0.5
    """Weight of distillation in what the client model learns (λ_KD)."""
    decoupled: bool = True
    """Whether client models stay with their clients; if not, they are averaged too."""
    transductive: bool = False
    """Whether the queries of a task see each other."""
    attention_heads: PositiveInt = 4
    """Heads of attention in the client model."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout in the client model."""

    def ranked(self) -> tuple[str, ...]:
        """The reading that counts comes first."""
        return (self.predictor, *(name for name in self.predictors if name != self.predictor))

    def notes(self) -> Sequence[str]:
        """One sample of a class has no mutual information within the class."""
        if self.shot > 1 or self.learn_from == "task" or self.mi_scope == "across" or not self.mi_weight:
            return ()
        return ["with shot = 1 the mutual information within a class is 0, as in the paper (mi = across: is not)"]

    # Training: Algorithm 1.

    def begin(self, task: Task, seed: int) -> Weights:
        """φ; without decoupling, ψ too."""
        phi = task.initial(seed)
        if self.decoupled:
            return phi
        return phi | {CLIENT + name: tensor for name, tensor in weights_of(self.client_model(task, seed)).items()}

    def learn(self, client: Client, model: Weights) -> Weights:
        """Lines 3 to 10: some tasks of base classes; ψ stays here, φ is sent."""
        pair = self.prepare(client, model, kept=False)
        optimizer = torch.optim.Adam(pair.server_model.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        draw = client.stream("tasks")
        for _ in range(self.tasks):
            self.learn_task(pair, optimizer, self.task(client.train, draw))
        phi = weights_of(pair.server_model)
        if not self.decoupled:
            return phi | {CLIENT + name: tensor for name, tensor in pair.own["weights"].items()}
        self.put(client, pair.own, pair.own["weights"])
        return phi

    def learn_task(self, pair: Pair, optimizer: torch.optim.Optimizer, task: Episode) -> None:
        """Lines 5 to 7: one step of φ and one of ψ, in place."""
        encoder, head = parts_of(pair.server_model)
        pair.server_model.train()
        pair.client_model.train()
        count = len(task.support_y)
        if self.learn_from == "task":
            features = encoder(torch.cat([task.support_x, task.query_x]))
            everything = features.detach()
        else:
            features = encoder(task.support_x)
            with torch.no_grad():
                everything = torch.cat([features, encoder(task.query_x)])
        with torch.no_grad():
            teacher = head(everything[count:])[:, task.classes]

        def client_loss(scores: Tensor, labels: Tensor) -> Tensor:
            """Eq 20"""
            mine = scores[count:]
            return (1 - self.kd_weight) * F.cross_entropy(mine, labels) + self.kd_weight * distillation(
                mine, teacher, labels
            )

        found = meta_gradient(
            pair.client_model,
            pair.own["weights"],
            [(everything[:count], task.support_y)] * self.fine_tune_steps,
            (everything, task.query_y),
            self.fine_tune_lr,
            self.first_order,
            client_loss,
        )  # Eqs 3 and 4

        load_weights(pair.client_model, found.adapted)
        theirs = pair.client_model.encoder(features)
        sure = pair.client_model.head(theirs).softmax(1).detach()
        labels = torch.cat([task.support_y, task.query_y])[: len(features)]
        loss = (1 - self.mi_weight) * F.cross_entropy(head(features), task.classes[labels])
        loss = loss + self.mi_weight * mutual_information(
            features, theirs, sure, labels, self.mi_scope == "across", self.mi_temperature
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # Eqs 5 and 14

        own = pair.own
        step, lr = own["step"] + 1, self.client_lr or self.lr
        weights, first, second = self.meta_step(own["weights"], found.weights, own["first"], own["second"], step, lr)
        pair.own = {"weights": weights, "first": first, "second": second, "step": step}

    def prepare(self, client: Client, model: Weights, kept: bool) -> Pair:
        """φ as it was sent, and ψ as the client has it."""
        server_model = client.net({name: tensor for name, tensor in model.items() if not name.startswith(CLIENT)})
        client_model = self.client_model(client.task, client.seed)
        own = self.own(client, kept)
        if own is None:
            weights = {
                name: tensor.clone() for name, tensor in learnable(client_model).items()
            }  # the net is tuned in place
            if not self.decoupled:
                weights = {name: model[CLIENT + name] for name in weights}
            nothing = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            own = {"weights": weights, "first": nothing, "second": nothing, "step": 0}
        return Pair(server_model, client_model.requires_grad_(False), own)  # what learns of ψ are the weights in `own`

    def client_model(self, task: Task, seed: int) -> Split:
        """ψ as everyone begins with it: a Transformer over a set (Eq 22) and a head for N classes."""
        features = feature_width(task)
        with global_streams(seed, "client model"):
            encoder = SetEncoder(features, self.way * self.shot, self.attention_heads, self.dropout, self.transductive)
            return blank(Split(encoder, features, self.way)).to(task.device)

    # Meta-test.

    def answer(self, ready: Pair, task: Episode) -> dict[str, Tensor]:
        """Fine-tune ψ on the support and classify with it; beside it, logistic regression on what φ sees."""
        encoder = parts_of(ready.server_model.eval())[0]
        ready.client_model.eval()
        with torch.no_grad():
            support, queries = encoder(task.support_x), encoder(task.query_x)
        batches = [(support, task.support_y)] * (self.adapt_steps or self.fine_tune_steps)
        load_weights(ready.client_model, adapted(ready.client_model, ready.own["weights"], batches, self.fine_tune_lr))
        with torch.no_grad():
            scores = ready.client_model(torch.cat([support, queries]))[len(support) :]
        return {"client": scores.argmax(1), "server": logistic_regression(support, task.support_y, queries)}

    def global_weights(self, state: FewShotState) -> Weights:
        """φ, which tells base classes apart."""
        return {name: tensor for name, tensor in self.broadcast(state).items() if not name.startswith(CLIENT)}


def mutual_information(
    server_model: Tensor,
    client_model: Tensor,
    sure: Tensor,
    labels: Tensor,
    across: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """L_MI of Eq 13 from features h_φ and h_ψ, and p_ψ (samples × classes), of samples with these labels.

    −(1/D) Σ_j Σ_{i∈C(j)} w_ij log p(h_ψʲ | h_φⁱ), with w of Eq 9 and p of Eq 10: a softmax over C(i), or over all.
    """
    same = labels[:, None] == labels
    likeness = F.normalize(server_model, dim=1) @ F.normalize(client_model, dim=1).T / temperature
    if not across:
        likeness = likeness.masked_fill(~same, -torch.inf)
    log_chance = likeness.log_softmax(1).masked_fill(~same, 0.0)
    confidence = sure[:, labels] * same  # p_ψⁱ(y_j) where i ∈ C(j)
    return -(confidence / confidence.sum(0) * log_chance).sum() / len(labels)


def distillation(client_model: Tensor, server_model: Tensor, labels: Tensor) -> Tensor:
    """L_KD of Eq 16: the cross-entropy of softmaxes over the classes of a task, each query at its own temperature.

    T_i = σ(max_{c≠y} exp z_φ(c) / exp z_φ(y)) by Eq 19, from what the server model says.
    """
    others = server_model.scatter(1, labels[:, None], -torch.inf).amax(1)
    own = server_model.gather(1, labels[:, None])[:, 0]
    temperature = (others - own).exp().sigmoid()[:, None]
    return F.cross_entropy(client_model / temperature, (server_model / temperature).softmax(1))
