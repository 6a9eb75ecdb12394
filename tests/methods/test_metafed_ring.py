"""The ring of MetaFed with federations that fail, lie, are late or are not trusted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer import MetaFed
from fewer.errors import QuorumLost
from fewer.methods import Client
from fewer.models import Weights, get_weights
from fewer.runtime import on_client, on_ring
from fewer.wire.sealing import new_key, public_key
from tests.helpers import is_close
from tests.methods.metafed_harness import (
    CLASSES,
    COUNT,
    DATA,
    FEATURES,
    HIDDEN,
    INITIAL,
    SEED,
    SMALL,
    C,
    RingHarness,
    linear,
    make_harness,
    run_sgd,
)


def test_each_federation_sends_to_the_next(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(rounds=2, local_steps=1), linear(), tmp_path / "sealed")
    harness.rounds(2)
    assert harness.hops == [(None, 0), (0, 1), (1, 2), (2, 3), (3, 0), (0, 1), (1, 2), (2, 3)]
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


def test_a_seed_shuffles_the_ring_for_all_rounds(tmp_path: Path) -> None:
    orders = set()
    for ring_seed in range(6):
        harness = make_harness(
            MetaFed(rounds=2, local_steps=1, ring_seed=ring_seed), linear(), tmp_path / str(ring_seed)
        )
        harness.rounds(2)
        order = [receiver for _, receiver in harness.hops]
        assert order[:4] == order[4:] and sorted(order[:4]) == [0, 1, 2, 3]
        assert [sender for sender, _ in harness.hops] == [None, *order[:-1]]
        orders.add(tuple(order[:4]))
    assert len(orders) > 2


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
        assert harness.hops == [(None, 0), (0, 1), (1, 2), (0, 2), (2, 3)]
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
    assert harness.absences == [(0, "refused")] and harness.hops == [(None, 0), (None, 1), (1, 2), (2, 3)]


def test_the_ring_restarts_if_the_first_holder_is_gone(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path, injected_faults={(1, 0): "corrupt"})
    harness.rounds(1)
    assert harness.hops == [(None, 0), (0, 1), (None, 1), (1, 2), (2, 3)] and harness.state.holders == [1, 2, 3]
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
