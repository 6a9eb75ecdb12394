"""FedMK: clients send condensed synthetic images ("meta knowledge", D̂) instead of models.

Liu, Yu, Zhou: Meta Knowledge Condensation for Federated Learning, ICLR 2023, Algorithm 1. Its steps:

- Federated meta knowledge extraction on clients (Eqs 3-6), `condense`: the outer loop moves D̂ so that a model trained
  on D̂ in the inner loop has a low loss on the client's samples. The gradient through the inner loop is exact, second
  order included.
- Meta knowledge sharing, `initial_images`: from round 2 on, D̂ starts from that of a random other client.
- Dynamic weight assignment (Eqs 7-8), `weigh_samples`: φ = sigmoid(τ · loss) per sample, a constant for the gradient.
- Global model training on the server (Eqs 9-11), `train_global_model`: on the D̂ of all clients and on pseudo meta
  knowledge. The latter are features from a generator that learns through the frozen head (Eq 10). It has FedGen's
  diversity term against collapse.

Readings where the paper is open:

- D̂ has hard labels of the classes that a client holds. With `labels = all` it has all classes, as the paper's
  byte count implies.
- "t == 1" in Algorithm 1 is read as t ≥ 1.
- β of Eq 11 is `pseudo_weight`.
- φ is taken at w*, where the loss is.
- The ablation "w/o Iter" is `rounds = 1`.
- D̂ never starts from real samples: clients would upload near-copies of private data.

Departures, each a setting (`fedmk-paper` turns all of these off):

- `matching_steps`: before the outer loop, D̂ is moved toward the client's class statistics under random nets
  (`fewer.learning.match`). The outer loop alone leaves most of the initial noise in D̂.
- `augment`: images of D̂ are randomly rotated, scaled and shifted whenever a net sees them. D̂ is small and is used many
  times; augmentation prevents overfitting.
- `refine_from`: no outer steps in round 1, where the model is random.
- `inner_batch_size`, `inner_steps`: several inner steps on shuffled batches of D̂, as in the server's training.
- `keep_images = latest`: the server trains on the latest D̂ of every client, not only of this round's cohort.
- `init_from = own`: a client continues from its own last D̂, which needs no message.
- `min_samples`: a client leaves out classes with fewer samples. On MNIST with 20 images per class, some images came
  nearer to a real one than half the typical distance. All of them were of classes with fewer than 30 samples. This is
  no guarantee: `fewer audit` measures what D̂ reveals.
- `codec`: D̂ is sent as uint8.
- `server_steps`, `momentum`, `lr_decay`: many server steps, with momentum and a decaying learning rate.

Departures of both methods:

- The outer optimizer is Adam; the paper uses plain gradient descent (`optimizer = sgd`). Adam moves pixels by about α
  per step. The raw gradient shrinks with the size of D̂.
- The outer loss is over 256 real samples per step; Eq 8 uses all of them (`outer_batch_size = null`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewer.data import Samples
from fewer.data.episodes import select_classes
from fewer.errors import SettingError
from fewer.learning.augment import apply_affine, draw_affine
from fewer.learning.generator import Generator, build_generator, train_generator
from fewer.learning.match import match_statistics
from fewer.methods.base import Client, ImageGrid, Method, Server
from fewer.models import Task, Weights, all_finite, get_weights, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, Each, Unable, on_client, on_server
from fewer.runtime.streams import global_streams
from fewer.wire import Codec, Encoded, Shaped

_LOG = logging.getLogger("fewer")
MAX_PIXEL = 1e3
"""The largest absolute value of a pixel of D̂, in normalized units."""
MAX_SHOWN = 10
"""The most clients, or rounds, in an image grid."""
Knowledge = dict[str, Tensor]
"""D̂ of one client: the images of each class, by class number. A class that it does not send has no images."""


@dataclass(frozen=True)
class FedMKState:
    """The global model, the generator and the clients' meta knowledge."""

    model: Weights
    """W_G"""
    generator: Weights
    """w^G"""
    empty: Knowledge
    """A D̂ without images, for clients with which nothing is shared."""
    knowledge: dict[int, Knowledge] = field(default_factory=dict)
    """The latest D̂ of every client."""
    image_history: dict[int, Knowledge] = field(default_factory=dict)
    """By round, one image per class of the client that was the first to send D̂. For display only."""


