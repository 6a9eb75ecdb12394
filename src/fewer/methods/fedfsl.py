"""FedFSL: MAML at each client with adversarial alignment of features. F2L's baseline.

Fan, Huang: Federated Few-Shot Learning with Adversarial Learning, WiOpt 2021, as F2L (Wang et al., KDD 2023, Section
4.2) compares with it: clients take meta-steps of MAML, and the disagreement of their predictions with those of the
global model keeps the feature spaces alike: the head learns to make it large, the encoder to make it small (as in Saito
et al., CVPR 2018). The server averages the models. Departures: disagreement is the mean absolute difference of
class probabilities on the queries, both models fine-tuned on the same support; encoder and head step at once. With
`zero_head` the head stays at zero, as F2L's does, and there is no adversary: the encoder alone learns.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fewer.data.episodes import Episode
from fewer.learning.adapt import adapted, learnable, meta_gradients
from fewer.methods.fl_maml import FLMAML
from fewer.models import Split, Weights
from fewer.registry import METHODS


@METHODS.register("fedfsl")
class FedFSL(FLMAML):
    """FL-MAML whose encoders are kept alike by an adversary: the head."""

    adversarial_weight: NonNegativeFloat = 0.1
    """Weight of the disagreement with the global model."""

    def slopes(self, net: Split, theta: Weights, received: Weights, task: Episode) -> Weights:
        """∇(CE + μ·disagreement) for the encoder, ∇(CE − μ·disagreement) for the head."""
        support = [(task.support_x, task.support_y)] * self.fine_tune_steps
        start = {name: received[name] for name in learnable(net)}
        tuned = adapted(net, start, support, self.fine_tune_lr)
        with torch.no_grad():
            theirs = functional_call(net, tuned, (task.query_x,)).softmax(1)

        def loss(sign: float, scores: Tensor, labels: Tensor) -> Tensor:
            apart: Tensor = (scores.softmax(1) - theirs).abs().mean()
            return F.cross_entropy(scores, labels) + sign * self.adversarial_weight * apart

        signs = {"encoder.": 1.0} if self.zero_head else {"encoder.": 1.0, "head.": -1.0}
        found = meta_gradients(
            net,
            theta,
            support,
            (task.query_x, task.query_y),
            self.fine_tune_lr,
            self.first_order,
            [partial(loss, sign) for sign in signs.values()],
        )
        return {
            name: slope
            for part, one in zip(signs, found, strict=True)
            for name, slope in one.weights.items()
            if name.startswith(part)
        }
