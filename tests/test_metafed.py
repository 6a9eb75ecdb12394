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
from fewer.methods.metafed import FEDERATION, distill_weight_for
from fewer.models import EncoderHead, Task, Weights, get_weights, load_weights, norm_weight_names
from fewer.runs.experiment import make_method, parse_settings
from fewer.runs.settings import Settings
from fewer.runtime import Absent, HandlerRunner, Inline, Unable, on_client, on_ring, seed_of, stream
from fewer.runtime.clients import Faults, RoundRules
from fewer.runtime.handlers import FETCH_OUTGOING, Call, Hop, Reply
from fewer.runtime.keys import PinnedKeys
from fewer.wire import Refused, decode, encode, pack, unpack
from fewer.wire.sealing import Header, fingerprint, new_key, parse_sealed, public_key, seal, unseal
from tests.test_baselines import left
from tests.test_cli import DIGITS, call
from tests.test_methods import Array, close

FEATURES, HIDDEN, CLASSES, SEED, COUNT = 3, 2, 2, 4, 4
DRAW = np.random.default_rng(1)
CLIENT = np.repeat(np.arange(COUNT), 20)
X = DRAW.normal(0, 1, (len(CLIENT), FEATURES)).astype(np.float32)
Y = (X[:, 0] + 0.5 * X[:, 1] * (CLIENT % 2) > 0).astype(np.int64)
A = DRAW.normal(0, 0.7, (HIDDEN, FEATURES)).astype(np.float32)
C = DRAW.normal(0, 0.7, (CLASSES, HIDDEN)).astype(np.float32)

Model = tuple[Array, Array]
"""Encoder and head of the linear net."""


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
class Carrier(Inline):
    """Records every call and injects the faults of a test."""

    down: list[tuple[Call, bytes]] = field(default_factory=list)
    fates: Mapping[tuple[int, int], str] = field(default_factory=dict)
    missed: list[Absent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_absent = lambda one, handler: self.missed.append(one)

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        self.down += calls
        return super()._deliver_calls(calls)

    def _draw_fault(self, client: int, handler: str) -> str | None:
        return None if handler == "begin" else self.fates.get((self.round, client))


@dataclass
class Work:
    """A ring that runs without the engine."""

    method: MetaFed
    clients: Carrier
    contexts: ContextFactory
    state: Any

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.clients.round += 1
            self.state = self.method.round(self.state, self.clients)

    def client(self, number: int) -> Client:
        context = self.contexts(number, self.clients.round)
        assert isinstance(context, Client)
        return context

    def personal_model(self, number: int) -> Weights:
        return get_weights(self.method.personal_model(self.client(number), {}))

    def own(self, client: int) -> dict[str, Any]:
        kept: dict[str, Any] = self.client(client).store.get(FEDERATION)
        return kept

    @property
    def hops(self) -> list[tuple[int, int]]:
        """Sender and receiver of each message; sender -1 means the ring starts here."""
        return [(c.hop.peer, c.client) for c, _ in self.clients.down if c.hop and c.handler != FETCH_OUTGOING]

    @property
    def messages(self) -> list[bytes]:
        """The messages between federations."""
        return [blob for c, blob in self.clients.down if c.hop and c.handler != FETCH_OUTGOING and c.hop.peer >= 0]

    @property
    def missed(self) -> list[tuple[int, str]]:
        return [(one.client, one.reason) for one in self.clients.missed]


def bench(
    method: MetaFed, net: nn.Module, folder: Path, data: Data = DATA, fates: Mapping[tuple[int, int], str] | None = None
) -> Work:
    data = method.prepare_data(data)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return Work(
        method, Carrier(len(data), SEED, handlers=handlers, fates=fates or {}), contexts, method.init(task, SEED)
    )


# --- by hand ----------------------------------------------------------------------------------------------------


def rows(client: int, part: str) -> tuple[Array, Any]:
    samples = getattr(DATA.client(client), part)
    x, y = samples.slice(0, len(samples))
    return x.double().numpy(), y.numpy()


def steps(method: MetaFed, client: int, round: int, purpose: str) -> list[tuple[Array, Any]]:
    x, y = rows(client, "train")
    drawn = torch.randint(
        len(y), (method.local_steps, method.batch_size), generator=stream(SEED, round, client, purpose)
    )
    return [(x[row], y[row]) for row in drawn.numpy()]


def descent(model: Model, batches: Sequence[tuple[Array, Any]], lr: float, teacher: Model | None, lam: float) -> Model:
    """Metrics = C A x; the derivative of cross-entropy by them is (softmax − one-hot) / n; that of the mean square of
    A x − A_t x over features and samples is 2 (A x − A_t x) / (n · features)."""
    a, c = model
    for x, y in batches:
        features = x @ a.T
        scores = features @ c.T
        likely = np.exp(scores - scores.max(1, keepdims=True))
        likely /= likely.sum(1, keepdims=True)
        away = (likely - np.eye(CLASSES)[y]) / len(y)
        back = away @ c
        if teacher is not None:
            back = back + lam * 2 * (features - x @ teacher[0].T) / (len(y) * HIDDEN)
        a, c = a - lr * back.T @ x, c - lr * away.T @ features
    return a, c


def valid(model: Model, client: int) -> tuple[float, float]:
    """Accuracy and summed loss on validation samples."""
    x, y = rows(client, "validation")
    scores = x @ model[0].T @ model[1].T
    loss = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]
    return float((scores.argmax(1) == y).mean()), float(loss.sum())


def same(weights: Weights, model: Model) -> bool:
    return close(weights["encoder.weight"], model[0], 1e-5) and close(weights["head.weight"], model[1], 1e-5)


FIRST: Model = (A.astype(np.float64), C.astype(np.float64))


