"""Meta-gradients against finite differences and formulas, and methods evaluated on new clients."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fewer
from fewer.data import ArrayData, Samples, from_clients
from fewer.data.episodes import split_clients
from fewer.errors import DataError, SettingError
from fewer.experiments import recipes
from fewer.experiments.targets import TargetCost, best_accuracy, cost_to_reach
from fewer.experiments.tune import tune_experiment
from fewer.learning.adam import adam_step
from fewer.learning.adapt import Batch, LearningRate, adapt_weights, meta_gradient, trainable_weights
from fewer.learning.flops import count_flops
from fewer.methods.alone import Alone
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.methods.fedmeta import ALPHA, FedMeta
from fewer.methods.new_clients import NewClients, adapt_in_place, fairness
from fewer.methods.per_fedavg import PerFedAvg
from fewer.methods.reptile import Reptile
from fewer.models import SmallCNN, Weights, load_weights
from fewer.models.sequences import MLP, CharLSTM
from fewer.report import write_report
from fewer.report.charts import plot_density
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.runs.result import open_run
from fewer.runtime import stream
from tests.examples import Stop, Stopping
from tests.test_cli import DIGITS, call

torch.set_num_threads(1)

Array = NDArray[np.float64]

# --- meta-gradients -------------------------------------------------------------------------------------------


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


def softmax_regression(w: Array, x: Array, y: NDArray[np.int64]) -> tuple[Array, Array]:
    """Gradient and Hessian (of the flattened weights) of the mean cross-entropy of scores x wᵀ."""
    scores = x @ w.T
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    gradient = (probabilities - np.eye(len(w))[y]).T @ x / len(y)
    curvature = np.einsum("nc,cd->ncd", probabilities, np.eye(len(w))) - np.einsum(
        "nc,nd->ncd", probabilities, probabilities
    )
    return gradient, np.einsum("ncd,ni,nj->cidj", curvature, x, x).reshape(w.size, w.size) / len(y)


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


def test_adam_matches_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(4)]
    expected = torch.ones(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([expected], lr=0.03)
    weights = {"w": torch.ones(5, dtype=torch.float64), "buffer": torch.tensor(7)}
    first_moment = second_moment = {"w": torch.zeros(5, dtype=torch.float64)}
    for step, gradient in enumerate(gradients, 1):
        expected.grad = gradient
        optimizer.step()
        weights, first_moment, second_moment = adam_step(
            weights, {"w": gradient}, first_moment, second_moment, step, 0.03
        )
        if step == 1:  # Adam's first step has the length lr, whatever the size of the gradient
            assert torch.allclose(weights["w"], 1 - 0.03 * gradient.sign(), atol=1e-7)
    assert torch.allclose(weights["w"], expected.detach(), rtol=1e-12) and int(weights["buffer"]) == 7


def test_adam_with_a_tiny_gradient() -> None:
    """ε is outside the square root: a gradient of ε gives half a step, a zero gradient none."""
    gradient, zeros = torch.tensor([1e-8, 0.0], dtype=torch.float64), {"w": torch.zeros(2, dtype=torch.float64)}
    updated, _, _ = adam_step(zeros, {"w": gradient}, zeros, zeros, 1, 0.5)
    assert torch.allclose(updated["w"], torch.tensor([-0.25, 0.0], dtype=torch.float64))


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
    adapt_in_place(model.eval(), support, 0.3)
    assert all(torch.allclose(tensor, expected[name]) for name, tensor in trainable_weights(model).items())


# --- methods against a NumPy reference ------------------------------------------------------------------------

FEATURES, CLASSES, SEED = 3, 2, 4
DRAW = np.random.default_rng(1)
PAIRS = [
    (DRAW.normal(client % 3, 1, (size, FEATURES)).astype(np.float32), DRAW.integers(CLASSES, size=size))
    for client, size in enumerate([5, 8, 6, 10, 7, 9, 5, 6, 12, 8])
]
WEIGHT: Array = DRAW.normal(0, 0.5, (CLASSES, FEATURES)).astype(np.float32).astype(np.float64)
GROUPS = split_clients(10, seed=SEED)


def linear() -> nn.Module:
    net = nn.Linear(FEATURES, CLASSES, bias=False)
    load_weights(net, {"weight": torch.from_numpy(WEIGHT)})
    return net


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    """Ten clients with time-ordered samples: the first ones are the support set."""
    return replace(from_clients(pairs, test=(PAIRS[0][0], PAIRS[0][1])), time_ordered=True)


def support_and_query(client: int, support_fraction: float) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
    x, y = PAIRS[client]
    cut = round(len(y) * support_fraction)
    return (x[:cut].astype(float), y[:cut]), (x[cut:].astype(float), y[cut:])


def meta_gradients_reference(w: Array, client: int, alpha: Any, support_fraction: float) -> tuple[Array, Array]:
    """∇_θ and ∇_α of a client's query loss after one inner step."""
    support, query = support_and_query(client, support_fraction)
    g, hessian = softmax_regression(w, *support)
    v = softmax_regression(w - alpha * g, *query)[0]
    return v - (hessian @ (alpha * v).ravel()).reshape(w.shape), -g * v


