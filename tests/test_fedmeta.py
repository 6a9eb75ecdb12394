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

# --- exactness ------------------------------------------------------------------------------------------------


def mlp() -> tuple[nn.Module, Any]:
    return MLP((5,), 4, hidden=7), lambda count: torch.randn(count, 5, dtype=torch.float64)


def cnn(norm: Any) -> tuple[nn.Module, Any]:
    return SmallCNN((1, 8, 8), 4, norm), lambda count: torch.randn(count, 1, 8, 8, dtype=torch.float64)


def lstm() -> tuple[nn.Module, Any]:
    return CharLSTM((6,), 4, vocabulary=9, hidden=5), lambda count: torch.randint(9, (count, 6))


NETS = {"mlp": mlp, "cnn, group": lambda: cnn("group"), "cnn, batch": lambda: cnn("batch"), "lstm": lstm}


def case(net: str, steps: int) -> tuple[nn.Module, Weights, list[Batch], Batch]:
    torch.manual_seed(len(net) + steps)
    made, draw = NETS[net]()
    made = made.double().train()
    support = [(draw(6), torch.randint(4, (6,))) for _ in range(steps)]
    return made, {n: t.clone() for n, t in trainable_weights(made).items()}, support, (draw(8), torch.randint(4, (8,)))


def query_loss(net: nn.Module, theta: Weights, support: Sequence[Batch], query: Batch, lr: LearningRate) -> float:
    """L_Q(θ_K), by nothing but first derivatives."""
    theta = dict(theta)
    for x, y in support:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
        gradients = torch.autograd.grad(F.cross_entropy(functional_call(net, leaves, (x,)), y), list(leaves.values()))
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            theta[name] = (leaf - (lr if isinstance(lr, float) else lr[name]) * gradient).detach()
    return float(F.cross_entropy(functional_call(net, theta, (query[0],)), query[1]))


def along(gradient: Weights, direction: Weights) -> float:
    return float(sum((gradient[name] * direction[name]).sum() for name in direction))


def moved(weights: Weights, direction: Weights, far: float) -> Weights:
    return {name: tensor + far * direction[name] for name, tensor in weights.items()}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("net", NETS)
def test_gradients_of_weights_and_lrs_agree_with_finite_differences(net: str, steps: int) -> None:
    made, theta, support, query = case(net, steps)
    lrs = {name: 0.2 + 0.3 * torch.rand_like(tensor) for name, tensor in theta.items()}
    found = meta_gradient(made, theta, support, query, lrs, first_order=False)
    assert found.loss == pytest.approx(query_loss(made, theta, support, query, lrs), rel=1e-12)
    small = 1e-6
    for _ in range(4):
        direction = {name: torch.randn_like(tensor) for name, tensor in theta.items()}
        by_theta = [query_loss(made, moved(theta, direction, far), support, query, lrs) for far in (small, -small)]
        assert along(found.weights, direction) == pytest.approx(
            (by_theta[0] - by_theta[1]) / (2 * small), rel=1e-5, abs=1e-7
        )
        by_alpha = [query_loss(made, theta, support, query, moved(lrs, direction, far)) for far in (small, -small)]
        assert along(found.lrs, direction) == pytest.approx(
            (by_alpha[0] - by_alpha[1]) / (2 * small), rel=1e-5, abs=1e-7
        )


@pytest.mark.parametrize("net", NETS)
def test_maml_is_not_fomaml(net: str) -> None:
    made, theta, support, query = case(net, 2)
    exact, first = (meta_gradient(made, theta, support, query, 0.4, order) for order in (False, True))
    end = {name: tensor.requires_grad_() for name, tensor in adapt_weights(made, theta, support, 0.4).items()}
    loss = F.cross_entropy(functional_call(made, end, (query[0],)), query[1])
    plain = dict(zip(end, torch.autograd.grad(loss, list(end.values())), strict=True))
    assert all(torch.allclose(first.weights[name], plain[name], rtol=1e-10, atol=1e-12) for name in plain)
    apart = sum(float((exact.weights[name] - first.weights[name]).square().sum()) for name in plain) ** 0.5
    assert apart > 0.01 * sum(float(gradient.square().sum()) for gradient in plain.values()) ** 0.5


def softmax_regression(w: Array, x: Array, y: NDArray[np.int64]) -> tuple[Array, Array]:
    """Gradient and Hessian (flat by flat) of the mean cross-entropy of scores x wᵀ."""
    scores = x @ w.T
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    gradient = (likely - np.eye(len(w))[y]).T @ x / len(y)
    inner = np.einsum("nc,cd->ncd", likely, np.eye(len(w))) - np.einsum("nc,nd->ncd", likely, likely)
    return gradient, np.einsum("ncd,ni,nj->cidj", inner, x, x).reshape(w.size, w.size) / len(y)