@METHODS.register("fedmk")
class FedMK(Method):
    """Clients condense their data into a few synthetic images; the server trains the global model on these."""

    tunable: ClassVar[Mapping[str, tuple[float, ...]]] = {"server_lr": (0.02, 0.05, 0.1, 0.2)}

    per_class: PositiveInt = 20
    """Images of D̂ per class."""
    labels: Literal["held", "all"] = "held"
    """Classes in a client's D̂: those it holds, or all."""
    min_samples: PositiveInt = 30
    """Samples that a client needs to hold a class. D̂ of fewer samples may reveal them."""
    codec: Codec = "uint8"
    """Encoding of D̂ in messages."""
    init_from: Literal["noise", "shared", "own"] = "own"
    """Start of D̂ after the first round: noise, the D̂ of a random other client, or the client's own last D̂."""
    augment: bool = True
    """Whether D̂ is randomly rotated, scaled and shifted whenever a net sees it."""

    matching_steps: NonNegativeInt = 200
    """Steps that match class statistics under random nets, before the outer loop."""
    matching_lr: PositiveFloat = 0.1
    """Learning rate of matching (Adam)."""

    outer_steps: NonNegativeInt = 20
    """Steps of D̂ in the outer loop."""
    refine_from: PositiveInt = 2
    """First round with outer steps. The model of round 1 is random, and D̂ would overfit to it."""
    outer_lr: PositiveFloat = 0.02
    """Learning rate of the outer loop (α)."""
    outer_batch_size: PositiveInt | None = 256
    """Real samples per outer step; null means all."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the outer loop."""
    inner_steps: PositiveInt = 5
    """Steps of the model on D̂ in the inner loop."""
    inner_lr: PositiveFloat = 0.1
    """Learning rate of the inner loop (η)."""
    inner_batch_size: PositiveInt | None = 64
    """Images of D̂ per inner step, shuffled; null means all."""
    restart_every: PositiveInt = 1
    """Outer steps after which the inner loop restarts from the global model; in between, it continues from w*."""
    sample_weights: Literal["dynamic", "class", "none"] = "dynamic"
    """Weights of real samples: by loss (Eq 7), by class frequency (rare classes count more), or equal."""
    tau: PositiveFloat = 5.0
    """Sharpness of the dynamic weights (τ)."""

    keep_images: Literal["latest", "round"] = "latest"
    """What the server trains on: the latest D̂ of every client, or that of this round only."""
    server_steps: PositiveInt = 1000
    """Server steps per round."""
    server_lr: PositiveFloat = 0.05
    """Learning rate of the server."""
    server_batch_size: Annotated[int, Field(ge=2)] = 128
    """Images of D̂ per server step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the server."""
    lr_decay: bool = True
    """Whether the server's learning rate decays to 0 (cosine)."""
    pseudo_weight: NonNegativeFloat = 0.1
    """Weight, and relative number, of generated features (β); 0 means no generator."""
    generator_steps: PositiveInt = 50
    """Generator steps per round."""
    generator_lr: PositiveFloat = 0.001
    """Learning rate of the generator (Adam)."""

    # --- Algorithm 1 ---

    def init(self, task: Task, seed: int) -> FedMKState:
        """The initial model and generator."""
        if not self.matching_steps and (not self.outer_steps or self.refine_from > 1):
            raise SettingError(
                "nothing would be condensed in round 1: set matching_steps > 0, or outer_steps > 0 with refine_from = 1"
            )
        if self.augment and len(task.shape) != 3:
            raise SettingError(f"augment = true needs images, but inputs have shape {task.shape}; set augment = false")
        net = task.net().eval()
        try:
            net(torch.zeros(1, *task.shape, device=task.device))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise SettingError("fedmk condenses real-valued inputs, but the model does not take any") from error
        generator: Weights = {}
        if self.pseudo_weight:
            with global_streams(seed, "generator"):
                generator = get_weights(build_generator(task, net))
        empty = {str(label): torch.empty(0, *task.shape) for label in range(task.classes)}
        return FedMKState(task.initial_weights(seed), generator, empty)

    def round(self, state: FedMKState, clients: Clients) -> FedMKState:
        """The cohort condenses its data to D̂; the server trains the global model on D̂."""
        cohort = self.sample_cohort(clients)
        per_class = range(self.per_class + 1)
        answers = clients.ask(
            cohort,
            self.condense,
            model=state.model,
            shared=Each(self.draw_shared_knowledge(state, cohort, clients.stream("sharing"))),
            returns={
                "knowledge": {
                    label: Shaped((per_class, *images.shape[1:]), max_value=MAX_PIXEL)
                    for label, images in state.empty.items()
                }
            },
        )
        sent: dict[int, Knowledge] = {answer.client: answer["knowledge"] for answer in answers}
        new = {client: knowledge for client, knowledge in sent.items() if any(map(len, knowledge.values()))}
        if not new:
            return state
        knowledge = {**state.knowledge, **new}
        images, labels = concatenate_images((knowledge if self.keep_images == "latest" else new).values())
        (result,) = clients.map_on_server(
            self.train_global_model, [{}], model=state.model, generator=state.generator, images=images, labels=labels
        )
        if not result["finite"]:
            _LOG.warning(
                f"{self.name}, round {clients.round}: training on D̂ diverged, so the last model is kept; "
                "lower -o server_lr"
            )
        image_history = {**state.image_history, **_snapshot(clients.round, knowledge, new)}
        return FedMKState(result["model"], result["generator"], state.empty, knowledge, image_history)

    def draw_shared_knowledge(
        self, state: FedMKState, cohort: list[int], stream: torch.Generator
    ) -> dict[int, Encoded]:
        """Meta knowledge sharing: for each client, the D̂ of a random other client if `init_from` is "shared"."""
        shared: dict[int, Encoded] = {}
        for client in cohort:
            others = [other for other in state.knowledge if other != client]
            knowledge = state.empty
            if self.init_from == "shared" and others:
                knowledge = state.knowledge[others[int(torch.randint(len(others), (), generator=stream))]]
            shared[client] = Encoded(knowledge, self.codec)
        return shared

    def synthetic_data(self, state: FedMKState) -> dict[int, tuple[Tensor, Tensor]]:
        """The latest D̂ of every client."""
        return {client: concatenate_images([knowledge]) for client, knowledge in state.knowledge.items()}

    # --- Federated meta knowledge extraction on clients: Eqs 3-8 ---

    @on_client
    def condense(self, client: Client, model: Weights, shared: Knowledge) -> dict[str, Any]:
        """Extracts D̂ from the client's data."""
        samples = self.eligible_samples(client)
        labels = self.hard_labels(samples, client.task.classes)
        images = self.initial_images(client, labels, shared)
        if self.matching_steps:
            images = match_statistics(
                client.net(model),
                images,
                labels,
                samples,
                steps=self.matching_steps,
                lr=self.matching_lr,
                augment=self.augment,
                stream=client.stream("matching"),
            )
        if self.outer_steps and client.round >= self.refine_from:
            images = self.outer_loop(client.net(model), images, labels, samples, client.stream("refining"))
        if not bool((images.abs() <= MAX_PIXEL).all()):
            raise Unable("the condensed images diverged; lower matching_lr, outer_lr or inner_lr")
        knowledge = {str(label): images[labels == label] for label in range(client.task.classes)}
        if self.init_from == "own":
            client.store.put("knowledge", knowledge)
        return {"knowledge": Encoded(knowledge, self.codec)}

    def eligible_samples(self, client: Client) -> Samples:
        """The samples of all classes with at least `min_samples`."""
        held = torch.nonzero(torch.bincount(client.train.labels) >= self.min_samples).squeeze(1).tolist()
        if not held:
            raise Unable(f"no class with {self.min_samples} samples or more; lower min_samples")
        return select_classes(client.train, held)

    def hard_labels(self, samples: Samples, classes: int) -> Tensor:
        """The labels of D̂: `per_class` of each class."""
        held = torch.bincount(samples.labels, minlength=classes) > 0
        included = held if self.labels == "held" else torch.ones_like(held)
        return included.nonzero().squeeze(1).repeat_interleave(self.per_class)

    def initial_images(self, client: Client, labels: Tensor, shared: Knowledge) -> Tensor:
        """D̂_ini: images of the same class from the shared or the client's own last D̂; otherwise U[−1, 1]."""
        images = (
            2 * torch.rand(len(labels), *client.task.shape, generator=client.stream("images")).to(labels.device) - 1
        )
        source = client.store.get("knowledge") or {} if self.init_from == "own" else shared
        for label, given in source.items():
            (positions,) = torch.nonzero(labels == int(label), as_tuple=True)
            images[positions[: len(given)]] = given[: len(positions)].to(images)
        return images

    def outer_loop(
        self, net: nn.Module, images: Tensor, labels: Tensor, samples: Samples, stream: torch.Generator
    ) -> Tensor:
        """D̂ ← D̂ − α ∇_D̂ L(w*, Φ, D) (Eqs 6 and 8), `outer_steps` times."""
        images = images.clone().requires_grad_()
        optimizer = (torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD)([images], lr=self.outer_lr)
        global_weights: dict[str, Tensor] = {name: p for name, p in net.named_parameters() if p.requires_grad}
        balance = class_balance(samples.labels)
        count, batch_size = len(samples), self.outer_batch_size
        w = global_weights
        for step in range(self.outer_steps):
            if step % self.restart_every == 0:
                w = global_weights
            batch = torch.arange(count) if batch_size is None else torch.randint(count, (batch_size,), generator=stream)
            x, y = samples.pick(batch)
            w_star = self.inner_loop(net, w, images, labels, stream)
            (images.grad,) = torch.autograd.grad(self.outer_loss(net, w_star, x, y, balance), images)
            optimizer.step()
            w = {name: tensor.detach().requires_grad_() for name, tensor in w_star.items()}
        return images.detach()

    def inner_loop(
        self, net: nn.Module, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor, stream: torch.Generator
    ) -> dict[str, Tensor]:
        """w* ← w − η ∇_w L(w, D̂) (Eq 5), `inner_steps` times; w* stays differentiable in D̂."""
        w = dict(weights)
        unused = torch.empty(0, dtype=torch.long)
        size = len(images) if self.inner_batch_size is None else min(self.inner_batch_size, len(images))
        for _ in range(self.inner_steps):
            if len(unused) < size:
                unused = torch.randperm(len(images), generator=stream) if size < len(images) else torch.arange(size)
            batch, unused = unused[:size], unused[size:]
            x = images[batch]
            if self.augment:
                x = apply_affine(x, draw_affine(size, stream))
            loss = F.cross_entropy(functional_call(net, w, (x,)), labels[batch])
            gradients = torch.autograd.grad(loss, list(w.values()), create_graph=True, materialize_grads=True)
            w = {
                name: tensor - self.inner_lr * gradient
                for (name, tensor), gradient in zip(w.items(), gradients, strict=True)
            }
        return w

    def outer_loss(self, net: nn.Module, w_star: dict[str, Tensor], x: Tensor, y: Tensor, balance: Tensor) -> Tensor:
        """L(w*, Φ, D) = (1/N) Σ φᵢ ℓ(w*, xᵢ, yᵢ) over real samples (Eq 8)."""
        losses = F.cross_entropy(functional_call(net, w_star, (x,)), y, reduction="none")
        return (self.weigh_samples(losses, balance[y]) * losses).mean()

    def weigh_samples(self, losses: Tensor, balance: Tensor) -> Tensor:
        """Dynamic weights φ = 1 / (1 + exp(−τ ℓ)) (Eq 7); or else class-balancing or equal weights."""
        if self.sample_weights == "dynamic":
            return torch.sigmoid(self.tau * losses.detach())
        return balance if self.sample_weights == "class" else torch.ones_like(losses)

    # --- Global model training on the server: Eqs 9-11 ---

    @on_server(stream="learn")
    def train_global_model(
        self, server: Server, model: Weights, generator: Weights, images: Tensor, labels: Tensor
    ) -> dict[str, Any]:
        """Trains the generator (Eq 10), then the global model on D̂ (Eq 9) and on generated features (Eq 11).

        If training diverges (too high a learning rate, or a malicious client), model and generator stay the same.
        """
        net, stream = server.net(model), server.stream("learning")
        class_weights = torch.bincount(labels, minlength=server.task.classes).float()
        generate = None
        if self.pseudo_weight:
            generate, head = build_generator(server.task, net, generator), split_net(net)[1]
            train_generator(
                generate,
                lambda features, _: head(features),
                class_weights,
                stream,
                steps=self.generator_steps,
                lr=self.generator_lr,
                batch_size=self.server_batch_size,
            )
        optimizer = torch.optim.SGD(net.parameters(), lr=self.server_lr, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.server_steps) if self.lr_decay else None
        for _ in range(self.server_steps):
            batch = torch.randint(len(images), (self.server_batch_size,), generator=stream)
            x = images[batch]
            if self.augment:
                x = apply_affine(x, draw_affine(len(x), stream))
            loss = F.cross_entropy(net(x), labels[batch])
            if generate is not None:
                loss = loss + self.pseudo_weight * self.pseudo_loss(generate, split_net(net)[1], class_weights, stream)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            if schedule:
                schedule.step()
        trained = {"model": get_weights(net), "generator": {} if generate is None else get_weights(generate)}
        finite = all(map(all_finite, trained.values()))
        return {**(trained if finite else {"model": model, "generator": generator}), "finite": finite}

    def pseudo_loss(
        self, generate: Generator, head: nn.Module, class_weights: Tensor, stream: torch.Generator
    ) -> Tensor:
        """L(W_G, D̂^pseu): the head's loss on generated features. The encoder gets no gradient from it."""
        count = max(2, round(self.pseudo_weight * self.server_batch_size))
        noise, y = generate.draw(count, stream, class_weights)
        with torch.no_grad():
            features = generate(noise, y)
        return F.cross_entropy(head(features), y)

    # --- Images for reports ---

    def image_grids(self, state: FedMKState) -> list[ImageGrid]:
        """D̂ by client and class, and the D̂ of one client by round."""
        clients = {
            f"client {client}": _images_by_class(state.knowledge[client])
            for client in sorted(state.knowledge)[:MAX_SHOWN]
        }
        per_class = 2 if len(state.empty) <= MAX_SHOWN else 1
        caption = f"the last D̂ of {len(clients)} of the {len(state.knowledge)} clients that sent any"
        all_grids = [
            ImageGrid("made-by-client", "Condensed images (D̂) by client and class", caption, clients, per_class)
        ]
        if len(state.image_history) > 1:
            history = sorted(state.image_history)
            shown = sorted({round(index) for index in torch.linspace(0, len(history) - 1, MAX_SHOWN).tolist()})
            rounds = {
                f"round {history[index]}": _images_by_class(state.image_history[history[index]]) for index in shown
            }
            caption = "the first image of each class in the D̂ of one client, in the rounds when it was in the cohort"
            all_grids.append(ImageGrid("made-by-round", "Condensed images (D̂) by round and class", caption, rounds))
        return all_grids