@pytest.mark.parametrize("threshold", [0.0, 0.6, 1.0])
def test_both_stages_by_hand(threshold: float, tmp_path: Path) -> None:
    method = MetaFed(
        rounds=3, lr=0.3, local_steps=3, batch_size=4, distill_weight=2.0, distill_threshold=threshold, warmup_steps=3
    )
    work = bench(method, linear(), tmp_path)
    mine = [descent(FIRST, steps(method, p, 1, "begin"), 0.3, None, 0) for p in range(COUNT)]
    best = [(valid(mine[p], p), mine[p]) for p in range(COUNT)]
    passing: Model | None = None
    adopted = [0] * COUNT
    for round in (1, 2, 3):
        work.rounds(1)
        for p in range(COUNT):
            if passing is None:  # the first federation has no teacher and sends its own model
                passing = mine[p]
                continue
            if round == 3:
                lam = distill_weight_for(2.0, valid(passing, p)[0], valid(mine[p], p)[0], method.ignore_threshold)
                mine[p] = descent(mine[p], steps(method, p, round, "study"), 0.3, passing if lam else None, lam)
            elif valid(mine[p], p)[0] > threshold:
                mine[p] = passing = descent(mine[p], steps(method, p, round, "study"), 0.3, passing, 2.0)
            else:
                mine[p] = passing = descent(passing, steps(method, p, round, "taken"), 0.3, None, 0)
                adopted[p] += 1
            count = valid(mine[p], p)
            if (count[0], -count[1]) >= (best[p][0][0], -best[p][0][1]):
                best[p] = count, mine[p]
        assert all(same(work.own(p)["model"], mine[p]) for p in range(COUNT))
        assert work.state.holders == list(range(COUNT))
    assert all(same(work.personal_model(p), best[p][1]) for p in range(COUNT))
    assert [work.own(p)["adopted"] for p in range(COUNT)] == adopted
    assert sum(adopted) == {0.0: 0, 1.0: 7}.get(threshold, sum(adopted))
    assert threshold != 0.6 or 0 < sum(adopted) < 7  # some distill, some adopt
    assert any(best[p][1] is not mine[p] for p in range(COUNT)) or threshold  # the best is not always the last


@pytest.mark.parametrize(
    ("common", "mine", "expected"),
    [
        (0.4, 0.4, 0.0),  # no better, and below the threshold
        (0.3, 0.6, 0.0),
        (0.5, 0.5, 0.2),  # acceptable: λ₀ · 10^(0 − 1)
        (0.6, 0.8, 2 * 10**-2.0),
        (0.9, 0.8, 2 * 10**-0.5),
        (0.4, 0.3, 2 * 10**-0.5),  # below the threshold, but better than its own
        (1.0, 0.8, 2.0),
        (0.9, 0.1, 2.0),  # the exponent is 0 at most
    ],
)
def test_lambda_of_a_federation(common: float, mine: float, expected: float) -> None:
    assert distill_weight_for(2.0, common, mine, 0.5) == pytest.approx(expected)


def test_gradient_of_the_loss_with_features_is_that_of_finite_differences() -> None:
    torch.manual_seed(1)
    nets = [EncoderHead(nn.Sequential(nn.Linear(FEATURES, n), nn.Tanh()), n, CLASSES).double() for n in (4, 3)]
    net, teacher = nets
    x, y = torch.randn(5, FEATURES).double(), torch.tensor([0, 1, 1, 0, 1])
    link = fit_feature_map(net, teacher, x).double()
    loss = feature_loss(net, teacher, 0.7, link)
    parameters = [*net.parameters(), *link.parameters()]
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
    expected = F.cross_entropy(net.head(features[0]), y) + 0.7 * ((link(features[0]) - features[1]) ** 2).mean()
    assert loss(net, x, y).item() == pytest.approx(expected.item())


def test_the_map_between_features_fits_and_learns() -> None:
    torch.manual_seed(2)
    wide, narrow = (EncoderHead(nn.Linear(FEATURES, n), n, CLASSES) for n in (5, 2))
    x, y = torch.randn(50, FEATURES), torch.randint(CLASSES, (50,))
    link = fit_feature_map(wide, narrow, x)
    assert link.weight.shape == (2, 5)
    # Both see linear functions of x and a constant, so the narrow net's features are a linear map of the wide one's.
    assert ((link(wide.encoder(x)) - narrow.encoder(x)) ** 2).mean() < 0.02 * (narrow.encoder(x) ** 2).mean()
    linear_map = fit_feature_map(narrow, wide, x)
    before, target = linear_map.weight.detach().clone(), get_weights(wide)
    distill(narrow, wide, [(x, y)] * 5, 0.1, 1.0, linear_map)
    assert not torch.equal(before, linear_map.weight)
    assert all(torch.equal(tensor, target[name]) for name, tensor in get_weights(wide).items())


def test_the_teacher_is_in_evaluation_mode() -> None:
    net, teacher = normed(), normed()
    before = get_weights(teacher)
    x = torch.randn(8, FEATURES)
    distill(net, teacher.train(), [(x, torch.zeros(8, dtype=torch.long))] * 3, 0.1, 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in get_weights(teacher).items())
    assert not torch.equal(get_weights(net)["encoder.1.running_mean"], before["encoder.1.running_mean"])


@pytest.mark.parametrize("keep", [True, False])
def test_adopting_a_model_keeps_the_own_norms(keep: bool, tmp_path: Path) -> None:
    work = bench(MetaFed(keep_norms=keep), normed(), tmp_path)
    came = {name: torch.full_like(tensor, 7) for name, tensor in get_weights(normed()).items()}
    mine = get_weights(normed())
    assert isinstance(work.method, MetaFed)
    mixed = work.method.merge_keeping_norms(work.client(0), came, mine)
    norms = norm_weight_names(normed())
    assert len(norms) == 5
    for name, tensor in mixed.items():
        assert torch.equal(tensor, (mine if keep and name in norms else came)[name])


def sevens(net: nn.Module) -> Weights:
    return {name: torch.full_like(tensor, 7) for name, tensor in get_weights(net).items()}


def test_an_adopted_model_is_trained_with_the_own_norms(tmp_path: Path) -> None:
    work = bench(MetaFed(rounds=2, lr=1e-9, local_steps=1, distill_threshold=1.0), normed(), tmp_path)
    mine = work.method.load_or_train_own(work.client(1))["model"]
    work.method.accumulate(work.client(1), sevens(normed()), "")
    now = work.own(1)["model"]
    assert close(now["encoder.1.weight"], mine["encoder.1.weight"].double().numpy(), 1e-5)
    assert close(now["encoder.0.weight"], np.full((HIDDEN, FEATURES), 7.0), 1e-5)