def test_one_step_of_meta_sgd_against_the_closed_form() -> None:
    draw = np.random.default_rng(0)
    w, alpha = draw.normal(size=(3, 4)), draw.uniform(0.1, 0.9, (3, 4))
    (sx, sy), (qx, qy) = ((draw.normal(size=(n, 4)), draw.integers(3, size=n)) for n in (6, 9))
    g, hessian = softmax_regression(w, sx, sy)
    v = softmax_regression(w - alpha * g, qx, qy)[0]
    net = nn.Linear(4, 3, bias=False).double()
    tensors = [torch.from_numpy(array) for array in (sx, sy, qx, qy)]
    found = meta_gradient(
        net,
        {"weight": torch.from_numpy(w)},
        [(tensors[0], tensors[1])],
        (tensors[2], tensors[3]),
        {"weight": torch.from_numpy(alpha)},
        first_order=False,
    )
    assert np.allclose(found.lrs["weight"], -g * v, rtol=1e-10)
    assert np.allclose(found.weights["weight"], v - (hessian @ (alpha * v).ravel()).reshape(3, 4), rtol=1e-10)


def test_adam_by_hand_and_against_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, generator=draw, dtype=torch.float64) for _ in range(4)]
    theirs = torch.ones(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theirs], lr=0.03)
    weights = {"w": torch.ones(5, dtype=torch.float64), "buffer": torch.tensor(7)}
    first = second = {"w": torch.zeros(5, dtype=torch.float64)}
    for step, gradient in enumerate(gradients, 1):
        theirs.grad = gradient
        optimizer.step()
        weights, first, second = adam_step(weights, {"w": gradient}, first, second, step, 0.03)
        if step == 1:  # at first Adam takes one step of its rate, whatever the size of the gradient
            assert torch.allclose(weights["w"], 1 - 0.03 * gradient.sign(), atol=1e-7)
    assert torch.allclose(weights["w"], theirs.detach(), rtol=1e-12) and int(weights["buffer"]) == 7


def test_adam_of_hardly_any_gradient() -> None:
    """ε stands outside the root: a gradient of ε takes half a step, none takes none."""
    gradient, none = torch.tensor([1e-8, 0.0], dtype=torch.float64), {"w": torch.zeros(2, dtype=torch.float64)}
    moved, _, _ = adam_step(none, {"w": gradient}, none, none, 1, 0.5)
    assert torch.allclose(moved["w"], torch.tensor([-0.25, 0.0], dtype=torch.float64))


def test_weights_that_do_not_learn_have_no_gradient_and_stay() -> None:
    made, theta, support, query = case("mlp", 1)
    frozen = next(iter(theta))
    dict(made.named_parameters())[frozen].requires_grad_(False)
    assert trainable_weights(made).keys() == theta.keys() - {frozen}
    found = meta_gradient(made, trainable_weights(made), support, query, 0.3, first_order=False)
    assert found.weights.keys() == found.lrs.keys() == trainable_weights(made).keys()


def test_fine_tuning_normalizes_as_training_does() -> None:
    made, theta, support, _ = case("cnn, batch", 2)
    expected = adapt_weights(copy.deepcopy(made).train(), theta, support, 0.3)
    adapt_in_place(made.eval(), support, 0.3)
    assert all(torch.allclose(tensor, expected[name]) for name, tensor in trainable_weights(made).items())


# --- a federation in which everything can be done by hand -----------------------------------------------------

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
    """Ten clients whose samples are in time: the first ones are the support."""
    return replace(from_clients(pairs, test=(PAIRS[0][0], PAIRS[0][1])), time_ordered=True)


def split(client: int, share: float) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
    x, y = PAIRS[client]
    cut = round(len(y) * share)
    return (x[:cut].astype(float), y[:cut]), (x[cut:].astype(float), y[cut:])


def by_hand(w: Array, client: int, alpha: Any, share: float) -> tuple[Array, Array]:
    """∇_θ and ∇_α of a client's query loss after one inner step."""
    support, query = split(client, share)
    g, hessian = softmax_regression(w, *support)
    v = softmax_regression(w - alpha * g, *query)[0]
    return v - (hessian @ (alpha * v).ravel()).reshape(w.shape), -g * v


def close(given: Tensor, expected: Array, tolerance: float = 3e-6) -> bool:
    return given.shape == expected.shape and bool(np.abs(given.double().numpy() - expected).max() <= tolerance)


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("algorithm", ["maml", "fomaml", "meta-sgd"])
def test_three_rounds_of_fedmeta_by_hand(algorithm: Any, weights: Any) -> None:
    method = FedMeta(
        rounds=3, cohort=8, algorithm=algorithm, weighting=weights, inner_lr=0.7, meta_lr=0.05, support_fraction=0.4
    )
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    phi = np.stack([WEIGHT, np.full_like(WEIGHT, 0.7)])
    first = second = np.zeros_like(phi)
    for step in (1, 2, 3):
        gradients = []
        for client in GROUPS.train:
            theta, alpha = by_hand(phi[0], client, phi[1], 0.4)
            if algorithm == "fomaml":
                support, query = split(client, 0.4)
                theta = softmax_regression(phi[0] - 0.7 * softmax_regression(phi[0], *support)[0], *query)[0]
            gradients.append(np.stack([theta, alpha if algorithm == "meta-sgd" else np.zeros_like(alpha)]))
        shares = [len(PAIRS[client][1]) if weights == "size" else 1 for client in GROUPS.train]
        gradient = np.average(gradients, axis=0, weights=shares)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        phi = phi - 0.05 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    assert state.step == 3 and close(state.algorithm["weight"], phi[0], 1e-5)
    assert (ALPHA + "weight" in state.algorithm) == (algorithm == "meta-sgd")
    if algorithm == "meta-sgd":
        assert close(state.algorithm[ALPHA + "weight"], phi[1], 1e-5)
    assert close(state.first_moment["weight"], first[0]) and np.abs(phi[0] - WEIGHT).max() > 0.05


