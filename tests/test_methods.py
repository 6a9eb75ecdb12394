"""Methods against a NumPy reference whose gradients come from formulas, not from autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fewer
from fewer.choices import Norm
from fewer.data import ArrayData, from_clients
from fewer.errors import SettingError
from fewer.learning import draw_batches, evaluate_net, sgd, weighted_mean
from fewer.methods import Client, Method
from fewer.methods.base import ContextFactory
from fewer.methods.fedavg import FedAvg
from fewer.methods.fedbn import FedBN
from fewer.methods.fedprox import FedProx
from fewer.methods.local import Local
from fewer.models import SmallCNN, Task, Weights, get_weights, load_weights, norm_weight_names
from fewer.runtime import HandlerRunner, Inline, stream
from fewer.runtime.handlers import Call, Reply
from fewer.wire import Refused, decode

torch.set_num_threads(1)

Array = NDArray[np.float64]
Batch = tuple[Array, NDArray[np.int64]]

FEATURES, CLASSES, SIZES, SEED = 3, 2, (3, 5, 2), 4
DRAW = np.random.default_rng(1)
PAIRS = [
    (DRAW.normal(client, 1, (size, FEATURES)).astype(np.float32), DRAW.integers(CLASSES, size=size))
    for client, size in enumerate(SIZES)
]
TEST = DRAW.normal(1, 1, (11, FEATURES)).astype(np.float32), DRAW.integers(CLASSES, size=11)
WEIGHT: Array = DRAW.normal(0, 0.5, (CLASSES, FEATURES)).astype(np.float32).astype(np.float64)


def linear() -> nn.Module:
    net = nn.Linear(FEATURES, CLASSES, bias=False)
    load_weights(net, {"weight": torch.from_numpy(WEIGHT)})
    return net


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    """Three clients with 3, 5 and 2 samples, and a global test set."""
    return from_clients(pairs, test=TEST)


def client_batches(method: FedAvg, client: int, round: int) -> list[Batch]:
    """The batches of a client in a round, drawn from the stream of (seed, round, client)."""
    x, y = PAIRS[client]
    indices = torch.randint(
        len(y), (method.local_steps, method.batch_size), generator=stream(SEED, round, client, "batches")
    )
    return [(x[row].astype(np.float64), y[row]) for row in indices.numpy()]


def residual(scores: Array, y: NDArray[np.int64]) -> Array:
    """Derivative of the mean cross-entropy by the scores: (softmax − one-hot) / batch size."""
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return np.asarray((probabilities - np.eye(CLASSES)[y]) / len(y))


def gradient(w: Array, x: Array, y: NDArray[np.int64]) -> Array:
    return residual(x @ w.T, y).T @ x


def run_sgd(w: Array, batches: list[Batch], lr: float, mu: float = 0.0) -> Array:
    start = w
    for x, y in batches:
        w = w - lr * (gradient(w, x, y) + mu * (w - start))
    return w


def weighted_average(models: Sequence[Array], sizes: Sequence[int] = SIZES) -> Array:
    return np.asarray(sum(size * model for size, model in zip(sizes, models, strict=True)) / sum(sizes))


def is_close(actual: Tensor, expected: Array, tolerance: float = 2e-6) -> bool:
    return actual.shape == expected.shape and bool(np.abs(actual.double().numpy() - expected).max() <= tolerance)


def trained_weight(method: FedAvg, **settings: Any) -> Tensor:
    weight = fewer.run(method, federation(), model=linear(), seed=SEED, **settings).state.model["weight"]
    assert isinstance(weight, Tensor)
    return weight


@dataclass
class Wiretap(Inline):
    """Records every message."""

    down: list[tuple[Call, bytes]] = field(default_factory=list)
    up: list[tuple[Call, bytes]] = field(default_factory=list)

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        self.down += calls
        for call, reply in super()._deliver_calls(calls):
            if reply is not None:
                assert reply.failure in (None, "unable"), reply.detail
                self.up.append((call, reply.blob))
            yield call, reply


@dataclass
class Harness:
    """Runs the rounds of a method without the engine."""

    method: Method
    task: Task
    clients: Wiretap
    contexts: ContextFactory
    state: Any

    def rounds(self, count: int) -> Any:
        for _ in range(count):
            self.clients.round += 1
            self.state = self.method.round(self.state, self.clients)
        return self.state

    def client(self, id: int) -> Client:
        context = self.contexts(id, self.clients.round)
        assert isinstance(context, Client)
        return context

    def personal_model(self, client: int) -> Weights:
        return get_weights(self.method.personal_model(self.client(client), self.method.broadcast(self.state)))


def make_harness(method: Method, net: nn.Module, folder: Path, pairs: Sequence[tuple[Any, Any]] = PAIRS) -> Harness:
    data = federation(pairs)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return Harness(method, task, Wiretap(len(data), SEED, handlers=handlers), contexts, method.init(task, SEED))


def data_bytes(blob: bytes) -> int:
    """The bytes of a message after its header."""
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


# --- FedAvg ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "batch_size", "lr"), [(1, 1, 0.5), (1, 4, 0.1), (3, 2, 0.5)])
def test_fedavg_round_is_the_mean_of_local_models_by_size(steps: int, batch_size: int, lr: float) -> None:
    method = FedAvg(rounds=1, local_steps=steps, batch_size=batch_size, lr=lr)
    expected = weighted_average([run_sgd(WEIGHT, client_batches(method, client, 1), lr) for client in range(3)])
    assert is_close(trained_weight(method), expected)
    assert np.abs(expected - WEIGHT).max() > 1e-2


def test_fedavg_second_round_continues_from_the_mean() -> None:
    method = FedAvg(rounds=2, local_steps=2, batch_size=3, lr=0.3)
    w = WEIGHT
    for round in (1, 2):
        w = weighted_average([run_sgd(w, client_batches(method, client, round), 0.3) for client in range(3)])
    assert is_close(trained_weight(method), w)


def test_fedavg_on_identical_samples_does_not_depend_on_the_draw() -> None:
    """All samples of a client are the same, so it does not matter which are drawn."""
    pairs = [(np.tile(x[:1], (len(y), 1)), np.repeat(y[:1], len(y))) for x, y in PAIRS]
    result = fewer.run(
        FedAvg(rounds=1, local_steps=4, batch_size=7, lr=0.2), federation(pairs), model=linear(), seed=SEED
    )
    local_models = [run_sgd(WEIGHT, [(x[:1].astype(np.float64), y[:1])] * 4, 0.2) for x, y in pairs]
    assert is_close(result.state.model["weight"], weighted_average(local_models))


def test_fedavg_averages_over_the_clients_that_answered(tmp_path: Path) -> None:
    empty = (np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))
    method = FedAvg(local_steps=2, batch_size=2, lr=0.5)
    state = make_harness(method, linear(), tmp_path, [PAIRS[0], empty, PAIRS[2]]).rounds(1)
    local_models = [run_sgd(WEIGHT, client_batches(method, client, 1), 0.5) for client in (0, 2)]
    assert is_close(state.model["weight"], weighted_average(local_models, [3, 2]))


def test_fedavg_averages_over_the_cohort_only(tmp_path: Path) -> None:
    method = FedAvg(local_steps=2, batch_size=2, lr=0.5, cohort=1)
    harness = make_harness(method, linear(), tmp_path)
    state = harness.rounds(1)
    (asked,) = {call.client for call, _ in harness.clients.down}
    assert is_close(state.model["weight"], run_sgd(WEIGHT, client_batches(method, asked, 1), 0.5))


def test_fedavg_codec_rounds_in_both_directions() -> None:
    method = FedAvg(rounds=1, local_steps=2, batch_size=2, lr=0.5, codec="float16")
    start = WEIGHT.astype(np.float16).astype(np.float64)
    local_models = [run_sgd(start, client_batches(method, client, 1), 0.5) for client in range(3)]
    expected = weighted_average([w.astype(np.float32).astype(np.float16).astype(np.float64) for w in local_models])
    assert is_close(trained_weight(method), expected)
    assert not is_close(
        trained_weight(method),
        weighted_average([run_sgd(WEIGHT, client_batches(method, client, 1), 0.5) for client in range(3)]),
    )


def test_fedavg_messages_contain_the_model_and_the_size(tmp_path: Path) -> None:
    harness = make_harness(FedAvg(local_steps=1, batch_size=1), linear(), tmp_path)
    harness.rounds(1)
    assert len(harness.clients.down) == len(harness.clients.up) == 3
    for call, blob in harness.clients.up:
        fields = decode(blob)[1]
        assert fields.keys() == {"model", "size"} and fields["size"] == SIZES[call.client]
    for _, blob in harness.clients.down + harness.clients.up:
        assert data_bytes(blob) == 4 * FEATURES * CLASSES
    for direction, blobs in (("down", harness.clients.down), ("up", harness.clients.up)):
        assert harness.clients.ledger.total[direction] == sum(len(blob) for _, blob in blobs)  # type: ignore[index]


def test_evaluation_is_accuracy_and_loss_on_the_test_set() -> None:
    result = fewer.run(FedAvg(rounds=1), federation(), model=linear(), seed=SEED)
    x, y = TEST
    scores = x.astype(np.float64) @ result.state.model["weight"].double().numpy().T
    loss = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(y)), y]
    assert result.history[-1]["accuracy"] == (scores.argmax(axis=1) == y).mean()
    assert abs(result.history[-1]["loss"] - loss.mean()) < 1e-6


# --- FedProx --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.0, 0.7, 2.0])
def test_fedprox_adds_mu_times_the_difference_to_the_gradient(mu: float) -> None:
    method = FedProx(rounds=1, local_steps=3, batch_size=2, lr=0.3, mu=mu)
    expected = weighted_average([run_sgd(WEIGHT, client_batches(method, client, 1), 0.3, mu) for client in range(3)])
    assert is_close(trained_weight(method), expected)


def test_fedprox_differs_from_fedavg_from_the_second_step_on() -> None:
    def distance(steps: int) -> float:
        fedavg, fedprox = (
            trained_weight(build(rounds=1, local_steps=steps, batch_size=2, lr=0.3))
            for build in (FedAvg, lambda **settings: FedProx(mu=0.7, **settings))
        )
        return float((fedavg - fedprox).abs().max())

    assert distance(1) == 0
    assert distance(2) > 1e-3


def test_fedprox_anchor_is_the_global_model_of_the_round() -> None:
    method = FedProx(rounds=2, local_steps=2, batch_size=2, lr=0.3, mu=1.5)
    w = WEIGHT
    for round in (1, 2):
        w = weighted_average([run_sgd(w, client_batches(method, client, round), 0.3, 1.5) for client in range(3)])
    assert is_close(trained_weight(method), w)


def test_fedprox_without_mu_is_fedavg_bit_for_bit() -> None:
    settings = {"rounds": 2, "local_steps": 3, "batch_size": 2, "lr": 0.3}
    assert torch.equal(trained_weight(FedProx(mu=0, **settings)), trained_weight(FedAvg(**settings)))


# --- FedBN ----------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm of the inputs, then a linear layer: gradients do not flow through the batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(x))
        return scores


NORMS = {f"norm.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def normed() -> Normed:
    net = Normed()
    weights = get_weights(net) | {
        "head.weight": torch.from_numpy(WEIGHT),
        "norm.weight": torch.tensor([1.0, 0.5, 2.0]),
        "norm.bias": torch.tensor([0.1, -0.2, 0.0]),
    }
    load_weights(net, weights)
    return net


def run_sgd_with_norm(
    norms: dict[str, Array], w: Array, batches: list[Batch], lr: float
) -> tuple[dict[str, Array], Array]:
    """h = γ x̂ + β and scores = W h. x̂ uses the batch's mean and variance; the running statistics have momentum 0.1."""
    gamma, beta, mean, var = (norms[part] for part in ("weight", "bias", "running_mean", "running_var"))
    for x, y in batches:
        batch_mean, batch_var = x.mean(axis=0), x.var(axis=0)
        normalized = (x - batch_mean) / np.sqrt(batch_var + 1e-5)
        d_scores = residual((gamma * normalized + beta) @ w.T, y)
        d_hidden = d_scores @ w
        w, gamma, beta = (
            w - lr * d_scores.T @ (gamma * normalized + beta),
            gamma - lr * (d_hidden * normalized).sum(axis=0),
            beta - lr * d_hidden.sum(axis=0),
        )
        mean, var = 0.9 * mean + 0.1 * batch_mean, 0.9 * var + 0.1 * batch_var * len(x) / (len(x) - 1)
    return {"weight": gamma, "bias": beta, "running_mean": mean, "running_var": var}, w