@METHODS.register("fedmk-paper")
class FedMKPaper(FedMK):
    """FedMK as in the paper: no matching, no augmentation, one inner step on all of D̂, this round's D̂ only.

    Two departures remain. The outer optimizer is Adam, not plain gradient descent, on 256 real samples per step, not
    all. The number of steps and the server's training, which the paper does not give, are our choice.
    """

    tunable: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "server_lr": (0.03, 0.1, 0.3),
        "outer_lr": (0.03, 0.1, 0.3),
    }

    min_samples: PositiveInt = 1
    codec: Codec = "float32"
    init_from: Literal["noise", "shared", "own"] = "shared"
    augment: bool = False
    matching_steps: NonNegativeInt = 0
    refine_from: PositiveInt = 1
    outer_steps: NonNegativeInt = 60
    outer_lr: PositiveFloat = 0.1
    inner_steps: PositiveInt = 1
    inner_batch_size: PositiveInt | None = None
    keep_images: Literal["latest", "round"] = "round"
    server_steps: PositiveInt = 80
    server_lr: PositiveFloat = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr_decay: bool = False


def concatenate_images(knowledge: Iterable[Knowledge]) -> tuple[Tensor, Tensor]:
    """All images of several D̂, and their labels."""
    parts = [(images, int(label)) for each in knowledge for label, images in each.items()]
    labels = [torch.full((len(images),), label) for images, label in parts]
    return torch.cat([images for images, _ in parts]), torch.cat(labels)


def class_balance(labels: Tensor) -> Tensor:
    """Weight by class, N / (held classes · samples of the class): each held class gets the same total."""
    counts = torch.bincount(labels)
    return len(labels) / ((counts > 0).sum() * counts.clamp_min(1))


def _images_by_class(knowledge: Knowledge) -> dict[int, Tensor]:
    return {int(label): images for label, images in knowledge.items() if len(images)}


def _snapshot(round: int, knowledge: Mapping[int, Knowledge], new: Mapping[int, Knowledge]) -> dict[int, Knowledge]:
    """One image per class of the client that was the first to send D̂, if it sent a new one this round."""
    first = next(iter(knowledge))
    return {round: {label: images[:1] for label, images in new[first].items()}} if first in new else {}