def test_local_steps_move_theta_and_the_server_updates_alpha() -> None:
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
    ends, alpha_gradients = [], []
    for client in GROUPS.train:
        one, first = by_hand(WEIGHT, client, 0.7, 0.4)
        two, second = by_hand(WEIGHT - 0.5 * one, client, 0.7, 0.4)
        ends.append(WEIGHT - 0.5 * one - 0.5 * two)
        alpha_gradients.append((first + second) / 2)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    assert close(state.algorithm["weight"], np.average(ends, axis=0, weights=sizes), 1e-5)
    sign = np.sign(np.average(alpha_gradients, axis=0, weights=sizes))
    assert close(state.algorithm[ALPHA + "weight"], 0.7 - 0.05 * sign, 1e-4)  # the first step of Adam
    assert close(state.first_moment[ALPHA + "weight"], 0.1 * np.average(alpha_gradients, axis=0, weights=sizes))
    assert method.search_space().keys() == {"local_lr", "inner_lr"} and FedMeta().search_space().keys() == {
        "meta_lr",
        "inner_lr",
    }


def batches(method: Any, client: int, count: int) -> list[tuple[Array, Any]]:
    x, y = PAIRS[client]
    numbers = torch.randint(len(y), (count, method.batch_size), generator=stream(SEED, 1, client, "batches"))
    return [(x[row].astype(float), y[row]) for row in numbers.numpy()]


def descent(w: Array, steps: Sequence[tuple[Array, Any]], lr: float) -> Array:
    for batch in steps:
        w = w - lr * softmax_regression(w, *batch)[0]
    return w


def test_fedavg_meta_and_reptile_by_hand() -> None:
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    method = FedAvgMeta(rounds=1, cohort=8, local_steps=3, batch_size=2, lr=0.3)
    ends = [descent(WEIGHT, batches(method, client, 3), 0.3) for client in GROUPS.train]
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert close(model, np.average(ends, axis=0, weights=sizes))
    reptile = Reptile(rounds=1, cohort=8, local_steps=3, batch_size=2, lr=0.3, outer_lr=0.25)
    model = fewer.run(reptile, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert close(model, WEIGHT + 0.25 * (np.mean(ends, axis=0) - WEIGHT))


@pytest.mark.parametrize("first_order", [False, True])
def test_per_fedavg_by_hand(first_order: bool) -> None:
    method = PerFedAvg(rounds=1, cohort=8, local_steps=2, batch_size=3, lr=0.4, adapt_lr=0.6, first_order=first_order)
    ends = []
    for client in GROUPS.train:
        w = WEIGHT
        drawn = batches(method, client, 4)
        for inner, outer in (drawn[:2], drawn[2:]):
            g, hessian = softmax_regression(w, *inner)
            v = softmax_regression(w - 0.6 * g, *outer)[0]
            curve = 0.6 * (hessian @ v.ravel()).reshape(w.shape) if not first_order else 0
            w = w - 0.4 * (v - curve)
        ends.append(w)
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert close(model, np.mean(ends, axis=0))


def test_inner_steps_of_training_are_as_many_as_are_set() -> None:
    method = FedMeta(rounds=1, cohort=8, inner_steps=3, inner_lr=0.7, support_fraction=0.4)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    gradients = []
    for client in GROUPS.train:
        (sx, sy), (qx, qy) = ([torch.from_numpy(array) for array in half] for half in split(client, 0.4))
        start = w = torch.from_numpy(WEIGHT).requires_grad_()
        for _ in range(3):  # all steps in one graph
            (gradient,) = torch.autograd.grad(F.cross_entropy(sx @ w.T, sy), w, create_graph=True)
            w = w - 0.7 * gradient
        gradients.append(torch.autograd.grad(F.cross_entropy(qx @ w.T, qy), start)[0].numpy())
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    assert close(state.first_moment["weight"], 0.1 * np.average(gradients, axis=0, weights=sizes))


def test_samples_of_a_step_are_as_many_as_are_set_and_from_their_half() -> None:
    samples = Samples(torch.arange(20.0)[:, None], torch.zeros(20, dtype=torch.int64))
    support, queries = samples.select(torch.arange(8)), samples.select(torch.arange(8, 20))
    method, draw = FedMeta(inner_steps=3, batch_size=5, queries=4), stream("test")
    inner, outer = method.support_batches(support, draw), method.query_batch(queries, draw)
    assert [len(x) for x, _ in inner] == [5, 5, 5] and not torch.equal(inner[0][0], inner[1][0])
    assert float(torch.cat([x for x, _ in inner]).max()) < 8
    assert len(set(outer[0][:, 0].tolist())) == 4 and float(outer[0].min()) >= 8
    assert len(FedMeta(queries=99).query_batch(queries, draw)[0]) == 12


def test_fedavg_with_adam_is_torchs_adam_begun_anew() -> None:
    method = FedAvgMeta(rounds=1, cohort=8, optimizer="adam", lr=0.07, local_steps=3, batch_size=2)
    ends = []
    for client in GROUPS.train:
        w = torch.from_numpy(WEIGHT.copy()).requires_grad_()
        optimizer = torch.optim.Adam([w], lr=0.07)
        for batch in batches(method, client, 3):
            w.grad = torch.from_numpy(softmax_regression(w.detach().numpy(), *batch)[0])
            optimizer.step()
        ends.append(w.detach().numpy())
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert close(model, np.average(ends, axis=0, weights=[len(PAIRS[client][1]) for client in GROUPS.train]), 1e-5)


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_running_statistics_are_averaged_as_gradients_are(weights: Any) -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.BatchNorm1d(FEATURES, momentum=1.0), nn.Linear(FEATURES, CLASSES))

    method = FedMeta(rounds=1, cohort=8, support_fraction=0.4, weighting=weights)
    state = fewer.run(method, federation(), model=Normed(), seed=SEED).state
    means = [split(client, 0.4)[1][0].mean(axis=0) for client in GROUPS.train]  # the last batch that each has seen
    shares = [len(PAIRS[client][1]) if weights == "size" else 1 for client in GROUPS.train]
    assert close(state.algorithm["0.running_mean"], np.average(means, axis=0, weights=shares))