def test_fedbn_matches_numpy(tmp_path: Path) -> None:
    method = FedBN(local_steps=2, batch_size=4, lr=0.2)
    harness = make_harness(method, normed(), tmp_path)
    initial = {
        name.removeprefix("norm."): tensor.double().numpy()
        for name, tensor in get_weights(normed()).items()
        if name in NORMS
    }
    norms, w = [initial] * 3, WEIGHT
    for round in (1, 2):
        results = [
            run_sgd_with_norm(norms[client], w, client_batches(method, client, round), 0.2) for client in range(3)
        ]
        norms, w = [result[0] for result in results], weighted_average([result[1] for result in results])
        state = harness.rounds(1)
        assert list(state.model) == ["head.weight"] and is_close(state.model["head.weight"], w, 1e-5)
    for client in range(3):
        personal = harness.personal_model(client)
        assert is_close(personal["head.weight"], w, 1e-5)
        assert all(is_close(personal[f"norm.{part}"], value, 1e-5) for part, value in norms[client].items())
        assert int(personal["norm.num_batches_tracked"]) == 4


def test_fedbn_clients_differ_in_their_norms_only(tmp_path: Path) -> None:
    harness = make_harness(FedBN(local_steps=2, batch_size=4), normed(), tmp_path)
    harness.rounds(2)
    first, second = harness.personal_model(0), harness.personal_model(1)
    assert first.keys() == second.keys() == {"head.weight", *NORMS}
    assert torch.equal(first["head.weight"], second["head.weight"])
    for name in NORMS - {"norm.num_batches_tracked"}:
        assert not torch.equal(first[name], second[name])
    stored = harness.client(0).store.get("norms")
    assert stored is not None and stored.keys() == NORMS
    assert all(torch.equal(stored[name], first[name]) for name in NORMS)


