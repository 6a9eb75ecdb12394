"""FedMK-Avg: condensed images and trained models in round 1, averaged models after it. Ours; no paper describes it.

Averages of locally trained models need several rounds. Condensed images (D̂) are enough for a model after one, and the
clients' models are its teachers. f_k is the model of client k, and n_kc is its number of samples of class c.

- Rounds 1 to `condense_rounds`: a client condenses its samples (fedmk.py), and trains the global model on them. It
  sends D̂, f_k and n_kc. The server averages the models by size. It then trains the mean on D̂, augmented and mixed in
  pairs, with the targets (1 − λ) · label + λ · p(x), where p(x)_c ∝ Π_k softmax(f_k(x))_c ^ (n_kc / Σ_j n_jc). So a
  client has no say on classes that it does not hold. Images of a class that no client holds keep their label.
- Every later round: a client trains the global model w, w ← w − η_s ∇ℓ(w; b) in step s. The server averages the models
  by size (fedavg.py). Up to round `distill_until`, it then trains the mean on the D̂ that it has, as in round 1.

Local training:

- Images are augmented as FedMK's are, and gradients are clipped. Right after a round of FedMK, one client that diverges
  is enough to spoil the mean; clipping prevents it.
- In round 1, η_s decays to 0 along a cosine: the models are teachers. In later rounds, η_s is constant: averaging takes
  out the noise of large steps.
- `calibrate`: the loss is the cross-entropy of f(x)_c + log((n_kc + 1) / (n_k + C)), so that a model does not unlearn
  classes that its client lacks (fedavg_calibrated.py).

Options that are off by default:

- `train_first = false`: round 1 is FedMK's, without trained models.
- `mixed_images`: every local batch also has images of D̂, against forgetting of classes that a client does not hold.
  The server draws `mixed_per_class` images of each class in each round, from the D̂ of all clients, and sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.errors import SettingError
from fewer.learning import LocalOptimizer, draw_batches, sgd, task_loss
from fewer.learning.aggregate import stack_models, unstack_models
from fewer.learning.augment import apply_affine, draw_affine
from fewer.methods import MAX_SAMPLES, Client, SearchSpace, Server
from fewer.methods.condensed import Knowledge, concatenate_images
from fewer.methods.fedavg import average_by_size, model_schema, train_models
from fewer.methods.fedavg_calibrated import calibrated_loss, class_frequencies, count_classes
from fewer.methods.fedmk import FedMK, FedMKState
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Answers, Clients, on_client, on_server
from fewer.wire import Shaped

LRSchedule = Literal["constant", "cosine", "linear"]

MIN_LOG = -8.0
"""The least log probability that a teacher may give to a class."""


@METHODS.register("fedmk-avg")
class FedMKAvg(FedMK):
    """Clients train and the server averages. In round 1, condensed images improve the mean; models are its teachers."""

    tunable: ClassVar[SearchSpace] = {"lr": (0.1, 0.2, 0.3, 0.5)}

    start: Literal["uniform", "class"] = "class"
    """Noise that D̂ starts from: uniform in [−1, 1], or Gaussian with the mean and covariance of the class."""
    condense_rounds: PositiveInt = 1
    """Rounds of FedMK; after these, models are averaged."""
    train_first: bool = True
    """Whether clients train the global model in rounds of FedMK, too. The server then starts from the mean model."""
    first_steps: PositiveInt = 1000
    """Local steps in rounds of FedMK. Only with `train_first`."""
    teacher_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the clients' models as teachers on D̂ (λ), next to its labels. Only with `train_first`."""
    mix_pairs: bool = True
    """Whether teachers see random mixtures of two images of D̂."""
    matching_steps: NonNegativeInt = 30
    """Steps that match class statistics under random nets, before the outer loop."""
    server_steps: PositiveInt = 1000
    """Server steps per round of FedMK."""
    server_lr: PositiveFloat | None = 0.1
    """Learning rate of the server; null means that of the inner loop."""
    server_batch_size: Annotated[int, Field(ge=2)] = 64
    """Images of D̂ per server step."""
    pseudo_weight: NonNegativeFloat = 0.0
    """Weight, and relative number, of generated features (β); 0 means no generator."""
    lr: PositiveFloat = 0.3
    """Learning rate of local training (η)."""
    local_steps: PositiveInt = 400
    """Local steps per round."""
    batch_size: PositiveInt = 32
    """Samples per local step."""
    first_schedule: LRSchedule = "cosine"
    """Learning rate over the local steps of a round of FedMK: constant, or down to 0 along a cosine or a line."""
    lr_schedule: LRSchedule = "constant"
    """The same in later rounds."""
    local_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of local training."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient in local training; null means no limit."""
    calibrate: bool = True
    """Whether local training adds the log of the client's class frequencies to the scores."""
    augment_local: bool = True
    """Whether images in local training are randomly rotated, scaled and shifted."""
    mixed_images: NonNegativeInt = 0
    """Images of D̂ that are added to each local batch."""
    mixed_per_class: PositiveInt = 20
    """Images of each class that clients receive to mix them, drawn from the D̂ of all clients in each round."""
    distill_until: NonNegativeInt = 3
    """Last round in which the server trains the mean on D̂. Only with `train_first`."""
    distill_steps: PositiveInt = 300
    """Server steps per round after the rounds of FedMK, up to `distill_until`."""
    distill_lr: PositiveFloat = 0.03
    """Learning rate of these steps."""

    def init(self, task: Task, seed: int) -> FedMKState:
        """Checks that images can be augmented, and returns FedMK's initial state."""
        if self.augment_local and len(task.shape) != 3:
            raise SettingError(
                f"augment_local = true needs images, but inputs have shape {task.shape}; "
                "set augment_local = false and augment = false"
            )
        return super().init(task, seed)

    def round(self, state: FedMKState, clients: Clients) -> FedMKState:
        """A round of FedMK, or one of averaging: w ← Σ_k (n_k / n) w_k, over the clients that answered."""
        if clients.round <= self.condense_rounds:
            return super().round(state, clients)
        knowledge = state.knowledge or {0: state.empty}
        images, labels = concatenate_images(knowledge.values(), clients.aggregation)
        sent = self.draw_sent_images(labels, clients.stream("mixing"))
        cohort = self.sample_cohort(clients)
        distills = (
            self.train_first and self.teacher_weight > 0 and clients.round <= self.distill_until and len(labels) > 0
        )
        answers = train_models(
            clients,
            cohort,
            self.local_train,
            state.model,
            self.counts_schema(state) if distills else None,
            images=images[sent],
            labels=labels[sent],
            counted=distills,
        )
        state = replace(state, model=average_by_size(answers))
        if not distills:
            return state
        result = self.train_server(
            clients, answers, model=state.model, generator=state.generator, images=images, labels=labels
        )
        if not result["finite"]:
            self.warn(clients, "training on D̂ diverged, so the mean of the models is kept; lower -o distill_lr")
        return replace(state, model=result["model"], generator=result["generator"])

    def draw_sent_images(self, labels: Tensor, stream: torch.Generator) -> Tensor:
        """The positions of the images of D̂ that clients receive: a few of each class, if they mix any."""
        if not self.mixed_images:
            return labels.new_empty(0)
        shuffled = torch.randperm(len(labels), generator=stream).to(labels.device)
        by_class = [shuffled[labels[shuffled] == label][: self.mixed_per_class] for label in torch.unique(labels)]
        return torch.cat([labels.new_empty(0), *by_class])

    # --- rounds of FedMK ---

    def answer_schema(self, state: FedMKState) -> dict[str, Any]:
        """The form of an answer; with `train_first`, it has a trained model and the samples per class, too."""
        if not self.train_first:
            return super().answer_schema(state)
        return super().answer_schema(state) | model_schema(state.model) | self.counts_schema(state)

    def counts_schema(self, state: FedMKState) -> dict[str, Any]:
        """The form of a client's samples per class, which weigh its model as a teacher."""
        return {"counts": Shaped((len(state.empty),), torch.int64, MAX_SAMPLES)}

    @on_client(exact=("model",))
    def condense(self, client: Client, model: Weights, shared: Knowledge) -> dict[str, Any]:
        """Condenses the client's samples; with `train_first`, also trains the global model on them."""
        answer = super().condense(client, model=model, shared=shared)
        if self.train_first:
            trained = self.fit_model(client, model, self.first_steps, self.first_schedule)
            answer |= {"model": trained, "size": len(client.train), "counts": count_classes(client)}
        return answer

    def server_start(self, state: FedMKState, answers: Answers) -> Weights:
        """The model that the server trains on D̂: the mean of the clients' models if they trained any, or else W_G."""
        return average_by_size(answers) if self.train_first else state.model

    def train_server(self, clients: Clients, answers: Answers, **fields: Any) -> dict[str, Any]:
        """Trains the model on D̂, with the clients' models as its teachers if they trained any."""
        if not self.train_first or not self.teacher_weight:
            return super().train_server(clients, answers, **fields)
        members = stack_models([answer["model"] for answer in answers])
        counts = torch.stack([answer["counts"] for answer in answers])
        (result,) = clients.map_on_server(self.distill, [{}], **fields, members=members, counts=counts)
        return result

    @on_server(stream="learn")
    def distill(
        self,
        server: Server,
        model: Weights,
        generator: Weights,
        images: Tensor,
        labels: Tensor,
        members: Weights,
        counts: Tensor,
    ) -> dict[str, Any]:
        """Trains the model on D̂, with soft targets (1 − λ) · label + λ · p(x)."""
        teachers = [server.net(weights).eval() for weights in unstack_models(members)]
        stream = server.stream("pairs")

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            targets = F.one_hot(y, server.task.classes).to(x)
            if self.mix_pairs:
                x, targets = mix_pairs(x, targets, stream)
            with torch.no_grad():
                soft = mix_by_class([teacher(x) for teacher in teachers], counts)
                soft = keep_unheld(soft, targets, counts)
            return F.cross_entropy(net(x), torch.lerp(targets, soft, self.teacher_weight))

        steps, lr = self.server_steps, self.server_lr or self.inner_lr
        if server.round > self.condense_rounds:
            steps, lr = self.distill_steps, self.distill_lr
        return self.train_on_images(server, model, generator, images, labels, steps=steps, lr=lr, real_loss=loss)

    # --- later rounds ---

    @on_client(stream="train", exact=("model",))
    def local_train(
        self, client: Client, model: Weights, images: Tensor, labels: Tensor, counted: bool
    ) -> dict[str, Any]:
        """Trains the global model on the client's samples, and on images of D̂ if it got any."""
        trained = self.fit_model(client, model, self.local_steps, self.lr_schedule, images, labels)
        answer = {"model": trained, "size": len(client.train)}
        return answer | ({"counts": count_classes(client)} if counted else {})

    def fit_model(
        self,
        client: Client,
        model: Weights,
        steps: int,
        schedule: LRSchedule,
        images: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Weights:
        """The model after this many steps of training."""
        net = client.net(model)
        optimizer = LocalOptimizer(momentum=self.local_momentum, lr_schedule=schedule, clip_norm=self.clip_norm)
        batches = self.local_batches(client, steps, images, labels)
        loss = calibrated_loss(client, self.batch_frequencies(client, labels)) if self.calibrate else None
        sgd(net, batches, self.lr, loss=loss or task_loss(client.task), optimizer=optimizer, steps=steps)
        return get_weights(net)

    def batch_frequencies(self, client: Client, labels: Tensor | None) -> Tensor:
        """How often each class is in a local batch, with the images of D̂ that are mixed in."""
        own = class_frequencies(client)
        if labels is None or not len(labels):
            return own
        mixed = torch.bincount(labels, minlength=len(own)) / len(labels)
        return torch.lerp(own, mixed, self.mixed_images / (self.batch_size + self.mixed_images))

    def local_batches(
        self, client: Client, steps: int, images: Tensor | None, labels: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of one round: real samples and `mixed_images` of D̂, each image with its own map."""
        mixed = None
        if images is not None and labels is not None and len(images):
            mixed = self.cut_into_tiles(images, labels)
        moves, mixing = client.stream("moves"), client.stream("mixing")
        indices = draw_batches(len(client.train), steps, self.batch_size, client.stream("batches"))
        for x, y in client.train.batches(indices):
            if mixed:
                drawn = torch.randint(len(mixed[0]), (self.mixed_images,), generator=mixing)
                x, y = torch.cat([x, mixed[0][drawn]]), torch.cat([y, mixed[1][drawn]])
            yield apply_affine(x, draw_affine(len(x), moves)) if self.augment_local else x, y


def mix_by_class(logits: Sequence[Tensor], counts: Tensor) -> Tensor:
    """p(x)_c ∝ Π_k softmax(f_k(x))_c ^ (n_kc / Σ_j n_jc); 0 for classes that no client holds.

    A single client cannot rule out a class: no softmax counts as less than e^−8.
    """
    shares = counts.clamp_min(0) / counts.clamp_min(0).sum(0).clamp_min(1)  # clients × classes
    opinions = torch.stack([scores.log_softmax(1).clamp_min(MIN_LOG) for scores in logits])
    mixed = (shares[:, None] * opinions).sum(0)
    return mixed.masked_fill(counts.sum(0) <= 0, -torch.inf).softmax(1)


def keep_unheld(soft: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Teachers' opinions, with the label's share of each image for the classes that no client holds."""
    unheld = targets * (counts.sum(0) <= 0)
    return soft * (1 - unheld.sum(1, keepdim=True)) + unheld


def mix_pairs(x: Tensor, targets: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """a · image + (1 − a) · another image of the batch, with a uniform in [0, 1] for each; targets alike."""
    a = torch.rand(len(x), generator=stream).to(x)
    partner = torch.randperm(len(x), generator=stream).to(x.device)
    return (
        torch.lerp(x[partner], x, a.view(-1, *[1] * (x.dim() - 1))),
        torch.lerp(targets[partner], targets, a[:, None]),
    )
