"""FedMK: clients send condensed synthetic images ("meta knowledge", D̂) instead of models.

Liu, Yu, Zhou: Meta Knowledge Condensation for Federated Learning, ICLR 2023, Algorithm 1. Its steps, in code order:

- Meta knowledge sharing (line 8), `initial_images`: from round 2 on, D̂ starts from the D̂ of a random other client.
- Federated meta knowledge extraction on clients (line 10, Eqs 3-6), `condense`: the outer loop moves D̂ so that a model
  trained on D̂ in the inner loop has a low loss on the client's samples D. The gradient through the inner loop is exact,
  second order included.
- Dynamic weight assignment (line 9, Eqs 7-8), `weigh_samples`: φ = sigmoid(τ ℓ) per sample, without gradient.
- Global model training on the server (lines 14-17, Eqs 9-11), `train_global_model`: on the D̂ of all clients and on
  pseudo meta knowledge D̂^pseu. The latter are features from a generator that learns through the frozen head (Eq 10).

Readings where the paper is open:

- t counts communication rounds, although Algorithm 1 loops over t inside a client. "t == 1" in line 8 means t ≥ 1.
- c′ in line 8 is any other client that has sent D̂, in whatever round. The server draws it.
- D̂ has hard labels. The paper's byte count implies all classes (`labels = all`); here, the classes of the
  client.
- φ and the loss of Eq 8 are taken at w*, as in Eq 6. Eqs 7 and 8 write w^c.
- β of Eq 11 is the option `pseudo_weight`; each server step draws β · |batch| features.
- The generator's loss has FedGen's diversity term, against collapse.
- The ablation "w/o Iter" is `rounds = 1`.
- D̂ never starts from real samples: clients would upload near-copies of private data.

Departures, each a setting (`fedmk-paper` turns all of these off):

- `matching_steps`: before the outer loop, D̂ is moved toward the client's class statistics under random nets
  (`fewer.learning.match`). The outer loop alone leaves most of the initial noise in D̂.
- `match_rounds`: matching again in a later round undoes outer steps. With a number, a client matches in its first
  rounds only. It matches in all by default: on images that no client holds, this was as good or better
  (docs/results/fedmk/matching.md).
- `matching_nets`: nets near the global model from round 2 on (as in FedDM), or nets that the client trains a little
  meanwhile. By default, all are random.
- `tiles`: with 2, each image of D̂ holds four smaller ones, which are resized to full size whenever a net sees them
  (the multi-formation of Kim et al.: Dataset Condensation via Efficient Synthetic-Data Parameterization, ICML 2022).
- `augment`: images of D̂ are randomly rotated, scaled and shifted whenever a net sees them. D̂ is small and is used many
  times; augmentation prevents overfitting.
- `refine_from`: no outer steps in round 1, where the model is random.
- `restart_every`: the inner loop restarts from W_G at every outer step, as the server does in the next round. Line 5
  sets w^c once.
- `inner_batch_size`: inner steps on shuffled batches of D̂, as in the server's training.
- `keep_images = latest`: the server trains on the latest D̂ of every client, not only of this round's cohort.
- `init_from = own`: a client continues from its own last D̂, which needs no message.
- `start = class`: D̂ starts from Gaussian noise with the mean and covariance of the client's samples of a class, if it
  has twice as many samples as images. Uniform noise leaves more noise in D̂ after the same number of steps.
- `min_samples`: a client leaves out classes with fewer samples. On MNIST with 20 images per class, some images came
  nearer to a real one than half the typical distance. All of them were of classes with fewer than 30 samples. This is
  no guarantee: `fewer audit` measures what D̂ reveals.
- `codec`: D̂ is sent as uint8.
- `server_steps`, `momentum`, `lr_decay`: many server steps, with momentum and a decaying learning rate.

Departures of both methods, each also a setting:

- The outer optimizer is Adam; the paper uses plain gradient descent (`optimizer = sgd`). Adam moves pixels by about α
  per step. The raw gradient shrinks with the size of D̂.
- The outer loss is over 256 real samples per step; Eq 8 uses all of them (`outer_batch_size = null`).

fedmk_paper.py lists all departures of `fedmk-paper`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewer.data import Samples
from fewer.data.episodes import select_classes
from fewer.errors import SettingError
from fewer.learning import LocalOptimizer, sgd
from fewer.learning.augment import apply_affine, cut_tiles, draw_affine, join_tiles
from fewer.learning.generator import Generator, GeneratorOutput, build_generator, train_generator
from fewer.learning.match import PerturbedNets, RandomNets, TrainedNets, match_statistics
from fewer.learning.sgd import Loss, cross_entropy
from fewer.methods import Client, ImageGrid, Method, ModelState, Needs, SearchSpace, Server
from fewer.methods.condensed import SAMPLES_PER_DRAW, Knowledge, concatenate_images, draw_gaussian, draw_grids, snapshot
from fewer.models import Task, Weights, all_finite, get_weights
from fewer.models.split import find_head
from fewer.registry import METHODS
from fewer.runtime import Answers, Clients, Each, Unable, on_client, on_server
from fewer.runtime.streams import global_streams
from fewer.wire import Codec, Shaped

MAX_PIXEL = 1e3
"""The largest absolute value of a pixel of D̂, in normalized units."""


@dataclass(frozen=True)
class FedMKState(ModelState):
    """The global model W_G, the generator and the clients' meta knowledge."""

    generator: Weights
    """w^G"""
    empty: Knowledge
    """A D̂ without images, for clients with which nothing is shared."""
    knowledge: dict[int, Knowledge] = field(default_factory=dict)
    """The latest D̂ of every client."""
    image_history: dict[int, Knowledge] = field(default_factory=dict)
    """By round, one image per class of the client that was the first to send D̂. For display only."""