def test_fedavg_with_adam_learns_and_is_not_sgd() -> None:
    one, two = (
        fewer.run(FedAvgMeta(rounds=1, optimizer=kind, lr=0.1), federation(), model=linear(), seed=SEED).state.model
        for kind in ("sgd", "adam")
    )
    assert not torch.equal(one["weight"], two["weight"])


# --- evaluation clients, and their samples --------------------------------------------------------------------


def accuracy(w: Array, clients: Sequence[int], steps: int, lr: float, share: float) -> tuple[float, dict[str, float]]:
    """Pooled and by client, after adapting on the support."""
    right = {}
    for client in clients:
        support, (x, y) = split(client, share)
        end = descent(w, [support] * steps, lr)
        right[client] = (x @ end.T).argmax(axis=1) == y
    by_client = {str(client): float(hits.mean()) for client, hits in right.items()}
    return float(np.concatenate(list(right.values())).mean()), by_client


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
    if len(by_client) == len(evaluated):  # else some pair of arrays is there twice
        assert result.accuracy == pytest.approx(pooled)
    assert all(value == by_client[str(int(client) % 10)] for client, value in result.metrics["clients"].items())
    assert result.metrics["fairness"] == fairness(list(result.metrics["clients"].values()))


@pytest.mark.parametrize(
    ("algorithm", "adapt_steps"), [("maml", None), ("meta-sgd", None), ("meta-sgd", 3), ("maml", 0)]
)
def test_new_clients_adapt_with_what_was_learned(algorithm: Any, adapt_steps: int | None) -> None:
    method = FedMeta(rounds=2, algorithm=algorithm, inner_steps=2, adapt_steps=adapt_steps, inner_lr=0.7, meta_lr=0.3)
    result = fewer.run(method, federation(), model=linear(), seed=SEED)
    phi = {name: tensor.double().numpy() for name, tensor in result.state.algorithm.items()}
    alpha = phi[ALPHA + "weight"] if algorithm == "meta-sgd" else 0.7
    total = count = 0.0
    for client in GROUPS.test:
        support, (x, y) = split(client, 0.2)
        w = phi["weight"]
        for _ in range(2 if adapt_steps is None else adapt_steps):
            w = w - alpha * softmax_regression(w, *support)[0]
        total += float(F.cross_entropy(torch.from_numpy(x @ w.T), torch.from_numpy(y), reduction="sum"))
        count += len(y)
    assert result.history[-1]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert algorithm == "maml" or np.abs(alpha - 0.7).max() > 0.1


