"""Meta-gradients against finite differences and formulas."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fewer.learning.adapt import Batch, LearningRate, adapt_weights, meta_gradient, trainable_weights
from fewer.methods.new_clients import adapt_in_place
from fewer.models import SmallCNN, Weights
from fewer.models.sequences import MLP, CharLSTM
from tests.methods.fedmeta_harness import softmax_regression

# --- meta-gradients ---------------------------------------------------------------------------------------------


def make_mlp() -> tuple[nn.Module, Any]:
    return MLP((5,), 4, hidden=7), lambda count: torch.randn(count, 5, dtype=torch.float64)


def make_cnn(norm: Any) -> tuple[nn.Module, Any]:
    return SmallCNN((1, 8, 8), 4, norm), lambda count: torch.randn(count, 1, 8, 8, dtype=torch.float64)


def make_lstm() -> tuple[nn.Module, Any]:
    return CharLSTM((6,), 4, vocabulary=9, hidden=5), lambda count: torch.randint(9, (count, 6))


NETS = {
    "mlp": make_mlp,
    "cnn, group": lambda: make_cnn("group"),
    "cnn, batch": lambda: make_cnn("batch"),
    "lstm": make_lstm,
}


def make_case(net: str, steps: int) -> tuple[nn.Module, Weights, list[Batch], Batch]:
    torch.manual_seed(len(net) + steps)
    model, draw = NETS[net]()
    model = model.double().train()
    support = [(draw(6), torch.randint(4, (6,))) for _ in range(steps)]
    return (
        model,
        {name: tensor.clone() for name, tensor in trainable_weights(model).items()},
        support,
        (draw(8), torch.randint(4, (8,))),
    )


def query_loss(net: nn.Module, theta: Weights, support: Sequence[Batch], query: Batch, lr: LearningRate) -> float:
    """L_Q(θ_K), computed with first derivatives only."""
    theta = dict(theta)
    for x, y in support:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
        gradients = torch.autograd.grad(F.cross_entropy(functional_call(net, leaves, (x,)), y), list(leaves.values()))
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            theta[name] = (leaf - (lr if isinstance(lr, float) else lr[name]) * gradient).detach()
    return float(F.cross_entropy(functional_call(net, theta, (query[0],)), query[1]))


def dot(gradient: Weights, direction: Weights) -> float:
    return float(sum((gradient[name] * direction[name]).sum() for name in direction))


def move_weights(weights: Weights, direction: Weights, step: float) -> Weights:
    return {name: tensor + step * direction[name] for name, tensor in weights.items()}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("net", NETS)
def test_gradients_of_weights_and_lrs_match_finite_differences(net: str, steps: int) -> None:
    model, theta, support, query = make_case(net, steps)
    lrs = {name: 0.2 + 0.3 * torch.rand_like(tensor) for name, tensor in theta.items()}
    gradients = meta_gradient(model, theta, support, query, lrs, first_order=False)
    assert gradients.loss == pytest.approx(query_loss(model, theta, support, query, lrs), rel=1e-12)
    step = 1e-6
    for _ in range(4):
        direction = {name: torch.randn_like(tensor) for name, tensor in theta.items()}
        by_theta = [
            query_loss(model, move_weights(theta, direction, offset), support, query, lrs) for offset in (step, -step)
        ]
        assert dot(gradients.weights, direction) == pytest.approx(
            (by_theta[0] - by_theta[1]) / (2 * step), rel=1e-5, abs=1e-7
        )
        by_alpha = [
            query_loss(model, theta, support, query, move_weights(lrs, direction, offset)) for offset in (step, -step)
        ]
        assert dot(gradients.lrs, direction) == pytest.approx(
            (by_alpha[0] - by_alpha[1]) / (2 * step), rel=1e-5, abs=1e-7
        )


@pytest.mark.parametrize("net", NETS)
def test_fomaml_omits_the_second_order_terms_of_maml(net: str) -> None:
    model, theta, support, query = make_case(net, 2)
    exact, first_order = (
        meta_gradient(model, theta, support, query, 0.4, approximate) for approximate in (False, True)
    )
    adapted = {name: tensor.requires_grad_() for name, tensor in adapt_weights(model, theta, support, 0.4).items()}
    loss = F.cross_entropy(functional_call(model, adapted, (query[0],)), query[1])
    expected = dict(zip(adapted, torch.autograd.grad(loss, list(adapted.values())), strict=True))
    assert all(torch.allclose(first_order.weights[name], expected[name], rtol=1e-10, atol=1e-12) for name in expected)
    distance = sum(float((exact.weights[name] - first_order.weights[name]).square().sum()) for name in expected) ** 0.5
    assert distance > 0.01 * sum(float(gradient.square().sum()) for gradient in expected.values()) ** 0.5


def test_one_step_of_meta_sgd_matches_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    w, alpha = rng.normal(size=(3, 4)), rng.uniform(0.1, 0.9, (3, 4))
    (sx, sy), (qx, qy) = ((rng.normal(size=(n, 4)), rng.integers(3, size=n)) for n in (6, 9))
    g, hessian = softmax_regression(w, sx, sy)
    v = softmax_regression(w - alpha * g, qx, qy)[0]
    net = nn.Linear(4, 3, bias=False).double()
    tensors = [torch.from_numpy(array) for array in (sx, sy, qx, qy)]
    gradients = meta_gradient(
        net,
        {"weight": torch.from_numpy(w)},
        [(tensors[0], tensors[1])],
        (tensors[2], tensors[3]),
        {"weight": torch.from_numpy(alpha)},
        first_order=False,
    )
    assert np.allclose(gradients.lrs["weight"], -g * v, rtol=1e-10)
    assert np.allclose(gradients.weights["weight"], v - (hessian @ (alpha * v).ravel()).reshape(3, 4), rtol=1e-10)


def test_frozen_weights_have_no_meta_gradient() -> None:
    model, theta, support, query = make_case("mlp", 1)
    frozen = next(iter(theta))
    dict(model.named_parameters())[frozen].requires_grad_(False)
    assert trainable_weights(model).keys() == theta.keys() - {frozen}
    gradients = meta_gradient(model, trainable_weights(model), support, query, 0.3, first_order=False)
    assert gradients.weights.keys() == gradients.lrs.keys() == trainable_weights(model).keys()


def test_fine_tuning_uses_batch_norm_in_training_mode() -> None:
    model, theta, support, _ = make_case("cnn, batch", 2)
    expected = adapt_weights(copy.deepcopy(model).train(), theta, support, 0.3)
    adapt_in_place(model.eval(), support, 0.3, F.cross_entropy)
    assert all(torch.allclose(tensor, expected[name]) for name, tensor in trainable_weights(model).items())


# --- FLOPs and costs --------------------------------------------------------------------------------------------


def test_meta_gradient_does_not_change_the_net() -> None:
    model, theta, support, query = make_case("mlp", 2)
    before = copy.deepcopy(model.state_dict())
    meta_gradient(model, theta, support, query, 0.3, first_order=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_fused_kernel_is_restored_after_a_second_derivative() -> None:
    model, theta, support, query = make_case("lstm", 1)
    before = torch._C._get_mkldnn_enabled()
    meta_gradient(model, theta, support, query, 0.3, first_order=False)
    assert torch._C._get_mkldnn_enabled() == before
    with pytest.raises(ValueError, match="batch_size"):
        meta_gradient(model, theta, [(support[0][0], query[1])], query, 0.3, first_order=False)
    assert torch._C._get_mkldnn_enabled() == before


def test_the_meta_gradient_of_a_regression_matches_finite_differences() -> None:
    """MAML on two sine waves: ∇_θ of the query loss after two inner steps on the squared error."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.linspace(-3, 3, 24, dtype=torch.float64)[:, None]
    support, query = (
        [(x[::3], 2 * torch.sin(x[::3] + 1)), (x[1::3], 2 * torch.sin(x[1::3] + 1))],
        (x[2::3], x[2::3].sin()),
    )
    theta = trainable_weights(net)

    def query_loss(weights: Weights) -> float:
        adapted = adapt_weights(net, weights, support, 0.2, F.mse_loss)
        return float(F.mse_loss(functional_call(net, adapted, (query[0],)), query[1]))

    gradient = meta_gradient(net, theta, support, query, 0.2, False, F.mse_loss, F.mse_loss)
    assert gradient.loss == pytest.approx(query_loss(theta))
    for name, tensor in theta.items():
        for index in range(tensor.numel()):
            step = torch.zeros_like(tensor)
            step.view(-1)[index] = 1e-6
            slope = (query_loss({**theta, name: tensor + step}) - query_loss({**theta, name: tensor - step})) / 2e-6
            assert float(gradient.weights[name].reshape(-1)[index]) == pytest.approx(slope, rel=1e-6, abs=1e-8)
