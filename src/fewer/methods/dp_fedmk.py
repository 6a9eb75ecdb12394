"""DP-FedMK: images condensed on the server from noisy class statistics of records. Ours, after FedMK and FedDM.

Each client sends one message, the noisy class sums of `fewer.learning.protect`. With J random nets that follow from a
seed of the server, a sample x has the vector

    v(x) = [m_1(x), …, m_J(x)] / √J        m_j(x) = [first, second] / √2
    first = p / ‖p‖,  second = first² / ‖first²‖        p = P_j φ_j(A_j x)

φ_j are the features of net j, P_j is a random projection if they are wider than `width`, and A_j is a small rotation,
shift and scaling. first and second are the first and second moment of one sample. v(x) has length 1, so that a clipping
norm of 1 changes nothing.

The server divides the noisy sums by the noisy counts. Images D̂ start from uniform noise and minimize the squared
distance between these means and the means of v(D̂), by class and net. Then the global model trains on D̂. All of this is
post-processing of one Gaussian release: the numbers of images, steps and rounds do not change ε. With
`--dp record:epsilon=…,distributed`, all clients share the noise of one sum. Without `--dp`, sums are exact and there is
no guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from fewer.errors import QuorumLost
from fewer.learning import LocalOptimizer, sgd
from fewer.learning.augment import apply_affine, draw_affine
from fewer.learning.match import extract_features, reinitialize
from fewer.learning.protect import ClassSums
from fewer.methods import Client, ImageGrid, Method, ModelState, Needs, SearchSpace, Server
from fewer.methods.condensed import Knowledge, draw_grids
from fewer.methods.private_prototypes import add_class_sums, class_sums_schema, send_class_sums, to_prototypes
from fewer.models import Task, Weights, all_finite, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client, on_server, stream
from fewer.runtime.streams import global_streams

Encoder = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DPFedMKState(ModelState):
    """The global model, the condensed images, and the noisy sums that they follow from."""

    nets_seed: int
    sums: Tensor
    """Noisy sums of v(x) by class (classes × length)."""
    counts: Tensor
    """Noisy numbers of samples by class."""
    deviation: float = 0.0
    """The standard deviation of the noise of a count."""
    answered: list[int] = field(default_factory=list)
    """The clients that answered."""
    images: Knowledge = field(default_factory=dict)
    """D̂, by class."""
    condensed: int = 0
    """The number of clients that D̂ follows from."""


@METHODS.register("dp-fedmk")
class DPFedMK(Method[DPFedMKState]):
    """Clients send noisy class statistics once; the server condenses images from them and trains on these."""

    needs: ClassVar[Needs] = "classes"
    answers_once: ClassVar[bool] = True
    tunable: ClassVar[SearchSpace] = {"server_lr": (0.02, 0.05, 0.1)}

    rounds: PositiveInt = 1
    """Number of rounds. One is enough if all clients answer."""
    cohort: PositiveInt | None = None
    """Clients asked in each round, of the clients without an answer so far. [default: all]"""
    per_class: PositiveInt = 20
    """Images of D̂ per class."""
    nets: PositiveInt = 8
    """Random nets (J)."""
    width: PositiveInt = 1024
    """Features of a net that are not projected to fewer."""
    augment: bool = True
    """Whether images are rotated, scaled and shifted, by one map for each net, and at random in training."""
    matching_steps: PositiveInt = 400
    """Steps of D̂, each with the next net."""
    matching_lr: PositiveFloat = 0.1
    """Learning rate of D̂ (Adam)."""
    server_steps: PositiveInt = 1000
    """Training steps of the global model."""
    server_lr: PositiveFloat = 0.05
    """Learning rate of the global model."""
    server_batch_size: PositiveInt = 128
    """Images of D̂ per training step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the global model."""

    def init(self, task: Task, seed: int) -> DPFedMKState:
        """The initial model, and the seed of the random nets."""
        nets_seed = int(torch.randint(1 << 31, (), generator=stream(seed, "nets")))
        example = self.build_encoders(task, nets_seed)[0](torch.zeros(1, *task.shape, device=task.device))
        sums = torch.zeros(task.classes, self.nets * example.shape[1], dtype=torch.float64)
        return DPFedMKState(task.initial_weights(seed), nets_seed, sums, torch.zeros(task.classes, dtype=torch.float64))

    def round(self, state: DPFedMKState, clients: Clients) -> DPFedMKState:
        """Asks clients without an answer so far for class sums. For an evaluation, condenses D̂ and trains on it."""
        answered = {*state.answered}
        if waiting := [client for client in range(len(clients)) if client not in answered]:
            state = self.collect_sums(state, clients, waiting)
        if not clients.will_evaluate or len(state.answered) == state.condensed:
            return state  # D̂ follows from the sums at any time
        clip = min(1.0, clients.privacy.clip) if clients.privacy else 1.0
        classes, means, _ = to_prototypes(ClassSums(state.sums / clip, state.counts, state.deviation))
        if not len(classes):
            raise QuorumLost(f"round {clients.round}: no class has more samples than the noise; use a larger epsilon")
        (result,) = clients.map_on_server(
            self.condense, [{}], model=state.model, nets_seed=state.nets_seed, classes=classes, means=means
        )
        if not result["finite"]:
            self.warn(clients, "training on D̂ diverged, so the last model is kept; lower -o server_lr")
        images = {str(label): part for label, part in zip(classes.tolist(), result["images"], strict=True)}
        return replace(state, model=result["model"], images=images, condensed=len(state.answered))

    def collect_sums(self, state: DPFedMKState, clients: Clients, waiting: list[int]) -> DPFedMKState:
        """Adds the class sums of this round's cohort."""
        count = len(waiting) if self.cohort is None else min(self.cohort, len(waiting))
        cohort = waiting if count == len(waiting) else clients.sample(count, among=waiting)
        returns = class_sums_schema(*state.sums.shape)
        answers = clients.ask(cohort, self.send_statistics, nets_seed=state.nets_seed, returns=returns)
        new = add_class_sums(answers)
        return replace(
            state,
            sums=state.sums + new.sums,
            counts=state.counts + new.counts,
            deviation=math.hypot(state.deviation, new.deviation),
            answered=sorted([*state.answered, *(answer.client for answer in answers)]),
        )

    def build_encoders(self, task: Task, nets_seed: int) -> list[Encoder]:
        """m_1, …, m_J: functions of a batch, each by a random net, projection and affine map."""
        return [self._build_encoder(task, nets_seed, number) for number in range(self.nets)]

    def _build_encoder(self, task: Task, nets_seed: int, number: int) -> Encoder:
        with global_streams(nets_seed, number):
            net = task.net().requires_grad_(False).eval()
            reinitialize(net)
        generator = stream(nets_seed, number, "projection")
        affine = draw_affine(1, generator) if self.augment and len(task.shape) == 3 else None
        projections: list[Tensor] = []

        def encode(x: Tensor) -> Tensor:
            features = extract_features(net, x if affine is None else apply_affine(x, affine))[0]
            if features.shape[1] > self.width:
                if not projections:
                    projections.append(torch.randn(features.shape[1], self.width, generator=generator).to(features))
                features = features @ projections[0]
            return moments(features)

        return encode

    # A client.

    @on_client(exact=("counts",))
    def send_statistics(self, client: Client, nets_seed: int) -> dict[str, Any]:
        """Σ v(x) by class, and counts: with noise under differential privacy."""
        encoders = self.build_encoders(client.task, nets_seed)
        return send_class_sums(client, lambda x: torch.cat([m(x) for m in encoders], dim=1) / math.sqrt(self.nets))

    # The server.

    @on_server
    def condense(
        self, server: Server, model: Weights, nets_seed: int, classes: Tensor, means: Tensor
    ) -> dict[str, Any]:
        """Condenses D̂ from noisy class means of v(x), and trains the global model on it."""
        encoders = self.build_encoders(server.task, nets_seed)
        targets = torch.chunk(math.sqrt(self.nets) * means, self.nets, dim=1)  # of m_j(x)
        noise = torch.rand(len(classes), self.per_class, *server.task.shape, generator=server.stream("images"))
        images = (2 * noise - 1).to(means.device).requires_grad_()
        optimizer = torch.optim.Adam([images], lr=self.matching_lr)
        for step in range(self.matching_steps):
            number = step % self.nets
            loss = matching_loss(encoders[number], images, targets[number])
            (images.grad,) = torch.autograd.grad(loss, images)
            optimizer.step()
        images = images.detach()
        labels, x = classes.repeat_interleave(self.per_class), images.flatten(0, 1)
        net, generator = server.net(model), server.stream("learning")
        batches = (self.draw_batch(x, labels, generator) for _ in range(self.server_steps))
        schedule = LocalOptimizer(momentum=self.momentum, lr_schedule="cosine")
        sgd(net, batches, self.server_lr, optimizer=schedule, steps=self.server_steps)
        trained = get_weights(net)
        finite = all_finite(trained)
        return {"model": trained if finite else model, "images": images, "finite": finite}

    def draw_batch(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random images of D̂ and their labels."""
        batch = torch.randint(len(images), (self.server_batch_size,), generator=generator)
        x = images[batch]
        moved = apply_affine(x, draw_affine(len(x), generator)) if self.augment and x.ndim == 4 else x
        return moved, labels[batch]

    def image_grids(self, state: DPFedMKState) -> list[ImageGrid]:
        """D̂ by class."""
        return draw_grids({0: state.images}, {}) if state.images else []


def moments(features: Tensor) -> Tensor:
    """[first, second] / √2 of each sample: its features and their squares, both of length 1."""
    first = F.normalize(features, dim=1)
    return torch.cat([first, F.normalize(first.square(), dim=1)], dim=1) / math.sqrt(2)


def matching_loss(encode: Encoder, images: Tensor, targets: Tensor) -> Tensor:
    """Σ_c ‖mean m_j(D̂_c) − target_c‖², for images by class (classes × images × shape)."""
    means = encode(images.flatten(0, 1)).view(*images.shape[:2], -1).mean(1)
    return (means - targets).square().sum()