def test_only_training_clients_train_and_only_new_ones_are_measured(tmp_path: Path) -> None:
    fewer.run(FedMeta(rounds=3, cohort=4), federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    lines = [line.split(",") for line in (tmp_path / "run/ledger.csv").read_text().splitlines()[1:]]
    trained = {int(line[1]) for line in lines if line[3] == "local_train"}
    assert trained and trained <= set(GROUPS.train)
    assert {int(line[1]) for line in lines if line[3].startswith("evaluate")} == set(GROUPS.test)


def test_trials_are_evaluated_on_validation_clients_and_see_no_new_one() -> None:
    seen: set[int] = set()

    class Watched(FedMeta):
        def eval_cohort_of(self, clients: fewer.Clients) -> list[int]:
            seen.update(found := super().eval_cohort_of(clients))
            return found

    experiment = build_experiment(
        parse_settings({"seed": SEED, "method": "fedmeta"}), Watched(rounds=1), federation(), linear()
    )
    tuned, trials = tune_experiment(experiment, 3)
    assert len(trials) == 3 and seen == set(GROUPS.validation)
    assert tuned.method.eval_clients == "new" and tuned.data is experiment.data  # type: ignore[attr-defined]


def test_a_fine_tuning_that_does_not_happen_is_not_tuned() -> None:
    assert FedAvgMeta(adapt_steps=0).search_space().keys() == {"lr"}
    assert FedAvgMeta(adapt_steps=1).search_space().keys() == {"lr", "adapt_lr"}


def test_support_and_queries_of_a_new_client_are_the_same_for_all_methods_and_rounds() -> None:
    drawn: dict[str, list[Any]] = {}

    def watching(kind: type[NewClients]) -> type[NewClients]:
        class Watched(kind):  # type: ignore[misc, valid-type]
            def support_and_query(self, client: Any, generator: Any = None) -> Any:
                found = super().support_and_query(client, generator)
                if generator is None:
                    drawn.setdefault(f"{kind.__name__} {client.id}", []).append([half.rows.tolist() for half in found])
                return found

        return Watched

    data = from_clients(PAIRS, test=(PAIRS[0][0], PAIRS[0][1]))
    for kind in (FedMeta, FedAvgMeta):
        fewer.run(watching(kind)(rounds=2), data, model=linear(), seed=SEED)
    divisions = [division for each in drawn.values() for division in each]
    assert len(divisions) > 4 and all(division == divisions[0] for division in divisions)
    assert divisions[0][0] != sorted(divisions[0][0]) or len(divisions[0][0]) == 1


def test_divisions_are_drawn_anew_in_training_and_stay_for_new_clients() -> None:
    drawn: dict[tuple[int, int, bool], list[Any]] = {}

    class Watched(FedMeta):
        def support_and_query(self, client: Any, generator: Any = None) -> Any:
            found: Any = super().support_and_query(client, generator)
            drawn.setdefault((client.seed, client.id, generator is not None), []).append(
                [half.rows.tolist() for half in found]
            )
            return found

    groups = {}
    for seed in (0, 1):
        x, y = np.zeros((30, FEATURES), np.float32), np.arange(30) % 2
        data = from_clients([(x, y)] * 20, test=(x, y))
        fewer.run(Watched(rounds=2, cohort=16), data, model=linear(), seed=seed)
        groups[seed] = split_clients(20, seed=seed)

    def within(rows: Any, client: int) -> tuple[int, ...]:  # numbers within the client
        assert sorted(rows[0] + rows[1]) == list(range(30 * client, 30 * client + 30)) and len(rows[0]) == 6
        return tuple(row - 30 * client for row in rows[0])

    for seed in (0, 1):
        for client in groups[seed].train:
            one, two = (within(rows, client) for rows in drawn[seed, client, True])
            assert one != two
        for client in groups[seed].test:
            assert len({within(rows, client) for rows in drawn[seed, client, False]}) == 1
    members: list[Any] = [
        SimpleNamespace(train=data.client(0).train, seed=n // 2, id=n % 2, time_ordered=False) for n in range(4)
    ]
    firsts: list[Any] = [FedMeta().support_and_query(each)[0].rows for each in members]
    assert len({tuple(rows.tolist()) for rows in firsts}) == 4  # by seed and client


def test_a_client_uses_no_more_samples_than_are_allowed() -> None:
    sizes: list[int] = []

    class Watched(FedAvgMeta):
        def client_samples(self, client: Any) -> Any:
            sizes.append(len(found := super().client_samples(client)))
            assert found.rows is not None and found.rows[[0, -1]].tolist() == client.train.rows[[0, -1]].tolist()
            return found

    fewer.run(Watched(rounds=1, max_samples=6), federation(), model=linear(), seed=SEED)
    assert max(sizes) == 6 and min(sizes) == 5


ODD = [
    *(FedMeta(rounds=2, cohort=32, algorithm=kind, inner_steps=2) for kind in ("maml", "fomaml", "meta-sgd")),
    FedMeta(rounds=2, cohort=32, local_steps=2, batch_size=3, queries=3, clip_norm=1.0),
    *(FedAvgMeta(rounds=2, cohort=32, local_steps=2, adapt_steps=steps) for steps in (0, 2)),
    FedAvgMeta(rounds=2, cohort=32, local_steps=2, optimizer="adam"),
    *(PerFedAvg(rounds=2, cohort=32, local_steps=2, first_order=flag) for flag in (False, True)),
    Reptile(rounds=2, cohort=32, local_steps=2),
    *(Alone(learner=kind) for kind in ("net", "most-used", "last-used", "naive-bayes")),
]


@pytest.mark.parametrize("eval_clients", ["new", "validation"])
@pytest.mark.parametrize("method", ODD, ids=lambda method: method.name)
def test_clients_with_one_sample_one_class_or_nothing_break_neither_round_nor_evaluation(
    method: NewClients, eval_clients: Any, tmp_path: Path
) -> None:
    pairs = [PAIRS[client % 10] for client in range(40)]
    groups = split_clients(40, seed=SEED)
    for group in groups:  # of each kind of client one with one sample, one with nothing, one with one class
        one, none, same = group[:3]
        pairs[one] = (pairs[one][0][:1], pairs[one][1][:1])
        pairs[none] = (np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))
        pairs[same] = (pairs[same][0], np.zeros_like(pairs[same][1]))
    chosen = method.model_copy(update={"eval_clients": eval_clients})
    result = fewer.run(chosen, federation(pairs), model=linear(), seed=SEED, out=tmp_path)
    evaluated = groups.test if eval_clients == "new" else groups.validation
    assert result.metrics["clients"].keys() == {str(client) for client in evaluated[2:]}
    assert all(torch.isfinite(tensor).all() for tensor in chosen.broadcast(result.state).values())
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    reported = {(event["client"], event["detail"]) for event in events if event.get("reason") == "unable"}
    few, nothing = "1 sample: it is the support set, and the query set is empty", "no training data"
    expected = {(evaluated[0], few), (evaluated[1], nothing)}
    if not isinstance(method, Alone):
        expected.add((groups.train[1], nothing))
    if isinstance(method, FedMeta):  # the others train on all samples, also on one
        expected.add((groups.train[0], few))
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


def test_no_client_with_queries_gets_one_line() -> None:
    pairs = list(PAIRS)
    for client in GROUPS.test:
        pairs[client] = (PAIRS[client][0][:1], PAIRS[client][1][:1])
    with pytest.raises(SettingError, match="no test samples to evaluate on"):
        fewer.run(FedMeta(rounds=1), federation(pairs), model=linear(), seed=SEED)


def test_too_few_clients_get_one_line() -> None:
    with pytest.raises(SettingError, match="cannot split 4 clients by fractions"):
        fewer.run(FedMeta(rounds=1), federation(PAIRS[:4]), model=linear())
    with pytest.raises(SettingError, match=r"cohort = 9, but there are only 8 clients \(allowed: 1 … 8\)"):
        fewer.run(FedMeta(rounds=1, cohort=9), federation(), model=linear())


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"algorithm": "mmaml"}, "'maml', 'fomaml' or 'meta-sgd'"),
        ({"support_fraction": 1.0}, "less than 1"),
        ({"weighting": "sizes"}, "'size' or 'uniform'"),
        ({"eval_clients": "old"}, "'new' or 'validation'"),
    ],
)
def test_wrong_settings_name_what_is_allowed(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.run("fedmeta", "digits", method_options=setting)


def test_fairness_by_hand() -> None:
    found = fairness([0.5, 1.0, 0.0, 0.5])
    assert found == {"mean": 0.5, "variance": 0.125, "worst": 0.0}
    assert fairness([i / 20 for i in range(20)])["worst"] == pytest.approx(0.025)
    assert fairness([i / 20 for i in range(11)])["worst"] == pytest.approx(0.025)  # a tenth of 11 is two


# --- promises -------------------------------------------------------------------------------------------------

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
    whole = fewer.run(method, data, seed=2)
    pooled = fewer.run(method, data, seed=2, runtime="pool")

    with pytest.raises(Stop):
        fewer.run(method, data, seed=2, out=tmp_path / "run", progress=Stopping())
    resumed = fewer.resume(tmp_path / "run")
    for other in (pooled, resumed):
        assert [{**h, "seconds": 0} for h in other.history] == [{**h, "seconds": 0} for h in whole.history]
        mine, theirs = method.broadcast(other.state), method.broadcast(whole.state)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_batch_norm_is_learned_and_its_statistics_are_averaged() -> None:
    data = fewer.data.load("digits", clients=12, alpha=1.0)
    state = fewer.run(FedMeta(rounds=2, algorithm="meta-sgd"), data, norm="batch", seed=2).state
    assert int(state.algorithm["encoder.1.num_batches_tracked"]) == 4  # support and queries, two rounds
    assert float(state.algorithm["encoder.1.running_mean"].abs().sum()) > 0
    assert ALPHA + "encoder.1.weight" in state.algorithm and ALPHA + "encoder.1.running_mean" not in state.algorithm


def test_bytes_are_those_of_the_algorithm() -> None:
    up = {}
    names: tuple[Any, ...] = ("maml", "fomaml", "meta-sgd")
    for algorithm in names:
        method = FedMeta(rounds=1, cohort=5, algorithm=algorithm)
        result = fewer.run(method, "digits", clients=12)
        size = 4 * sum(p.numel() for p in result.task.net().parameters()) * (2 if algorithm == "meta-sgd" else 1)
        up[algorithm] = result.metrics["up"]
        assert 5 * size < result.metrics["up"] < 5 * size * 1.05 + 5000
    assert up["maml"] == up["fomaml"] < up["meta-sgd"]


def test_a_float16_gradient_costs_half_and_still_learns() -> None:
    one, two = (fewer.run(FedMeta(rounds=1, codec=codec), "digits", clients=12) for codec in ("float32", "float16"))
    assert two.metrics["up"] < 0.6 * one.metrics["up"]


# --- a new client's own model ----------------------------------------------------------------------------------


def test_adapt_writes_a_personal_model_that_predicts(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    words: list[str | Path] = ["fedmeta", *DIGITS, "--clients", "12", "--rounds", "2", "-o", "inner_lr=0.5"]
    assert "worst tenth" in call("run", *words, "--out", run, "--no-report").stdout
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 255, (30, 1, 8, 8), np.uint8), np.full(30, 3)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    result = call("adapt", run, "--data", f"npz:{tmp_path / 'mine.npz'}", "--out", mine)
    assert "adapted to 30 samples" in result.stderr and str(mine / "model.safetensors") in result.stdout
    by_hand = open_run(run)
    start = by_hand.model
    pixels = by_hand.data.test
    batch = (torch.from_numpy(x).float() - pixels.shift) * pixels.scale, torch.from_numpy(y)
    start.train()
    end = adapt_weights(start, trainable_weights(start), [batch], 0.5)
    written = safetensors.torch.load_file(mine / "model.safetensors")
    assert all(torch.allclose(written[name], end[name], atol=1e-6) for name in end)
    from_python = by_hand.adapt(x, y).state_dict()
    assert all(torch.equal(written[name], from_python[name]) for name in written)
    sure = {}
    options: tuple[list[str | Path], ...] = ([], ["--weights", mine / "model.safetensors"])
    for weights in options:
        lines = call("predict", run, "--data", f"npz:{tmp_path / 'mine.npz'}", *weights).stdout.splitlines()[1:]
        sure[len(weights)] = sum(line.split(",")[1] == "3" for line in lines)
    assert sure[2] == 30 > sure[0]


def test_what_cannot_be_adapted_gets_one_line(tmp_path: Path) -> None:
    call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "run", "--no-report")
    np.savez(tmp_path / "mine.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.zeros(3, int))
    words: list[str | Path] = ["adapt", tmp_path / "run", "--out", tmp_path / "mine", "--data"]
    assert (
        "(allowed: alone, fedavg-meta, fedmeta, per-fedavg, reptile)"
        in call(*words, f"npz:{tmp_path}/mine.npz", code=2).stderr
    )
    call("run", "fedmeta", *DIGITS, "--clients", "12", "--rounds", "1", "--out", tmp_path / "meta", "--no-report")
    words[1] = tmp_path / "meta"
    np.savez(tmp_path / "bare.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
    assert "has no labels to adapt to" in call(*words, f"npz:{tmp_path}/bare.npz", code=2).stderr
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.array([0, 1, 10]))
    assert "a label of 10 to adapt to (allowed: 0 … 9)" in call(*words, f"npz:{tmp_path}/odd.npz", code=2).stderr
    result = fewer.run(FedMeta(rounds=1, cohort=2), federation(), model=linear(), seed=SEED)
    wide, whole = np.zeros((3, FEATURES + 1), np.float32), np.zeros((3, FEATURES), int)
    for x, word in ((wide, f"inputs of shape ({FEATURES + 1},)"), (whole, "inputs; the model was trained on")):
        with pytest.raises(DataError, match=re.escape(word)):
            result.adapt(x, [0, 1, 1])


# --- counting -------------------------------------------------------------------------------------------------


def test_flops_of_a_linear_net_by_arithmetic() -> None:
    net = nn.Linear(5, 4, bias=False)
    theta, batch = trainable_weights(net), (torch.randn(6, 5), torch.randint(4, (6,)))
    one = 2 * 6 * 5 * 4  # scores of 6 samples; a gradient by the weights costs the same
    with count_flops() as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=True)
    assert counter.flops == 4 * one
    with count_flops() as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=False)
    assert counter.flops == 6 * one  # ∇_θ⟨g, v⟩: of g back to the scores, and from there to the weights
    with count_flops(False) as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=False)
    assert counter.flops == 0