def test_ties_in_accuracy_go_to_the_lower_loss(tmp_path: Path) -> None:
    work = bench(MetaFed(), linear(), tmp_path)
    first, later = get_weights(linear()), sevens(linear())
    own = {"best_correct": 5, "best_loss": 1.0, "best_model": first, "inner_bytes": {}}
    for correct, loss, best in ((5, 2.0, first), (5, 0.5, later), (4, 0.1, first), (6, 9.0, later)):
        stub: Any = SimpleNamespace(evaluate=MagicMock(return_value=Counts(correct, 10, loss)))
        assert work.method.save_own(work.client(0), stub, own, later)["best_model"] is best


# --- ablations ----------------------------------------------------------------------------------------------------


def test_ablations_are_what_they_say(tmp_path: Path) -> None:
    def calls(**settings: Any) -> tuple[list[str], Work]:
        work = bench(MetaFed(rounds=3, local_steps=2, **settings), linear(), tmp_path / str(settings))
        work.rounds(3)
        asked = [call.handler for call, _ in work.clients.down if call.hop and call.handler != FETCH_OUTGOING]
        return [asked[round * COUNT] for round in range(3)], work

    both, first, second = ["accumulate", "accumulate", "personalize"], ["accumulate"] * 3, ["personalize"] * 3
    assert calls()[0] == both
    assert calls(stages="accumulate")[0] == first
    kinds, work = calls(stages="personalize", sealed=False)
    assert kinds == second
    sent = {bytes(decode(blob)[1]["model"]["head.weight"].numpy()) for blob in work.messages}
    assert len(sent) == 1  # f is one federation's own model throughout
    assert list(MetaFed().search_space()) == ["lr", "distill_threshold"]
    assert (
        list(MetaFed(transfer="fine-tune").search_space())
        == list(MetaFed(stages="personalize").search_space())
        == ["lr"]
    )
    kinds, work = calls(transfer="fine-tune", distill_threshold=0.0)
    assert kinds == both and [work.own(p)["adopted"] for p in range(COUNT)] == [2, 3, 3, 3]


def test_fine_tuning_adopts_in_stage_two_as_well(tmp_path: Path) -> None:
    work = bench(MetaFed(rounds=1, lr=1e-9, local_steps=1, transfer="fine-tune"), linear(), tmp_path)
    work.method.personalize(work.client(1), sevens(linear()), "")
    assert close(work.own(1)["model"]["head.weight"], np.full((CLASSES, HIDDEN), 7.0), 1e-5)


# --- the ring -----------------------------------------------------------------------------------------------------


def test_a_message_goes_from_each_to_the_next(tmp_path: Path) -> None:
    work = bench(MetaFed(rounds=2, local_steps=1), linear(), tmp_path / "sealed")
    work.rounds(2)
    assert work.hops == [(-1, 0), (0, 1), (1, 2), (2, 3), (3, 0), (0, 1), (1, 2), (2, 3)]
    ledger = [entry for entry in work.clients.ledger.entries if entry.kind != "warm_up"]
    assert [entry.client for entry in ledger if entry.direction == "up"] == [0, 1, 2, 3, 0, 1, 2]
    downs = [entry for entry in ledger if entry.direction == "down"]
    assert [entry.client for entry in downs] == [1, 2, 3, 0, 1, 2, 3]
    model = 4 * (FEATURES * HIDDEN + HIDDEN * CLASSES)
    opened = bench(MetaFed(rounds=2, local_steps=1, sealed=False), linear(), tmp_path / "open")
    opened.rounds(2)
    for entry, sealed, blob in zip(downs, work.messages, opened.messages, strict=True):
        assert len(blob) - 8 - int.from_bytes(blob[:8], "little") == model
        head = 8 + int.from_bytes(sealed[4:8], "little")
        assert entry.bytes == len(sealed) == head + 32 + len(blob) + 16  # head, fresh key, message, tag


class Without(MetaFed):
    """A ring without one federation."""

    out: int = -1

    def sample_cohort(self, clients: Any) -> list[int]:
        return [client for client in super().sample_cohort(clients) if client != self.out]


