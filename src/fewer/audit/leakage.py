"""Deep leakage: images from the gradient that they gave.

Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019: dummy images are moved until their gradient is that which was
seen. They use smooth nets. For nets with ReLU, as ours, more is needed. From Geiping, Bauermeister, Dröge, Moeller:
Inverting Gradients, NeurIPS 2020: the angle between gradients, signed steps of Adam, values kept in the range of
pixels, and a price on total variation. Our own: for the first half of the steps the attacker's net has softplus in the
place of ReLU, as units that are off would not show the way. Labels are known to the attacker (they can be read off the
gradient of the last layer: Zhao, Mopuri, Bilen 2020), and of several starts the one with the best match is taken.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

LR = 0.1
SHARP = 10.0
"""How sharp the bend of softplus is."""
SMOOTH = 0.01
"""Price of total variation, against an angle of 1 − cosine."""


def gradients_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """For each batch (batches × samples × …) the gradient of its mean loss, as one row.

    The net is in evaluation mode: without dropout and batch statistics, which is the attacker's best case.
    """
    net.eval()
    learned = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(weights: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (inputs,)), labels)

    found = vmap(grad(loss), (None, 0, 0))(learned, x, y)
    return torch.cat([each.flatten(1) for each in found.values()], dim=1)


def restore(
    net: nn.Module,
    seen: Tensor,
    labels: Tensor,
    like: Tensor,
    stream: torch.Generator,
    *,
    steps: int,
    starts: int = 1,
    smooth: float = SMOOTH,
) -> tuple[Tensor, Tensor]:
    """Images of these labels (batches × samples) whose gradients point where those seen do, and 1 − cosine reached.

    `like` are images of anyone: only their shape and the range of their values are used.
    """
    low, high = float(like.min()), float(like.max())
    wanted, y = seen.repeat(starts, 1), labels.repeat(starts, 1)
    dummy = torch.randn(*y.shape, *like.shape[1:], generator=stream).to(like).clamp_(low, high).requires_grad_()
    optimizer = torch.optim.Adam([dummy], lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    soft = softened(net)
    for step in range(steps):
        seeing = soft if 2 * step < steps else net
        apart = 1 - F.cosine_similarity(gradients_of(seeing, dummy, y), wanted, eps=1e-20)
        (slope,) = torch.autograd.grad((apart + smooth * variation(dummy)).sum(), dummy)
        dummy.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            dummy.clamp_(low, high)
    with torch.no_grad():
        apart = 1 - F.cosine_similarity(gradients_of(net, dummy, y), wanted, eps=1e-20)
    best = apart.view(starts, len(seen)).argmin(0)
    chosen = best * len(seen) + torch.arange(len(seen), device=best.device)
    return dummy.detach()[chosen], apart[chosen]


def softened(net: nn.Module) -> nn.Module:
    """A copy of the net with softplus in the place of ReLU, where that is a module."""
    net = deepcopy(net)
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Softplus(SHARP))
    return net


def variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighboring values, down and across, of each batch."""
    down, across = images.diff(dim=-2).abs(), images.diff(dim=-1).abs()
    return down.flatten(1).mean(1) + across.flatten(1).mean(1)


def psnr(images: Tensor, real: Tensor, span: float) -> Tensor:
    """Peak signal-to-noise ratio of each image in decibels, for values that span so much: high is alike."""
    error = (images - real).flatten(1).square().mean(1)
    return 10 * torch.log10(span**2 / error.clamp_min(1e-12))