def is_close(actual: Tensor, expected: Array, tolerance: float = 3e-6) -> bool:
    return actual.shape == expected.shape and bool(np.abs(actual.double().numpy() - expected).max() <= tolerance)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("algorithm", ["maml", "fomaml", "meta-sgd"])
def test_three_rounds_of_fedmeta_match_numpy(algorithm: Any, weighting: Any) -> None:
    method = FedMeta(
        rounds=3, cohort=8, algorithm=algorithm, weighting=weighting, inner_lr=0.7, meta_lr=0.05, support_fraction=0.4
    )
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    phi = np.stack([WEIGHT, np.full_like(WEIGHT, 0.7)])
    first_moment = second_moment = np.zeros_like(phi)
    for step in (1, 2, 3):
        gradients = []
        for client in GROUPS.train:
            theta, alpha = meta_gradients_reference(phi[0], client, phi[1], 0.4)
            if algorithm == "fomaml":
                support, query = support_and_query(client, 0.4)
                theta = softmax_regression(phi[0] - 0.7 * softmax_regression(phi[0], *support)[0], *query)[0]
            gradients.append(np.stack([theta, alpha if algorithm == "meta-sgd" else np.zeros_like(alpha)]))
        shares = [len(PAIRS[client][1]) if weighting == "size" else 1 for client in GROUPS.train]
        gradient = np.average(gradients, axis=0, weights=shares)
        first_moment, second_moment = 0.9 * first_moment + 0.1 * gradient, 0.999 * second_moment + 0.001 * gradient**2
        phi = phi - 0.05 * (first_moment / (1 - 0.9**step)) / (np.sqrt(second_moment / (1 - 0.999**step)) + 1e-8)
    assert state.step == 3 and is_close(state.algorithm["weight"], phi[0], 1e-5)
    assert (ALPHA + "weight" in state.algorithm) == (algorithm == "meta-sgd")
    if algorithm == "meta-sgd":
        assert is_close(state.algorithm[ALPHA + "weight"], phi[1], 1e-5)
    assert is_close(state.first_moment["weight"], first_moment[0]) and np.abs(phi[0] - WEIGHT).max() > 0.05


def test_local_steps_update_theta_and_the_server_updates_alpha() -> None:
    method = FedMeta(
        rounds=1,
        cohort=8,
        algorithm="meta-sgd",
        local_steps=2,
        local_lr=0.5,
        inner_lr=0.7,
        meta_lr=0.05,
        support_fraction=0.4,
    )
    models, alpha_gradients = [], []
    for client in GROUPS.train:
        first_gradient, first_alpha = meta_gradients_reference(WEIGHT, client, 0.7, 0.4)
        second_gradient, second_alpha = meta_gradients_reference(WEIGHT - 0.5 * first_gradient, client, 0.7, 0.4)
        models.append(WEIGHT - 0.5 * first_gradient - 0.5 * second_gradient)
        alpha_gradients.append((first_alpha + second_alpha) / 2)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    assert is_close(state.algorithm["weight"], np.average(models, axis=0, weights=sizes), 1e-5)
    sign = np.sign(np.average(alpha_gradients, axis=0, weights=sizes))
    assert is_close(state.algorithm[ALPHA + "weight"], 0.7 - 0.05 * sign, 1e-4)  # the first step of Adam
    assert is_close(state.first_moment[ALPHA + "weight"], 0.1 * np.average(alpha_gradients, axis=0, weights=sizes))
    assert method.search_space().keys() == {"local_lr", "inner_lr"} and FedMeta().search_space().keys() == {
        "meta_lr",
        "inner_lr",
    }


def client_batches(method: Any, client: int, count: int) -> list[tuple[Array, Any]]:
    x, y = PAIRS[client]
    indices = torch.randint(len(y), (count, method.batch_size), generator=stream(SEED, 1, client, "batches"))
    return [(x[row].astype(float), y[row]) for row in indices.numpy()]


def run_sgd(w: Array, batches: Sequence[tuple[Array, Any]], lr: float) -> Array:
    for batch in batches:
        w = w - lr * softmax_regression(w, *batch)[0]
    return w


def test_fedavg_meta_and_reptile_match_numpy() -> None:
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    method = FedAvgMeta(rounds=1, cohort=8, local_steps=3, batch_size=2, lr=0.3)
    models = [run_sgd(WEIGHT, client_batches(method, client, 3), 0.3) for client in GROUPS.train]
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, np.average(models, axis=0, weights=sizes))
    reptile = Reptile(rounds=1, cohort=8, local_steps=3, batch_size=2, lr=0.3, outer_lr=0.25)
    model = fewer.run(reptile, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, WEIGHT + 0.25 * (np.mean(models, axis=0) - WEIGHT))