class Dead(MetaFed):
    """A federation that fails in every handler until round `until`."""

    victim: int = -1
    until: int = 99

    @on_client(stream="begin")
    def warm_up(self, client: Client) -> dict[str, Any]:
        self._die(client)
        return super().warm_up(client)

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        self._die(client)
        return super().accumulate(client, model, net)

    @on_ring(stream="personalise")
    def personalize(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        self._die(client)
        return super().personalize(client, model, net)

    def _die(self, client: Client) -> None:
        if client.id == self.victim and client.round <= self.until:
            raise ConnectionError("gone")


SMALL: dict[str, Any] = {"rounds": 3, "lr": 0.3, "local_steps": 2, "batch_size": 4}


@pytest.mark.parametrize("victim", range(COUNT))
def test_the_ring_closes_over_a_dead_federation(victim: int, tmp_path: Path) -> None:
    ring = fewer.run(Dead(victim=victim, **SMALL), DATA, model=linear(), seed=SEED, out=tmp_path / "dead")
    alone = fewer.run(Without(out=victim, **SMALL), DATA, model=linear(), seed=SEED, out=tmp_path / "without")
    others = [client for client in range(COUNT) if client != victim]
    assert ring.state.holders == alone.state.holders == others
    for client in others:
        one, two = get_weights(ring.personal_model(client)), get_weights(alone.personal_model(client))
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert [line["absent"] for line in ring.history] == [2, 1, 1]  # it misses the warm-up too
    assert get_weights(ring.personal_model(victim)).keys() == get_weights(linear()).keys()


def test_a_federation_returns_to_the_ring(tmp_path: Path) -> None:
    ring = fewer.run(Dead(victim=2, until=1, **SMALL), DATA, model=linear(), seed=SEED, out=tmp_path / "ring")
    assert [line["absent"] for line in ring.history] == [2, 0, 0] and ring.state.holders == [0, 1, 2, 3]
    assert not torch.equal(get_weights(ring.personal_model(2))["head.weight"], torch.from_numpy(C))


def test_a_slow_federation_is_skipped_but_has_trained(tmp_path: Path) -> None:
    work = bench(MetaFed(**SMALL), linear(), tmp_path, fates={(1, 2): "slow"})
    before = descent(FIRST, [], 0, None, 0)
    work.rounds(1)
    assert work.state.holders == [0, 1, 3] and work.missed == [(2, "late")]
    assert work.hops[-1] == (1, 3)  # federation 3 gets the model of 1
    assert not close(work.own(2)["model"]["head.weight"], before[1], 1e-3)
    work.rounds(1)
    assert work.state.holders == [0, 1, 2, 3]


def test_a_damaged_model_is_refused_and_the_previous_one_is_sent(tmp_path: Path) -> None:
    for sealed in (True, False):
        work = bench(MetaFed(sealed=sealed, **SMALL), linear(), tmp_path / str(sealed), fates={(1, 1): "corrupt"})
        work.rounds(1)
        assert work.missed == [(1, "refused")] and work.state.holders == [0, 2, 3]
        assert work.hops == [(-1, 0), (0, 1), (1, 2), (0, 2), (2, 3)]
        assert "by client 2: " in work.clients.missed[0].detail
        work.rounds(1)
        assert work.state.holders == [0, 1, 2, 3]


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
    work = bench(Liar(lie=lie, **SMALL), linear(), tmp_path)
    work.rounds(1)
    assert work.missed == [(1, "refused")] and work.state.holders == [0, 2, 3]


def pin_all(work: Work) -> None:
    """Lets all federations pin each other's keys."""
    for one, other in itertools.product(range(COUNT), repeat=2):
        work.contexts.keys.public(one, other)


def test_a_federation_that_refuses_everything_is_skipped(tmp_path: Path) -> None:
    work = bench(MetaFed(**SMALL), linear(), tmp_path)
    work.rounds(1)
    pin_all(work)
    pins = tmp_path / "000/000002/pins.json"
    pins.write_text(json.dumps({str(other): "0" * 64 for other in range(COUNT)}))
    work.rounds(1)
    assert work.missed[-1] == (2, "refused") and work.state.holders == [2, 0, 1, 3]
    assert "has the fingerprint" in work.clients.missed[-1].detail


def test_no_federation_seals_for_a_key_that_is_not_pinned(tmp_path: Path) -> None:
    work = bench(MetaFed(**SMALL), linear(), tmp_path)
    work.rounds(1)
    pin_all(work)
    (tmp_path / "000/000002/key.pub").write_bytes(public_key(new_key()))  # what a carrier would like to be taken for it
    work.rounds(1)
    assert work.missed == [(2, "refused")] and work.hops[-1] == (1, 3)
    assert "by clients 1 and 0: the key offered for client 2 has the fingerprint" in work.clients.missed[0].detail
    assert work.state.holders == [2, 0, 1, 3]


def test_a_holder_that_trusts_no_key_is_skipped(tmp_path: Path) -> None:
    work = bench(MetaFed(**SMALL), linear(), tmp_path)
    work.rounds(1)
    pin_all(work)
    (tmp_path / "000/000001/pins.json").write_text(json.dumps({"2": "0" * 64, "3": "0" * 64}))
    work.rounds(1)
    assert work.missed == [(1, "refused")] and work.state.holders == [0, 2, 3]
    assert work.hops[-4:] == [(3, 0), (0, 1), (0, 2), (2, 3)]
    assert "to send to client 2: the key offered for client 2 has" in work.clients.missed[0].detail


def test_the_ring_restarts_if_the_first_holder_trusts_no_key(tmp_path: Path) -> None:
    work = bench(MetaFed(**SMALL), linear(), tmp_path)
    pin_all(work)
    (tmp_path / "000/000000/pins.json").write_text(json.dumps({"1": "0" * 64}))
    work.rounds(1)
    assert work.missed == [(0, "refused")] and work.hops == [(-1, 0), (-1, 1), (1, 2), (2, 3)]


def test_the_ring_restarts_if_the_first_holder_is_gone(tmp_path: Path) -> None:
    work = bench(MetaFed(**SMALL), linear(), tmp_path, fates={(1, 0): "corrupt"})
    work.rounds(1)
    assert work.hops == [(-1, 0), (0, 1), (-1, 1), (1, 2), (2, 3)] and work.state.holders == [1, 2, 3]
    for path in (tmp_path / "000/000003").glob("ring_outgoing.*"):
        path.unlink()
    work.rounds(1)
    assert work.missed[-1] == (3, "unable") and work.hops[5] == (2, 0)


def test_too_few_federations_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(QuorumLost, match="0 of 4 clients answered"):
        fewer.run(MetaFed(**SMALL), DATA, model=linear(), seed=SEED, drop=1.0)
    lost = tmp_path / "lost"
    with pytest.raises(QuorumLost, match="1: 3 of 4 clients answered, 4 needed"):
        fewer.run(Dead(victim=1, until=1, **SMALL), DATA, model=linear(), seed=SEED, quorum=1.0, out=lost)


# --- resuming, and other runtimes -----------------------------------------------------------------------------------

TAKEN: list[tuple[int, int]] = []


def ends(path: Path) -> dict[str, Any]:
    """Everything in a run that must match; messages are decoded, since the order of their header varies."""
    kept = left(path)
    outgoing = {f: unpack((path / f).read_bytes()) for f in kept["clients"] if f.name.startswith("ring_outgoing")}
    fields = {f: decode(bytes(message.numpy()))[1] for f, message in outgoing.items()}
    decoded = {f: (each["net"], pack(each["model"])) for f, each in fields.items()}
    return {
        **kept,
        "clients": {f: blob for f, blob in kept["clients"].items() if f not in outgoing},
        "outgoing": decoded,
    }


class Counted(MetaFed):
    """Records which federation receives a model in which round."""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        TAKEN.append((client.round, client.id))
        return super().accumulate(client, model, net)


class Break:
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
    method = Counted(sealed=False, **SMALL)
    given_: dict[str, Any] = {"model": linear(), "seed": SEED, "drop": 0.1, "corrupt": 0.2}
    fewer.run(method, DATA, out=tmp_path / "whole", **given_)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "broken", progress=Break(after), **given_)
    before = len([one for one in TAKEN if one[0] == 2])
    half = next((tmp_path / "broken/clients/000/000003").glob("federation.00000001.safetensors"))
    half.with_name("federation.00000002.safetensors").write_bytes(half.read_bytes()[:99])  # an unfinished write
    TAKEN.clear()
    fewer.resume(tmp_path / "broken", method=method, data=DATA, model=linear())
    assert before and {client for round, client in TAKEN if round == 2} == set(range(after, COUNT))
    one, two = ends(tmp_path / "whole"), ends(tmp_path / "broken")
    assert one == two and not list((tmp_path / "broken/hops").iterdir())


class Cut(MetaFed):
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


