"""Deep leakage: restores images from their gradient, or from mean features that a client sends.

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
- Class means are inverted by the same search: an image is optimized until its features match the mean (Mahendran,
  Vedaldi: Understanding Deep Image Representations by Inverting Them, CVPR 2015).
- Mean logits of a class are inverted in the same way, under the global model. Takahashi, Liu, Liu: Breaching FedMD,
  CVPR 2023, invert pairs of a client's and the server's logits on one public sample. No method here sends those.
"""

from __future__ import annotations

from collections.abc import Callable
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
    targets, y = gradients.repeat(starts, 1), labels.repeat(starts, 1)
    dummy = _draw_start((*y.shape, *like.shape[1:]), like, stream)

    def mismatch(net: nn.Module) -> Tensor:
        return 1 - F.cosine_similarity(compute_gradients(net, dummy, y), targets, eps=1e-20)

    return _search_images(net, dummy, mismatch, _value_limits(like), steps, starts, smooth)


def invert_features(
    encoder: nn.Module,
    features: Tensor,
    like: Tensor,
    stream: torch.Generator,
    *,
    steps: int,
    starts: int = 1,
    smooth: float = VARIATION_WEIGHT,
) -> tuple[Tensor, Tensor]:
    """Finds images whose features match these (images × width). Returns them and ‖f(image) − features‖² / ‖features‖².

    Only the shape and the value range of `like` are used.
    """
    targets = features.repeat(starts, 1)
    dummy = _draw_start((len(targets), *like.shape[1:]), like, stream)

    def mismatch(net: nn.Module) -> Tensor:
        distances: Tensor = (net.eval()(dummy) - targets).square().sum(1)
        return distances / targets.square().sum(1).clamp_min(1e-20)

    return _search_images(encoder, dummy, mismatch, _value_limits(like), steps, starts, smooth)


def _value_limits(like: Tensor) -> tuple[float, float]:
    return float(like.min()), float(like.max())


def _draw_start(shape: tuple[int, ...], like: Tensor, stream: torch.Generator) -> Tensor:
    """Noise in the value range of `like`, to be optimized."""
    return torch.randn(*shape, generator=stream).to(like).clamp_(*_value_limits(like)).requires_grad_()


def _search_images(
    net: nn.Module,
    dummy: Tensor,
    mismatch: Callable[[nn.Module], Tensor],
    limits: tuple[float, float],
    steps: int,
    starts: int,
    smooth: float,
) -> tuple[Tensor, Tensor]:
    """Optimizes the dummy images until they match. Returns the best of all starts, and the mismatch reached."""
    optimizer = torch.optim.Adam([dummy], lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    softplus_net = replace_relu(net)
    for step in range(steps):
        attacker_net = softplus_net if 2 * step < steps else net
        (gradient,) = torch.autograd.grad((mismatch(attacker_net) + smooth * total_variation(dummy)).sum(), dummy)
        dummy.grad = gradient.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            dummy.clamp_(*limits)
    with torch.no_grad():
        reached = mismatch(net)
    count = len(dummy) // starts
    best = reached.view(starts, count).argmin(0)
    chosen = best * count + torch.arange(count, device=best.device)
    return dummy.detach()[chosen], reached[chosen]


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