@METHODS.register("fedmk")
class FedMK(Method[FedMKState]):
    """Clients condense their data into a few synthetic images; the server trains the global model on these."""

    needs: ClassVar[Needs] = "classes"

    tunable: ClassVar[SearchSpace] = {"server_lr": (0.02, 0.05, 0.1, 0.2)}

    per_class: PositiveInt = 20
    """Images of D̂ per class."""
    labels: Literal["held", "all"] = "held"
    """Classes in a client's D̂: those it holds, or all."""
    min_samples: PositiveInt = 30
    """Samples that a client needs to hold a class. D̂ of fewer samples may reveal them."""
    codec: Codec = "uint8"
    """Encoding of D̂ in messages; models are sent exactly."""
    init_from: Literal["noise", "shared", "own"] = "own"
    """Start of D̂ after the first round: noise, the D̂ of a random other client, or the client's own last D̂."""
    start: Literal["uniform", "class"] = Field(default="uniform", json_schema_extra={"neutral": True})
    """Noise that D̂ starts from: uniform in [−1, 1], or Gaussian with the mean and covariance of the class."""
    augment: bool = True
    """Whether D̂ is randomly rotated, scaled and shifted whenever a net sees it."""

    matching_steps: NonNegativeInt = 200
    """Steps that match class statistics under random nets, before the outer loop."""
    matching_lr: PositiveFloat = 0.1
    """Learning rate of matching (Adam)."""
    match_rounds: PositiveInt | Literal["all"] = "all"
    """Rounds of a client that begin with matching; after these, it only refines the D̂ that it kept."""

    matching_nets: Literal["random", "global", "trained"] = Field(default="random", json_schema_extra={"neutral": True})
    """Nets of matching: random ones, from round 2 on ones near the global model, or ones trained by the client."""
    rho: PositiveFloat = Field(default=5.0, json_schema_extra={"neutral": True})
    """Distance from the global model (ρ), for `matching_nets` = global."""
    queue_size: PositiveInt = Field(default=5, json_schema_extra={"neutral": True})
    """Nets in the queue, for `matching_nets` = trained."""
    queue_steps: PositiveInt = Field(default=20, json_schema_extra={"neutral": True})
    """Training steps after which a net of the queue starts again from random weights."""
    queue_lr: PositiveFloat = Field(default=0.1, json_schema_extra={"neutral": True})
    """Learning rate of the nets of the queue."""
    ce_weight: NonNegativeFloat = Field(default=0.1, json_schema_extra={"neutral": True})
    """Weight of the cross-entropy of D̂ under the nets of the queue."""
    tiles: PositiveInt = Field(default=1, json_schema_extra={"neutral": True})
    """Each image of D̂ is cut into tiles × tiles parts, which are resized to full size whenever a net sees them."""

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
    restart_every: PositiveInt | None = 1
    """Outer steps after which the inner loop restarts from the global model; in between, it continues from w*. Null
    means never."""
    sample_weights: Literal["dynamic", "class", "none"] = "dynamic"
    """Weights of real samples: by loss (Eq 7), by class frequency (rare classes count more), or equal."""
    tau: PositiveFloat = 5.0
    """Sharpness of the dynamic weights (τ)."""

    keep_images: Literal["latest", "round"] = "latest"
    """What the server trains on: the latest D̂ of every client, or that of this round only."""
    server_steps: PositiveInt = 1000
    """Server steps per round."""
    server_lr: PositiveFloat | None = 0.05
    """Learning rate of the server; null means that of the inner loop."""
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
    generator_output: GeneratorOutput = "encoder"
    """Range of generated features: that of the encoder (≥ 0 if it ends with ReLU), or all numbers."""

    # --- Algorithm 1: the server's loop ---

    def init(self, task: Task, seed: int) -> FedMKState:
        """Input: the initial global parameters W_G and generator parameters w^G."""
        if not self.matching_steps and (not self.outer_steps or self.refine_from > 1):
            raise SettingError(
                "nothing would be condensed in round 1: set matching_steps > 0, or outer_steps > 0 with refine_from = 1"
            )
        if self.augment and len(task.shape) != 3:
            raise SettingError(f"augment = true needs images, but inputs have shape {task.shape}; set augment = false")
        if self.tiles > 1 and (len(task.shape) != 3 or any(size % self.tiles for size in task.shape[1:])):
            problem = f"tiles = {self.tiles} needs images whose height and width it divides"
            raise SettingError(f"{problem}, but inputs have shape {task.shape}")
        net = task.net().eval()
        try:
            net(torch.zeros(1, *task.shape, device=task.device))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise SettingError("fedmk condenses real-valued inputs, but the model does not take any") from error
        generator: Weights = {}
        if self.pseudo_weight:
            with global_streams(seed, "generator"):
                generator = get_weights(build_generator(task, net, self.generator_output))
        empty = {str(label): torch.empty(0, *task.shape) for label in range(task.classes)}
        return FedMKState(task.initial_weights(seed), generator, empty)

    def round(self, state: FedMKState, clients: Clients) -> FedMKState:
        """Lines 2 to 17: the cohort C condenses its data to D̂; the server trains W_G on D̂."""
        cohort = self.sample_cohort(clients)  # line 2
        shared = self.draw_shared_knowledge(state, cohort, clients.stream("sharing"))
        answers = clients.ask(  # lines 4 to 13
            cohort, self.condense, model=state.model, shared=Each(shared), returns=self.answer_schema(state)
        )
        model = self.server_start(state, answers)
        sent: dict[int, Knowledge] = {answer.client: answer["knowledge"] for answer in answers}
        new = {client: d_hat for client, d_hat in sent.items() if any(map(len, d_hat.values()))}
        if not new:
            return replace(state, model=model)
        knowledge = {**state.knowledge, **new}
        images, labels = concatenate_images(
            (knowledge if self.keep_images == "latest" else new).values(), clients.aggregation
        )
        result = self.train_server(  # lines 14 to 17
            clients, answers, model=model, generator=state.generator, images=images, labels=labels
        )
        if not result["finite"]:
            self.warn(clients, "training on D̂ diverged, so the last model is kept; lower -o server_lr")
        image_history = {**state.image_history, **snapshot(clients.round, knowledge, new)}
        return FedMKState(result["model"], result["generator"], state.empty, knowledge, image_history)

    def answer_schema(self, state: FedMKState) -> dict[str, Any]:
        """The form of a valid answer: at most `per_class` images of each class."""
        sizes = range(self.per_class + 1)
        forms = {label: Shaped((sizes, *x.shape[1:]), max_value=MAX_PIXEL) for label, x in state.empty.items()}
        return {"knowledge": forms}

    def server_start(self, state: FedMKState, answers: Answers) -> Weights:
        """The model that the server trains on D̂: W_G."""
        return state.model

    def train_server(self, clients: Clients, answers: Answers, **fields: Any) -> dict[str, Any]:
        """The result of training the model on D̂."""
        (result,) = clients.map_on_server(self.train_global_model, [{}], **fields)
        return result

    def draw_shared_knowledge(
        self, state: FedMKState, cohort: list[int], stream: torch.Generator
    ) -> dict[int, Knowledge]:
        """Line 8, c′ ~ randint[1, C]: for each client the D̂ of a random other one, if `init_from` is "shared"."""
        shared: dict[int, Knowledge] = {}
        for client in cohort:
            others = [other for other in state.knowledge if other != client]
            shared[client] = state.empty
            if self.init_from == "shared" and others:
                shared[client] = state.knowledge[others[int(torch.randint(len(others), (), generator=stream))]]
        return shared

    # --- Federated meta knowledge extraction on clients: lines 4 to 13, Eqs 3-8 ---

    @on_client(exact=("model",))
    def condense(self, client: Client, model: Weights, shared: Knowledge) -> dict[str, Any]:
        """Lines 5 to 12: extracts D̂ from the client's samples D, and sends it to the server."""
        samples = self.eligible_samples(client)
        labels = self.hard_labels(samples, client.task.classes)
        images = self.initial_images(client, labels, shared, samples)  # lines 7 and 8
        matched = client.store.get("matched") or 0
        if self.matching_steps and self.is_matching_round(matched):  # not in the paper
            images = match_statistics(
                self.nets_for_matching(client, model, samples),
                images,
                labels,
                samples,
                steps=self.matching_steps,
                lr=self.matching_lr,
                augment=self.augment,
                stream=client.stream("matching"),
                tiles=self.tiles,
            )
        if self.outer_steps and client.round >= self.refine_from:
            images = self.outer_loop(client.net(model), images, labels, samples, client.stream("refining"))  # line 10
        if not bool((images.abs() <= MAX_PIXEL).all()):
            raise Unable("the condensed images diverged; lower matching_lr, outer_lr or inner_lr")
        knowledge = {str(label): images[labels == label] for label in range(client.task.classes)}
        if self.init_from == "own":
            client.store.put("knowledge", knowledge)
        if self.match_rounds != "all":
            client.store.put("matched", matched + 1)
        return {"knowledge": knowledge}

    def is_matching_round(self, matched: int) -> bool:
        """Whether D̂ is matched in this round of a client, after `matched` rounds. Noise always is."""
        return self.match_rounds == "all" or self.init_from == "noise" or matched < self.match_rounds

    def nets_for_matching(self, client: Client, model: Weights, samples: Samples) -> RandomNets:
        """The nets of `matching_nets`. The model of round 1 is random, so nets around it have no advantage there."""
        net = client.net(model)
        if self.matching_nets == "global" and client.round > 1:
            return PerturbedNets(net, self.rho, client.stream("perturbations"))
        if self.matching_nets == "trained":
            return TrainedNets(
                net,
                samples,
                count=self.queue_size,
                steps=self.queue_steps,
                lr=self.queue_lr,
                ce_weight=self.ce_weight,
                augment=self.augment,
                stream=client.stream("queue"),
            )
        return RandomNets(net)

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

    def initial_images(self, client: Client, labels: Tensor, shared: Knowledge, samples: Samples) -> Tensor:
        """Lines 7 and 8: D̂_ini, by class from the shared or the client's own last D̂; the rest is noise (`start`)."""
        stream = client.stream("images")
        images = 2 * torch.rand(len(labels), *client.task.shape, generator=stream).to(labels.device) - 1
        count = self.per_class * self.tiles**2
        if self.start == "class":
            for label in torch.unique(samples.labels).tolist():
                x, _ = select_classes(samples, [label]).all()
                if len(x) >= SAMPLES_PER_DRAW * count:
                    images[labels == label] = join_tiles(draw_gaussian(x, count, stream), self.tiles)
        source = client.store.get("knowledge") or {} if self.init_from == "own" else shared
        for label, previous in source.items():
            (positions,) = torch.nonzero(labels == int(label), as_tuple=True)
            images[positions[: len(previous)]] = previous[: len(positions)].to(images)
        return images

    def outer_loop(
        self, net: nn.Module, images: Tensor, labels: Tensor, samples: Samples, stream: torch.Generator
    ) -> Tensor:
        """D̂ ← D̂ − α ∇_D̂ L(w*, Φ, D), `outer_steps` times: Eq 8, which is Eq 6 with dynamic weights Φ."""
        images = images.clone().requires_grad_()
        optimizer = (torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD)([images], lr=self.outer_lr)
        global_weights: dict[str, Tensor] = {name: p for name, p in net.named_parameters() if p.requires_grad}
        balance = class_balance(samples.labels)
        count, batch_size = len(samples), self.outer_batch_size
        w = global_weights
        for step in range(self.outer_steps):
            if self.restart_every and step % self.restart_every == 0:
                w = global_weights  # line 5: w ← W_G
            batch = torch.arange(count) if batch_size is None else torch.randint(count, (batch_size,), generator=stream)
            x, y = samples.pick(batch)
            w_star = self.inner_loop(net, w, *self.cut_into_tiles(images, labels), stream)  # Eq 5
            (images.grad,) = torch.autograd.grad(self.outer_loss(net, w_star, x, y, balance), images)
            optimizer.step()  # Eq 8
            w = {name: tensor.detach().requires_grad_() for name, tensor in w_star.items()}
        return images.detach()

    def inner_loop(
        self, net: nn.Module, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor, stream: torch.Generator
    ) -> dict[str, Tensor]:
        """w ← w − η ∇_w L(w, D̂), `inner_steps` times (Eq 5). The result w* is differentiable in D̂."""
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
        """L(w*, Φ, D) = (1/N) Σ φᵢ ℓ(w*, xᵢ, yᵢ) over real samples (below Eq 8)."""
        losses = F.cross_entropy(functional_call(net, w_star, (x,)), y, reduction="none")
        return (self.weigh_samples(losses, balance[y]) * losses).mean()

    def weigh_samples(self, losses: Tensor, balance: Tensor) -> Tensor:
        """Line 9: dynamic weights φ = 1 / (1 + exp(−τ ℓ)) (Eq 7); as ablations, class-balancing or equal weights."""
        if self.sample_weights == "dynamic":
            return torch.sigmoid(self.tau * losses.detach())
        return balance if self.sample_weights == "class" else torch.ones_like(losses)

    def cut_into_tiles(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The images of D̂ as nets see them, and their labels."""
        return cut_tiles(images, self.tiles), labels.repeat_interleave(self.tiles**2)

    # --- Global model training on the server: lines 14 to 17, Eqs 9-11 ---

    @on_server(stream="learn")
    def train_global_model(
        self, server: Server, model: Weights, generator: Weights, images: Tensor, labels: Tensor
    ) -> dict[str, Any]:
        """Lines 15 to 17, on all of D̂ that the server keeps."""
        lr = self.server_lr or self.inner_lr
        return self.train_on_images(server, model, generator, images, labels, steps=self.server_steps, lr=lr)

    def train_on_images(
        self,
        server: Server,
        model: Weights,
        generator: Weights,
        images: Tensor,
        labels: Tensor,
        *,
        steps: int,
        lr: float,
        real_loss: Loss = cross_entropy,
    ) -> dict[str, Any]:
        """Updates w^G by Eq 10, then W_G by `steps` of Eq 11, on D̂ and on features from the generator (D̂^pseu).

        `real_loss` is the loss on D̂. If training diverges (too high a learning rate, or a malicious client), model and
        generator stay the same.
        """
        images, labels = self.cut_into_tiles(images, labels)
        net, stream = server.net(model), server.stream("learning")
        class_weights = torch.bincount(labels, minlength=server.task.classes).float()
        generator_net, head = None, net
        if self.pseudo_weight:
            generator_net, (head, _) = (
                build_generator(server.task, net, self.generator_output, generator),
                find_head(server.task, net),
            )
            train_generator(  # line 15
                generator_net,
                lambda features, _: head(features),
                class_weights,
                stream,
                steps=self.generator_steps,
                lr=self.generator_lr,
                batch_size=self.server_batch_size,
            )

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            images_loss = real_loss(net, x, y)  # L(W_G, D̂), Eq 9
            if generator_net is None:
                return images_loss
            return images_loss + self.pseudo_weight * self.pseudo_loss(
                generator_net, head, class_weights, stream
            )  # Eq 11

        optimizer = LocalOptimizer(momentum=self.momentum, lr_schedule="cosine" if self.lr_decay else "constant")
        batches = (self.draw_batch(images, labels, stream) for _ in range(steps))
        sgd(net, batches, lr, loss=loss, optimizer=optimizer, steps=steps)  # lines 16 and 17
        trained = {"model": get_weights(net), "generator": {} if generator_net is None else get_weights(generator_net)}
        finite = all(map(all_finite, trained.values()))
        return {**(trained if finite else {"model": model, "generator": generator}), "finite": finite}

    def draw_batch(self, images: Tensor, labels: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random images of D̂ and their labels."""
        batch = torch.randint(len(images), (self.server_batch_size,), generator=stream)
        x = images[batch]
        return apply_affine(x, draw_affine(len(x), stream)) if self.augment else x, labels[batch]

    def pseudo_loss(
        self, generator: Generator, head: nn.Module, class_weights: Tensor, stream: torch.Generator
    ) -> Tensor:
        """Line 16: L(W_G, D̂^pseu), the head's loss on new features z ~ G(y). The encoder gets no gradient from it."""
        count = max(2, round(self.pseudo_weight * self.server_batch_size))
        noise, y = generator.draw(count, stream, class_weights)
        with torch.no_grad():
            z = generator(noise, y)
        return F.cross_entropy(head(z), y)

    # --- D̂ for audits and reports ---

    def synthetic_data(self, state: FedMKState) -> dict[int, tuple[Tensor, Tensor]]:
        """The latest D̂ of every client, in tiles if it has any."""
        knowledge = {client: concatenate_images([d_hat]) for client, d_hat in state.knowledge.items()}
        return {client: self.cut_into_tiles(*images) for client, images in knowledge.items()}

    def image_grids(self, state: FedMKState) -> list[ImageGrid]:
        """D̂ by client and class, and the D̂ of one client by round."""
        return draw_grids(state.knowledge, state.image_history)


def class_balance(labels: Tensor) -> Tensor:
    """Weight by class, N / (held classes · samples of the class): each held class gets the same total."""
    counts = torch.bincount(labels)
    return len(labels) / ((counts > 0).sum() * counts.clamp_min(1))