def seed_with(faults: Faults, wanted: list[str | None]) -> int:
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
def test_a_run_resumes_after_a_refusal_as_if_unbroken(sealed: bool, victim: int, tmp_path: Path) -> None:
    """Federation 2 refuses the message of 1; then the victim is interrupted."""
    seed = seed_with(Faults(corrupt=0.2), [None, "corrupt", None, None])
    given_: dict[str, Any] = {"model": linear(), "seed": seed, "corrupt": 0.2}
    whole = fewer.run(Cut(sealed=sealed, **SMALL), DATA, out=tmp_path / "whole", **given_)
    method = Cut(sealed=sealed, victim=victim, mark=str(tmp_path / "mark"), **SMALL)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "broken", **given_)
    ring = fewer.resume(tmp_path / "broken", method=method, data=DATA, model=linear())
    assert whole.history[1]["absent"] == 1
    assert_same(ring, whole)


class Faint(Cut):
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
            self.load_or_train_own(client)
            raise Unable("ill")
        return super().accumulate(client, model, net)


def test_the_work_of_a_skipped_federation_is_kept(tmp_path: Path) -> None:
    given_: dict[str, Any] = {"model": linear(), "seed": SEED}
    whole = fewer.run(Faint(**SMALL), DATA, out=tmp_path / "whole", **given_)
    method = Faint(victim=3, mark=str(tmp_path / "mark"), **SMALL)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "broken", **given_)
    assert_same(fewer.resume(tmp_path / "broken", method=method, data=DATA, model=linear()), whole)
    assert [line["absent"] for line in whole.history] == [2, 1, 0]


def assert_same(one: Any, two: Any) -> None:
    """Compares absences and every federation's model."""
    assert [line["absent"] for line in one.history] == [line["absent"] for line in two.history]
    for client in range(COUNT):
        model, other = get_weights(one.personal_model(client)), get_weights(two.personal_model(client))
        assert all(torch.equal(tensor, other[name]) for name, tensor in model.items())


def test_hops_made_with_other_settings_are_discarded(tmp_path: Path) -> None:
    seed = seed_with(Faults(drop=0.2), [None, "drop", None, None])
    given_: dict[str, Any] = {"model": linear(), "seed": seed}
    with pytest.raises(KeyboardInterrupt):
        fewer.run(MetaFed(**SMALL), DATA, drop=0.2, out=tmp_path / "run", progress=Break(3), **given_)
    ring = fewer.resume(tmp_path / "run", data=DATA, model=linear(), drop=0.0)
    assert_same(ring, fewer.run(MetaFed(**SMALL), DATA, out=tmp_path / "whole", **given_))


class Once(MetaFed):
    """Federation 1 fails the first time."""

    mark: str = ""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        if client.id == 1 and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise ConnectionError("gone")
        return super().accumulate(client, model, net)


def test_after_a_lost_quorum_all_federations_are_asked_again(tmp_path: Path) -> None:
    method = Once(mark=str(tmp_path / "mark"), **SMALL)
    with pytest.raises(QuorumLost):
        fewer.run(method, DATA, model=linear(), seed=SEED, quorum=1.0, out=tmp_path / "run")
    ring = fewer.resume(tmp_path / "run", method=method, data=DATA, model=linear())
    assert [line["absent"] for line in ring.history] == [0, 0, 0]


class Sleepy(MetaFed):
    """Federation 2 is slow."""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        time.sleep(1.5 * (client.id == 2))
        return super().accumulate(client, model, net)


def test_a_federation_that_misses_the_deadline_is_late(tmp_path: Path) -> None:
    work = bench(Sleepy(**SMALL), linear(), tmp_path)
    work.clients.rules = RoundRules(deadline=1.2)
    work.rounds(1)
    assert work.missed == [(2, "late")] and work.state.holders == [0, 1, 3] and work.hops[-1] == (1, 3)


def test_inline_and_pool_give_the_same_and_so_do_sealed_and_open(digits: Data, tmp_path: Path) -> None:
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
    assert ends(tmp_path / "inline") == ends(tmp_path / "pool")
    for client in range(6):
        same, other = (get_weights(runs[kind].personal_model(client)) for kind in ("inline", "open"))
        assert all(torch.equal(tensor, other[name]) for name, tensor in same.items())
    metrics = [[(line["accuracy"], line["loss"], line["absent"]) for line in runs[k].history] for k in runs]
    assert metrics[0] == metrics[2]


class Killer(MetaFed):
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
    method = Killer(victim=1, mark=str(tmp_path / "mark"), **SMALL)
    ring = fewer.run(method, DATA, model=linear(), seed=SEED, runtime="pool", workers=1, out=tmp_path / "ring")
    assert [line["absent"] for line in ring.history] == [1, 0, 0] and ring.state.holders == [0, 1, 2, 3]


# --- seals ----------------------------------------------------------------------------------------------------------


def sealed_ring(tmp_path: Path) -> tuple[Work, Call, bytes]:
    """A ring after one round, and a call with a sealed message that its receiver has not opened yet."""
    work = bench(MetaFed(**SMALL), linear(), tmp_path)
    work.rounds(1)
    work.clients.round = 2
    give = Call(1, FETCH_OUTGOING, 2, hop=Hop(2, "accumulate", 5, True))
    blob = work.clients.handlers.answer(give, b"").blob
    return work, Call(2, "accumulate", 2, hop=Hop(1, "accumulate", 5, True)), blob


def test_a_sealed_message_is_taken_once(tmp_path: Path) -> None:
    work, take, blob = sealed_ring(tmp_path)
    answer = work.clients.handlers.answer
    assert answer(take, blob).failure is None
    again = answer(take, blob)
    assert again.failure == "refused" and "replayed sealed message (round 2, number 5)" in again.detail
    older = answer(Call(1, FETCH_OUTGOING, 1, hop=Hop(2, "accumulate", 9, True)), b"").blob  # of a round that is over
    again = answer(Call(2, "accumulate", 1, hop=Hop(1, "accumulate", 9, True)), older)
    assert again.failure == "refused" and "replayed sealed message (round 1, number 9)" in again.detail


def test_a_message_of_another_run_is_refused(tmp_path: Path) -> None:
    work, take, blob = sealed_ring(tmp_path)
    another = replace(work.clients.handlers, run_id=b"another run")
    reply = another.answer(take, blob)
    assert reply.failure == "refused" and "the seal is broken" in reply.detail
    give = Call(1, FETCH_OUTGOING, 2, hop=Hop(2, "accumulate", 5, True))
    assert another.answer(take, another.answer(give, b"").blob).failure is None


