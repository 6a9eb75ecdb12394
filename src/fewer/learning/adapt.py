"""Adaptation by a few gradient steps (the inner loop of MAML), and its exact meta-gradient.

Inner steps (Finn, Abbeel, Levine, ICML 2017): θ_{k+1} = θ_k − α ∘ g_k with g_k = ∇L_S(θ_k). α is one learning rate, or
one per weight (Meta-SGD). The gradient of the query loss L_Q(θ_K) with respect to θ_0 and α runs backward over the
steps, starting from v_K = ∇L_Q(θ_K):

    v_k = v_{k+1} − ∇_θ ⟨g_k, α ∘ v_{k+1}⟩        (first order: v_k = v_{k+1})
    ∇_α = −Σ_k g_k ∘ v_{k+1}

Differentiating through all steps at once gives the same result. This code differentiates one step at a time, and frees
its graph.
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
"""Inputs and targets."""
LearningRate = float | Mapping[str, Tensor]
"""One learning rate (α) for all weights, or one per weight."""
Criterion = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets to a loss."""


class MetaGradient(NamedTuple):
    """The gradient of the query loss after adaptation."""

    weights: Weights
    """∇_θ: with respect to the initial weights."""
    lrs: Weights
    """∇_α: with respect to the learning rates, one per weight."""
    loss: float
    """The query loss."""
    adapted: Weights
    """θ_K: the adapted weights."""


def trainable_weights(net: nn.Module) -> Weights:
    """The parameters of a net that require gradients, detached."""
    return {name: tensor.detach() for name, tensor in net.named_parameters() if tensor.requires_grad}


def adapt_weights(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    batches: Sequence[Batch],
    lr: LearningRate,
    criterion: Criterion = F.cross_entropy,
) -> Weights:
    """Takes one inner step per batch. Returns θ_K without a graph."""
    theta = dict(weights)
    for batch in batches:
        theta = _inner_step(theta, _inner_gradients(net, theta, batch, criterion, graph=False)[1], lr)
    return theta


def meta_gradient(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    support: Sequence[Batch],
    query: Batch,
    lr: LearningRate,
    first_order: bool,
    criterion: Criterion = F.cross_entropy,
    inner_criterion: Criterion = F.cross_entropy,
) -> MetaGradient:
    """The gradient of L_Q(θ_K) with respect to θ_0 and α, with one inner step per support batch.

    `first_order` drops the second derivatives. `criterion` is L_Q and `inner_criterion` L_S.
    """
    return meta_gradients(net, weights, support, query, lr, first_order, [criterion], inner_criterion)[0]


def meta_gradients(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    support: Sequence[Batch],
    query: Batch,
    lr: LearningRate,
    first_order: bool,
    criteria: Sequence[Criterion],
    inner_criterion: Criterion = F.cross_entropy,
) -> list[MetaGradient]:
    """`meta_gradient` for several query losses that share the same inner steps."""
    path = []
    theta: Weights = dict(weights)
    for batch in support:
        theta, gradients = _inner_gradients(net, theta, batch, inner_criterion, graph=not first_order)
        path.append((theta, gradients))
        theta = _inner_step(theta, gradients, lr)
    adapted = theta
    results = []
    for number, criterion in enumerate(criteria, 1):
        v, loss = _query_gradients(net, adapted, query, criterion)
        lr_gradients = {name: torch.zeros_like(tensor) for name, tensor in v.items()}
        for theta, gradients in reversed(path):
            for name, gradient in gradients.items():
                lr_gradients[name] -= gradient.detach() * v[name]
            if not first_order:
                v = _backward_step(theta, gradients, v, lr, retain_graph=number < len(criteria))
        results.append(MetaGradient(v, lr_gradients, loss, adapted))
    return results


def _inner_gradients(
    net: nn.Module, theta: Mapping[str, Tensor], batch: Batch, criterion: Criterion, graph: bool
) -> tuple[Weights, Weights]:
    """θ as leaf tensors, and g = ∇L(θ); with `graph`, g can be differentiated again."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
    with _differentiable_twice(net, graph):
        loss = _loss(net, leaves, batch, criterion)
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=graph, allow_unused=True, materialize_grads=True
        )
    return leaves, dict(zip(leaves, gradients, strict=True))


def _query_gradients(
    net: nn.Module, theta: Mapping[str, Tensor], batch: Batch, criterion: Criterion
) -> tuple[Weights, float]:
    """∇L_Q(θ) and L_Q(θ)."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
    loss = _loss(net, leaves, batch, criterion)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True)), float(loss.detach())


def _backward_step(
    theta: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    v: Mapping[str, Tensor],
    lr: LearningRate,
    retain_graph: bool,
) -> Weights:
    """v − ∇_θ ⟨g, α ∘ v⟩: the backward pass of one inner step."""
    with_graph = [name for name, gradient in gradients.items() if gradient.requires_grad]
    products = torch.autograd.grad(
        [gradients[name] for name in with_graph],
        list(theta.values()),
        [_select_lr(lr, name) * v[name] for name in with_graph],
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return {name: v[name] - product for name, product in zip(theta, products, strict=True)}


def _inner_step(theta: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: LearningRate) -> Weights:
    """θ − α ∘ g"""
    return {name: tensor.detach() - _select_lr(lr, name) * gradients[name].detach() for name, tensor in theta.items()}


def _select_lr(lr: LearningRate, name: str) -> float | Tensor:
    return lr if isinstance(lr, float) else lr[name]


def _loss(net: nn.Module, theta: Mapping[str, Tensor], batch: Batch, criterion: Criterion) -> Tensor:
    x, y = batch
    return criterion(functional_call(net, dict(theta), (x,)), y)


@contextmanager
def _differentiable_twice(net: nn.Module, enabled: bool) -> Iterator[None]:
    """Turns off oneDNN's fused kernel for recurrent nets: its second derivative is several times slower."""
    before = torch._C._get_mkldnn_enabled()
    if enabled and any(isinstance(module, nn.RNNBase) for module in net.modules()):
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
