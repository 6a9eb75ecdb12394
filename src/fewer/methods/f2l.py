"""F2L: federated few-shot learning with a private client model.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning, KDD 2023, Algorithm 1 and Eqs 2 to 22. The server model φ
(an encoder and a head for all base classes) is shared and averaged. The client model ψ (a Transformer over the features
of a support set, and an N-way head) never leaves its client. Each task, with support set S and query set Q, updates
both:

    ψ̃ = ψ − α_ft ∇_ψ CE(S)                                        (3)
    φ ← φ − α_φ ∇_φ [(1 − λ_MI) CE(S) + λ_MI L_MI]                 (5, 13, 14)
    ψ ← ψ − α_ψ ∇_ψ [(1 − λ_KD) CE(Q) + λ_KD L_KD] at ψ̃            (4, 16 to 20)

L_MI moves knowledge from ψ to φ, L_KD from φ to ψ. A task of novel classes is solved by ψ, fine-tuned on its support.

Departures:

- The first line of Eq 13 misses the minus sign that its second line has.
- h_ψ and p_ψ in L_MI come from ψ̃, as Section 3.2.2 says (Eq 5 writes ψ). Both are constants in the gradient of φ: p_ψ
  is a weight and h_ψ the target. h_ψ = q_ψ̃(h_φ) (Eq 22) depends on φ too; `detach_client_features = false` lets the
  gradient of Eqs 6 and 12 flow through ψ̃.
- With K = 1 the softmax of Eq 10 has one term and L_MI is 0. `mi_scope = across` takes it over all classes.
- Queries attend to the support and to themselves, not to each other, unless `transductive` is set.
- ψ starts as a plain normalization with a zero head, so one fine-tuning step gives each class its mean feature.
- The head starts every task at zero: the mean of Eq 4 over all class orders keeps it there. `zero_head = false` lets
  it follow the orders that are drawn.
- Dropout is in the Transformer and, as DropBlock, in ResNet-12.
- φ's Adam restarts in every round, because φ is replaced. ψ's Adam keeps its moments.

The paper's ablations are options: `decoupled = false` (without M), `mi_weight = 0` (without T) and `kd_weight = 0`
(without A).

Beyond the paper:

- `learn_from = task` trains φ on the queries too. With one shot that is six times the data, and L_MI is not 0.
- `mi_temperature` below 1 sharpens the softmax of Eq 10. Its inputs lie in [-1, 1], so its gradient is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data.episodes import Episode
from fewer.learning.adapt import adapt_weights, meta_gradient, trainable_weights
from fewer.learning.logistic import logistic_regression
from fewer.learning.prototypes import nearest_centroid
from fewer.methods.context import Client, Context
from fewer.methods.fine_tuned import FineTuned, resize_head, zero_head
from fewer.models import EncoderHead, Task, Weights, get_weights, load_weights, split_net
from fewer.models.sets import SetEncoder
from fewer.models.split import feature_width
from fewer.registry import METHODS
from fewer.runtime.streams import global_streams

PSI = "ψ "
"""Prefix of the client model's weights where they are shared (`decoupled = false`)."""
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass
class ModelPair:
    """Both models on a client: φ as a net, ψ as a net without weights, and ψ's private state."""

    server_model: nn.Module
    client_model: EncoderHead
    private: dict[str, Any]
    """The `weights` of ψ, and Adam's `first` and `second` moments and `step`."""