def test_the_carrier_can_neither_ask_for_a_model_nor_put_one_in(tmp_path: Path) -> None:
    work, take, blob = sealed_ring(tmp_path)
    before, answer = work.own(2), work.clients.handlers.answer
    assert take.hop
    for name in ("accumulate", "personalize"):
        reply = answer(Call(2, name, 2), encode(name, {}))
        assert reply.failure == "refused" and "is not an @on_client handler" in reply.detail
        assert not reply.blob
        own = encode(name, {"model": sevens(linear()), "net": ""})
        reply = answer(Call(2, name, 2, hop=Hop(-1, name, 6, True)), own)
        assert reply.failure == "refused" and reply.detail == "a message without a sender"
    assert answer(Call(2, "warm_up", 2, hop=take.hop), blob).failure == "refused"
    assert answer(Call(2, FETCH_OUTGOING, 2), b"").failure == "refused"
    assert pack(work.own(2)) == pack(before)


def test_the_carrier_cannot_change_what_is_under_the_seal(tmp_path: Path) -> None:
    work, take, blob = sealed_ring(tmp_path)
    assert work.clients.handlers.answer(replace(take, item={"net": 5}), blob).failure is None


def test_the_seal_is_what_its_module_says() -> None:
    one, two = new_key(), new_key()
    blob = seal(b"weights", Header(1, 2, "accumulate", 3, 4), one, public_key(two), b"run")
    cut = 8 + int.from_bytes(blob[4:8], "little")
    signed, fresh, ciphertext = blob[:cut], blob[cut : cut + 32], blob[cut + 32 :]
    mine = X25519PrivateKey.from_private_bytes(two)
    shared = b"".join(mine.exchange(X25519PublicKey.from_public_bytes(key)) for key in (fresh, public_key(one)))
    key = HKDF(SHA256(), 32, None, b"FWS1" + fresh + public_key(one) + public_key(two)).derive(shared)
    assert ChaCha20Poly1305(key).decrypt(bytes(12), ciphertext, signed + b"run") == b"weights"
    with pytest.raises(Refused, match="the seal is broken"):
        unseal(parse_sealed(blob.replace(b'"round":3', b'"round":4')), two, public_key(one), b"run")


def test_private_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    work = bench(MetaFed(**SMALL), linear(), tmp_path)
    work.rounds(1)
    PinnedKeys(tmp_path).create()
    keys = [*tmp_path.glob("*/*/key"), tmp_path / "seal.key"]
    assert len(keys) == COUNT + 1 and not any(path.stat().st_mode & 0o077 for path in keys)
    assert not list(tmp_path.rglob("*.part"))


def test_a_key_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        PinnedKeys(tmp_path).create()
    monkeypatch.undo()
    assert not (tmp_path / "seal.key").exists()
    assert PinnedKeys(tmp_path).create() == public_key(PinnedKeys(tmp_path).private(0))


def test_a_changed_message_is_refused_wherever_it_was_changed(tmp_path: Path) -> None:
    work, take, blob = sealed_ring(tmp_path)
    for place in [*range(60), *range(60, len(blob), 41), len(blob) - 1]:
        changed = bytearray(blob)
        changed[place] ^= 1
        assert work.clients.handlers.answer(take, bytes(changed)).failure == "refused", place
    for cut in (0, 3, 8, 100, len(blob) - 1):
        assert work.clients.handlers.answer(take, blob[:cut]).failure == "refused"
    assert work.clients.handlers.answer(take, blob).failure is None


@pytest.mark.parametrize(
    "change", [{"client": 3}, {"handler": "personalize"}, {"peer": 0}, {"number": 6}, {"round": 3}]
)
def test_a_message_is_for_one_federation_one_purpose_and_one_moment(change: dict[str, Any], tmp_path: Path) -> None:
    work, take, blob = sealed_ring(tmp_path)
    assert take.hop
    hop = replace(take.hop, **{name: change[name] for name in ("peer", "number") if name in change})
    call_ = replace(take, hop=hop, **{name: change[name] for name in change if name not in ("peer", "number")})
    reply = work.clients.handlers.answer(call_, blob)
    assert reply.failure == "refused" and "a sealed message with an unexpected header" in reply.detail


def test_only_the_sender_can_have_written_it_and_only_the_receiver_can_read_it() -> None:
    one, two, three = new_key(), new_key(), new_key()
    head = Header(1, 2, "accumulate", 1, 0)
    blob = seal(b"weights", head, one, public_key(two))
    assert unseal(parse_sealed(blob), two, public_key(one)) == b"weights" and b"weights" not in blob
    assert blob != seal(b"weights", head, one, public_key(two))
    for private, sender in ((three, public_key(one)), (two, public_key(three))):
        with pytest.raises(Refused, match="the seal is broken"):
            unseal(parse_sealed(blob), private, sender)
    forged = seal(b"weights", head, three, public_key(two))  # knows the receiver's key, says that it is 1
    with pytest.raises(Refused, match="the seal is broken"):
        unseal(parse_sealed(forged), two, public_key(one))
    assert len(fingerprint(public_key(one))) == 64 and fingerprint(public_key(one)) != fingerprint(public_key(two))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_reason(junk: bytes) -> None:
    for blob in (junk, b"FWS1" + junk, b"FWS1\x02\0\0\0{}" + junk, b"FWS1\x04\0\0\0null" + junk):
        with pytest.raises(Refused):
            parse_sealed(blob)
            raise AssertionError("it has no head")


