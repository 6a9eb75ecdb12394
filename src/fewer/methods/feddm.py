"""FedDM: clients send synthetic samples whose distribution matches their own under nets around the global model.

Xiong, Wang, Cheng, Yu, Hsieh: FedDM: Iterative Distribution Matching for Communication-Efficient Federated Learning,
CVPR 2023, Algorithm 1. w_r is the global model in round r, h are the features that its head receives, z its logits.

- Client, `condense`: for each class c that it holds, synthetic samples S_c minimize, under random nets w,

      ‖mean h_w(D_c) − mean h_w(S_c)‖² + ‖mean z_w(D_c) − mean z_w(S_c)‖²,        w = w_r + ρ ε / ‖ε‖,  ε normal

- Server, `train_global_model`: w_{r+1} minimizes the cross-entropy on the synthetic samples of all clients of the
  round, within the distance ρ of w_r, where they are a good surrogate.

Departures:

- S starts from noise, U[−1, +1]. The paper starts from real samples, and clients would upload near-copies of private
  data. With `start = class`, S starts from a Gaussian with the mean and covariance of the class, as in fedmk.py; a
  class with fewer than 30 samples, or than twice as many as images, still starts from U[−1, +1].
- All classes move in one step; the paper sums their losses as well.
- Nets lie on the sphere of radius ρ. A Gaussian that is truncated to the ball has nearly all of its mass there.
- A fixed number of server steps, which are projected back to the ball at the end.
- The differentially private variant is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.learning import LocalOptimizer, draw_batches, sgd
from fewer.learning.prototypes import class_prototypes
from fewer.methods import Client, ImageGrid, Method, ModelState, Needs, SearchSpace, Server
from fewer.methods.condensed import SAMPLES_PER_DRAW, Knowledge, concatenate_images, draw_gaussian, draw_grids
from fewer.models import Task, Weights, all_finite, get_weights, load_weights
from fewer.models.split import find_head
from fewer.registry import METHODS
from fewer.runtime import Clients, Unable, on_client, on_server
from fewer.wire import Shaped

MIN_SAMPLES = 30
"""Fewest samples of a class whose statistics S may start from."""
MAX_PIXEL = 1e3
"""The largest absolute value of a synthetic input, in normalized units."""


@dataclass(frozen=True)
class FedDMState(ModelState):
    """The global model and the clients' synthetic samples."""

    empty: Knowledge
    """No samples of any class, to show the form of an answer."""
    knowledge: dict[int, Knowledge] = field(default_factory=dict)
    """The last synthetic samples of every client."""