@pytest.mark.parametrize("first_order", [False, True])
def test_per_fedavg_matches_numpy(first_order: bool) -> None:
    method = PerFedAvg(rounds=1, cohort=8, local_steps=2, batch_size=3, lr=0.4, adapt_lr=0.6, first_order=first_order)
    models = []
    for client in GROUPS.train:
        w = WEIGHT
        drawn = client_batches(method, client, 4)
        for inner, outer in (drawn[:2], drawn[2:]):
            g, hessian = softmax_regression(w, *inner)
            v = softmax_regression(w - 0.6 * g, *outer)[0]
            second_order_term = 0.6 * (hessian @ v.ravel()).reshape(w.shape) if not first_order else 0
            w = w - 0.4 * (v - second_order_term)
        models.append(w)
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, np.mean(models, axis=0))


def test_inner_steps_sets_the_number_of_inner_steps() -> None:
    method = FedMeta(rounds=1, cohort=8, inner_steps=3, inner_lr=0.7, support_fraction=0.4)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    gradients = []
    for client in GROUPS.train:
        (sx, sy), (qx, qy) = ([torch.from_numpy(array) for array in part] for part in support_and_query(client, 0.4))
        start = w = torch.from_numpy(WEIGHT).requires_grad_()
        for _ in range(3):  # all steps in one graph
            (gradient,) = torch.autograd.grad(F.cross_entropy(sx @ w.T, sy), w, create_graph=True)
            w = w - 0.7 * gradient
        gradients.append(torch.autograd.grad(F.cross_entropy(qx @ w.T, qy), start)[0].numpy())
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    assert is_close(state.first_moment["weight"], 0.1 * np.average(gradients, axis=0, weights=sizes))


def test_batch_size_and_queries_set_the_number_of_samples_per_step() -> None:
    samples = Samples(torch.arange(20.0)[:, None], torch.zeros(20, dtype=torch.int64))
    support, queries = samples.select(torch.arange(8)), samples.select(torch.arange(8, 20))
    method, generator = FedMeta(inner_steps=3, batch_size=5, queries=4), stream("test")
    inner, outer = method.support_batches(support, generator), method.query_batch(queries, generator)
    assert [len(x) for x, _ in inner] == [5, 5, 5] and not torch.equal(inner[0][0], inner[1][0])
    assert float(torch.cat([x for x, _ in inner]).max()) < 8
    assert len(set(outer[0][:, 0].tolist())) == 4 and float(outer[0].min()) >= 8
    assert len(FedMeta(queries=99).query_batch(queries, generator)[0]) == 12


def test_fedavg_meta_with_adam_is_a_new_torch_adam_per_round() -> None:
    method = FedAvgMeta(rounds=1, cohort=8, optimizer="adam", lr=0.07, local_steps=3, batch_size=2)
    models = []
    for client in GROUPS.train:
        w = torch.from_numpy(WEIGHT.copy()).requires_grad_()
        optimizer = torch.optim.Adam([w], lr=0.07)
        for batch in client_batches(method, client, 3):
            w.grad = torch.from_numpy(softmax_regression(w.detach().numpy(), *batch)[0])
            optimizer.step()
        models.append(w.detach().numpy())
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, np.average(models, axis=0, weights=[len(PAIRS[client][1]) for client in GROUPS.train]), 1e-5)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_running_statistics_are_averaged_like_gradients(weighting: Any) -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.BatchNorm1d(FEATURES, momentum=1.0), nn.Linear(FEATURES, CLASSES))

    method = FedMeta(rounds=1, cohort=8, support_fraction=0.4, weighting=weighting)
    state = fewer.run(method, federation(), model=Normed(), seed=SEED).state
    # The query set is the last batch of each client.
    means = [support_and_query(client, 0.4)[1][0].mean(axis=0) for client in GROUPS.train]
    shares = [len(PAIRS[client][1]) if weighting == "size" else 1 for client in GROUPS.train]
    assert is_close(state.algorithm["0.running_mean"], np.average(means, axis=0, weights=shares))


def test_fedavg_meta_with_adam_differs_from_sgd() -> None:
    sgd, adam = (
        fewer.run(FedAvgMeta(rounds=1, optimizer=kind, lr=0.1), federation(), model=linear(), seed=SEED).state.model
        for kind in ("sgd", "adam")
    )
    assert not torch.equal(sgd["weight"], adam["weight"])


# --- evaluation clients and their samples ---------------------------------------------------------------------


def accuracy(
    w: Array, clients: Sequence[int], steps: int, lr: float, support_fraction: float
) -> tuple[float, dict[str, float]]:
    """Accuracy over all samples and by client, after adapting on the support set."""
    hits = {}
    for client in clients:
        support, (x, y) = support_and_query(client, support_fraction)
        adapted = run_sgd(w, [support] * steps, lr)
        hits[client] = (x @ adapted.T).argmax(axis=1) == y
    by_client = {str(client): float(client_hits.mean()) for client, client_hits in hits.items()}
    return float(np.concatenate(list(hits.values())).mean()), by_client