class Marked(MetaFed):
    """Federation 0 sends a secret. The file has it reversed, so that no other process holds it."""

    file: str = ""

    def outgoing_message(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == 0 and client.round == 1:
            mark = torch.randint(1, 120, (16,), dtype=torch.uint8)
            Path(self.file).write_bytes(bytes(mark.tolist())[::-1])
            model = {**model, "head.weight": mark.view(torch.float32).view(CLASSES, HIDDEN).clone()}
        return super().outgoing_message(client, model)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sealed", [True, False])
def test_the_carrier_holds_ciphertext_only(sealed: bool, tmp_path: Path) -> None:
    """Searches the relay's memory and files for a model that it forwarded."""
    out = tmp_path / "run"
    method = Marked(file=str(tmp_path / "mark"), sealed=sealed, distill_threshold=0.0, **SMALL)
    found: list[Any] = []

    class Grep(Break):
        def on_answer(self, round: int, done: int, asked: int) -> None:
            if round == 1 and done == 3 and Path(method.file).exists():
                mark = Path(method.file).read_bytes()
                own = [path for path in out.rglob("*") if path.is_file() and "clients" not in path.parts]
                assert any("hops" in path.parts for path in own)
                found.extend(path for path in own if mark in path.read_bytes()[::-1])
                found.extend(["memory"] if in_memory(mark) else [])

    fewer.run(method, DATA, model=linear(), seed=SEED, runtime="pool", workers=1, out=out, progress=Grep(99))
    assert bool(found) is not sealed  # with the seal nowhere; without it, it is seen: the test can see
    secret = Path(method.file).read_bytes()
    outgoing = list(out.glob("clients/*/*/ring_outgoing*"))
    assert outgoing and secret


def in_memory(backwards: bytes) -> bool:
    """True if this process holds these bytes, reversed back, in memory."""
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if rights[:2] != "rw" or high - low > 1 << 28:
                continue
            try:
                memory.seek(low)
                if backwards in memory.read(high - low)[::-1]:
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


def test_federations_hold_what_their_members_hold() -> None:
    data = ring_data(7)
    three = group_clients(data, 3)
    assert len(three) == 3 and [len(three.members_of(n)) for n in range(3)] == [2, 2, 3]
    for number, members in enumerate(([0, 1], [2, 3], [4, 5, 6])):
        inside = three.members_of(number)
        for part in ("train", "validation", "test"):
            whole = getattr(three.client(number), part).labels
            each = [getattr(data.client(member), part) for member in members]
            assert torch.equal(whole, torch.cat([samples.labels for samples in each]))
            for place, samples in enumerate(each):
                assert torch.equal(getattr(inside.client(place), part).rows, samples.rows)
    held = three.hold_out(0.2, 0)
    assert isinstance(held, type(three)) and len(held.members_of(2)) == 3 and held.size(0) < three.size(0)
    assert three.fingerprint() != data.fingerprint()
    for wrong in (0, 8):
        with pytest.raises(SettingError, match=rf"federations must be 1 to 7 \(the number of clients\), got {wrong}"):
            group_clients(data, wrong)
    with pytest.raises(SettingError, match="has no federations"):
        data.members_of(0)


def group(inside: str, **more: Any) -> MetaFed:
    return MetaFed(
        **SMALL, federations=2, inner_method=inside, inner_rounds=2, inner_options=INNER_OPTIONS[inside], **more
    )


@pytest.mark.parametrize("inside", ["fedavg", "fedprox"])
def test_two_levels_equal_the_inner_method_and_distillation(inside: str, tmp_path: Path) -> None:
    data = ring_data(6)
    method = group(inside, distill_threshold=0.0)
    work = bench(method, linear(), tmp_path, data)
    work.rounds(1)
    two = group_clients(data, 2)

    def alone(number: int, kind: type[FedAvg], **more: Any) -> Any:
        """The inner method alone, among the members of one federation."""
        seed = seed_of(SEED, number, "members")
        star = kind(rounds=2, lr=0.3, local_steps=2, batch_size=4, **more)
        return fewer.run(star, two.members_of(number), model=linear(), seed=seed).state.model

    kind = find(inside)
    assert issubclass(kind, FedAvg)
    first = alone(0, kind, **INNER_OPTIONS[inside])
    assert all(torch.equal(tensor, work.own(0)["model"][name]) for name, tensor in first.items())

    class Taught(FedAvg):
        """Members distill the previous federation's model into theirs."""

        def fit(self, net: nn.Module, client: Client) -> None:
            numbers = torch.randint(len(client.train), (2, 4), generator=client.stream("study"))
            teacher = linear()
            load_weights(teacher, first)
            distill(net, teacher, client.train.batches(numbers), self.lr, 1.0)

    second = alone(1, kind, **INNER_OPTIONS[inside])
    star, seed = Taught(rounds=2, lr=0.3), seed_of(SEED, 1, "members")
    inside_data = two.members_of(1)
    task = Task((FEATURES,), CLASSES, lambda: linear(), pretrained=second)
    contexts = ContextFactory(inside_data, task, seed, tmp_path / "taught")
    members = Inline(len(inside_data), seed, handlers=HandlerRunner(star, contexts, seed, torch.device("cpu")))
    state = star.init(task, seed)
    for members.round in (3, 4):
        state = star.round(state, members)
    assert all(torch.equal(tensor, work.own(1)["model"][name]) for name, tensor in state.model.items())


@pytest.mark.parametrize("inside", ["fedavg", "fedbn"])
def test_groups_resume_and_run_anywhere(inside: str, tmp_path: Path) -> None:
    data, net = ring_data(6), normed()
    method = group(inside)
    result = fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "whole")
    fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "pool", runtime="pool")
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "broken", progress=Break(1))
    fewer.resume(tmp_path / "broken", method=method, data=data, model=net)
    members = {
        kind: {
            f.relative_to(tmp_path / kind): f.read_bytes() for f in tmp_path.glob(f"{kind}/clients/*/*/members/**/*.s*")
        }
        for kind in ("whole", "pool", "broken")
    }
    assert ends(tmp_path / "whole") == ends(tmp_path / "pool") == ends(tmp_path / "broken")
    assert members["whole"] == members["pool"] == members["broken"] and bool(members["whole"]) == (inside == "fedbn")
    ring = result.metrics["ring"]
    assert set(ring) == {"0", "1"} and all(one["up"] > 0 and one["down"] > 0 for one in ring.values())


def uneven() -> tuple[ArrayData, MetaFed]:
    data = from_arrays(X, Y, client_ids=np.repeat([0, 1, 2, 3], [8, 32, 20, 20]), validation=0.3)
    return data, MetaFed(**SMALL, federations=2, inner_rounds=1)