@METHODS.register("feddm")
class FedDM(Method[FedDMState]):
    """Clients match the distribution of their data with synthetic samples; the server trains on these."""

    needs: ClassVar[Needs] = "classes"
    tunable: ClassVar[SearchSpace] = {"server_lr": (0.003, 0.01, 0.03, 0.1), "matching_lr": (0.3, 1.0, 3.0, 10.0)}

    start: Literal["uniform", "class"] = Field(default="uniform", json_schema_extra={"neutral": True})
    """Noise that S starts from: uniform in [−1, 1], or Gaussian with the mean and covariance of the class."""
    per_class: PositiveInt = 10
    """Synthetic samples per class."""
    radius: PositiveFloat = 5.0
    """Distance of matching nets from the global model, and the most that the server moves it (ρ)."""
    matching_steps: PositiveInt = 1000
    """Steps of the synthetic samples, each under a new net."""
    matching_lr: PositiveFloat = 1.0
    """Learning rate of the synthetic samples."""
    matching_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Momentum of the synthetic samples."""
    real_per_class: PositiveInt = 256
    """Real samples per class and step."""
    server_steps: PositiveInt = 1000
    """Server steps per round."""
    server_lr: PositiveFloat = 0.01
    """Learning rate of the server."""
    server_batch_size: PositiveInt = 256
    """Synthetic samples per server step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the server."""
    weight_decay: NonNegativeFloat = 5e-4
    """Weight decay of the server."""

    def init(self, task: Task, seed: int) -> FedDMState:
        """Initializes w_0."""
        find_head(task, task.net())  # fails early if the net has none
        empty = {str(label): torch.empty(0, *task.shape) for label in range(task.classes)}
        return FedDMState(task.initial_weights(seed), empty)

    def round(self, state: FedDMState, clients: Clients) -> FedDMState:
        """The cohort sends synthetic samples S_k; the server trains w_r on their union."""
        sizes, cohort = range(self.per_class + 1), self.sample_cohort(clients)
        schema = {label: Shaped((sizes, *x.shape[1:]), max_value=MAX_PIXEL) for label, x in state.empty.items()}
        answers = clients.ask(cohort, self.condense, model=state.model, returns={"knowledge": schema})
        new: dict[int, Knowledge] = {answer.client: answer["knowledge"] for answer in answers}
        images, labels = concatenate_images(new.values(), clients.aggregation)
        (result,) = clients.map_on_server(
            self.train_global_model, [{}], model=state.model, images=images, labels=labels
        )
        if not result["finite"]:
            self.warn(clients, "training on synthetic samples diverged, so the last model is kept; lower -o server_lr")
        return FedDMState(result["model"], state.empty, {**state.knowledge, **new})

    @on_client(exact=("model",))
    def condense(self, client: Client, model: Weights) -> dict[str, Any]:
        """Matches the client's samples D by synthetic samples S, under a new net around w_r in each step."""
        y, stream = client.train.labels, client.stream("matching")
        classes = torch.unique(y)
        indices_by_class = [torch.nonzero(y == label).squeeze(1).cpu() for label in classes]
        labels = classes.repeat_interleave(self.per_class)
        noise = client.stream("images")
        images = (2 * torch.rand(len(labels), *client.task.shape, generator=noise) - 1).to(labels.device)
        if self.start == "class":
            for label, indices in zip(classes, indices_by_class, strict=True):
                if len(indices) >= max(MIN_SAMPLES, SAMPLES_PER_DRAW * self.per_class):
                    images[labels == label] = draw_gaussian(client.train.pick(indices)[0], self.per_class, noise)
        images.requires_grad_()
        optimizer = torch.optim.SGD([images], self.matching_lr, momentum=self.matching_momentum)
        net = client.net(model).requires_grad_(False)
        with feature_reader(client.task, net) as read:
            for _ in range(self.matching_steps):
                load_weights(net, perturb_weights(net, model, self.radius, stream))
                rows = [
                    indices[torch.randint(len(indices), (self.real_per_class,), generator=stream)]
                    for indices in indices_by_class
                ]
                x, real_labels = client.train.pick(torch.cat(rows))
                with torch.no_grad():
                    target = read(x)
                loss = matching_loss(read(images), labels, target, real_labels)
                (images.grad,) = torch.autograd.grad(loss, images)
                optimizer.step()
        images = images.detach()
        if not bool((images.abs() <= MAX_PIXEL).all()):
            raise Unable("the synthetic samples diverged; lower matching_lr")
        return {"knowledge": {str(label): images[labels == label] for label in range(client.task.classes)}}

    @on_server
    def train_global_model(self, server: Server, model: Weights, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """w_{r+1} = argmin of the loss on all S_k, with ‖w − w_r‖ ≤ ρ. If it diverges, the model stays the same."""
        net = server.net(model)
        indices = draw_batches(len(images), self.server_steps, self.server_batch_size, server.stream("learning"))
        optimizer = LocalOptimizer(momentum=self.momentum, weight_decay=self.weight_decay)
        sgd(net, ((images[batch], labels[batch]) for batch in indices), self.server_lr, optimizer=optimizer)
        trained = limit_distance(net, model, self.radius)
        finite = all_finite(trained)
        return {"model": trained if finite else model, "finite": finite}

    def synthetic_data(self, state: FedDMState) -> dict[int, tuple[Tensor, Tensor]]:
        """The last synthetic samples of every client."""
        return {client: concatenate_images([samples]) for client, samples in state.knowledge.items()}

    def image_grids(self, state: FedDMState) -> list[ImageGrid]:
        """The synthetic samples by client and class."""
        return draw_grids(state.knowledge, {})


def matching_loss(
    synthetic: tuple[Tensor, Tensor], labels: Tensor, real: tuple[Tensor, Tensor], real_labels: Tensor
) -> Tensor:
    """Σ_c ‖mean h(D_c) − mean h(S_c)‖² + ‖mean z(D_c) − mean z(S_c)‖², for features h and logits z."""
    pairs = zip(synthetic, real, strict=True)
    means = [(class_prototypes(s, labels).means, class_prototypes(d, real_labels).means) for s, d in pairs]
    return torch.stack([(s - d).square().sum() for s, d in means]).sum()


def perturb_weights(net: nn.Module, weights: Weights, radius: float, stream: torch.Generator) -> Weights:
    """w + ρ ε / ‖ε‖ over all parameters of the net, with normal ε. Buffers stay the same."""
    names = [name for name, _ in net.named_parameters()]
    draws = {name: torch.randn(weights[name].shape, generator=stream).to(weights[name]) for name in names}
    scale = radius / float(torch.cat([draw.flatten() for draw in draws.values()]).norm())
    return {**weights, **{name: weights[name] + scale * draw for name, draw in draws.items()}}


def limit_distance(net: nn.Module, center: Weights, radius: float) -> Weights:
    """The weights of the net; its parameters are projected to the ball of this radius around `center`."""
    trained, names = get_weights(net), [name for name, _ in net.named_parameters()]
    distance = float(torch.cat([(trained[name] - center[name]).flatten() for name in names]).norm())
    share = min(1.0, radius / distance) if distance else 1.0
    return {**trained, **{name: center[name] + share * (trained[name] - center[name]) for name in names}}


@contextmanager
def feature_reader(task: Task, net: nn.Module) -> Iterator[Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Yields a function that maps inputs to the features that the head receives, and to the logits."""
    captured: list[Tensor] = []

    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = net(x)
        return captured.pop().flatten(1), logits

    with find_head(task, net)[0].register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0])):
        yield read