@METHODS.register("f2l")
class F2L(FineTuned):
    """Few-shot learning with a shared server model and a client model that never leaves its client."""

    predictors: ClassVar[tuple[str, ...]] = ("client", "server", "centroid")

    predictor: Literal["client", "server", "centroid"] = "client"
    """What solves a task: the fine-tuned client model, logistic regression on the server model's features, or their
    nearest centroid. The others are recorded, too."""
    zero_head: bool = True
    """Start each task with a zero head in the client model. Otherwise meta-steps train the head too, although their
    mean over all class orders is 0."""
    client_lr: PositiveFloat | None = None
    """Learning rate of the client model (α_ψ); `lr` is the server model's (α_φ). [default: lr]"""
    mi_scope: Literal["within", "across"] = "within"
    """Samples in the softmax of the mutual information: those of one class, or of all classes of the task."""
    learn_from: Literal["support", "task"] = "support"
    """Samples that train the server model: the support, as in the paper, or the support and the queries."""
    mi_weight: Fraction = 0.5
    """Weight of the mutual information in the server model's loss (λ_MI)."""
    detach_client_features: bool = True
    """Treat the client model's features (h_ψ) as constants in the mutual information. Otherwise its gradient flows to
    the server model through them too."""
    mi_temperature: PositiveFloat = 1.0
    """Temperature of the softmax of the mutual information. Similarities lie in [-1, 1], so 1 is a soft choice."""
    kd_weight: Fraction = 0.5
    """Weight of distillation in the client model's loss (λ_KD)."""
    decoupled: bool = True
    """Keep client models private. Otherwise they are averaged too."""
    transductive: bool = False
    """Let the queries of a task attend to each other."""
    attention_heads: PositiveInt = 4
    """Attention heads of the client model."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout in the client model."""

    def predictor_order(self) -> tuple[str, ...]:
        """All predictors, the chosen one first."""
        return (self.predictor, *(name for name in self.predictors if name != self.predictor))

    def setting_warnings(self) -> Sequence[str]:
        """Warns if the mutual information is constant: one sample of a class has none within the class."""
        several = self.task_size(training=True)[1] > 1 or self.learn_from == "task"
        if several or self.mi_scope == "across" or not self.mi_weight:
            return ()
        return ["with shot = 1 the mutual information within a class is 0, as in the paper; set mi_scope = across"]

    # Training: Algorithm 1.

    def initial_weights(self, task: Task, seed: int) -> Weights:
        """φ; without decoupling, ψ too."""
        phi = task.initial_weights(seed)
        if self.decoupled:
            return phi
        psi = get_weights(self.build_client_model(task, seed, training=True))
        return phi | {PSI + name: tensor for name, tensor in psi.items()}

    def fit(self, client: Client, model: Weights) -> Weights:
        """Lines 3 to 10: trains both models on τ tasks and returns φ. ψ stays in the client's store."""
        pair = self.load_pair(client, model, best=False, training=True)
        optimizer = torch.optim.Adam(pair.server_model.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        generator = client.stream("tasks")
        for _ in range(self.tasks):
            self.train_on_task(pair, optimizer, self.draw_task(client.train, generator))
        phi = get_weights(pair.server_model)
        if not self.decoupled:
            return phi | {PSI + name: tensor for name, tensor in pair.private["weights"].items()}
        self.save_private(client, pair.private, pair.private["weights"])
        return phi

    def train_on_task(self, pair: ModelPair, optimizer: torch.optim.Optimizer, task: Episode) -> None:
        """Lines 5 to 7: one step of φ and one of ψ, in place."""
        encoder, head = split_net(pair.server_model)
        pair.server_model.train()
        pair.client_model.train()
        shots = len(task.support_y)
        if self.learn_from == "task":
            features = encoder(torch.cat([task.support_x, task.query_x]))
            task_features = features.detach()
        else:
            features = encoder(task.support_x)
            with torch.no_grad():
                task_features = torch.cat([features, encoder(task.query_x)])
        with torch.no_grad():
            teacher_logits = head(task_features[shots:])[:, task.classes]

        def client_loss(logits: Tensor, labels: Tensor) -> Tensor:
            """Eq 20"""
            query_logits = logits[shots:]
            kd_loss = distillation(query_logits, teacher_logits, labels)
            return (1 - self.kd_weight) * F.cross_entropy(query_logits, labels) + self.kd_weight * kd_loss

        gradient = meta_gradient(
            pair.client_model,
            pair.private["weights"],
            [(task_features[:shots], task.support_y)] * self.fine_tune_steps,
            (task_features, task.query_y),
            self.fine_tune_lr,
            self.first_order,
            client_loss,
        )  # line 5 (Eq 3), and the gradient for line 7 (Eqs 4 and 20)

        load_weights(pair.client_model, gradient.adapted)
        with torch.set_grad_enabled(not self.detach_client_features):
            client_features = pair.client_model.encoder(features)
        confidences = pair.client_model.head(client_features).softmax(1).detach()
        labels = torch.cat([task.support_y, task.query_y])[: len(features)]
        loss = (1 - self.mi_weight) * F.cross_entropy(head(features), task.classes[labels])
        loss = loss + self.mi_weight * mutual_information(
            features, client_features, confidences, labels, self.mi_scope == "across", self.mi_temperature
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()  # line 6 (Eqs 5 and 14)

        psi = pair.private  # line 7 (Eq 4)
        step, lr = psi["step"] + 1, self.client_lr or self.lr
        weights, first, second = self.meta_step(psi["weights"], gradient.weights, psi["first"], psi["second"], step, lr)
        pair.private = {"weights": weights, "first": first, "second": second, "step": step}

    def task_solver(self, client: Client, model: Weights, best: bool) -> ModelPair:
        """Both models, with a head of ψ for the classes of a novel task."""
        pair = self.load_pair(client, model, best, training=False)
        return replace(pair, private={**pair.private, "weights": resize_head(pair.private["weights"], self.way)})

    def load_pair(self, client: Client, model: Weights, best: bool, training: bool) -> ModelPair:
        """φ as received, and ψ from the client's store, as a net for tasks of training or for novel ones."""
        server_model = client.net({name: tensor for name, tensor in model.items() if not name.startswith(PSI)})
        client_model = self.build_client_model(client.task, client.seed, training)
        private = self.load_private(client, best)
        if private is None:
            # Clones, because the net is fine-tuned in place.
            weights = {name: tensor.clone() for name, tensor in trainable_weights(client_model).items()}
            if not self.decoupled:
                weights = {name: model[PSI + name] for name in weights}
            zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            private = {"weights": weights, "first": zeros, "second": zeros, "step": 0}
        # Meta-steps update the weights in `private`; the net only runs them.
        return ModelPair(server_model, client_model.requires_grad_(False), private)

    def build_client_model(self, task: Task, seed: int, training: bool) -> EncoderHead:
        """The initial ψ, the same on all clients: a Transformer over a set (Eq 22) and a zero N-way head."""
        features = feature_width(task)
        way, shot, _ = self.task_size(training)
        with global_streams(seed, "client model"):
            encoder = SetEncoder(features, way * shot, self.attention_heads, self.dropout, self.transductive)
            return zero_head(EncoderHead(encoder, features, way)).to(task.device)

    # Meta-test.

    def predict(self, solver: ModelPair, task: Episode) -> dict[str, Tensor]:
        """Fine-tunes ψ on the support and classifies with it; also by simple classifiers on the features of φ."""
        encoder = split_net(solver.server_model.eval())[0]
        client_model = solver.client_model.eval()
        with torch.no_grad():
            support, queries = encoder(task.support_x), encoder(task.query_x)
        batches = [(support, task.support_y)] * (self.adapt_steps or self.fine_tune_steps)
        load_weights(client_model, adapt_weights(client_model, solver.private["weights"], batches, self.fine_tune_lr))
        with torch.no_grad():
            logits = client_model(torch.cat([support, queries]))[len(support) :]
        return {
            "client": logits.argmax(1),
            "server": logistic_regression(support, task.support_y, queries),
            "centroid": nearest_centroid(support, task.support_y, queries),
        }

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """φ, a classifier of the base classes. A client has a model only for a task."""
        if isinstance(context, Client):
            return super().build_predictor(shared, context)
        return context.net({name: tensor for name, tensor in shared.items() if not name.startswith(PSI)})


def mutual_information(
    server_features: Tensor,
    client_features: Tensor,
    confidences: Tensor,
    labels: Tensor,
    across: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """L_MI of Eq 13 from the features h_φ and h_ψ and the class probabilities p_ψ (samples × classes).

    −(1/D) Σ_j Σ_{i∈C(j)} w_ij log p(h_ψʲ | h_φⁱ), with w of Eq 9 and p of Eq 10: a softmax over C(i), or over all
    samples (`across`).
    """
    same_class = labels[:, None] == labels
    similarity = F.normalize(server_features, dim=1) @ F.normalize(client_features, dim=1).T / temperature
    if not across:
        similarity = similarity.masked_fill(~same_class, -torch.inf)
    log_p = similarity.log_softmax(1).masked_fill(~same_class, 0.0)
    weights = confidences[:, labels] * same_class  # p_ψⁱ(y_j) where i ∈ C(j)
    return -(weights / weights.sum(0) * log_p).sum() / len(labels)


def distillation(client_logits: Tensor, server_logits: Tensor, labels: Tensor) -> Tensor:
    """L_KD of Eq 16: cross-entropy between softmaxes over the classes of a task, with one temperature per query.

    By Eq 19, T_i = σ(max_{c≠y} exp z_φ(c) / exp z_φ(y)), from the server model's logits.
    """
    largest_other = server_logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    true_class = server_logits.gather(1, labels[:, None])[:, 0]
    temperature = (largest_other - true_class).exp().sigmoid()[:, None]
    return F.cross_entropy(client_logits / temperature, (server_logits / temperature).softmax(1))