@pytest.mark.parametrize(("eval_clients", "steps"), [("new", 2), ("new", 0), ("validation", 2)])
def test_new_clients_are_evaluated_on_their_queries_after_adapting(eval_clients: Any, steps: int) -> None:
    pairs = [PAIRS[client % 10] for client in range(40)]
    groups = split_clients(40, seed=SEED)
    method = FedAvgMeta(rounds=1, adapt_steps=steps, adapt_lr=2.0, support_fraction=0.4, eval_clients=eval_clients)
    result = fewer.run(method, federation(pairs), model=linear(), seed=SEED)
    evaluated = groups.test if eval_clients == "new" else groups.validation
    w = result.state.model["weight"].double().numpy()
    pooled, by_client = accuracy(w, [client % 10 for client in evaluated], steps, 2.0, 0.4)
    assert result.metrics["clients"].keys() == {str(client) for client in evaluated}
    assert {str(int(client) % 10) for client in result.metrics["clients"]} == by_client.keys()
    if len(by_client) == len(evaluated):  # otherwise some clients have the same samples
        assert result.accuracy == pytest.approx(pooled)
    assert all(value == by_client[str(int(client) % 10)] for client, value in result.metrics["clients"].items())
    assert result.metrics["fairness"] == fairness(list(result.metrics["clients"].values()))


@pytest.mark.parametrize(
    ("algorithm", "adapt_steps"), [("maml", None), ("meta-sgd", None), ("meta-sgd", 3), ("maml", 0)]
)
def test_new_clients_adapt_with_the_learned_algorithm(algorithm: Any, adapt_steps: int | None) -> None:
    method = FedMeta(rounds=2, algorithm=algorithm, inner_steps=2, adapt_steps=adapt_steps, inner_lr=0.7, meta_lr=0.3)
    result = fewer.run(method, federation(), model=linear(), seed=SEED)
    phi = {name: tensor.double().numpy() for name, tensor in result.state.algorithm.items()}
    alpha = phi[ALPHA + "weight"] if algorithm == "meta-sgd" else 0.7
    total = count = 0.0
    for client in GROUPS.test:
        support, (x, y) = support_and_query(client, 0.2)
        w = phi["weight"]
        for _ in range(2 if adapt_steps is None else adapt_steps):
            w = w - alpha * softmax_regression(w, *support)[0]
        total += float(F.cross_entropy(torch.from_numpy(x @ w.T), torch.from_numpy(y), reduction="sum"))
        count += len(y)
    assert result.history[-1]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert algorithm == "maml" or np.abs(alpha - 0.7).max() > 0.1