def test_a_head_averages_by_size_and_counts_all_members(tmp_path: Path) -> None:
    data, method = uneven()
    work = bench(method, linear(), tmp_path, data)
    group_, first = method.build_federation(work.client(0)), get_weights(linear())
    seed, two = seed_of(SEED, 0, "members"), group_clients(data, 2).members_of(0)
    task = Task((FEATURES,), CLASSES, linear, pretrained=first)
    contexts = ContextFactory(two, task, seed, tmp_path / "by-hand")
    contexts_ = [cast(Client, contexts(member, 1)) for member in range(2)]
    members = [SingleClient(context, "", TrainingBudget(0.3, 2, 4)) for context in contexts_]
    counts = [member.evaluate(first, "") for member in members]
    assert group_.evaluate(first, "") == tuple(map(sum, zip(*counts, strict=True)))
    teacher = Teacher({name: tensor + 1 for name, tensor in first.items()}, "", 1.0)
    sizes = [len(context.train) for context in contexts_]
    assert sizes[0] != sizes[1]
    mean = weighted_mean([member.distill(first, teacher) for member in members], sizes)
    assert all(torch.equal(tensor, mean[name]) for name, tensor in group_.distill(first, teacher).items())


def test_bytes_inside_add_up_over_rounds(tmp_path: Path) -> None:
    data, method = uneven()
    work = bench(method, linear(), tmp_path, data)
    inner_bytes = []
    for _ in range(3):
        work.rounds(1)
        inner_bytes.append(work.own(1)["inner_bytes"])
    assert all(
        later[side] > before[side] for before, later in itertools.pairwise(inner_bytes) for side in ("up", "down")
    )
    assert inner_bytes[2]["up"] - inner_bytes[1]["up"] < inner_bytes[1]["up"]  # one round's, not all over again


@pytest.mark.parametrize("inside", ["fedmk", "fedgen", "feddistill", "local"])
def test_other_methods_work_inside(inside: str) -> None:
    data = fewer.data.load("digits", clients=4, alpha=5.0, validation=0.2, fraction=0.2)
    method = MetaFed(
        rounds=1, local_steps=2, federations=2, inner_method=inside, inner_options=INNER_OPTIONS.get(inside, {})
    )
    result = fewer.run(method, data, seed=0)
    assert result.history[-1]["absent"] == 0 and all(one["up"] > 0 for one in result.metrics["ring"].values())


# --- different nets -------------------------------------------------------------------------------------------------


def test_federations_with_different_nets_learn_from_each_other(digits: Data, tmp_path: Path) -> None:
    method = MetaFed(rounds=3, lr=0.1, local_steps=3, nets=("cnn", "mlp"), distill_threshold=1.0)
    result = fewer.run(method, digits, seed=1, out=tmp_path / "run")
    assert [type(result.personal_model(client)).__name__ for client in range(6)] == ["SmallCNN", "MLP"] * 3
    assert [result.metrics["ring"][str(client)]["adopted"] for client in range(6)] == [0] * 6  # never adopted
    assert [line["absent"] for line in result.history] == [0, 0, 0]
    three = MetaFed(rounds=3, lr=0.1, local_steps=3, nets=("cnn", "mlp", "mlp"), distill_threshold=1.0)
    ring = fewer.run(three, digits, seed=1).metrics["ring"]
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

    def spy(net: nn.Module, guide: nn.Module, x: torch.Tensor) -> nn.Linear:
        seen.append(len(x))
        return fit_feature_map(net, guide, x)

    monkeypatch.setattr(federation, "fit_feature_map", spy)
    work = bench(MetaFed(**SMALL, nets=("mlp",)), linear(), tmp_path)
    client = work.client(0)
    teacher = Teacher(get_weights(linear()), "", 1.0)
    for limit, count in ((5, 5), (MAX_MAP_SAMPLES, len(client.train))):
        monkeypatch.setattr(federation, "MAX_MAP_SAMPLES", limit)
        SingleClient(client, "mlp", TrainingBudget(0.1, 1, 4)).distill(
            replace_client_net(client, "mlp").initial_weights(), teacher
        )
        assert seen.pop() == count and MAX_MAP_SAMPLES >= 100


# --- odd clients and wrong settings -----------------------------------------------------------------------------------


def test_odd_federations_break_nothing(tmp_path: Path) -> None:
    owners = np.repeat([0, 1, 2, 3], [30, 1, 6, 43])
    y = np.where(owners == 2, 1, Y)  # 2 has one class, 1 one sample, so neither validation nor test samples
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
    ("words", "text"),
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
        (["-o", 'inner_options={"rats":1}'], "inner_options: fedavg: rats: extra inputs are not permitted"),
    ],
)
def test_a_wrong_option_gives_one_line(words: list[str], text: str) -> None:
    result = call("run", "metafed", *words, *DIGITS, code=2)
    assert result.stderr.startswith("fewer: ") and result.stderr.count("\n") == 1 and text in result.stderr


# --- recipes ----------------------------------------------------------------------------------------------------------


def cells(name: str) -> Iterator[tuple[RecipeRow, RecipeColumn, Settings, Any]]:
    """All cells of a recipe."""
    plan = load_recipe(f"metafed/{name}")
    for column in plan.column:
        for row, values in zip(plan.row, row_settings(column, plan, False), strict=True):
            settings_ = parse_settings(values)
            yield row, column, settings_, make_method(find(settings_.method), settings_)


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "fig5", "fig6", "fig7"])
def test_recipes_treat_all_rows_alike(name: str) -> None:
    """Each tuned row gets its whole grid, MetaFed from the paper's l_t1; baselines may use its validation samples."""
    more = set()
    for row, _, settings_, method in cells(name):
        if row.tune:
            assert (
                sum(len(grid) - 1 for grid in method.search_space().values()) < load_recipe(f"metafed/{name}").trials
            ), row.name
            assert "distill_threshold" not in method.search_space() or method.distill_threshold == 0.6
            more |= {method.name} if settings_.validation == 0 else set()
    assert more == ({"fedavg", "fedprox", "fedbn", "local"} if name.startswith("table") else set())


def test_recipes_compare_what_they_say() -> None:
    for _, _, settings_, method in cells("table1"):  # VLCS: 10 % to train on, 10 % to validate, 20 % to test
        left_ = (1 - TEST_FRACTION) * settings_.fraction
        assert (
            left_ == TEST_FRACTION
            and settings_.validation in (0.5, 0.0)
            and getattr(method, "ignore_threshold", 0.4) == 0.4
        )
    for _, column, _, method in cells("fig6"):  # with l_t1 = 1 the distillation weight has no effect
        assert method.name != "metafed" or "weight" not in column.name or method.distill_threshold == 0.6
    for _, _, settings_, method in cells("fig7"):
        assert settings_.rounds * method.local_steps == 100 and getattr(method, "warmup_steps", 0) == 0
