"""Adaptation by a few gradient steps, and the exact gradient of what comes of it.

Inner steps (Finn, Abbeel, Levine, ICML 2017): θ_{k+1} = θ_k − α ∘ g_k with g_k = ∇L_S(θ_k), α one number or one for
each weight (Meta-SGD). The gradient of the query loss L_Q(θ_K) by θ_0 and α goes back over these steps, with
v_K = ∇L_Q(θ_K):

    v_k = v_{k+1} − ∇_θ ⟨g_k, α ∘ v_{k+1}⟩        (first order: v_k = v_{k+1})
    ∇_α = −Σ_k g_k ∘ v_{k+1}

This is what differentiating through all steps at once gives, but each step's graph is walked and freed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewer.models import Weights

Batch = tuple[Tensor, Tensor]
LearningRate = float | Mapping[str, Tensor]
"""One step size (α) for all weights, or one for each."""
Criterion = Callable[[Tensor, Tensor], Tensor]
"""The loss of a net's scores on labels."""


class MetaGradient(NamedTuple):
    """How the query loss after adaptation changes with where it began and with its step sizes."""

    weights: Weights
    """∇_θ"""
    rates: Weights
    """∇_α, one for each weight."""
    loss: float
    adapted: Weights
    """θ_K"""


def learnable(net: nn.Module) -> Weights:
    """The parameters of a net that learn, as they are."""
    return {name: tensor.detach() for name, tensor in net.named_parameters() if tensor.requires_grad}


def adapted(net: nn.Module, weights: Mapping[str, Tensor], batches: Sequence[Batch], lr: LearningRate) -> Weights:
    """θ_K: one inner step for each batch, without a graph."""
    theta = dict(weights)
    for batch in batches:
        theta = _step(theta, _slopes(net, theta, batch, graph=False)[1], lr)
    return theta


def meta_gradient(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    support: Sequence[Batch],
    query: Batch,
    lr: LearningRate,
    first_order: bool,
    criterion: Criterion = F.cross_entropy,
) -> MetaGradient:
    """The gradient of L_Q(θ_K) by θ_0 and α, with one inner step for each support batch. With `first_order`, without second derivatives.

    L_Q is what `criterion` says of the queries; inner steps are on the cross-entropy.
    """
    return meta_gradients(net, weights, support, query, lr, first_order, [criterion])[0]


def meta_gradients(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    support: Sequence[Batch],
    query: Batch,
    lr: LearningRate,
    first_order: bool,
    criteria: Sequence[Criterion],
) -> list[MetaGradient]:
    """The same for several criteria of the queries, with the inner steps done once."""
    path = []
    theta: Weights = dict(weights)
    for batch in support:
        theta, slopes = _slopes(net, theta, batch, graph=not first_order)
        path.append((theta, slopes))
        theta = _step(theta, slopes, lr)
    end = theta
    found = []
    for number, criterion in enumerate(criteria, 1):
        back, loss = _query(net, end, query, criterion)
        rates = {name: torch.zeros_like(tensor) for name, tensor in back.items()}
        for theta, slopes in reversed(path):
            for name, slope in slopes.items():
                rates[name] -= slope.detach() * back[name]
            if not first_order:
                back = _through(theta, slopes, back, lr, again=number < len(criteria))
        found.append(MetaGradient(back, rates, loss, end))
    return found


def _slopes(net: nn.Module, theta: Mapping[str, Tensor], batch: Batch, graph: bool) -> tuple[Weights, Weights]:
    """θ as leaves of a graph, and g = ∇L(θ), with its own graph if it is to be differentiated again."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
    with _differentiable_twice(net, graph):
        loss = _loss(net, leaves, batch)
        found = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=graph, allow_unused=True, materialize_grads=True
        )
    return leaves, dict(zip(leaves, found, strict=True))


def _query(net: nn.Module, theta: Mapping[str, Tensor], batch: Batch, criterion: Criterion) -> tuple[Weights, float]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
    loss = _loss(net, leaves, batch, criterion)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), float(loss.detach())


def _through(
    theta: Mapping[str, Tensor], slopes: Mapping[str, Tensor], back: Mapping[str, Tensor], lr: LearningRate, again: bool
) -> Weights:
    """v − ∇_θ ⟨g, α ∘ v⟩: back over one inner step, whose graph is freed unless it is walked again."""
    live = [name for name, slope in slopes.items() if slope.requires_grad]
    curved = torch.autograd.grad(
        [slopes[name] for name in live],
        list(theta.values()),
        [_rate(lr, name) * back[name] for name in live],
        retain_graph=again,
        allow_unused=True,
        materialize_grads=True,
    )
    return {name: back[name] - curve for name, curve in zip(theta, curved, strict=True)}


def _step(theta: Mapping[str, Tensor], slopes: Mapping[str, Tensor], lr: LearningRate) -> Weights:
    """θ − α ∘ g"""
    return {name: tensor.detach() - _rate(lr, name) * slopes[name].detach() for name, tensor in theta.items()}


def _rate(lr: LearningRate, name: str) -> float | Tensor:
    return lr if isinstance(lr, float) else lr[name]


def _loss(net: nn.Module, theta: Mapping[str, Tensor], batch: Batch, criterion: Criterion = F.cross_entropy) -> Tensor:
    x, y = batch
    return criterion(functional_call(net, dict(theta), (x,)), y)


@contextmanager
def _differentiable_twice(net: nn.Module, wanted: bool) -> Iterator[None]:
    """Inside, recurrent nets do without oneDNN's fused kernel, whose second derivative is several times slower."""
    before = torch._C._get_mkldnn_enabled()
    if wanted and any(isinstance(module, nn.RNNBase) for module in net.modules()):
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
