"""Deep leakage: restores images from their gradient.

- Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019. Dummy images are optimized until their gradient matches the
  observed one. They use smooth networks.
- Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients, NeurIPS 2020, make this work for ReLU networks:
  cosine distance between gradients, Adam on the sign of the gradient, values clipped to the pixel range, and a penalty
  on total variation.
- Zhao, Mopuri, Bilen 2020: labels can be read off the gradient of the last layer, so the attacker knows them.

Departures:

- In the first half of the steps the attacker's network has softplus instead of ReLU, because inactive units have no
  gradient.
- The attack keeps the best match of several random starts.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

LR = 0.1
SOFTPLUS_BETA = 10.0
VARIATION_WEIGHT = 0.01
"""Weight of total variation, relative to a cosine distance of 1."""


def compute_gradients(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Returns the gradient of the mean loss of each batch (batches × samples × …), one row per batch.

    The net is in evaluation mode, without dropout and batch statistics. This is the attacker's best case.
    """
    net.eval()
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(weights: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (inputs,)), labels)

    gradients = vmap(grad(loss), (None, 0, 0))(weights, x, y)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def restore_images(
    net: nn.Module,
    gradients: Tensor,
    labels: Tensor,
    like: Tensor,
    stream: torch.Generator,
    *,
    steps: int,
    starts: int = 1,
    smooth: float = VARIATION_WEIGHT,
) -> tuple[Tensor, Tensor]:
    """Finds images with these labels (batches × samples) that match the observed gradients.

    Returns the images and the mismatch reached (1 − cosine). Only the shape and the value range of `like` are used.
    """
    low, high = float(like.min()), float(like.max())
    targets, y = gradients.repeat(starts, 1), labels.repeat(starts, 1)
    dummy = torch.randn(*y.shape, *like.shape[1:], generator=stream).to(like).clamp_(low, high).requires_grad_()
    optimizer = torch.optim.Adam([dummy], lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    softplus_net = replace_relu(net)
    for step in range(steps):
        attacker_net = softplus_net if 2 * step < steps else net
        mismatch = 1 - F.cosine_similarity(compute_gradients(attacker_net, dummy, y), targets, eps=1e-20)
        (gradient,) = torch.autograd.grad((mismatch + smooth * total_variation(dummy)).sum(), dummy)
        dummy.grad = gradient.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            dummy.clamp_(low, high)
    with torch.no_grad():
        mismatch = 1 - F.cosine_similarity(compute_gradients(net, dummy, y), targets, eps=1e-20)
    best = mismatch.view(starts, len(gradients)).argmin(0)
    chosen = best * len(gradients) + torch.arange(len(gradients), device=best.device)
    return dummy.detach()[chosen], mismatch[chosen]


def replace_relu(net: nn.Module) -> nn.Module:
    """Returns a copy of the net with softplus instead of every ReLU module."""
    net = deepcopy(net)
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Softplus(SOFTPLUS_BETA))
    return net


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference between neighboring values, down plus across, for each batch."""
    down, across = images.diff(dim=-2).abs(), images.diff(dim=-1).abs()
    return down.flatten(1).mean(1) + across.flatten(1).mean(1)


def psnr(images: Tensor, real: Tensor, span: float) -> Tensor:
    """Peak signal-to-noise ratio of each image in decibels; `span` is the range of values. High means similar."""
    error = (images - real).flatten(1).square().mean(1)
    return 10 * torch.log10(span**2 / error.clamp_min(1e-12))