def test_only_training_clients_train_and_only_new_clients_are_evaluated(tmp_path: Path) -> None:
    fewer.run(FedMeta(rounds=3, cohort=4), federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    lines = [line.split(",") for line in (tmp_path / "run/ledger.csv").read_text().splitlines()[1:]]
    trained = {int(line[1]) for line in lines if line[3] == "local_train"}
    assert trained and trained <= set(GROUPS.train)
    assert {int(line[1]) for line in lines if line[3].startswith("evaluate")} == set(GROUPS.test)


def test_trials_are_evaluated_on_validation_clients_only() -> None:
    seen: set[int] = set()

    class Watched(FedMeta):
        def eval_cohort_of(self, clients: fewer.Clients) -> list[int]:
            seen.update(cohort := super().eval_cohort_of(clients))
            return cohort

    experiment = build_experiment(
        parse_settings({"seed": SEED, "method": "fedmeta"}), Watched(rounds=1), federation(), linear()
    )
    tuned, trials = tune_experiment(experiment, 3)
    assert len(trials) == 3 and seen == set(GROUPS.validation)
    assert tuned.method.eval_clients == "new" and tuned.data is experiment.data  # type: ignore[attr-defined]


def test_adapt_lr_is_tuned_only_with_adapt_steps() -> None:
    assert FedAvgMeta(adapt_steps=0).search_space().keys() == {"lr"}
    assert FedAvgMeta(adapt_steps=1).search_space().keys() == {"lr", "adapt_lr"}


def test_support_and_queries_of_a_new_client_are_the_same_for_all_methods_and_rounds() -> None:
    drawn: dict[str, list[Any]] = {}

    def record_splits(kind: type[NewClients]) -> type[NewClients]:
        class Watched(kind):  # type: ignore[misc, valid-type]
            def support_and_query(self, client: Any, generator: Any = None) -> Any:
                parts = super().support_and_query(client, generator)
                if generator is None:
                    drawn.setdefault(f"{kind.__name__} {client.id}", []).append([part.rows.tolist() for part in parts])
                return parts

        return Watched

    data = from_clients(PAIRS, test=(PAIRS[0][0], PAIRS[0][1]))
    for kind in (FedMeta, FedAvgMeta):
        fewer.run(record_splits(kind)(rounds=2), data, model=linear(), seed=SEED)
    splits = [client_split for client_splits in drawn.values() for client_split in client_splits]
    assert len(splits) > 4 and all(client_split == splits[0] for client_split in splits)
    assert splits[0][0] != sorted(splits[0][0]) or len(splits[0][0]) == 1


def test_splits_change_in_training_and_are_fixed_for_new_clients() -> None:
    drawn: dict[tuple[int, int, bool], list[Any]] = {}

    class Watched(FedMeta):
        def support_and_query(self, client: Any, generator: Any = None) -> Any:
            parts: Any = super().support_and_query(client, generator)
            drawn.setdefault((client.seed, client.id, generator is not None), []).append(
                [part.rows.tolist() for part in parts]
            )
            return parts

    groups = {}
    for seed in (0, 1):
        x, y = np.zeros((30, FEATURES), np.float32), np.arange(30) % 2
        data = from_clients([(x, y)] * 20, test=(x, y))
        fewer.run(Watched(rounds=2, cohort=16), data, model=linear(), seed=seed)
        groups[seed] = split_clients(20, seed=seed)

    def support_rows(rows: Any, client: int) -> tuple[int, ...]:  # indices within the client
        assert sorted(rows[0] + rows[1]) == list(range(30 * client, 30 * client + 30)) and len(rows[0]) == 6
        return tuple(row - 30 * client for row in rows[0])

    for seed in (0, 1):
        for client in groups[seed].train:
            first, second = (support_rows(rows, client) for rows in drawn[seed, client, True])
            assert first != second
        for client in groups[seed].test:
            assert len({support_rows(rows, client) for rows in drawn[seed, client, False]}) == 1
    members: list[Any] = [
        SimpleNamespace(train=data.client(0).train, seed=number // 2, id=number % 2, time_ordered=False)
        for number in range(4)
    ]
    supports: list[Any] = [FedMeta().support_and_query(member)[0].rows for member in members]
    assert len({tuple(rows.tolist()) for rows in supports}) == 4  # one split per seed and client


def test_max_samples_limits_the_samples_of_a_client() -> None:
    sizes: list[int] = []

    class Watched(FedAvgMeta):
        def client_samples(self, client: Any) -> Any:
            sizes.append(len(samples := super().client_samples(client)))
            assert samples.rows is not None and samples.rows[[0, -1]].tolist() == client.train.rows[[0, -1]].tolist()
            return samples

    fewer.run(Watched(rounds=1, max_samples=6), federation(), model=linear(), seed=SEED)
    assert max(sizes) == 6 and min(sizes) == 5


EDGE_CASES = [
    *(FedMeta(rounds=2, cohort=32, algorithm=kind, inner_steps=2) for kind in ("maml", "fomaml", "meta-sgd")),
    FedMeta(rounds=2, cohort=32, local_steps=2, batch_size=3, queries=3, clip_norm=1.0),
    *(FedAvgMeta(rounds=2, cohort=32, local_steps=2, adapt_steps=steps) for steps in (0, 2)),
    FedAvgMeta(rounds=2, cohort=32, local_steps=2, optimizer="adam"),
    *(PerFedAvg(rounds=2, cohort=32, local_steps=2, first_order=flag) for flag in (False, True)),
    Reptile(rounds=2, cohort=32, local_steps=2),
    *(Alone(learner=kind) for kind in ("net", "most-used", "last-used", "naive-bayes")),
]


@pytest.mark.parametrize("eval_clients", ["new", "validation"])
@pytest.mark.parametrize("method", EDGE_CASES, ids=lambda method: method.name)
def test_runs_survive_clients_with_one_sample_one_class_or_no_data(
    method: NewClients, eval_clients: Any, tmp_path: Path
) -> None:
    pairs = [PAIRS[client % 10] for client in range(40)]
    groups = split_clients(40, seed=SEED)
    for group in groups:  # each group gets a client with one sample, an empty one and one with one class
        one_sample, empty, one_class = group[:3]
        pairs[one_sample] = (pairs[one_sample][0][:1], pairs[one_sample][1][:1])
        pairs[empty] = (np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))
        pairs[one_class] = (pairs[one_class][0], np.zeros_like(pairs[one_class][1]))
    configured = method.model_copy(update={"eval_clients": eval_clients})
    result = fewer.run(configured, federation(pairs), model=linear(), seed=SEED, out=tmp_path)
    evaluated = groups.test if eval_clients == "new" else groups.validation
    assert result.metrics["clients"].keys() == {str(client) for client in evaluated[2:]}
    assert all(torch.isfinite(tensor).all() for tensor in configured.broadcast(result.state).values())
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    reported = {(event["client"], event["detail"]) for event in events if event.get("reason") == "unable"}
    one_sample_error, empty_error = "support and query set need at least 2 samples, got 1", "no training data"
    expected = {(evaluated[0], one_sample_error), (evaluated[1], empty_error)}
    if not isinstance(method, Alone):
        expected.add((groups.train[1], empty_error))
    if isinstance(method, FedMeta):  # the other methods also train on one sample
        expected.add((groups.train[0], one_sample_error))
    assert reported == expected and not any(event.get("reason") in ("failed", "refused") for event in events)


def test_a_client_with_impossible_counts_is_ignored() -> None:
    class Liar(FedAvgMeta):
        @fewer.on_client
        def answer_queries(self, client: Any, model: Weights) -> dict[str, float]:
            counts = super().answer_queries(client, model)
            return counts | ({"correct": counts["total"] + 1} if client.id == first else {})

    pairs = [PAIRS[client % 10] for client in range(40)]
    first, *others = split_clients(40, seed=SEED).test
    result = fewer.run(Liar(rounds=1), federation(pairs), model=linear(), seed=SEED)
    assert result.metrics["clients"].keys() == {str(client) for client in others} and result.accuracy <= 1


def test_evaluation_clients_without_queries_are_an_error() -> None:
    pairs = list(PAIRS)
    for client in GROUPS.test:
        pairs[client] = (PAIRS[client][0][:1], PAIRS[client][1][:1])
    with pytest.raises(SettingError, match="no test samples to evaluate on"):
        fewer.run(FedMeta(rounds=1), federation(pairs), model=linear(), seed=SEED)


def test_too_few_clients_are_an_error() -> None:
    with pytest.raises(SettingError, match="cannot split 4 clients by fractions"):
        fewer.run(FedMeta(rounds=1), federation(PAIRS[:4]), model=linear())
    with pytest.raises(SettingError, match=r"cohort = 9, but there are only 8 clients \(allowed: 1 … 8\)"):
        fewer.run(FedMeta(rounds=1, cohort=9), federation(), model=linear())


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"algorithm": "mmaml"}, "'maml', 'fomaml' or 'meta-sgd'"),
        ({"support_fraction": 1.0}, "support_fraction must be < 1, got 1.0"),
        ({"weighting": "sizes"}, "'size' or 'uniform'"),
        ({"eval_clients": "old"}, "'new' or 'validation'"),
    ],
)
def test_wrong_settings_report_the_allowed_values(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.run("fedmeta", "digits", method_options=setting)


def test_fairness_metrics() -> None:
    metrics = fairness([0.5, 1.0, 0.0, 0.5])
    assert metrics == {"mean": 0.5, "variance": 0.125, "worst": 0.0}
    assert fairness([i / 20 for i in range(20)])["worst"] == pytest.approx(0.025)
    assert fairness([i / 20 for i in range(11)])["worst"] == pytest.approx(0.025)  # a tenth of 11, rounded up, is 2


# --- reproducibility ------------------------------------------------------------------------------------------

METHODS = [
    FedMeta(rounds=3, algorithm="meta-sgd", inner_steps=2, batch_size=3, queries=4, count_flops=True),
    FedMeta(rounds=3),
    FedMeta(rounds=3, local_steps=3),
    FedAvgMeta(rounds=3, optimizer="adam", lr=0.01),
    PerFedAvg(rounds=3, local_steps=3, batch_size=4),
    Reptile(rounds=3, local_steps=3, batch_size=4),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_pool_and_resume_give_the_same_numbers(method: NewClients, tmp_path: Path) -> None:
    data = fewer.data.load("digits", clients=12, alpha=1.0)
    expected = fewer.run(method, data, seed=2)
    pooled = fewer.run(method, data, seed=2, runtime="pool")

    with pytest.raises(Stop):
        fewer.run(method, data, seed=2, out=tmp_path / "run", progress=Stopping())
    resumed = fewer.resume(tmp_path / "run")
    for other in (pooled, resumed):
        assert [{**line, "seconds": 0} for line in other.history] == [
            {**line, "seconds": 0} for line in expected.history
        ]
        weights, expected_weights = method.broadcast(other.state), method.broadcast(expected.state)
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


def test_batch_norm_is_learned_and_its_statistics_are_averaged() -> None:
    data = fewer.data.load("digits", clients=12, alpha=1.0)
    state = fewer.run(FedMeta(rounds=2, algorithm="meta-sgd"), data, norm="batch", seed=2).state
    assert int(state.algorithm["encoder.1.num_batches_tracked"]) == 4  # support and queries, two rounds
    assert float(state.algorithm["encoder.1.running_mean"].abs().sum()) > 0
    assert ALPHA + "encoder.1.weight" in state.algorithm and ALPHA + "encoder.1.running_mean" not in state.algorithm


def test_upload_has_the_size_of_the_algorithm() -> None:
    up = {}
    names: tuple[Any, ...] = ("maml", "fomaml", "meta-sgd")
    for algorithm in names:
        method = FedMeta(rounds=1, cohort=5, algorithm=algorithm)
        result = fewer.run(method, "digits", clients=12)
        size = 4 * sum(p.numel() for p in result.task.net().parameters()) * (2 if algorithm == "meta-sgd" else 1)
        up[algorithm] = result.metrics["up"]
        assert 5 * size < result.metrics["up"] < 5 * size * 1.05 + 5000
    assert up["maml"] == up["fomaml"] < up["meta-sgd"]


def test_float16_gradients_halve_the_upload() -> None:
    float32, float16 = (
        fewer.run(FedMeta(rounds=1, codec=codec), "digits", clients=12) for codec in ("float32", "float16")
    )
    assert float16.metrics["up"] < 0.6 * float32.metrics["up"]


# --- personal models of new clients ----------------------------------------------------------------------------


def test_adapt_writes_a_personal_model_that_predicts(tmp_path: Path) -> None:
    run, adapted = tmp_path / "run", tmp_path / "adapted"
    args: list[str | Path] = ["fedmeta", *DIGITS, "--clients", "12", "--rounds", "2", "-o", "inner_lr=0.5"]
    assert "worst tenth" in call("run", *args, "--out", run, "--no-report").stdout
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (30, 1, 8, 8), np.uint8), np.full(30, 3)
    np.savez(tmp_path / "samples.npz", x=x, y=y)
    result = call("adapt", run, "--data", f"npz:{tmp_path / 'samples.npz'}", "--out", adapted)
    assert "adapted to 30 samples" in result.stderr and str(adapted / "model.safetensors") in result.stdout
    opened = open_run(run)
    start = opened.model
    samples = opened.data.test
    batch = (torch.from_numpy(x).float() - samples.shift) * samples.scale, torch.from_numpy(y)
    start.train()
    expected = adapt_weights(start, trainable_weights(start), [batch], 0.5)
    written = safetensors.torch.load_file(adapted / "model.safetensors")
    assert all(torch.allclose(written[name], expected[name], atol=1e-6) for name in expected)
    from_python = opened.adapt(x, y).state_dict()
    assert all(torch.equal(written[name], from_python[name]) for name in written)
    hits = {}
    options: tuple[list[str | Path], ...] = ([], ["--weights", adapted / "model.safetensors"])
    for weights in options:
        lines = call("predict", run, "--data", f"npz:{tmp_path / 'samples.npz'}", *weights).stdout.splitlines()[1:]
        hits[len(weights)] = sum(line.split(",")[1] == "3" for line in lines)
    assert hits[2] == 30 > hits[0]


def test_invalid_adaptations_are_reported(tmp_path: Path) -> None:
    call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "run", "--no-report")
    np.savez(tmp_path / "samples.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.zeros(3, int))
    args: list[str | Path] = ["adapt", tmp_path / "run", "--out", tmp_path / "adapted", "--data"]
    assert (
        "(allowed: alone, fedavg-meta, fedmeta, per-fedavg, reptile)"
        in call(*args, f"npz:{tmp_path}/samples.npz", code=2).stderr
    )
    call("run", "fedmeta", *DIGITS, "--clients", "12", "--rounds", "1", "--out", tmp_path / "meta", "--no-report")
    args[1] = tmp_path / "meta"
    np.savez(tmp_path / "bare.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
    assert "has no labels to adapt to" in call(*args, f"npz:{tmp_path}/bare.npz", code=2).stderr
    np.savez(tmp_path / "label10.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.array([0, 1, 10]))
    assert "cannot adapt to label 10 (allowed: 0 … 9)" in call(*args, f"npz:{tmp_path}/label10.npz", code=2).stderr
    result = fewer.run(FedMeta(rounds=1, cohort=2), federation(), model=linear(), seed=SEED)
    too_wide, integers = np.zeros((3, FEATURES + 1), np.float32), np.zeros((3, FEATURES), int)
    for x, text in ((too_wide, f"inputs of shape ({FEATURES + 1},)"), (integers, "inputs; the model was trained on")):
        with pytest.raises(DataError, match=re.escape(text)):
            result.adapt(x, [0, 1, 1])


# --- FLOPs and costs ------------------------------------------------------------------------------------------


def test_flops_of_a_linear_net() -> None:
    net = nn.Linear(5, 4, bias=False)
    theta, batch = trainable_weights(net), (torch.randn(6, 5), torch.randint(4, (6,)))
    forward = 2 * 6 * 5 * 4  # scores of 6 samples; a gradient with respect to the weights costs the same
    with count_flops() as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=True)
    assert counter.flops == 4 * forward
    with count_flops() as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=False)
    assert counter.flops == 6 * forward  # ∇_θ⟨g, v⟩ adds two: from g to the scores, from the scores to the weights
    with count_flops(False) as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=False)
    assert counter.flops == 0


