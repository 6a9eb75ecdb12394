"""Per-FedAvg: FedAvg whose local steps are MAML steps.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, Algorithm 1. A client takes local steps, each on new batches D, D′ and D″:

    w ← w − β (I − α ∇²f(w; D″)) ∇f(w − α ∇f(w; D); D′)

The server averages the models with equal weights. `first_order` drops the Hessian, as the paper's FO variant does.

Departures:
- The Hessian is taken on D instead of a third batch D″, so the step is the exact gradient of f(w − α ∇f(w; D); D′).
- The mean is over the clients that answered.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from fewer.learning import draw_batches
from fewer.learning.adapt import meta_gradient, trainable_weights
from fewer.methods import Client, SearchSpace
from fewer.methods.fedavg import average_equally
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime import Answers


@METHODS.register("per-fedavg")
class PerFedAvg(FedAvgMeta):
    """FedAvg for a model that does well after one gradient step on a client's data (exact or first order)."""

    tunable: ClassVar[SearchSpace] = {"lr": (0.01, 0.03, 0.1, 0.3), "adapt_lr": (0.01, 0.03, 0.1, 0.3)}

    first_order: bool = False
    """Drop second derivatives."""
    lr: PositiveFloat = 0.1
    """Learning rate of local training (β)."""
    adapt_lr: PositiveFloat = 0.1
    """Learning rate of adaptation (α), in training and for new clients."""

    def aggregate(self, model: Weights, answers: Answers) -> Weights:
        """Averages the clients' models with equal weights."""
        return average_equally(answers)

    def fit(self, net: nn.Module, client: Client) -> None:
        """w ← w − β ∇_w f(w − α ∇f(w; D); D′), `local_steps` times, in place, each on new batches D and D′."""
        samples = self.client_samples(client)
        indices = draw_batches(len(samples), 2 * self.local_steps, self.batch_size, client.stream("batches"))
        batches = list(self.augmented(samples.batches(indices), client))
        parameters: list[Tensor] = [parameter for parameter in net.parameters() if parameter.requires_grad]
        step, loss = self.make_step(parameters, self.lr, self.local_steps), client.task.loss
        for inner, outer in zip(batches[::2], batches[1::2], strict=True):
            w = trainable_weights(net)
            meta = meta_gradient(net, w, [inner], outer, self.adapt_lr, self.first_order, loss, loss)
            with torch.no_grad():
                step(tuple(meta.weights[name] for name in w))