def test_operations_of_like_work_are_counted_once_but_not_of_other_nets() -> None:
    class Often(nn.Module):
        """Its layers do not tell how often they are used."""

        def __init__(self, times: int) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(FEATURES, CLASSES), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.stack([self.layer(x) for _ in range(self.times)]).sum(0)
            return found

    def flops(times: int) -> Any:
        method = FedMeta(rounds=1, cohort=8, count_flops=True)
        return fewer.run(method, federation(), model=partial(Often, times), seed=SEED).history[0]["flops"]

    assert (one := flops(1)) and flops(2) == 2 * one and flops(1) == one


def test_flops_of_an_lstm_are_counted_also_where_its_kernel_is_fused() -> None:
    net = CharLSTM((6,), 4, vocabulary=9, hidden=16)
    x = torch.randint(9, (3, 6))
    with count_flops() as counter:
        scores = net(x)
    forward = 2 * 3 * 6 * 4 * 16 * ((8 + 16) + (16 + 16)) + 2 * 3 * 16 * 4
    assert counter.flops == forward
    with count_flops() as counter:
        scores.sum().backward()
    assert 1.5 * forward < counter.flops <= 2 * forward


def test_a_long_gradient_is_shortened() -> None:
    """Its length is that of all weights together."""
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, CLASSES)
    changes = []
    for clip in (None, 1e-3, 1e3):
        method = FedMeta(rounds=1, cohort=1, local_steps=1, local_lr=1.0, clip_norm=clip)
        end = fewer.run(method, federation(), model=net, seed=SEED).state.algorithm
        changes.append(torch.cat([(net.state_dict()[name] - end[name]).flatten() for name in ("weight", "bias")]))
    assert float(changes[1].norm()) == pytest.approx(1e-3, rel=1e-3) and torch.equal(changes[0], changes[2])
    assert torch.allclose(changes[1] / changes[1].norm(), changes[0] / changes[0].norm(), atol=1e-3)


