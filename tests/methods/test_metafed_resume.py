"""A ring resumes at the hop where it stopped, with the same result in every runtime."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer import MetaFed
from fewer.data import Data
from fewer.errors import QuorumLost
from fewer.methods import Client
from fewer.models import Weights, get_weights
from fewer.runtime import Inline, Unable, on_client, on_ring
from fewer.runtime.clients import Faults, RoundRules
from tests.helpers import Interrupt
from tests.methods.metafed_harness import COUNT, DATA, SEED, SMALL, comparable_parts, linear, make_harness

RECEIVED: list[tuple[int, int]] = []


class RecordingMetaFed(MetaFed):
    """Records which federation receives a model in which round."""

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        RECEIVED.append((client.round, client.id))
        return super().accumulate(client, model, net)


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_resumes_at_the_hop_where_it_stopped(after: int, tmp_path: Path) -> None:
    method = RecordingMetaFed(sealed=False, **SMALL)
    options: dict[str, Any] = {"model": linear(), "seed": SEED, "drop": 0.1, "corrupt": 0.2}
    fewer.run(method, DATA, out=tmp_path / "uninterrupted", **options)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "interrupted", callbacks=[Interrupt(after)], **options)
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
        fewer.run(MetaFed(**SMALL), DATA, drop=0.2, out=tmp_path / "run", callbacks=[Interrupt(3)], **options)
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
