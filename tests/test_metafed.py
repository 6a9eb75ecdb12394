"""MetaFed against a NumPy reference, and its ring: faults, sealed messages, groups, different nets."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fewer
from fewer import FedAvg, MetaFed
from fewer.data import ArrayData, Data
from fewer.data.federated import TEST_FRACTION, from_arrays
from fewer.data.federations import group_clients
from fewer.errors import QuorumLost, SettingError
from fewer.experiments.recipes import RecipeColumn, RecipeRow, load_recipe, row_settings
from fewer.learning import Counts, weighted_mean
from fewer.learning.distill import distill, feature_loss, fit_feature_map
from fewer.methods import Client, federation, find
from fewer.methods.base import ContextFactory
from fewer.methods.federation import MAX_MAP_SAMPLES, SingleClient, Teacher, TrainingBudget, replace_client_net
from fewer.methods.metafed import FEDERATION, adaptive_distill_weight
from fewer.models import EncoderHead, Task, Weights, get_weights, load_weights, norm_weight_names
from fewer.runs.experiment import make_method, parse_settings
from fewer.runs.settings import Settings
from fewer.runtime import Absent, HandlerRunner, Inline, Unable, on_client, on_ring, seed_of, stream
from fewer.runtime.clients import Faults, RoundRules
from fewer.runtime.handlers import FETCH_OUTGOING, Call, Hop, Reply
from fewer.runtime.keys import PinnedKeys
from fewer.wire import Refused, decode, encode, pack, unpack
from fewer.wire.sealing import Header, fingerprint, new_key, parse_sealed, public_key, seal, unseal
from tests.test_baselines import run_contents
from tests.test_cli import DIGITS, call
from tests.test_methods import Array, is_close

FEATURES, HIDDEN, CLASSES, SEED, COUNT = 3, 2, 2, 4, 4
DRAW = np.random.default_rng(1)
CLIENT = np.repeat(np.arange(COUNT), 20)
X = DRAW.normal(0, 1, (len(CLIENT), FEATURES)).astype(np.float32)
Y = (X[:, 0] + 0.5 * X[:, 1] * (CLIENT % 2) > 0).astype(np.int64)
A = DRAW.normal(0, 0.7, (HIDDEN, FEATURES)).astype(np.float32)
C = DRAW.normal(0, 0.7, (CLASSES, HIDDEN)).astype(np.float32)

Model = tuple[Array, Array]
"""Weights of the linear net: encoder and head."""


def ring_data(clients: int = COUNT) -> ArrayData:
    return from_arrays(X, Y, client_ids=CLIENT if clients == COUNT else np.arange(len(Y)) % clients, validation=0.3)


DATA = ring_data()


def linear() -> EncoderHead:
    net = EncoderHead(nn.Linear(FEATURES, HIDDEN, bias=False), HIDDEN, CLASSES)
    net.head = nn.Linear(HIDDEN, CLASSES, bias=False)
    load_weights(net, {"encoder.weight": torch.from_numpy(A), "head.weight": torch.from_numpy(C)})
    return net


def normed() -> EncoderHead:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh())
    return EncoderHead(encoder, HIDDEN, CLASSES)


@dataclass
class RecordingClients(Inline):
    """Records every call and injects the faults of a test."""

    down: list[tuple[Call, bytes]] = field(default_factory=list)
    injected_faults: Mapping[tuple[int, int], str] = field(default_factory=dict)
    absences: list[Absent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_absent = lambda absence, handler: self.absences.append(absence)

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        self.down += calls
        return super()._deliver_calls(calls)

    def _draw_fault(self, client: int, stream_name: str) -> str | None:
        return None if stream_name == "begin" else self.injected_faults.get((self.round, client))


@dataclass
class RingHarness:
    """Runs the rounds of a ring without the engine."""

    method: MetaFed
    clients: RecordingClients
    contexts: ContextFactory
    state: Any

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.clients.round += 1
            self.state = self.method.round(self.state, self.clients)

    def client(self, id: int) -> Client:
        context = self.contexts(id, self.clients.round)
        assert isinstance(context, Client)
        return context

    def personal_model(self, client: int) -> Weights:
        return get_weights(self.method.personal_model(self.client(client), {}))

    def federation_state(self, client: int) -> dict[str, Any]:
        state: dict[str, Any] = self.client(client).store.get(FEDERATION)
        return state

    @property
    def hops(self) -> list[tuple[int, int]]:
        """Sender and receiver of each message; sender -1 means the ring starts here."""
        return [
            (call.hop.peer, call.client) for call, _ in self.clients.down if call.hop and call.handler != FETCH_OUTGOING
        ]

    @property
    def messages(self) -> list[bytes]:
        """The messages between federations."""
        return [
            blob
            for call, blob in self.clients.down
            if call.hop and call.handler != FETCH_OUTGOING and call.hop.peer >= 0
        ]

    @property
    def absences(self) -> list[tuple[int, str]]:
        return [(absence.client, absence.reason) for absence in self.clients.absences]


def make_harness(
    method: MetaFed,
    net: nn.Module,
    folder: Path,
    data: Data = DATA,
    injected_faults: Mapping[tuple[int, int], str] | None = None,
) -> RingHarness:
    data = method.prepare_data(data)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return RingHarness(
        method,
        RecordingClients(len(data), SEED, handlers=handlers, injected_faults=injected_faults or {}),
        contexts,
        method.init(task, SEED),
    )


# --- NumPy reference --------------------------------------------------------------------------------------------


def load_samples(client: int, part: str) -> tuple[Array, Any]:
    samples = getattr(DATA.client(client), part)
    x, y = samples.slice(0, len(samples))
    return x.double().numpy(), y.numpy()


def training_batches(method: MetaFed, client: int, round: int, purpose: str) -> list[tuple[Array, Any]]:
    x, y = load_samples(client, "train")
    indices = torch.randint(
        len(y), (method.local_steps, method.batch_size), generator=stream(SEED, round, client, purpose)
    )
    return [(x[row], y[row]) for row in indices.numpy()]


def run_sgd(
    model: Model, batches: Sequence[tuple[Array, Any]], lr: float, teacher: Model | None, distill_weight: float
) -> Model:
    """SGD on scores C A x and features A x.

    Cross-entropy has the derivative (softmax − one-hot) / n by the scores. The mean square of A x − A_t x over features
    and samples has the derivative 2 (A x − A_t x) / (n · features) by the features.
    """
    a, c = model
    for x, y in batches:
        features = x @ a.T
        scores = features @ c.T
        probabilities = np.exp(scores - scores.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        d_scores = (probabilities - np.eye(CLASSES)[y]) / len(y)
        d_features = d_scores @ c
        if teacher is not None:
            d_features = d_features + distill_weight * 2 * (features - x @ teacher[0].T) / (len(y) * HIDDEN)
        a, c = a - lr * d_features.T @ x, c - lr * d_scores.T @ features
    return a, c


def validate(model: Model, client: int) -> tuple[float, float]:
    """Accuracy and summed loss on the validation samples."""
    x, y = load_samples(client, "validation")
    scores = x @ model[0].T @ model[1].T
    loss = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]
    return float((scores.argmax(1) == y).mean()), float(loss.sum())


def is_close_model(weights: Weights, model: Model) -> bool:
    return is_close(weights["encoder.weight"], model[0], 1e-5) and is_close(weights["head.weight"], model[1], 1e-5)


INITIAL: Model = (A.astype(np.float64), C.astype(np.float64))


@pytest.mark.parametrize("threshold", [0.0, 0.6, 1.0])
def test_both_stages_match_numpy(threshold: float, tmp_path: Path) -> None:
    method = MetaFed(
        rounds=3, lr=0.3, local_steps=3, batch_size=4, distill_weight=2.0, distill_threshold=threshold, warmup_steps=3
    )
    harness = make_harness(method, linear(), tmp_path)
    models = [run_sgd(INITIAL, training_batches(method, client, 1, "begin"), 0.3, None, 0) for client in range(COUNT)]
    best = [(validate(models[client], client), models[client]) for client in range(COUNT)]
    common: Model | None = None
    adopted = [0] * COUNT
    for round in (1, 2, 3):
        harness.rounds(1)
        for client in range(COUNT):
            if common is None:  # the first federation has no teacher and sends its own model
                common = models[client]
                continue
            if round == 3:
                weight = adaptive_distill_weight(
                    2.0, validate(common, client)[0], validate(models[client], client)[0], method.ignore_threshold
                )
                models[client] = run_sgd(
                    models[client],
                    training_batches(method, client, round, "study"),
                    0.3,
                    common if weight else None,
                    weight,
                )
            elif validate(models[client], client)[0] > threshold:
                models[client] = common = run_sgd(
                    models[client], training_batches(method, client, round, "study"), 0.3, common, 2.0
                )
            else:
                models[client] = common = run_sgd(
                    common, training_batches(method, client, round, "taken"), 0.3, None, 0
                )
                adopted[client] += 1
            score = validate(models[client], client)
            if (score[0], -score[1]) >= (best[client][0][0], -best[client][0][1]):
                best[client] = score, models[client]
        assert all(is_close_model(harness.federation_state(client)["model"], models[client]) for client in range(COUNT))
        assert harness.state.holders == list(range(COUNT))
    assert all(is_close_model(harness.personal_model(client), best[client][1]) for client in range(COUNT))
    assert [harness.federation_state(client)["adopted"] for client in range(COUNT)] == adopted
    assert sum(adopted) == {0.0: 0, 1.0: 7}.get(threshold, sum(adopted))
    assert threshold != 0.6 or 0 < sum(adopted) < 7  # some distill, some adopt
    # The best model is not always the last.
    assert any(best[client][1] is not models[client] for client in range(COUNT)) or threshold


@pytest.mark.parametrize(
    ("common_accuracy", "own_accuracy", "expected"),
    [
        (0.4, 0.4, 0.0),  # no better, and below the threshold
        (0.3, 0.6, 0.0),
        (0.5, 0.5, 0.2),  # acceptable: λ₀ · 10^(0 − 1)
        (0.6, 0.8, 2 * 10**-2.0),
        (0.9, 0.8, 2 * 10**-0.5),
        (0.4, 0.3, 2 * 10**-0.5),  # below the threshold, but better than the own model
        (1.0, 0.8, 2.0),
        (0.9, 0.1, 2.0),  # the exponent is at most 0
    ],
)
def test_distill_weight_of_a_federation(common_accuracy: float, own_accuracy: float, expected: float) -> None:
    assert adaptive_distill_weight(2.0, common_accuracy, own_accuracy, 0.5) == pytest.approx(expected)


def test_gradient_of_the_feature_loss_matches_finite_differences() -> None:
    torch.manual_seed(1)
    nets = [EncoderHead(nn.Sequential(nn.Linear(FEATURES, n), nn.Tanh()), n, CLASSES).double() for n in (4, 3)]
    net, teacher = nets
    x, y = torch.randn(5, FEATURES).double(), torch.tensor([0, 1, 1, 0, 1])
    feature_map = fit_feature_map(net, teacher, x).double()
    loss = feature_loss(net, teacher, 0.7, feature_map)
    parameters = [*net.parameters(), *feature_map.parameters()]
    gradients = torch.autograd.grad(loss(net, x, y), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        for position in range(parameter.numel()):
            with torch.no_grad():
                flat = parameter.view(-1)
                flat[position] += 1e-6
                above = loss(net, x, y).item()
                flat[position] -= 2e-6
                below = loss(net, x, y).item()
                flat[position] += 1e-6
            assert gradient.view(-1)[position].item() == pytest.approx((above - below) / 2e-6, abs=1e-7)
    features = net.encoder(x), teacher.encoder(x)
    expected = F.cross_entropy(net.head(features[0]), y) + 0.7 * ((feature_map(features[0]) - features[1]) ** 2).mean()
    assert loss(net, x, y).item() == pytest.approx(expected.item())


def test_the_feature_map_is_fitted_and_then_trained() -> None:
    torch.manual_seed(2)
    wide, narrow = (EncoderHead(nn.Linear(FEATURES, n), n, CLASSES) for n in (5, 2))
    x, y = torch.randn(50, FEATURES), torch.randint(CLASSES, (50,))
    feature_map = fit_feature_map(wide, narrow, x)
    assert feature_map.weight.shape == (2, 5)
    # Both encoders are affine in x, so a linear map takes the wide net's features to the narrow net's.
    assert ((feature_map(wide.encoder(x)) - narrow.encoder(x)) ** 2).mean() < 0.02 * (narrow.encoder(x) ** 2).mean()
    trained_map = fit_feature_map(narrow, wide, x)
    before, target = trained_map.weight.detach().clone(), get_weights(wide)
    distill(narrow, wide, [(x, y)] * 5, 0.1, 1.0, trained_map)
    assert not torch.equal(before, trained_map.weight)
    assert all(torch.equal(tensor, target[name]) for name, tensor in get_weights(wide).items())


def test_the_teacher_is_in_evaluation_mode() -> None:
    net, teacher = normed(), normed()
    before = get_weights(teacher)
    x = torch.randn(8, FEATURES)
    distill(net, teacher.train(), [(x, torch.zeros(8, dtype=torch.long))] * 3, 0.1, 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in get_weights(teacher).items())
    assert not torch.equal(get_weights(net)["encoder.1.running_mean"], before["encoder.1.running_mean"])


@pytest.mark.parametrize("keep", [True, False])
def test_adopting_a_model_can_keep_the_federations_norms(keep: bool, tmp_path: Path) -> None:
    harness = make_harness(MetaFed(keep_norms=keep), normed(), tmp_path)
    received = {name: torch.full_like(tensor, 7) for name, tensor in get_weights(normed()).items()}
    own_model = get_weights(normed())
    assert isinstance(harness.method, MetaFed)
    merged = harness.method.merge_keeping_norms(harness.client(0), received, own_model)
    norms = norm_weight_names(normed())
    assert len(norms) == 5
    for name, tensor in merged.items():
        assert torch.equal(tensor, (own_model if keep and name in norms else received)[name])


def all_sevens(net: nn.Module) -> Weights:
    return {name: torch.full_like(tensor, 7) for name, tensor in get_weights(net).items()}


def test_an_adopted_model_is_trained_with_the_federations_norms(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(rounds=2, lr=1e-9, local_steps=1, distill_threshold=1.0), normed(), tmp_path)
    own_model = harness.method.load_or_train_record(harness.client(1))["model"]
    harness.method.accumulate(harness.client(1), all_sevens(normed()), "")
    adopted = harness.federation_state(1)["model"]
    assert is_close(adopted["encoder.1.weight"], own_model["encoder.1.weight"].double().numpy(), 1e-5)
    assert is_close(adopted["encoder.0.weight"], np.full((HIDDEN, FEATURES), 7.0), 1e-5)


def test_ties_in_accuracy_go_to_the_lower_loss(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(), linear(), tmp_path)
    first, later = get_weights(linear()), all_sevens(linear())
    stored = {"best_correct": 5, "best_loss": 1.0, "best_model": first, "inner_bytes": {}}
    for correct, loss, best in ((5, 2.0, first), (5, 0.5, later), (4, 0.1, first), (6, 9.0, later)):
        stub: Any = SimpleNamespace(evaluate=MagicMock(return_value=Counts(correct, 10, loss)))
        assert harness.method.save_record(harness.client(0), stub, stored, later)["best_model"] is best


# --- ablations ----------------------------------------------------------------------------------------------------


def test_ablations_run_the_right_stages(tmp_path: Path) -> None:
    def run_stages(**settings: Any) -> tuple[list[str], RingHarness]:
        harness = make_harness(MetaFed(rounds=3, local_steps=2, **settings), linear(), tmp_path / str(settings))
        harness.rounds(3)
        handlers = [call.handler for call, _ in harness.clients.down if call.hop and call.handler != FETCH_OUTGOING]
        return [handlers[round * COUNT] for round in range(3)], harness

    both, first, second = ["accumulate", "accumulate", "personalize"], ["accumulate"] * 3, ["personalize"] * 3
    assert run_stages()[0] == both
    assert run_stages(stages="accumulate")[0] == first
    stages, harness = run_stages(stages="personalize", sealed=False)
    assert stages == second
    sent = {bytes(decode(blob)[1]["model"]["head.weight"].numpy()) for blob in harness.messages}
    assert len(sent) == 1  # the common model f is one federation's own model throughout
    assert list(MetaFed().search_space()) == ["lr", "distill_threshold"]
    assert (
        list(MetaFed(transfer="fine-tune").search_space())
        == list(MetaFed(stages="personalize").search_space())
        == ["lr"]
    )
    stages, harness = run_stages(transfer="fine-tune", distill_threshold=0.0)
    assert stages == both and [harness.federation_state(client)["adopted"] for client in range(COUNT)] == [2, 3, 3, 3]


def test_fine_tuning_adopts_in_stage_two_as_well(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(rounds=1, lr=1e-9, local_steps=1, transfer="fine-tune"), linear(), tmp_path)
    harness.method.personalize(harness.client(1), all_sevens(linear()), "")
    assert is_close(harness.federation_state(1)["model"]["head.weight"], np.full((CLASSES, HIDDEN), 7.0), 1e-5)


# --- the ring -----------------------------------------------------------------------------------------------------


def test_each_federation_sends_to_the_next(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(rounds=2, local_steps=1), linear(), tmp_path / "sealed")
    harness.rounds(2)
    assert harness.hops == [(-1, 0), (0, 1), (1, 2), (2, 3), (3, 0), (0, 1), (1, 2), (2, 3)]
    ledger = [entry for entry in harness.clients.ledger.entries if entry.kind != "warm_up"]
    assert [entry.client for entry in ledger if entry.direction == "up"] == [0, 1, 2, 3, 0, 1, 2]
    downs = [entry for entry in ledger if entry.direction == "down"]
    assert [entry.client for entry in downs] == [1, 2, 3, 0, 1, 2, 3]
    model_bytes = 4 * (FEATURES * HIDDEN + HIDDEN * CLASSES)
    unsealed = make_harness(MetaFed(rounds=2, local_steps=1, sealed=False), linear(), tmp_path / "open")
    unsealed.rounds(2)
    for entry, sealed, blob in zip(downs, harness.messages, unsealed.messages, strict=True):
        assert len(blob) - 8 - int.from_bytes(blob[:8], "little") == model_bytes
        header_end = 8 + int.from_bytes(sealed[4:8], "little")
        assert entry.bytes == len(sealed) == header_end + 32 + len(blob) + 16  # header, fresh key, message, tag


class Without(MetaFed):
    """A ring without one federation."""

    excluded: int = -1

    def sample_cohort(self, clients: Any) -> list[int]:
        return [client for client in super().sample_cohort(clients) if client != self.excluded]


class Failing(MetaFed):
    """A federation that fails in every handler until round `until`."""

    victim: int = -1
    until: int = 99

    @on_client(stream="begin")
    def warm_up(self, client: Client) -> dict[str, Any]:
        self._fail(client)
        return super().warm_up(client)

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        self._fail(client)
        return super().accumulate(client, model, net)

    @on_ring(stream="personalise")
    def personalize(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        self._fail(client)
        return super().personalize(client, model, net)

    def _fail(self, client: Client) -> None:
        if client.id == self.victim and client.round <= self.until:
            raise ConnectionError("gone")


SMALL: dict[str, Any] = {"rounds": 3, "lr": 0.3, "local_steps": 2, "batch_size": 4}


@pytest.mark.parametrize("victim", range(COUNT))
def test_the_ring_skips_a_failing_federation(victim: int, tmp_path: Path) -> None:
    failing = fewer.run(Failing(victim=victim, **SMALL), DATA, model=linear(), seed=SEED, out=tmp_path / "dead")
    without = fewer.run(Without(excluded=victim, **SMALL), DATA, model=linear(), seed=SEED, out=tmp_path / "without")
    remaining = [client for client in range(COUNT) if client != victim]
    assert failing.state.holders == without.state.holders == remaining
    for client in remaining:
        first, second = get_weights(failing.personal_model(client)), get_weights(without.personal_model(client))
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert [line["absent"] for line in failing.history] == [2, 1, 1]  # it misses the warm-up too
    assert get_weights(failing.personal_model(victim)).keys() == get_weights(linear()).keys()


def test_a_federation_returns_to_the_ring(tmp_path: Path) -> None:
    result = fewer.run(Failing(victim=2, until=1, **SMALL), DATA, model=linear(), seed=SEED, out=tmp_path / "ring")
    assert [line["absent"] for line in result.history] == [2, 0, 0] and result.state.holders == [0, 1, 2, 3]
    assert not torch.equal(get_weights(result.personal_model(2))["head.weight"], torch.from_numpy(C))


def test_a_slow_federation_is_skipped_but_has_trained(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path, injected_faults={(1, 2): "slow"})
    before = run_sgd(INITIAL, [], 0, None, 0)
    harness.rounds(1)
    assert harness.state.holders == [0, 1, 3] and harness.absences == [(2, "late")]
    assert harness.hops[-1] == (1, 3)  # federation 3 gets the model of 1
    assert not is_close(harness.federation_state(2)["model"]["head.weight"], before[1], 1e-3)
    harness.rounds(1)
    assert harness.state.holders == [0, 1, 2, 3]


def test_a_damaged_model_is_refused_and_the_previous_one_is_sent(tmp_path: Path) -> None:
    for sealed in (True, False):
        harness = make_harness(
            MetaFed(sealed=sealed, **SMALL), linear(), tmp_path / str(sealed), injected_faults={(1, 1): "corrupt"}
        )
        harness.rounds(1)
        assert harness.absences == [(1, "refused")] and harness.state.holders == [0, 2, 3]
        assert harness.hops == [(-1, 0), (0, 1), (1, 2), (0, 2), (2, 3)]
        assert "by client 2: " in harness.clients.absences[0].detail
        harness.rounds(1)
        assert harness.state.holders == [0, 1, 2, 3]


class Liar(MetaFed):
    """Federation 1 sends an invalid message."""

    lie: str = "nan"

    def outgoing_message(self, client: Client, model: Weights) -> dict[str, Any]:
        message = super().outgoing_message(client, model)
        if client.id == 1 and self.lie == "nan":
            message["model"] = {**model, "head.weight": torch.full((CLASSES, HIDDEN), torch.nan)}
        if client.id == 1 and self.lie == "shape":
            message["model"] = {**model, "head.weight": torch.zeros(9, 9)}
        if client.id == 1 and self.lie == "net":
            message["net"] = "resnet12"
        if client.id == 1 and self.lie == "field":
            message["more"] = 1
        if client.id == 1 and self.lie == "number":
            message["net"] = 7
        if client.id == 1 and self.lie == "tensor":
            message["model"] = torch.zeros(3)
        if client.id == 1 and self.lie == "double":
            message["model"] = {name: tensor.double() for name, tensor in model.items()}
        if client.id == 1 and self.lie in ("1e10", "1e30"):
            message["model"] = {name: torch.full_like(tensor, float(self.lie)) for name, tensor in model.items()}
        return message


@pytest.mark.parametrize("lie", ["nan", "shape", "net", "field", "number", "tensor", "double", "1e10", "1e30"])
def test_an_invalid_model_is_refused_by_the_next_federation(lie: str, tmp_path: Path) -> None:
    harness = make_harness(Liar(lie=lie, **SMALL), linear(), tmp_path)
    harness.rounds(1)
    assert harness.absences == [(1, "refused")] and harness.state.holders == [0, 2, 3]


def pin_all(harness: RingHarness) -> None:
    """Makes all federations pin each other's keys."""
    for federation_id, peer in itertools.product(range(COUNT), repeat=2):
        harness.contexts.keys.public(federation_id, peer)


