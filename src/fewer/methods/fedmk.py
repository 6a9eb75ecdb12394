"""FedMK: clients send condensed synthetic data ("meta knowledge", D̂) instead of models.

Liu, Yu, Zhou: Meta Knowledge Condensation for Federated Learning, ICLR 2023, Algorithm 1. In this order below:

- Eqs 3-6, `condense` and `refine`: D̂ is moved so that a model which takes a few steps on D̂ has a low loss on the
  client's own samples. The gradient goes through those steps: it is exact, second order included.
- Eq 7, `weigh`: a sample counts by φ = sigmoid(τ · its loss), a constant for the gradient. Eq 8 is the weighted mean.
- Meta knowledge sharing, `first_images`: from the second round on, D̂ begins from that of a random other client.
- Eqs 9-11, `learn`: the server trains the global model on all D̂ that it has, and on features from a generator
  that is trained by cross-entropy through the frozen head (Eq 10), with FedGen's diversity term against collapse.

What the paper leaves open: D̂ has the hard labels of the classes that a client holds (`labels = all`: of all classes,
as the paper's count of bytes implies); Algorithm 1's "t == 1" is read as t ≥ 1; β of Eq 11 is the setting `pseudo`;
φ is taken at w*, where the loss is; the ablation "w/o Iter" is `rounds = 1`. Never does D̂ begin from real samples: that
would upload near-copies of private data.

Departures, each a setting; `fedmk-paper` has all of these off:

- `matching`: before the bi-level steps, D̂ is brought near the client's samples by matching class statistics under
  random nets (`fewer.learning.match`). Bi-level steps alone leave most of the noise that D̂ begins with.
- `augment`: images of D̂ are turned and shifted a little whenever a net sees them (matching, inner steps, the
  server's training). D̂ is small and seen many times; this keeps the model from learning it by heart.
- `refine_from`: no bi-level steps in the first round, whose model is random.
- `inner_batch`, `inner_steps`: inner steps go over shuffled parts of D̂, as the server's own steps do.
- `keep = latest`: the server trains on the last D̂ of everyone who ever sent one, not only of this round's clients.
- `begin = own`: a client goes on from its own last D̂, which need not be sent.
- `least`: classes of which a client has fewer samples are left out. Of 20 images a class on MNIST, some came nearer than
  half the usual distance to a real image wherever there were fewer than 30 samples, and none where there were more.
  That is no guarantee: `fewer audit` tells what D̂ still shows.
- `codec`: D̂ travels as uint8.
- The server takes many steps (`server_steps`) with `momentum`, at a size that falls (`decay`).

Two departures are in both. The paper moves D̂ by plain descent (after Eq 4), here it is Adam (`optimizer = sgd`: as
there): pixels then move by about α in each step, whatever the size of the gradient, which falls with the size of D̂. And
Eq 8 is the mean over all real samples, here over 256 drawn for each step (`outer_batch = null`: as there).
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
from fewer.data.episodes import of_classes
from fewer.errors import SettingError
from fewer.learning.augment import draw_moves, move
from fewer.learning.generator import Generator, generator_for, train_generator
from fewer.learning.match import match
from fewer.methods.base import Client, ImageGrid, Method, Server
from fewer.models import Task, Weights, finite, parts_of, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, Each, Unable, on_client, on_server
from fewer.runtime.streams import global_streams
from fewer.wire import Codec, Coded, Shaped

_LOG = logging.getLogger("fewer")
MOST = 1e3
"""The largest value that a pixel of D̂ may have, in what nets see."""
Knowledge = dict[str, Tensor]
"""D̂ of one client: the images of each class, by its number; none where it sent none."""
SHOWN = 10
"""At most so many clients, and rounds, are shown in a picture."""


@dataclass(frozen=True)
class MKState:
    """The global model, its generator, and what clients have sent."""

    model: Weights
    generator: Weights
    blank: Knowledge
    """A D̂ without images: what a client gets where there is nothing to share."""
    knowledge: dict[int, Knowledge] = field(default_factory=dict)
    """The last D̂ of every client."""
    album: dict[int, Knowledge] = field(default_factory=dict)
    """By round, one image of each class from the client that was the first to send: to look at."""


@METHODS.register("fedmk")
class FedMK(Method):
    """Clients condense their data into a few synthetic images; the server trains the global model on these."""

    tunable: ClassVar[Mapping[str, tuple[float, ...]]] = {"server_lr": (0.02, 0.05, 0.1, 0.2)}

    per_class: PositiveInt = 20
    """Images of D̂ in each class."""
    labels: Literal["held", "all"] = "held"
    """Classes that a client's D̂ has: those it holds, or all."""
    min_samples: PositiveInt = 30
    """A class counts as held from so many samples on: D̂ of fewer may show them."""
    codec: Codec = "uint8"
    """How D̂ is written on the wire."""
    init_from: Literal["noise", "shared", "own"] = "own"
    """What D̂ begins from after the first round: noise, the D̂ of a random other client, or the client's own last one."""
    augment: bool = True
    """Whether images are turned and shifted a little whenever a net sees them."""

    matching_steps: NonNegativeInt = 200
    """First steps, which match class statistics under random nets."""
    matching_lr: PositiveFloat = 0.1
    """Step size of matching (Adam)."""

    outer_steps: NonNegativeInt = 20
    """Bi-level steps on D̂."""
    refine_from: PositiveInt = 2
    """The first round with bi-level steps: in the first, the model is random, and D̂ would come to fit that."""
    outer_lr: PositiveFloat = 0.02
    """Step size of D̂ in a bi-level step (α)."""
    outer_batch_size: PositiveInt | None = 256
    """Real samples in a bi-level step; none means all."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """How D̂ steps."""
    inner_steps: PositiveInt = 5
    """Steps of the model on D̂ that each bi-level step goes through."""
    inner_lr: PositiveFloat = 0.1
    """Step size of these (η)."""
    inner_batch_size: PositiveInt | None = 64
    """Images of D̂ in such a step, shuffled; none means all."""
    restart_every: PositiveInt = 1
    """After so many bi-level steps the model is the global one again; 1: at each. Until then it is carried along."""
    sample_weights: Literal["dynamic", "class", "none"] = "dynamic"
    """How real samples are weighted: by their loss (Eq 7), by how rare their class is, or evenly."""
    tau: PositiveFloat = 5.0
    """Sharpness of dynamic weights (τ)."""

    keep_images: Literal["latest", "round"] = "latest"
    """What the server trains on: the last D̂ of every client, or this round's only."""
    server_steps: PositiveInt = 1000
    """The server's steps in a round."""
    server_lr: PositiveFloat = 0.05
    """Step size of these."""
    server_batch_size: Annotated[int, Field(ge=2)] = 128
    """Images of D̂ in each."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of these."""
    lr_decay: bool = True
    """Whether their size falls to 0 (half a cosine)."""
    pseudo_weight: NonNegativeFloat = 0.1
    """Share of generated features, against D̂ (β); 0: no generator."""
    generator_steps: PositiveInt = 50
    """Training steps of the generator in a round."""
    generator_lr: PositiveFloat = 0.001
    """Step size of these (Adam)."""

    # --- Algorithm 1 ---

    def init(self, task: Task, seed: int) -> MKState:
        """The initial model and generator."""
        if not self.matching_steps and (not self.outer_steps or self.refine_from > 1):
            raise SettingError("matching = 0 and no bi-level steps in the first round: nothing would be condensed")
        if self.augment and len(task.shape) != 3:
            raise SettingError(f"augment = true moves images, and samples here have the shape {task.shape}")
        net = task.net().eval()
        try:
            net(torch.zeros(1, *task.shape, device=task.device))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise SettingError("fedmk condenses inputs of real numbers, which this model does not take") from error
        generator: Weights = {}
        if self.pseudo_weight:
            with global_streams(seed, "generator"):
                generator = weights_of(generator_for(task, net))
        blank = {str(label): torch.empty(0, *task.shape) for label in range(task.classes)}
        return MKState(task.initial(seed), generator, blank)

    def round(self, state: MKState, clients: Clients) -> MKState:
        """Clients condense their data, the server trains on what they sent."""
        who = self.sample_cohort(clients)
        per_class = range(self.per_class + 1)
        answers = clients.ask(
            who,
            self.condense,
            model=state.model,
            shared=Each(self.lots(state, who, clients.stream("sharing"))),
            returns={
                "knowledge": {
                    c: Shaped((per_class, *none.shape[1:]), max_value=MOST) for c, none in state.blank.items()
                }
            },
        )
        sent: dict[int, Knowledge] = {answer.client: answer["knowledge"] for answer in answers}
        new = {client: one for client, one in sent.items() if any(map(len, one.values()))}
        if not new:
            return state
        knowledge = {**state.knowledge, **new}
        used = knowledge if self.keep_images == "latest" else new
        images, labels = joined(used.values())
        (learned,) = clients.map_on_server(
            self.learn, [{}], model=state.model, generator=state.generator, images=images, labels=labels
        )
        if not learned["sound"]:
            _LOG.warning(
                f"{self.name}, round {clients.round}: training on D̂ ran off to infinity, the model stays as it was "
                "(smaller steps: -o server_rate)"
            )
        album = {**state.album, **_page(clients.round, knowledge, new)}
        return MKState(learned["model"], learned["generator"], state.blank, knowledge, album)

    def lots(self, state: MKState, who: list[int], stream: torch.Generator) -> dict[int, Coded]:
        """Meta knowledge sharing: for each client the D̂ of a random other one, where there is any and it is wanted."""
        lots: dict[int, Coded] = {}
        for client in who:
            others = [other for other in state.knowledge if other != client]
            shared = state.blank
            if self.init_from == "shared" and others:
                shared = state.knowledge[others[int(torch.randint(len(others), (), generator=stream))]]
            lots[client] = Coded(shared, self.codec)
        return lots

    def condensed(self, state: MKState) -> dict[int, tuple[Tensor, Tensor]]:
        """The last D̂ of every client."""
        return {client: joined([knowledge]) for client, knowledge in state.knowledge.items()}

    # --- at a client: Eqs 3-8 ---

    @on_client
    def condense(self, client: Client, model: Weights, shared: Knowledge) -> dict[str, Any]:
        """D̂ of this client's data."""
        samples = self.enough(client)
        labels = self.hard_labels(samples, client.task.classes)
        images = self.first_images(client, labels, shared)
        if self.matching_steps:
            images = match(
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
            images = self.refine(client.net(model), images, labels, samples, client.stream("refining"))
        if not bool((images.abs() <= MOST).all()):
            raise Unable("D̂ ran off to infinity (settings matching_rate, outer_rate, inner_rate)")
        knowledge = {str(label): images[labels == label] for label in range(client.task.classes)}
        if self.init_from == "own":
            client.store.put("knowledge", knowledge)
        return {"knowledge": Coded(knowledge, self.codec)}

    def enough(self, client: Client) -> Samples:
        """The samples that D̂ is made of: those of classes of which there are enough."""
        held = torch.nonzero(torch.bincount(client.train.labels) >= self.min_samples).squeeze(1).tolist()
        if not held:
            raise Unable(f"no class with {self.min_samples} samples or more (setting least)")
        return of_classes(client.train, held)

    def hard_labels(self, samples: Samples, classes: int) -> Tensor:
        """The labels of D̂: `per_class` of each class."""
        held = torch.bincount(samples.labels, minlength=classes) > 0
        which = held if self.labels == "held" else torch.ones_like(held)
        return which.nonzero().squeeze(1).repeat_interleave(self.per_class)

    def first_images(self, client: Client, labels: Tensor, shared: Knowledge) -> Tensor:
        """U[-1, 1], or where there is one the image of the same class that was shared or that the client had."""
        images = (
            2 * torch.rand(len(labels), *client.task.shape, generator=client.stream("images")).to(labels.device) - 1
        )
        source = client.store.get("knowledge") or {} if self.init_from == "own" else shared
        for label, given in source.items():
            (slots,) = torch.nonzero(labels == int(label), as_tuple=True)
            images[slots[: len(given)]] = given[: len(slots)].to(images)
        return images

    def refine(
        self, net: nn.Module, images: Tensor, labels: Tensor, samples: Samples, stream: torch.Generator
    ) -> Tensor:
        """Bi-level steps: D̂ ← D̂ − α ∇_D̂ of the outer loss."""
        images = images.clone().requires_grad_()
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
        optimizer = kind([images], lr=self.outer_lr)
        first: dict[str, Tensor] = {name: p for name, p in net.named_parameters() if p.requires_grad}
        balance = _balance(samples.labels)
        count, batch = len(samples), self.outer_batch_size
        reached = first
        for step in range(self.outer_steps):
            if step % self.restart_every == 0:
                reached = first
            chosen = torch.arange(count) if batch is None else torch.randint(count, (batch,), generator=stream)
            x, y = samples.pick(chosen)
            reached = self.unroll(net, reached, images, labels, stream)
            (images.grad,) = torch.autograd.grad(self.outer_loss(net, reached, x, y, balance), images)
            optimizer.step()
            reached = {name: tensor.detach().requires_grad_() for name, tensor in reached.items()}
        return images.detach()

    def unroll(
        self, net: nn.Module, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor, stream: torch.Generator
    ) -> dict[str, Tensor]:
        """w* = w − η ∇ℓ(w, D̂), `inner_steps` times, still a function of D̂."""
        reached = dict(weights)
        left = torch.empty(0, dtype=torch.long)
        size = len(images) if self.inner_batch_size is None else min(self.inner_batch_size, len(images))
        for _ in range(self.inner_steps):
            if len(left) < size:
                left = torch.randperm(len(images), generator=stream) if size < len(images) else torch.arange(size)
            chosen, left = left[:size], left[size:]
            x = images[chosen]
            if self.augment:
                x = move(x, draw_moves(size, stream))
            loss = F.cross_entropy(functional_call(net, reached, (x,)), labels[chosen])
            gradients = torch.autograd.grad(loss, list(reached.values()), create_graph=True, materialize_grads=True)
            reached = {
                name: tensor - self.inner_lr * gradient
                for (name, tensor), gradient in zip(reached.items(), gradients, strict=True)
            }
        return reached

    def outer_loss(self, net: nn.Module, reached: dict[str, Tensor], x: Tensor, y: Tensor, balance: Tensor) -> Tensor:
        """(1/N) Σ φᵢ ℓ(w*, xᵢ, yᵢ) over real samples."""
        losses = F.cross_entropy(functional_call(net, reached, (x,)), y, reduction="none")
        return (self.weigh(losses, balance[y]) * losses).mean()

    def weigh(self, losses: Tensor, balance: Tensor) -> Tensor:
        """φ = 1 / (1 + exp(−τ ℓ)), or instead of it weights that give every class the same sum, or none."""
        if self.sample_weights == "dynamic":
            return torch.sigmoid(self.tau * losses.detach())
        return balance if self.sample_weights == "class" else torch.ones_like(losses)

    # --- at the server: Eqs 9-11 ---

    @on_server
    def learn(
        self, server: Server, model: Weights, generator: Weights, images: Tensor, labels: Tensor
    ) -> dict[str, Any]:
        """Train the generator (Eq 10), then the model on D̂ (Eq 9) and on what is generated (Eq 11).

        Where this runs off to infinity, for a rate that is too high or a client that lies, they stay as they were.
        """
        net, stream = server.net(model), server.stream("learning")
        chances = torch.bincount(labels, minlength=server.task.classes).float()
        make = None
        if self.pseudo_weight:
            make, head = generator_for(server.task, net, generator), parts_of(net)[1]
            train_generator(
                make,
                lambda features, _: head(features),
                chances,
                stream,
                steps=self.generator_steps,
                lr=self.generator_lr,
                batch=self.server_batch_size,
            )
        optimizer = torch.optim.SGD(net.parameters(), lr=self.server_lr, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.server_steps) if self.lr_decay else None
        for _ in range(self.server_steps):
            chosen = torch.randint(len(images), (self.server_batch_size,), generator=stream)
            x = images[chosen]
            if self.augment:
                x = move(x, draw_moves(len(x), stream))
            loss = F.cross_entropy(net(x), labels[chosen])
            if make is not None:
                loss = loss + self.pseudo_weight * self.pseudo_loss(make, parts_of(net)[1], chances, stream)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            if schedule:
                schedule.step()
        learned = {"model": weights_of(net), "generator": {} if make is None else weights_of(make)}
        sound = all(map(finite, learned.values()))
        return {**(learned if sound else {"model": model, "generator": generator}), "sound": sound}

    def pseudo_loss(self, make: Generator, head: nn.Module, chances: Tensor, stream: torch.Generator) -> Tensor:
        """Loss of the head on generated features; they are constants, so the encoder gets no gradient from them."""
        noise, y = make.draw(max(2, round(self.pseudo_weight * self.server_batch_size)), stream, chances)
        with torch.no_grad():
            features = make(noise, y)
        return F.cross_entropy(head(features), y)

    # --- to look at ---

    def image_grids(self, state: MKState) -> list[ImageGrid]:
        """D̂ by class and client, and how that of one client changes."""
        clients = {f"client {client}": _by_class(state.knowledge[client]) for client in sorted(state.knowledge)[:SHOWN]}
        each = 2 if len(state.blank) <= SHOWN else 1
        about = f"the last D̂ of {len(clients)} of the {len(state.knowledge)} clients that sent any"
        sheets = [ImageGrid("made-by-client", "Condensed images (D̂) by client and class", about, clients, each)]
        if len(state.album) > 1:
            pages = sorted(state.album)
            some = sorted({round(place) for place in torch.linspace(0, len(pages) - 1, SHOWN).tolist()})
            rounds = {f"round {pages[place]}": _by_class(state.album[pages[place]]) for place in some}
            about = "D̂ of one client, whenever it was asked: the first image of each class"
            sheets.append(ImageGrid("made-by-round", "Condensed images (D̂) by round and class", about, rounds))
        return sheets


@METHODS.register("fedmk-paper")
class FedMKPaper(FedMK):
    """FedMK as the paper has it: no matching, no augmentation, one inner step on all of D̂, this round's D̂ only.

    But D̂ steps by Adam, where the paper has plain descent, on 256 real samples a step, where it has all. What it does
    not say is our choice: how many steps there are, and how the server trains.
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


def joined(knowledge: Iterable[Knowledge]) -> tuple[Tensor, Tensor]:
    """All images of some D̂, and their labels."""
    parts = [(images, int(label)) for one in knowledge for label, images in one.items()]
    labels = [torch.full((len(images),), label) for images, label in parts]
    return torch.cat([images for images, _ in parts]), torch.cat(labels)


def _by_class(knowledge: Knowledge) -> dict[int, Tensor]:
    return {int(label): images for label, images in knowledge.items() if len(images)}


def _balance(labels: Tensor) -> Tensor:
    """By class, N / (classes held · samples of it)."""
    counts = torch.bincount(labels)
    return len(labels) / ((counts > 0).sum() * counts.clamp_min(1))


def _page(round: int, knowledge: Mapping[int, Knowledge], new: Mapping[int, Knowledge]) -> dict[int, Knowledge]:
    """One image of each class from the client that was first, where it has sent anew."""
    first = next(iter(knowledge))
    return {round: {label: images[:1] for label, images in new[first].items()}} if first in new else {}
