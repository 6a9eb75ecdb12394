"""FedFSL: MAML on each client with adversarial feature alignment. A baseline of F2L.

Fan, Huang: Federated Few-Shot Learning with Adversarial Learning, WiOpt 2021, as F2L (Wang et al., KDD 2023, Section
4.2) compares with it. Clients take meta-steps of MAML; the server averages the models. The disagreement between a
client's predictions and those of the global model aligns the feature spaces: the head maximizes it, the encoder
minimizes it (as in Saito et al., CVPR 2018).

Departures:

- Disagreement is the mean absolute difference of class probabilities on the queries, after fine-tuning both models on
  the same support.
- Encoder and head step at the same time.
- With `zero_head` the head stays at zero, like F2L's. Then there is no adversary, and only the encoder learns.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fewer.data.episodes import Episode
from fewer.learning.adapt import adapt_weights, meta_gradients, trainable_weights
from fewer.methods.fl_maml import FLMAML
from fewer.models import EncoderHead, Weights
from fewer.registry import METHODS


@METHODS.register("fedfsl")
class FedFSL(FLMAML):
    """FL-MAML with an adversary, the head, that aligns the clients' encoders."""

    adversarial_weight: NonNegativeFloat = 0.1
    """Weight of the disagreement with the global model (μ)."""

    def task_gradient(self, net: EncoderHead, theta: Weights, received: Weights, task: Episode) -> Weights:
        """∇(CE + μ · disagreement) for the encoder, ∇(CE − μ · disagreement) for the head."""
        support = [(task.support_x, task.support_y)] * self.fine_tune_steps
        global_theta = {name: received[name] for name in trainable_weights(net)}
        global_tuned = adapt_weights(net, global_theta, support, self.fine_tune_lr)
        with torch.no_grad():
            global_probabilities = functional_call(net, global_tuned, (task.query_x,)).softmax(1)

        def loss(sign: float, logits: Tensor, labels: Tensor) -> Tensor:
            disagreement: Tensor = (logits.softmax(1) - global_probabilities).abs().mean()
            return F.cross_entropy(logits, labels) + sign * self.adversarial_weight * disagreement

        signs = {"encoder.": 1.0} if self.zero_head else {"encoder.": 1.0, "head.": -1.0}
        gradients = meta_gradients(
            net,
            theta,
            support,
            (task.query_x, task.query_y),
            self.fine_tune_lr,
            self.first_order,
            [partial(loss, sign) for sign in signs.values()],
        )
        return {
            name: tensor
            for prefix, gradient in zip(signs, gradients, strict=True)
            for name, tensor in gradient.weights.items()
            if name.startswith(prefix)
        }
