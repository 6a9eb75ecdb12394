"""FedMK-Avg: condensed images in round 1, averaged models after it. Ours; no paper describes it.

On MNIST, a model trained on the condensed images of all clients (FedMK) is ahead after one round, and averages of
augmented local training are ahead later. This method combines the two. Whether it is better on other data is open:

- Rounds 1 to `condense_rounds` are rounds of FedMK (fedmk.py), with all of its options.
- In every later round, a client trains the global model w on its own samples: w ← w − η_s ∇ℓ(w; b) in step s. Images
  are augmented as FedMK's are, and η_s decays to 0 along a cosine. The server averages the models by size
  (fedavg.py).

Two options keep D̂ in use after round 1. Both are off by default:

- `mixed_images`: every local batch also has images of D̂, against forgetting of classes that a client does not hold.
  The server draws `mixed_per_class` images of each class in each round, from the D̂ of all clients, and sends them.
- `replay_steps`: after averaging, the server trains the mean on D̂, as in FedMK's rounds.

A learning rate that suits FedAvg from a random model can be too high right after FedMK's round: one client that
diverges is enough to spoil the mean, and the decay does not prevent it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fewer.errors import SettingError
from fewer.learning import LocalOptimizer, draw_batches, sgd, task_loss
from fewer.learning.augment import apply_affine, draw_affine
from fewer.methods import Client, SearchSpace, Server
from fewer.methods.condensed import concatenate_images
from fewer.methods.fedavg import average_by_size, train_models
from fewer.methods.fedmk import FedMK, FedMKState
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client, on_server


@METHODS.register("fedmk-avg")
class FedMKAvg(FedMK):
    """FedMK in the first round. Later, clients train the global model on their data and the server averages."""

    tunable: ClassVar[SearchSpace] = {"lr": (0.03, 0.1, 0.2, 0.3)}

    start: Literal["uniform", "class"] = "class"
    """Noise that D̂ starts from: uniform in [−1, 1], or Gaussian with the mean and covariance of the class."""
    condense_rounds: PositiveInt = 1
    """Rounds of FedMK; after these, models are averaged."""
    lr: PositiveFloat = 0.1
    """Learning rate of local training (η)."""
    local_steps: PositiveInt = 400
    """Local steps per round of averaging."""
    batch_size: PositiveInt = 32
    """Samples per local step."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Learning rate over the local steps of a round: constant, or down to 0 along a cosine or a line."""
    augment_local: bool = True
    """Whether images in local training are randomly rotated, scaled and shifted."""
    mixed_images: NonNegativeInt = 0
    """Images of D̂ that are added to each local batch."""
    mixed_per_class: PositiveInt = 20
    """Images of each class that clients receive to mix them, drawn from the D̂ of all clients in each round."""
    replay_steps: NonNegativeInt = 0
    """Server steps on D̂ after each averaging."""
    replay_lr: PositiveFloat = 0.01
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
        answers = train_models(clients, cohort, self.local_train, state.model, images=images[sent], labels=labels[sent])
        state = replace(state, model=average_by_size(answers))
        if not self.replay_steps or not len(images):
            return state
        (result,) = clients.map_on_server(
            self.replay, [{}], model=state.model, generator=state.generator, images=images, labels=labels
        )
        if not result["finite"]:
            self.warn(clients, "training on D̂ diverged, so the mean of the models is kept; lower -o replay_lr")
        return replace(state, model=result["model"], generator=result["generator"])

    def draw_sent_images(self, labels: Tensor, stream: torch.Generator) -> Tensor:
        """The positions of the images of D̂ that clients receive: a few of each class, if they mix any."""
        if not self.mixed_images:
            return labels.new_empty(0)
        shuffled = torch.randperm(len(labels), generator=stream).to(labels.device)
        by_class = [shuffled[labels[shuffled] == label][: self.mixed_per_class] for label in torch.unique(labels)]
        return torch.cat([labels.new_empty(0), *by_class])

    @on_client(stream="train", exact=("model",))
    def local_train(self, client: Client, model: Weights, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Trains the global model on the client's samples, and on images of D̂ if it got any."""
        net = client.net(model)
        optimizer = LocalOptimizer(lr_schedule=self.lr_schedule)
        batches = self.local_batches(client, images, labels)
        sgd(net, batches, self.lr, loss=task_loss(client.task), optimizer=optimizer, steps=self.local_steps)
        return {"model": get_weights(net), "size": len(client.train)}

    def local_batches(self, client: Client, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of one round: real samples and `mixed_images` of D̂, each image with its own map."""
        images, labels = self.cut_into_tiles(images, labels)
        moves, mixing = client.stream("moves"), client.stream("mixing")
        indices = draw_batches(len(client.train), self.local_steps, self.batch_size, client.stream("batches"))
        for x, y in client.train.batches(indices):
            if len(images):
                drawn = torch.randint(len(images), (self.mixed_images,), generator=mixing)
                x, y = torch.cat([x, images[drawn]]), torch.cat([y, labels[drawn]])
            yield apply_affine(x, draw_affine(len(x), moves)) if self.augment_local else x, y

    @on_server(stream="replay")
    def replay(
        self, server: Server, model: Weights, generator: Weights, images: Tensor, labels: Tensor
    ) -> dict[str, Any]:
        """Trains the mean model on D̂ as in a round of FedMK, with `replay_steps` and `replay_lr`."""
        return self.train_on_images(
            server, model, generator, images, labels, steps=self.replay_steps, lr=self.replay_lr
        )