def test_fedbn_sends_no_norms(tmp_path: Path) -> None:
    harness = make_harness(FedBN(local_steps=2, batch_size=4), normed(), tmp_path)
    harness.rounds(2)
    traffic = harness.clients.down + harness.clients.up
    assert len(traffic) == 12
    for _, blob in traffic:
        assert list(decode(blob)[1]["model"]) == ["head.weight"]
        assert b"norm" not in blob and b"running" not in blob
        assert data_bytes(blob) == 4 * FEATURES * CLASSES
    assert sum(harness.clients.ledger.total.values()) == sum(len(blob) for _, blob in traffic)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fedbn_bytes_of_the_small_cnn(norm: Norm, tmp_path: Path) -> None:
    """Each message has 4 bytes for each of the 26,390 weights outside the norms, and a header of less than 1 %."""
    x = np.random.default_rng(0).integers(256, size=(12, 28, 28), dtype=np.uint8)
    data = from_clients([(x[:6], np.arange(6)), (x[6:], np.arange(4, 10))], test=(x, np.arange(12) % 10))
    result = fewer.run(FedBN(rounds=1, local_steps=1, batch_size=4), data, norm=norm, seed=0, out=tmp_path / "run")
    payload = 4 * 26_390
    for direction in ("up", "down"):
        assert 2 * payload < result.history[-1][direction] <= 2 * payload * 1.01
    assert sum(tensor.numel() for tensor in result.state.model.values()) == 26_390
    nets = [get_weights(result.personal_model(client)) for client in range(2)]
    norm_names = norm_weight_names(result.task.net())
    assert len(norm_names) == (10 if norm == "batch" else 4)
    for name in nets[0]:
        if name not in norm_names:
            assert torch.equal(nets[0][name], nets[1][name])
    for name in norm_names - {"encoder.1.num_batches_tracked", "encoder.4.num_batches_tracked"}:
        assert not torch.equal(nets[0][name], nets[1][name])