def test_flops_are_cached_per_net_and_not_across_nets() -> None:
    class Repeated(nn.Module):
        """Uses its layer several times; the layer alone does not show how often."""

        def __init__(self, times: int) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(FEATURES, CLASSES), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = torch.stack([self.layer(x) for _ in range(self.times)]).sum(0)
            return scores

    def flops(times: int) -> Any:
        method = FedMeta(rounds=1, cohort=8, count_flops=True)
        return fewer.run(method, federation(), model=partial(Repeated, times), seed=SEED).history[0]["flops"]

    assert (once := flops(1)) and flops(2) == 2 * once and flops(1) == once


def test_flops_of_a_fused_lstm_are_counted() -> None:
    net = CharLSTM((6,), 4, vocabulary=9, hidden=16)
    x = torch.randint(9, (3, 6))
    with count_flops() as counter:
        scores = net(x)
    forward = 2 * 3 * 6 * 4 * 16 * ((8 + 16) + (16 + 16)) + 2 * 3 * 16 * 4
    assert counter.flops == forward
    with count_flops() as counter:
        scores.sum().backward()
    assert 1.5 * forward < counter.flops <= 2 * forward


def test_clip_norm_limits_the_gradient_norm() -> None:
    """The norm is over all weights together."""
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, CLASSES)
    changes = []
    for clip in (None, 1e-3, 1e3):
        method = FedMeta(rounds=1, cohort=1, local_steps=1, local_lr=1.0, clip_norm=clip)
        updated = fewer.run(method, federation(), model=net, seed=SEED).state.algorithm
        changes.append(torch.cat([(net.state_dict()[name] - updated[name]).flatten() for name in ("weight", "bias")]))
    assert float(changes[1].norm()) == pytest.approx(1e-3, rel=1e-3) and torch.equal(changes[0], changes[2])
    assert torch.allclose(changes[1] / changes[1].norm(), changes[0] / changes[0].norm(), atol=1e-3)