def test_flops_add_up_over_rounds_and_clients() -> None:
    method = FedMeta(rounds=2, cohort=8, count_flops=True, support_fraction=0.4)
    result = fewer.run(method, federation(), model=linear(), seed=SEED)
    each = sum(
        2 * FEATURES * CLASSES * (4 * len(split(client, 0.4)[0][1]) + 2 * len(split(client, 0.4)[1][1]))
        for client in GROUPS.train
    )
    assert [line["flops"] for line in result.history] == [each, 2 * each]
    result = fewer.run(
        FedAvgMeta(rounds=2, cohort=8, count_flops=True, local_steps=3, batch_size=2),
        federation(),
        model=linear(),
        seed=SEED,
    )
    each = 8 * 3 * 2 * (2 * 2 * FEATURES * CLASSES)  # clients, steps, there and back
    assert [line["flops"] for line in result.history] == [each, 2 * each]


def test_cost_of_a_target_by_hand() -> None:
    def history(accuracies: Sequence[float | None]) -> list[dict[str, Any]]:
        lines = [{"round": r, "up": 1e6 * r, "down": 2e6 * r, "flops": 5e9 * r} for r in range(1, len(accuracies) + 1)]
        return [line | ({} if a is None else {"accuracy": a}) for line, a in zip(lines, accuracies, strict=True)]

    runs = [history([0.1, 0.5, None, 0.7]), history([0.3, 0.3, 0.9, 0.5])]
    assert best_accuracy(runs) == pytest.approx(0.6)
    assert cost_to_reach(runs, 0.4) == TargetCost(0.4, 2, 6.0, 10.0)
    assert cost_to_reach(runs, 0.61) == TargetCost(0.61)


