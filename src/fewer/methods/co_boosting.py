"""Co-Boosting: DENSE in which hard images and the weights of the ensemble improve each other.

Dai, Zhang, Li, Liu, Yang, Han: Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting, ICLR 2024,
Algorithm 1. The ensemble is A_w(x) = Σ_k w_k f_k(x), and starts with w_k = 1/n. In each epoch:

- Hard images, `generator_loss`: the generator minimizes d CE(A_w(x), y) − β KL(A_w(x) ‖ f_S(x)). The difficulty
  d = 1 − softmax(A_w(x))_y is a constant: images that the ensemble is unsure of count more.
- Ensemble, `improve_ensemble`: w ← w − μ sign(∇_w CE(A_w(x), y)), clipped to [0, 1], for batches of all images so far.
- Diverse images, `transform_images`: the student learns from x + ε sign(∇_x uᵀ softmax(A_w(x) / 4)), u ~ U[−1, +1].
- Distillation as in DENSE: KL(A_w(x) ‖ f_S(x)).

Readings from the released code: the sign and the softmax with temperature 4 in the diverse images, μ that decays by
0.99 per epoch, and no update of w in the first epoch.

Departures: those of DENSE. The temperature of β's KL is 1; the released code has 3. One pass over the images adapts w
and f_S in the released code; here, `distill_steps` random batches of them do.
"""

from __future__ import annotations

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.synthesis import kl_divergence
from fewer.methods.dense import Dense
from fewer.methods.fedensemble import Ensemble
from fewer.registry import METHODS

DIVERSITY_TEMPERATURE = 4.0
"""Of the softmax whose random combination moves the images."""


class WeightedEnsemble(Ensemble):
    """A_w(x) = Σ_k w_k f_k(x), of logits."""

    weights: Tensor

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__(members)
        self.register_buffer("weights", torch.full((len(members),), 1 / len(members)))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        return self.mix_logits(torch.stack([member(x) for member in self.members]), self.weights)

    def mix_logits(self, logits: Tensor, weights: Tensor) -> Tensor:
        """Σ_k w_k · logits_k, of logits (members × samples × classes)."""
        return (weights.to(logits)[:, None, None] * logits).sum(0)


@METHODS.register("co-boosting")
class CoBoosting(Dense):
    """DENSE with hard images and learned weights of the ensemble, which improve each other."""

    adversarial_weight: NonNegativeFloat = 1.0
    """Weight of the images' disagreement between ensemble and student (β)."""
    bn_weight: NonNegativeFloat = 0.0
    """Weight of the batch norm loss of DENSE (λ₁); 0 in the paper."""
    weight_step: NonNegativeFloat = 0.01
    """Step size of the ensemble's weights (μ)."""
    weight_decay_rate: float = Field(default=0.99, ge=0, le=1)
    """Factor on μ per epoch."""
    perturbation: NonNegativeFloat = 8 / 255
    """How far diverse images move (ε), in normalized units."""

    def build_ensemble(self, members: list[nn.Module]) -> Ensemble:
        """A_w with equal weights."""
        ensemble = WeightedEnsemble(members)
        ensemble.eval().requires_grad_(False)
        return ensemble

    def generator_loss(self, ensemble: Ensemble, student: nn.Module, images: Tensor, y: Tensor) -> Tensor:
        """mean d CE(A_w(x), y) − β KL(A_w(x) ‖ f_S(x)) + λ₁ L_BN"""
        teacher, l_bn = self.classify(ensemble, images)
        difficulty = 1 - teacher.detach().softmax(1).gather(1, y[:, None]).squeeze(1)  # d
        l_hard = (difficulty * F.cross_entropy(teacher, y, reduction="none")).mean()
        l_adversarial = -kl_divergence(teacher, student(images)).mean()
        return l_hard + self.adversarial_weight * l_adversarial + self.bn_weight * l_bn

    def improve_ensemble(self, ensemble: Ensemble, images: Tensor, labels: Tensor, batches: Tensor, epoch: int) -> None:
        """w ← clip(w − μ sign(∇_w CE(A_w(x), y))), for each batch x."""
        assert isinstance(ensemble, WeightedEnsemble)
        step = self.weight_step * self.weight_decay_rate**epoch if epoch else 0.0
        for batch in batches if step else ():
            with torch.no_grad():
                logits = torch.stack([member(images[batch]) for member in ensemble.members])
            w = ensemble.weights.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(ensemble.mix_logits(logits, w), labels[batch]), w)
            ensemble.weights.copy_((w.detach() - step * gradient.sign()).clamp(0, 1))

    def transform_images(self, ensemble: Ensemble, images: Tensor, stream: torch.Generator) -> Tensor:
        """x + ε sign(∇_x uᵀ softmax(A_w(x) / 4))"""
        x = images.clone().requires_grad_()
        scores = (ensemble(x) / DIVERSITY_TEMPERATURE).softmax(1)
        u = 2 * torch.rand(scores.shape, generator=stream).to(scores) - 1
        (gradient,) = torch.autograd.grad((u * scores).sum(), x)
        moved: Tensor = images + self.perturbation * gradient.sign()
        return moved