def test_fedbn_client_outside_every_cohort_has_the_initial_norms(tmp_path: Path) -> None:
    harness = make_harness(FedBN(local_steps=2, batch_size=4, cohort=1), normed(), tmp_path)
    harness.rounds(1)
    asked = harness.clients.down[0][0].client
    for client in range(3):
        personal, initial = harness.personal_model(client), get_weights(normed())
        assert all(torch.equal(personal[name], initial[name]) for name in NORMS) == (client != asked)
        assert torch.equal(personal["head.weight"], harness.state.model["head.weight"])


def test_fedbn_needs_norm_layers() -> None:
    with pytest.raises(SettingError, match="fedbn needs a model with normalization layers"):
        fewer.run(FedBN(rounds=1), federation(), model=linear(), seed=0)


# --- Local ----------------------------------------------------------------------------------------------------


def test_local_is_plain_sgd_on_each_client(tmp_path: Path) -> None:
    method = Local(rounds=3, local_steps=2, batch_size=2, lr=0.3)
    result = fewer.run(method, federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    for client in range(3):
        w = WEIGHT
        for round in (1, 2, 3):
            w = run_sgd(w, client_batches(method, client, round), 0.3)
        assert is_close(get_weights(result.personal_model(client))["weight"], w)
    with pytest.raises(SettingError, match="local has no global model"):
        _ = result.model


def test_local_clients_do_not_influence_each_other(tmp_path: Path) -> None:
    def models(pairs: Sequence[tuple[Any, Any]], name: str) -> list[Tensor]:
        harness = make_harness(Local(local_steps=3, batch_size=2, lr=0.3), linear(), tmp_path / name, pairs)
        harness.rounds(2)
        return [harness.personal_model(client)["weight"] for client in range(3)]

    before = models(PAIRS, "before")
    after = models([(PAIRS[0][0] * 3 + 1, 1 - PAIRS[0][1]), *PAIRS[1:]], "after")
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True]