def test_flops_add_up_over_rounds_and_clients() -> None:
    method = FedMeta(rounds=2, cohort=8, count_flops=True, support_fraction=0.4)
    result = fewer.run(method, federation(), model=linear(), seed=SEED)
    per_round = sum(
        2
        * FEATURES
        * CLASSES
        * (4 * len(support_and_query(client, 0.4)[0][1]) + 2 * len(support_and_query(client, 0.4)[1][1]))
        for client in GROUPS.train
    )
    assert [line["flops"] for line in result.history] == [per_round, 2 * per_round]
    result = fewer.run(
        FedAvgMeta(rounds=2, cohort=8, count_flops=True, local_steps=3, batch_size=2),
        federation(),
        model=linear(),
        seed=SEED,
    )
    per_round = 8 * 3 * 2 * (2 * 2 * FEATURES * CLASSES)  # clients × steps × (forward and backward)
    assert [line["flops"] for line in result.history] == [per_round, 2 * per_round]


def test_cost_to_reach_a_target() -> None:
    def history(accuracies: Sequence[float | None]) -> list[dict[str, Any]]:
        lines = [
            {"round": round, "up": 1e6 * round, "down": 2e6 * round, "flops": 5e9 * round}
            for round in range(1, len(accuracies) + 1)
        ]
        return [
            line | ({} if accuracy is None else {"accuracy": accuracy})
            for line, accuracy in zip(lines, accuracies, strict=True)
        ]

    runs = [history([0.1, 0.5, None, 0.7]), history([0.3, 0.3, 0.9, 0.5])]
    assert best_accuracy(runs) == pytest.approx(0.6)
    assert cost_to_reach(runs, 0.4) == TargetCost(0.4, 2, 6.0, 10.0)
    assert cost_to_reach(runs, 0.61) == TargetCost(0.61)