def test_a_federation_that_refuses_everything_is_skipped(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    harness.rounds(1)
    pin_all(harness)
    pins = tmp_path / "000/000002/pins.json"
    pins.write_text(json.dumps({str(other): "0" * 64 for other in range(COUNT)}))
    harness.rounds(1)
    assert harness.absences[-1] == (2, "refused") and harness.state.holders == [2, 0, 1, 3]
    assert "has the fingerprint" in harness.clients.absences[-1].detail


def test_no_federation_seals_for_a_key_that_is_not_pinned(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    harness.rounds(1)
    pin_all(harness)
    (tmp_path / "000/000002/key.pub").write_bytes(public_key(new_key()))  # a key that a malicious relay could offer
    harness.rounds(1)
    assert harness.absences == [(2, "refused")] and harness.hops[-1] == (1, 3)
    assert "by clients 1 and 0: the key offered for client 2 has the fingerprint" in harness.clients.absences[0].detail
    assert harness.state.holders == [2, 0, 1, 3]


def test_a_holder_that_trusts_no_key_is_skipped(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    harness.rounds(1)
    pin_all(harness)
    (tmp_path / "000/000001/pins.json").write_text(json.dumps({"2": "0" * 64, "3": "0" * 64}))
    harness.rounds(1)
    assert harness.absences == [(1, "refused")] and harness.state.holders == [0, 2, 3]
    assert harness.hops[-4:] == [(3, 0), (0, 1), (0, 2), (2, 3)]
    assert "to send to client 2: the key offered for client 2 has" in harness.clients.absences[0].detail


def test_the_ring_restarts_if_the_first_holder_trusts_no_key(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    pin_all(harness)
    (tmp_path / "000/000000/pins.json").write_text(json.dumps({"1": "0" * 64}))
    harness.rounds(1)
    assert harness.absences == [(0, "refused")] and harness.hops == [(-1, 0), (-1, 1), (1, 2), (2, 3)]


def test_the_ring_restarts_if_the_first_holder_is_gone(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path, injected_faults={(1, 0): "corrupt"})
    harness.rounds(1)
    assert harness.hops == [(-1, 0), (0, 1), (-1, 1), (1, 2), (2, 3)] and harness.state.holders == [1, 2, 3]
    for path in (tmp_path / "000/000003").glob("ring_outgoing.*"):
        path.unlink()
    harness.rounds(1)
    assert harness.absences[-1] == (3, "unable") and harness.hops[5] == (2, 0)


def test_too_few_federations_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(QuorumLost, match="0 of 4 clients answered"):
        fewer.run(MetaFed(**SMALL), DATA, model=linear(), seed=SEED, drop=1.0)
    lost = tmp_path / "lost"
    with pytest.raises(QuorumLost, match="1: 3 of 4 clients answered, 4 needed"):
        fewer.run(Failing(victim=1, until=1, **SMALL), DATA, model=linear(), seed=SEED, quorum=1.0, out=lost)


# --- resuming, and other runtimes -----------------------------------------------------------------------------------

RECEIVED: list[tuple[int, int]] = []


def comparable_parts(path: Path) -> dict[str, Any]:
    """The parts of two runs that must be equal. Messages are decoded, because the order of header fields varies."""
    parts = run_contents(path)
    outgoing = {f: unpack((path / f).read_bytes()) for f in parts["clients"] if f.name.startswith("ring_outgoing")}
    decoded_fields = {f: decode(bytes(message.numpy()))[1] for f, message in outgoing.items()}
    decoded = {
        f: (message_fields["net"], pack(message_fields["model"])) for f, message_fields in decoded_fields.items()
    }
    return {
        **parts,
        "clients": {f: blob for f, blob in parts["clients"].items() if f not in outgoing},
        "outgoing": decoded,
    }


class RecordingMetaFed(MetaFed):
    """Records which federation receives a model in which round."""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        RECEIVED.append((client.round, client.id))
        return super().accumulate(client, model, net)


class Interrupt:
    """Interrupts a run after `after` hops of its second round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_run_start(self, method: str, done: int, rounds: int) -> None: ...

    def on_answer(self, round: int, done: int, asked: int) -> None:
        if round == 2 and done == self.after:
            raise KeyboardInterrupt

    def on_round_end(self, metrics: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_resumes_at_the_hop_where_it_stopped(after: int, tmp_path: Path) -> None:
    method = RecordingMetaFed(sealed=False, **SMALL)
    options: dict[str, Any] = {"model": linear(), "seed": SEED, "drop": 0.1, "corrupt": 0.2}
    fewer.run(method, DATA, out=tmp_path / "uninterrupted", **options)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "interrupted", progress=Interrupt(after), **options)
    received_before = len([hop for hop in RECEIVED if hop[0] == 2])
    saved = next((tmp_path / "interrupted/clients/000/000003").glob("federation.00000001.safetensors"))
    saved.with_name("federation.00000002.safetensors").write_bytes(saved.read_bytes()[:99])  # an unfinished write
    RECEIVED.clear()
    fewer.resume(tmp_path / "interrupted", method=method, data=DATA, model=linear())
    assert received_before and {client for round, client in RECEIVED if round == 2} == set(range(after, COUNT))
    uninterrupted, interrupted = (
        comparable_parts(tmp_path / "uninterrupted"),
        comparable_parts(tmp_path / "interrupted"),
    )
    assert uninterrupted == interrupted and not list((tmp_path / "interrupted/hops").iterdir())


class InterruptOnce(MetaFed):
    """Interrupts one federation once, after it has saved its model."""

    victim: int = -1
    mark: str = ""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        message = super().accumulate(client, model, net)
        if client.id == self.victim and client.round == 2 and self.mark and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise KeyboardInterrupt
        return message


def find_seed_with_faults(faults: Faults, wanted: list[str | None]) -> int:
    """A seed with no faults in the first round and the `wanted` ones in the second."""
    for seed in range(10_000):
        clients = Inline(COUNT, seed, faults, handlers=None)  # type: ignore[arg-type]
        clients.round = 1
        first = [clients._draw_fault(client, handler) for client in range(COUNT) for handler in ("begin", "accumulate")]
        clients.round = 2
        if not any(first) and [clients._draw_fault(client, "accumulate") for client in range(COUNT)] == wanted:
            return seed
    raise AssertionError


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("victim", [2, 3])
def test_a_run_resumes_after_a_refusal_as_if_uninterrupted(sealed: bool, victim: int, tmp_path: Path) -> None:
    """Federation 2 refuses the message of 1; then the victim is interrupted."""
    seed = find_seed_with_faults(Faults(corrupt=0.2), [None, "corrupt", None, None])
    options: dict[str, Any] = {"model": linear(), "seed": seed, "corrupt": 0.2}
    uninterrupted = fewer.run(InterruptOnce(sealed=sealed, **SMALL), DATA, out=tmp_path / "uninterrupted", **options)
    method = InterruptOnce(sealed=sealed, victim=victim, mark=str(tmp_path / "mark"), **SMALL)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "interrupted", **options)
    resumed = fewer.resume(tmp_path / "interrupted", method=method, data=DATA, model=linear())
    assert uninterrupted.history[1]["absent"] == 1
    assert_same_result(resumed, uninterrupted)


class AbsentThenUnable(InterruptOnce):
    """Federation 2 is absent in round 1; in round 2 it warms up and is then unable."""

    @on_client(stream="begin")
    def warm_up(self, client: Client) -> dict[str, Any]:
        if client.id == 2:
            raise ConnectionError("gone")
        return super().warm_up(client)

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        if client.id == 2 and client.round == 1:
            raise ConnectionError("gone")
        if client.id == 2:
            self.load_or_train_record(client)
            raise Unable("ill")
        return super().accumulate(client, model, net)


def test_the_state_of_a_skipped_federation_is_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": linear(), "seed": SEED}
    uninterrupted = fewer.run(AbsentThenUnable(**SMALL), DATA, out=tmp_path / "uninterrupted", **options)
    method = AbsentThenUnable(victim=3, mark=str(tmp_path / "mark"), **SMALL)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "interrupted", **options)
    assert_same_result(fewer.resume(tmp_path / "interrupted", method=method, data=DATA, model=linear()), uninterrupted)
    assert [line["absent"] for line in uninterrupted.history] == [2, 1, 0]


def assert_same_result(result: Any, expected: Any) -> None:
    """Compares absences and every federation's model."""
    assert [line["absent"] for line in result.history] == [line["absent"] for line in expected.history]
    for client in range(COUNT):
        model, expected_model = get_weights(result.personal_model(client)), get_weights(expected.personal_model(client))
        assert all(torch.equal(tensor, expected_model[name]) for name, tensor in model.items())


def test_hops_made_with_other_settings_are_discarded(tmp_path: Path) -> None:
    seed = find_seed_with_faults(Faults(drop=0.2), [None, "drop", None, None])
    options: dict[str, Any] = {"model": linear(), "seed": seed}
    with pytest.raises(KeyboardInterrupt):
        fewer.run(MetaFed(**SMALL), DATA, drop=0.2, out=tmp_path / "run", progress=Interrupt(3), **options)
    resumed = fewer.resume(tmp_path / "run", data=DATA, model=linear(), drop=0.0)
    assert_same_result(resumed, fewer.run(MetaFed(**SMALL), DATA, out=tmp_path / "uninterrupted", **options))


class FailOnce(MetaFed):
    """Federation 1 fails the first time."""

    mark: str = ""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        if client.id == 1 and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise ConnectionError("gone")
        return super().accumulate(client, model, net)


def test_after_a_lost_quorum_all_federations_are_asked_again(tmp_path: Path) -> None:
    method = FailOnce(mark=str(tmp_path / "mark"), **SMALL)
    with pytest.raises(QuorumLost):
        fewer.run(method, DATA, model=linear(), seed=SEED, quorum=1.0, out=tmp_path / "run")
    resumed = fewer.resume(tmp_path / "run", method=method, data=DATA, model=linear())
    assert [line["absent"] for line in resumed.history] == [0, 0, 0]


class Sleepy(MetaFed):
    """Federation 2 is slow."""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        time.sleep(1.5 * (client.id == 2))
        return super().accumulate(client, model, net)


def test_a_federation_that_misses_the_deadline_is_late(tmp_path: Path) -> None:
    harness = make_harness(Sleepy(**SMALL), linear(), tmp_path)
    harness.clients.rules = RoundRules(deadline=1.2)
    harness.rounds(1)
    assert harness.absences == [(2, "late")] and harness.state.holders == [0, 1, 3] and harness.hops[-1] == (1, 3)


def test_results_do_not_depend_on_runtime_or_sealing(digits: Data, tmp_path: Path) -> None:
    faulty: dict[str, Any] = {"seed": 3, "drop": 0.15, "slow": 0.1, "corrupt": 0.15}
    runs = {
        "inline": fewer.run(MetaFed(rounds=3, lr=0.1, local_steps=5), digits, out=tmp_path / "inline", **faulty),
        "pool": fewer.run(
            MetaFed(rounds=3, lr=0.1, local_steps=5), digits, out=tmp_path / "pool", runtime="pool", **faulty
        ),
        "open": fewer.run(
            MetaFed(rounds=3, lr=0.1, local_steps=5, sealed=False), digits, out=tmp_path / "open", **faulty
        ),
    }
    assert any(line["absent"] for line in runs["inline"].history)
    assert comparable_parts(tmp_path / "inline") == comparable_parts(tmp_path / "pool")
    for client in range(6):
        sealed_model, open_model = (get_weights(runs[kind].personal_model(client)) for kind in ("inline", "open"))
        assert all(torch.equal(tensor, open_model[name]) for name, tensor in sealed_model.items())
    metrics = [[(line["accuracy"], line["loss"], line["absent"]) for line in runs[kind].history] for kind in runs]
    assert metrics[0] == metrics[2]


class Killed(MetaFed):
    """Kills the process of one federation, once."""

    victim: int = 0
    mark: str = ""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        if client.id == self.victim and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().accumulate(client, model, net)


def test_a_killed_process_is_skipped_and_returns(tmp_path: Path) -> None:
    method = Killed(victim=1, mark=str(tmp_path / "mark"), **SMALL)
    result = fewer.run(method, DATA, model=linear(), seed=SEED, runtime="pool", workers=1, out=tmp_path / "ring")
    assert [line["absent"] for line in result.history] == [1, 0, 0] and result.state.holders == [0, 1, 2, 3]


# --- seals ----------------------------------------------------------------------------------------------------------


def sealed_ring(tmp_path: Path) -> tuple[RingHarness, Call, bytes]:
    """A ring after one round, and a call with a sealed message that its receiver has not opened yet."""
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    harness.rounds(1)
    harness.clients.round = 2
    fetch = Call(1, FETCH_OUTGOING, 2, hop=Hop(2, "accumulate", 5, True))
    blob = harness.clients.handlers.answer(fetch, b"").blob
    return harness, Call(2, "accumulate", 2, hop=Hop(1, "accumulate", 5, True)), blob


def test_a_sealed_message_is_accepted_once(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    answer = harness.clients.handlers.answer
    assert answer(delivery, blob).failure is None
    replay = answer(delivery, blob)
    assert replay.failure == "refused" and "replayed sealed message (round 2, number 5)" in replay.detail
    old_message = answer(
        Call(1, FETCH_OUTGOING, 1, hop=Hop(2, "accumulate", 9, True)), b""
    ).blob  # from an earlier round
    replay = answer(Call(2, "accumulate", 1, hop=Hop(1, "accumulate", 9, True)), old_message)
    assert replay.failure == "refused" and "replayed sealed message (round 1, number 9)" in replay.detail


def test_a_message_of_another_run_is_refused(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    other_run = replace(harness.clients.handlers, run_id=b"another run")
    reply = other_run.answer(delivery, blob)
    assert reply.failure == "refused" and "the seal is broken" in reply.detail
    fetch = Call(1, FETCH_OUTGOING, 2, hop=Hop(2, "accumulate", 5, True))
    assert other_run.answer(delivery, other_run.answer(fetch, b"").blob).failure is None


def test_the_relay_can_neither_request_nor_inject_a_model(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    before, answer = harness.federation_state(2), harness.clients.handlers.answer
    assert delivery.hop
    for name in ("accumulate", "personalize"):
        reply = answer(Call(2, name, 2), encode(name, {}))
        assert reply.failure == "refused" and "is not an @on_client handler" in reply.detail
        assert not reply.blob
        injected = encode(name, {"model": all_sevens(linear()), "net": ""})
        reply = answer(Call(2, name, 2, hop=Hop(-1, name, 6, True)), injected)
        assert reply.failure == "refused" and reply.detail == "a message without a sender"
    assert answer(Call(2, "warm_up", 2, hop=delivery.hop), blob).failure == "refused"
    assert answer(Call(2, FETCH_OUTGOING, 2), b"").failure == "refused"
    assert pack(harness.federation_state(2)) == pack(before)


def test_the_relay_cannot_override_sealed_fields(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    assert harness.clients.handlers.answer(replace(delivery, item={"net": 5}), blob).failure is None


def test_the_seal_uses_x25519_hkdf_and_chacha20poly1305() -> None:
    sender, receiver = new_key(), new_key()
    blob = seal(b"weights", Header(1, 2, "accumulate", 3, 4), sender, public_key(receiver), b"run")
    header_end = 8 + int.from_bytes(blob[4:8], "little")
    header, fresh, ciphertext = blob[:header_end], blob[header_end : header_end + 32], blob[header_end + 32 :]
    private = X25519PrivateKey.from_private_bytes(receiver)
    shared = b"".join(private.exchange(X25519PublicKey.from_public_bytes(key)) for key in (fresh, public_key(sender)))
    key = HKDF(SHA256(), 32, None, b"FWS1" + fresh + public_key(sender) + public_key(receiver)).derive(shared)
    assert ChaCha20Poly1305(key).decrypt(bytes(12), ciphertext, header + b"run") == b"weights"
    with pytest.raises(Refused, match="the seal is broken"):
        unseal(parse_sealed(blob.replace(b'"round":3', b'"round":4')), receiver, public_key(sender), b"run")


def test_only_the_owner_can_read_private_keys(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    harness.rounds(1)
    PinnedKeys(tmp_path).create()
    keys = [*tmp_path.glob("*/*/key"), tmp_path / "seal.key"]
    assert len(keys) == COUNT + 1 and not any(path.stat().st_mode & 0o077 for path in keys)
    assert not list(tmp_path.rglob("*.part"))


def test_a_key_file_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        PinnedKeys(tmp_path).create()
    monkeypatch.undo()
    assert not (tmp_path / "seal.key").exists()
    assert PinnedKeys(tmp_path).create() == public_key(PinnedKeys(tmp_path).private(0))


def test_a_message_with_any_changed_byte_is_refused(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    for position in [*range(60), *range(60, len(blob), 41), len(blob) - 1]:
        changed = bytearray(blob)
        changed[position] ^= 1
        assert harness.clients.handlers.answer(delivery, bytes(changed)).failure == "refused", position
    for cut in (0, 3, 8, 100, len(blob) - 1):
        assert harness.clients.handlers.answer(delivery, blob[:cut]).failure == "refused"
    assert harness.clients.handlers.answer(delivery, blob).failure is None


@pytest.mark.parametrize(
    "change", [{"client": 3}, {"handler": "personalize"}, {"peer": 0}, {"number": 6}, {"round": 3}]
)
def test_a_message_is_valid_for_one_receiver_handler_and_hop(change: dict[str, Any], tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    assert delivery.hop
    hop = replace(delivery.hop, **{name: change[name] for name in ("peer", "number") if name in change})
    call_ = replace(delivery, hop=hop, **{name: change[name] for name in change if name not in ("peer", "number")})
    reply = harness.clients.handlers.answer(call_, blob)
    assert reply.failure == "refused" and "a sealed message with an unexpected header" in reply.detail


def test_sealed_messages_are_authenticated_and_encrypted() -> None:
    sender, receiver, stranger = new_key(), new_key(), new_key()
    header = Header(1, 2, "accumulate", 1, 0)
    blob = seal(b"weights", header, sender, public_key(receiver))
    assert unseal(parse_sealed(blob), receiver, public_key(sender)) == b"weights" and b"weights" not in blob
    assert blob != seal(b"weights", header, sender, public_key(receiver))
    for private, sender_public in ((stranger, public_key(sender)), (receiver, public_key(stranger))):
        with pytest.raises(Refused, match="the seal is broken"):
            unseal(parse_sealed(blob), private, sender_public)
    forged = seal(b"weights", header, stranger, public_key(receiver))  # the stranger claims to be federation 1
    with pytest.raises(Refused, match="the seal is broken"):
        unseal(parse_sealed(forged), receiver, public_key(sender))
    assert len(fingerprint(public_key(sender))) == 64 and fingerprint(public_key(sender)) != fingerprint(
        public_key(receiver)
    )


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    for blob in (junk, b"FWS1" + junk, b"FWS1\x02\0\0\0{}" + junk, b"FWS1\x04\0\0\0null" + junk):
        with pytest.raises(Refused):
            parse_sealed(blob)
            raise AssertionError("parse_sealed accepted invalid bytes")


class SecretSender(MetaFed):
    """Federation 0 sends a secret. A file stores it reversed, so no other process holds the secret itself."""

    file: str = ""

    def outgoing_message(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == 0 and client.round == 1:
            secret = torch.randint(1, 120, (16,), dtype=torch.uint8)
            Path(self.file).write_bytes(bytes(secret.tolist())[::-1])
            model = {**model, "head.weight": secret.view(torch.float32).view(CLASSES, HIDDEN).clone()}
        return super().outgoing_message(client, model)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sealed", [True, False])
def test_the_relay_holds_only_ciphertext(sealed: bool, tmp_path: Path) -> None:
    """Searches the relay's memory and files for a model that it forwarded."""
    out = tmp_path / "run"
    method = SecretSender(file=str(tmp_path / "mark"), sealed=sealed, distill_threshold=0.0, **SMALL)
    leaks: list[Any] = []

    class SearchForSecret(Interrupt):
        def on_answer(self, round: int, done: int, asked: int) -> None:
            if round == 1 and done == 3 and Path(method.file).exists():
                reversed_secret = Path(method.file).read_bytes()
                relay_files = [path for path in out.rglob("*") if path.is_file() and "clients" not in path.parts]
                assert any("hops" in path.parts for path in relay_files)
                leaks.extend(path for path in relay_files if reversed_secret in path.read_bytes()[::-1])
                leaks.extend(["memory"] if in_memory(reversed_secret) else [])

    fewer.run(method, DATA, model=linear(), seed=SEED, runtime="pool", workers=1, out=out, progress=SearchForSecret(99))
    assert bool(leaks) is not sealed  # without the seal, the search must find the secret
    reversed_secret = Path(method.file).read_bytes()
    outgoing = list(out.glob("clients/*/*/ring_outgoing*"))
    assert outgoing and reversed_secret


def in_memory(reversed_bytes: bytes) -> bool:
    """True if the memory of this process contains these bytes in reverse order."""
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", 0) as memory:
        for line in maps:
            span, permissions = line.split()[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if permissions[:2] != "rw" or high - low > 1 << 28:
                continue
            try:
                memory.seek(low)
                if reversed_bytes in memory.read(high - low)[::-1]:
                    return True
            except (OSError, OverflowError, ValueError):
                continue
    return False


# --- groups ---------------------------------------------------------------------------------------------------------

INNER_OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.5},
    "fedbn": {},
    "fedmk": {
        "min_samples": 2,
        "per_class": 2,
        "outer_steps": 1,
        "inner_steps": 1,
        "matching_steps": 4,
        "server_steps": 3,
    },
}


def test_a_federation_has_the_samples_of_its_members() -> None:
    data = ring_data(7)
    federated = group_clients(data, 3)
    assert len(federated) == 3 and [len(federated.members_of(n)) for n in range(3)] == [2, 2, 3]
    for number, members in enumerate(([0, 1], [2, 3], [4, 5, 6])):
        members_data = federated.members_of(number)
        for part in ("train", "validation", "test"):
            labels = getattr(federated.client(number), part).labels
            member_samples = [getattr(data.client(member), part) for member in members]
            assert torch.equal(labels, torch.cat([samples.labels for samples in member_samples]))
            for position, samples in enumerate(member_samples):
                assert torch.equal(getattr(members_data.client(position), part).rows, samples.rows)
    trial = federated.hold_out(0.2, 0)
    assert isinstance(trial, type(federated)) and len(trial.members_of(2)) == 3 and trial.size(0) < federated.size(0)
    assert federated.fingerprint() != data.fingerprint()
    for wrong in (0, 8):
        with pytest.raises(SettingError, match=rf"federations must be 1 to 7 \(the number of clients\), got {wrong}"):
            group_clients(data, wrong)
    with pytest.raises(SettingError, match="has no federations"):
        data.members_of(0)


def make_group_method(inner: str, **options: Any) -> MetaFed:
    return MetaFed(
        **SMALL, federations=2, inner_method=inner, inner_rounds=2, inner_options=INNER_OPTIONS[inner], **options
    )


@pytest.mark.parametrize("inner", ["fedavg", "fedprox"])
def test_a_group_trains_with_the_inner_method_and_distills(inner: str, tmp_path: Path) -> None:
    data = ring_data(6)
    method = make_group_method(inner, distill_threshold=0.0)
    harness = make_harness(method, linear(), tmp_path, data)
    harness.rounds(1)
    federated = group_clients(data, 2)

    def run_inner(number: int, kind: type[FedAvg], **options: Any) -> Any:
        """Runs the inner method among the members of one federation."""
        seed = seed_of(SEED, number, "members")
        inner_method = kind(rounds=2, lr=0.3, local_steps=2, batch_size=4, **options)
        return fewer.run(inner_method, federated.members_of(number), model=linear(), seed=seed).state.model

    kind = find(inner)
    assert issubclass(kind, FedAvg)
    first_model = run_inner(0, kind, **INNER_OPTIONS[inner])
    assert all(torch.equal(tensor, harness.federation_state(0)["model"][name]) for name, tensor in first_model.items())

    class Distilling(FedAvg):
        """Members distill the previous federation's model into their own."""

        def fit(self, net: nn.Module, client: Client) -> None:
            numbers = torch.randint(len(client.train), (2, 4), generator=client.stream("study"))
            teacher = linear()
            load_weights(teacher, first_model)
            distill(net, teacher, client.train.batches(numbers), self.lr, 1.0)

    second_model = run_inner(1, kind, **INNER_OPTIONS[inner])
    inner_method, seed = Distilling(rounds=2, lr=0.3), seed_of(SEED, 1, "members")
    members_data = federated.members_of(1)
    task = Task((FEATURES,), CLASSES, lambda: linear(), pretrained=second_model)
    contexts = ContextFactory(members_data, task, seed, tmp_path / "taught")
    members = Inline(len(members_data), seed, handlers=HandlerRunner(inner_method, contexts, seed, torch.device("cpu")))
    state = inner_method.init(task, seed)
    for members.round in (3, 4):
        state = inner_method.round(state, members)
    assert all(torch.equal(tensor, harness.federation_state(1)["model"][name]) for name, tensor in state.model.items())


@pytest.mark.parametrize("inner", ["fedavg", "fedbn"])
def test_groups_give_the_same_result_in_a_pool_and_after_resuming(inner: str, tmp_path: Path) -> None:
    data, net = ring_data(6), normed()
    method = make_group_method(inner)
    result = fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "uninterrupted")
    fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "pool", runtime="pool")
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "interrupted", progress=Interrupt(1))
    fewer.resume(tmp_path / "interrupted", method=method, data=data, model=net)
    members = {
        kind: {
            file.relative_to(tmp_path / kind): file.read_bytes()
            for file in tmp_path.glob(f"{kind}/clients/*/*/members/**/*.s*")
        }
        for kind in ("uninterrupted", "pool", "interrupted")
    }
    assert (
        comparable_parts(tmp_path / "uninterrupted")
        == comparable_parts(tmp_path / "pool")
        == comparable_parts(tmp_path / "interrupted")
    )
    assert members["uninterrupted"] == members["pool"] == members["interrupted"] and bool(members["uninterrupted"]) == (
        inner == "fedbn"
    )
    ring = result.metrics["ring"]
    assert set(ring) == {"0", "1"} and all(record["up"] > 0 and record["down"] > 0 for record in ring.values())


def uneven_groups() -> tuple[ArrayData, MetaFed]:
    data = from_arrays(X, Y, client_ids=np.repeat([0, 1, 2, 3], [8, 32, 20, 20]), validation=0.3)
    return data, MetaFed(**SMALL, federations=2, inner_rounds=1)


def test_a_group_head_averages_by_size_and_evaluates_all_members(tmp_path: Path) -> None:
    data, method = uneven_groups()
    harness = make_harness(method, linear(), tmp_path, data)
    federation_group, initial = method.build_federation(harness.client(0)), get_weights(linear())
    seed, members_data = seed_of(SEED, 0, "members"), group_clients(data, 2).members_of(0)
    task = Task((FEATURES,), CLASSES, linear, pretrained=initial)
    factory = ContextFactory(members_data, task, seed, tmp_path / "by-hand")
    member_contexts = [cast(Client, factory(member, 1)) for member in range(2)]
    members = [SingleClient(context, "", TrainingBudget(0.3, 2, 4)) for context in member_contexts]
    counts = [member.evaluate(initial, "") for member in members]
    assert federation_group.evaluate(initial, "") == tuple(map(sum, zip(*counts, strict=True)))
    teacher = Teacher({name: tensor + 1 for name, tensor in initial.items()}, "", 1.0)
    sizes = [len(context.train) for context in member_contexts]
    assert sizes[0] != sizes[1]
    mean = weighted_mean([member.distill(initial, teacher) for member in members], sizes)
    assert all(torch.equal(tensor, mean[name]) for name, tensor in federation_group.distill(initial, teacher).items())


def test_inner_bytes_add_up_over_rounds(tmp_path: Path) -> None:
    data, method = uneven_groups()
    harness = make_harness(method, linear(), tmp_path, data)
    inner_bytes = []
    for _ in range(3):
        harness.rounds(1)
        inner_bytes.append(harness.federation_state(1)["inner_bytes"])
    assert all(
        later[side] > before[side] for before, later in itertools.pairwise(inner_bytes) for side in ("up", "down")
    )
    assert (
        inner_bytes[2]["up"] - inner_bytes[1]["up"] < inner_bytes[1]["up"]
    )  # the bytes of one round, not of all rounds


@pytest.mark.parametrize("inner", ["fedmk", "fedgen", "feddistill", "local"])
def test_other_inner_methods_work(inner: str) -> None:
    data = fewer.data.load("digits", clients=4, alpha=5.0, validation=0.2, fraction=0.2)
    method = MetaFed(
        rounds=1, local_steps=2, federations=2, inner_method=inner, inner_options=INNER_OPTIONS.get(inner, {})
    )
    result = fewer.run(method, data, seed=0)
    assert result.history[-1]["absent"] == 0 and all(record["up"] > 0 for record in result.metrics["ring"].values())


# --- different nets -------------------------------------------------------------------------------------------------


def test_federations_with_different_nets_learn_from_each_other(digits: Data, tmp_path: Path) -> None:
    method = MetaFed(rounds=3, lr=0.1, local_steps=3, nets=("cnn", "mlp"), distill_threshold=1.0)
    result = fewer.run(method, digits, seed=1, out=tmp_path / "run")
    assert [type(result.personal_model(client)).__name__ for client in range(6)] == ["SmallCNN", "MLP"] * 3
    assert [result.metrics["ring"][str(client)]["adopted"] for client in range(6)] == [0] * 6  # never adopted
    assert [line["absent"] for line in result.history] == [0, 0, 0]
    same_nets = MetaFed(rounds=3, lr=0.1, local_steps=3, nets=("cnn", "mlp", "mlp"), distill_threshold=1.0)
    ring = fewer.run(same_nets, digits, seed=1).metrics["ring"]
    assert [ring[str(client)]["adopted"] for client in range(6)] == [
        0,
        0,
        2,
        0,
        0,
        2,
    ]  # models of the same net are adopted
    assert MetaFed(nets="cnn,mlp").nets == ("cnn", "mlp")


def test_the_feature_map_is_fitted_on_a_limited_number_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def spy(net: nn.Module, teacher: nn.Module, x: torch.Tensor) -> nn.Linear:
        seen.append(len(x))
        return fit_feature_map(net, teacher, x)

    monkeypatch.setattr(federation, "fit_feature_map", spy)
    harness = make_harness(MetaFed(**SMALL, nets=("mlp",)), linear(), tmp_path)
    client = harness.client(0)
    teacher = Teacher(get_weights(linear()), "", 1.0)
    for limit, count in ((5, 5), (MAX_MAP_SAMPLES, len(client.train))):
        monkeypatch.setattr(federation, "MAX_MAP_SAMPLES", limit)
        SingleClient(client, "mlp", TrainingBudget(0.1, 1, 4)).distill(
            replace_client_net(client, "mlp").initial_weights(), teacher
        )
        assert seen.pop() == count and MAX_MAP_SAMPLES >= 100


# --- edge cases and wrong settings ------------------------------------------------------------------------------------


def test_runs_survive_empty_and_tiny_federations(tmp_path: Path) -> None:
    owners = np.repeat([0, 1, 2, 3], [30, 1, 6, 43])
    y = np.where(owners == 2, 1, Y)  # 2 has one class; 1 has one sample, and so no validation or test samples
    data = from_arrays(X, y, client_ids=owners, validation=0.3, test=(X[:20], Y[:20]))
    result = fewer.run(
        MetaFed(rounds=3, local_steps=2, batch_size=4), data, model=linear(), seed=0, out=tmp_path / "run"
    )
    assert [line["absent"] for line in result.history] == [0, 0, 0]
    pairs = [(X[:20], Y[:20]), (X[:0], Y[:0]), (X[20:40], Y[20:40])]
    empty = fewer.data.from_clients(pairs, validation=0.3)
    result = fewer.run(MetaFed(rounds=2, local_steps=2, batch_size=4), empty, model=linear(), seed=0)
    assert [line["absent"] for line in result.history] == [2, 1] and result.state.holders == [0, 2]


def test_a_federation_that_diverges_is_unable(tmp_path: Path) -> None:
    with pytest.raises(QuorumLost, match=r"4 unable \(training diverged; lower lr \(now 1e\+30\)\)"):
        fewer.run(MetaFed(lr=1e30, local_steps=5), DATA, model=linear(), seed=0)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["-o", "ignore_threshold=2"], "metafed: ignore_threshold must be <= 1, got 2"),
        (["-o", "stages=three"], "metafed: stages must be 'both', 'accumulate' or 'personalize', got 'three'"),
        (["-o", "nets=cnn,alexnett"], "unknown model 'alexnett', did you mean 'alexnet'?"),
        (["-o", "nets=cnn,lenet5"], "nets: lenet5 does not take inputs of shape (1, 8, 8)"),
        (
            ["-o", "inner_method=metafed"],
            "inner_method = metafed does not work inside a federation (allowed: fedavg, fedprox, ",
        ),
        (
            ["-o", "inner_method=fedmeta"],
            "inner_method = fedmeta does not work inside a federation (allowed: fedavg, fedprox, ",
        ),
        (["-o", "inner_method=fedavgg"], "unknown method 'fedavgg', did you mean 'fedavg'?"),
        (["-o", "federations=99"], "federations must be 1 to 6 (the number of clients), got 99"),
        (["-o", 'inner_options={"rats":1}'], "inner_options: unknown option of fedavg 'rats'"),
    ],
)
def test_a_wrong_option_is_reported_in_one_line(args: list[str], text: str) -> None:
    result = call("run", "metafed", *args, *DIGITS, code=2)
    assert result.stderr.startswith("fewer: ") and result.stderr.count("\n") == 1 and text in result.stderr


# --- recipes ----------------------------------------------------------------------------------------------------------


def cells(name: str) -> Iterator[tuple[RecipeRow, RecipeColumn, Settings, Any]]:
    """Rows, columns, settings and methods of a recipe's cells."""
    plan = load_recipe(f"metafed/{name}")
    for column in plan.column:
        for row, values in zip(plan.row, row_settings(column, plan, False), strict=True):
            settings_ = parse_settings(values)
            yield row, column, settings_, make_method(find(settings_.method), settings_)


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "fig5", "fig6", "fig7"])
def test_recipes_tune_all_rows_equally(name: str) -> None:
    """Tuned rows search full grids, MetaFed from the paper's l_t1. Baselines train on its validation samples too."""
    without_validation = set()
    for row, _, settings_, method in cells(name):
        if row.tune:
            assert (
                sum(len(grid) - 1 for grid in method.search_space().values()) < load_recipe(f"metafed/{name}").trials
            ), row.name
            assert "distill_threshold" not in method.search_space() or method.distill_threshold == 0.6
            without_validation |= {method.name} if settings_.validation == 0 else set()
    assert without_validation == ({"fedavg", "fedprox", "fedbn", "local"} if name.startswith("table") else set())


def test_recipes_use_the_stated_settings() -> None:
    for _, _, settings_, method in cells("table1"):  # VLCS: 10 % to train on, 10 % to validate, 20 % to test
        remaining = (1 - TEST_FRACTION) * settings_.fraction
        assert (
            remaining == TEST_FRACTION
            and settings_.validation in (0.5, 0.0)
            and getattr(method, "ignore_threshold", 0.4) == 0.4
        )
    for _, column, _, method in cells("fig6"):  # with l_t1 = 1 the distillation weight has no effect
        assert method.name != "metafed" or "weight" not in column.name or method.distill_threshold == 0.6
    for _, _, settings_, method in cells("fig7"):
        assert settings_.rounds * method.local_steps == 100 and getattr(method, "warmup_steps", 0) == 0