def test_local_sends_only_empty_messages(tmp_path: Path) -> None:
    harness = make_harness(Local(local_steps=1, batch_size=1), linear(), tmp_path)
    harness.rounds(2)
    traffic = harness.clients.down + harness.clients.up
    assert len(traffic) == 12
    for _, blob in traffic:
        assert decode(blob)[1] == {} and data_bytes(blob) == 0 and len(blob) < 150
    assert sum(harness.clients.ledger.total.values()) == sum(len(blob) for _, blob in traffic) < 12 * 150


# --- helpers --------------------------------------------------------------------------------------------------


def test_weighted_mean_of_each_dtype() -> None:
    models = [
        {
            "w": torch.tensor([[1.0, 2.0]]),
            "n": torch.tensor(3),
            "m": torch.tensor([1, 1, -1]),
            "h": torch.ones(1).half(),
        },
        {
            "w": torch.tensor([[5.0, -2.0]]),
            "n": torch.tensor(4),
            "m": torch.tensor([2, 8, -6]),
            "h": torch.zeros(1).half(),
        },
    ]
    mean = weighted_mean(models, [1, 3])
    assert mean["w"].tolist() == [[4.0, -1.0]] and mean["w"].dtype == torch.float32
    assert mean["n"].item() == 4 and mean["n"].dtype == torch.int64  # 3.75
    assert mean["m"].tolist() == [2, 6, -5]  # 1.75, 6.25, -4.75
    assert mean["h"].tolist() == [0.25] and mean["h"].dtype == torch.float16
    assert list(mean) == ["w", "n", "m", "h"]
    assert models[0]["w"].tolist() == [[1.0, 2.0]] and models[1]["n"].item() == 4