def test_a_recipe_reports_the_cost_of_a_target(tmp_path: Path) -> None:
    text = """
title = "t"
paper = "p"
seeds = 1
trials = 1
target = "FedAvg"
rivals = ["FedAvg"]
[settings]
data = "digits"
clients = 20
rounds = 2
method_options = { count_flops = true }
[[column]]
name = "50 %"
method_options = { support_fraction = 0.5 }
[[row]]
name = "FedAvg"
method = "fedavg-meta"
method_options = { adapt_steps = 0, local_steps = 2 }
[[row]]
name = "MAML"
method = "fedmeta"
"""
    (tmp_path / "t.toml").write_text(text)
    plan, cells = recipes.reproduce(str(tmp_path / "t.toml"), tmp_path / "runs")
    assert all(cell.ours.settings["support_fraction"] == 0.5 and cell.target_cost for cell in cells)
    cost = cells[0].target_cost
    assert cost and cost.round and cost.mb and cost.gflop and cost.target == cells[1].target_cost.target  # type: ignore[union-attr]
    page = recipes.render_markdown(plan, cells, "c", False)
    assert f"| FedAvg | 50 % | {100 * cost.target:.2f} | {cost.round} | {cost.mb:.3g} | {cost.gflop:.3g} |" in page
    lines = [(tmp_path / f"runs/50/{row}-seed0/metrics.jsonl").read_text().splitlines() for row in ("fedavg", "maml")]
    fedavg, maml = (json.loads(line[-1])["clients"] for line in lines)
    gains = [maml[client] - fedavg[client] for client in fedavg]
    assert len(gains) == 2 and list(fedavg) == list(maml)
    half_width = 12.706 * abs(gains[0] - gains[1]) / 2  # Student's t with one degree of freedom
    assert "| FedAvg | 50 % | – |" in page
    assert f"| MAML | 50 % | {50 * sum(gains):.1f} ± {100 * half_width:.1f} |" in page
    pages = write_report([tmp_path / "runs/50/fedavg-seed0"], tmp_path / "report")
    assert pages[0].exists()


def test_the_distribution_over_clients_is_plotted() -> None:
    line = {"round": 1, "accuracy": 0.5, "clients": {str(n): n / 10 for n in range(10)}}
    assert plot_density({"fedmeta": [[line]]}) is not None
    assert plot_density({"fedmeta": [[{"round": 1, "accuracy": 0.5}]]}) is None


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