def test_a_recipe_tells_what_a_target_costs(tmp_path: Path) -> None:
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
    found = cells[0].target_cost
    assert found and found.round and found.mb and found.gflop and found.target == cells[1].target_cost.target  # type: ignore[union-attr]
    page = recipes.render_markdown(plan, cells, "c", False)
    assert f"| FedAvg | 50 % | {100 * found.target:.2f} | {found.round} | {found.mb:.3g} | {found.gflop:.3g} |" in page
    lines = [(tmp_path / f"runs/50/{row}-seed0/metrics.jsonl").read_text().splitlines() for row in ("fedavg", "maml")]
    first, second = (json.loads(line[-1])["clients"] for line in lines)
    gains = [second[client] - first[client] for client in first]
    assert len(gains) == 2 and list(first) == list(second)
    half = 12.706 * abs(gains[0] - gains[1]) / 2  # Student's t with one degree of freedom
    assert "| FedAvg | 50 % | – |" in page
    assert f"| MAML | 50 % | {50 * sum(gains):.1f} ± {100 * half:.1f} |" in page
    pages = write_report([tmp_path / "runs/50/fedavg-seed0"], tmp_path / "report")
    assert pages[0].exists()


def test_the_spread_over_clients_is_drawn() -> None:
    line = {"round": 1, "accuracy": 0.5, "clients": {str(n): n / 10 for n in range(10)}}
    assert plot_density({"fedmeta": [[line]]}) is not None
    assert plot_density({"fedmeta": [[{"round": 1, "accuracy": 0.5}]]}) is None


def test_a_net_is_left_as_it_was() -> None:
    made, theta, support, query = case("mlp", 2)
    before = copy.deepcopy(made.state_dict())
    meta_gradient(made, theta, support, query, 0.3, first_order=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_the_fused_kernel_is_back_after_a_second_derivative() -> None:
    made, theta, support, query = case("lstm", 1)
    before = torch._C._get_mkldnn_enabled()
    meta_gradient(made, theta, support, query, 0.3, first_order=False)
    assert torch._C._get_mkldnn_enabled() == before
    with pytest.raises(ValueError, match="batch_size"):
        meta_gradient(made, theta, [(support[0][0], query[1])], query, 0.3, first_order=False)
    assert torch._C._get_mkldnn_enabled() == before