def test_weighted_mean_is_summed_in_float64() -> None:
    models = [{"w": torch.tensor([value])} for value in (1e8, 1.0, -1e8)]
    assert abs(weighted_mean(models, [1, 1, 1])["w"].item() - 1 / 3) < 1e-7


def test_weighted_mean_of_one_model_is_that_model() -> None:
    model = get_weights(SmallCNN((1, 8, 8), 3, "batch"))
    mean = weighted_mean([model], [17])
    assert all(torch.equal(mean[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize(("count", "shares"), [(0, []), (1, [0]), (2, [1]), (1, [1, 1]), (2, [1, -1])])
def test_weighted_mean_needs_models_and_shares(count: int, shares: list[float]) -> None:
    with pytest.raises(ValueError, match=r"a mean needs|argument 2"):
        weighted_mean([{"w": torch.zeros(1)}] * count, shares)


def test_batches_are_drawn_from_all_samples_with_replacement() -> None:
    indices = draw_batches(5, 200, 3, torch.Generator().manual_seed(0))
    assert indices.shape == (200, 3)
    counts = torch.bincount(indices.reshape(-1), minlength=5)
    assert len(counts) == 5 and int(counts.min()) > 80
    assert any(len(set(row)) < 3 for row in indices.tolist())
    assert torch.equal(indices, draw_batches(5, 200, 3, torch.Generator().manual_seed(0)))


def test_sgd_does_not_change_frozen_weights() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
    net[0].requires_grad_(False)
    before = get_weights(net)
    sgd(net, [(torch.from_numpy(PAIRS[1][0]), torch.from_numpy(PAIRS[1][1]))], 0.1)
    changed = {name for name, tensor in get_weights(net).items() if not torch.equal(tensor, before[name])}
    assert changed == {"1.weight", "1.bias"} and net.training


def test_evaluation_adds_up_over_batches() -> None:
    net = linear().train()
    x, y = torch.from_numpy(TEST[0]), torch.from_numpy(TEST[1])
    at_once, in_parts = evaluate_net(net, [(x, y)]), evaluate_net(net, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert at_once.total == in_parts.total == 11 and at_once.correct == in_parts.correct
    assert at_once.correct == int(((TEST[0] @ WEIGHT.T).argmax(axis=1) == TEST[1]).sum())
    assert abs(at_once.loss - in_parts.loss) < 1e-5 and not net.training


# --- models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "count"), [("batch", 26_434), ("group", 26_434), ("none", 26_390)])
def test_small_cnn_parameter_count(norm: Norm, count: int) -> None:
    net = SmallCNN((1, 28, 28), 10, norm)
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 5, 12), (2, 1, 1)])
def test_small_cnn_takes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    assert SmallCNN(shape, 4)(torch.zeros(3, *shape)).shape == (3, 4)


def test_unknown_or_unsuitable_models_are_rejected() -> None:
    with pytest.raises(SettingError, match="unknown model 'cnm', did you mean 'cnn'"):
        fewer.run(FedAvg(rounds=1), federation(), model="cnm")
    with pytest.raises(SettingError, match=r"images .* but inputs have shape \(3,\)"):
        fewer.run(FedAvg(rounds=1), federation(), model="cnn")
    with pytest.raises(SettingError, match=r"rejects inputs of shape \(3,\)"):
        fewer.run(FedAvg(rounds=1), federation(), model=nn.Linear(4, 2))
    with pytest.raises(SettingError, match="at least 2 classes"):
        fewer.run(FedAvg(rounds=1), federation(), model=nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        (lambda: nn.BatchNorm2d(4), {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}),
        (lambda: nn.GroupNorm(2, 4), {"weight", "bias"}),
        (lambda: nn.LayerNorm(4), {"weight", "bias"}),
        (lambda: nn.RMSNorm(4), {"weight"}),
        (lambda: nn.InstanceNorm2d(4, affine=True), {"weight", "bias"}),
        (lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False), set()),
        (lambda: nn.Linear(4, 4), set()),
        (lambda: nn.Identity(), set()),
    ],
)
def test_norm_weight_names(layer: Callable[[], nn.Module], parts: set[str]) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Sequential(layer(), nn.Linear(4, 2)))
    assert norm_weight_names(net) == {f"1.0.{part}" for part in parts}
    assert norm_weight_names(layer()) == parts
    assert norm_weight_names(net) <= net.state_dict().keys()


def test_small_cnn_norms() -> None:
    assert norm_weight_names(SmallCNN((1, 28, 28), 10, "none")) == set()
    names = norm_weight_names(SmallCNN((1, 28, 28), 10, "group"))
    assert names == {"encoder.1.weight", "encoder.1.bias", "encoder.4.weight", "encoder.4.bias"}


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({}, "weights do not fit the model: bias, weight$"),
        ({"weight": torch.zeros(2, 3)}, "weights do not fit the model: bias$"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)}, "the model: more$"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"weight has shape \(3, 2\), expected \(2, 3\)$"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(1)}, r"bias has shape \(1,\), expected \(2,\)$"),
        ({str(number): torch.zeros(1) for number in range(9)}, "the model: 0, 1, 2 …$"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_not_loaded(weights: Weights, reason: str) -> None:
    net = nn.Linear(3, 2)
    before = get_weights(net)
    with pytest.raises(Refused, match=reason):
        load_weights(net, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in get_weights(net).items())


def test_weights_are_copies() -> None:
    net = nn.Linear(3, 2)
    weights = get_weights(net)
    load_weights(net, {name: torch.full_like(tensor, 7) for name, tensor in weights.items()})
    assert not any((tensor == 7).any() for tensor in weights.values())
    copies = get_weights(net)
    load_weights(nn.Linear(3, 2), copies)
    assert all((tensor == 7).all() for tensor in net.state_dict().values())
    with torch.no_grad():
        net.weight.zero_()
    assert (copies["weight"] == 7).all()


def test_initial_weights_depend_on_the_seed_only() -> None:
    task = Task((1, 28, 28), 10, lambda: SmallCNN((1, 28, 28), 10))
    torch.manual_seed(1)
    first = task.initial_weights(3)
    torch.manual_seed(2)
    same_seed, other_seed = task.initial_weights(3), task.initial_weights(4)
    assert all(torch.equal(first[name], same_seed[name]) for name in first)
    assert not torch.equal(first["head.weight"], other_seed["head.weight"])


def test_pretrained_weights_are_the_initial_weights() -> None:
    pretrained = get_weights(SmallCNN((1, 28, 28), 10))
    task = Task((1, 28, 28), 10, lambda: SmallCNN((1, 28, 28), 10), pretrained=pretrained)
    for seed in (0, 1):
        initial = task.initial_weights(seed)
        assert all(torch.equal(initial[name], tensor) for name, tensor in pretrained.items())
