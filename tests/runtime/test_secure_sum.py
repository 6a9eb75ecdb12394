"""Secure sums, all clients in one process: the server sees the sum only, also if clients drop out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fewer
from fewer.errors import QuorumLost, RunInterrupted, SettingError
from fewer.methods import Client
from fewer.methods.fedavg import FedAvg, average_by_size, average_equally, average_field
from fewer.privacy import (
    PrivacyLedger,
    PrivacySettings,
    RecordRelease,
    Release,
    compute_epsilon,
    compute_record_epsilon,
)
from fewer.runs.engine import build_handler_runner, connect_clients, open_noise, run_experiment, runtime_options
from fewer.runs.experiment import Experiment, build_experiment, parse_settings
from fewer.runtime import Inline, on_client
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.keys import KeyFiles
from fewer.runtime.secure_sum import SEND_MASKED, SEND_SHARES, SHARE_KEYS, SumMember, withhold
from fewer.runtime.store import Store
from fewer.wire import Number, Refused, Shaped, decode
from fewer.wire.masking import STEP

FORM = {"w": torch.zeros(3), "steps": torch.zeros((), dtype=torch.int64)}
RETURNS: dict[str, Any] = {"model": FORM, "size": Number(int, 1, 10**9)}


class Vectors(FedAvg):
    """Client k sends (k + 1) · (1, −0.5, 0.001), 10 k, and the size k + 1."""

    @on_client
    def send_vector(self, client: Client) -> dict[str, Any]:
        vector = (client.id + 1) * torch.tensor([1.0, -0.5, 0.001])
        return {"model": {"w": vector, "steps": torch.tensor(10 * client.id)}, "size": client.id + 1}


class Watched(Inline):
    """Records all replies. `gone` are calls (client, step) that get no reply."""

    gone: set[tuple[int, str]]
    seen: list[tuple[Call, bytes]]

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        for call, reply in super()._deliver_calls(calls):
            if (call.client, call.handler) in self.gone:
                yield call, None
                continue
            assert reply
            self.seen.append((call, reply.blob))
            yield call, reply


def connect(folder: Path, clients: int = 5, gone: Sequence[tuple[int, str]] = (), **settings: Any) -> Watched:
    data = fewer.data.load("digits", clients=clients, alpha=10.0)
    experiment = build_experiment(parse_settings({"secure_sum": True, **settings}), Vectors(), data)
    watched = Watched(**runtime_options(experiment), handlers=build_handler_runner(experiment, folder))
    watched.gone, watched.seen, watched.round = set(gone), [], 1
    return watched


def test_the_mean_by_arithmetic(tmp_path: Path) -> None:
    clients = connect(tmp_path)
    answers = clients.ask(range(5), Vectors().send_vector, returns=RETURNS)
    # Σ k² / Σ k = 55 / 15 for k = 1 … 5; Σ k · 10 (k − 1) / 15 = 400 / 15 = 26.7, rounded
    mean = average_by_size(answers)
    expected = 55 / 15 * torch.tensor([1.0, -0.5, 0.001])
    assert (mean["w"] - expected).abs().max() <= STEP + 1e-6 and mean["steps"].item() == 27
    assert mean["w"].dtype == torch.float32 and list(mean) == ["w", "steps"]
    again = clients.ask(range(5), Vectors().send_vector, returns=RETURNS)
    assert average_equally(again)["w"].tolist() == pytest.approx([3, -1.5, 0.003], abs=1e-6)


def test_nothing_that_the_server_gets_has_a_single_update(tmp_path: Path) -> None:
    clients = connect(tmp_path)
    answers = clients.ask(range(5), Vectors().send_vector, returns=RETURNS)
    average_by_size(answers)
    assert {call.handler for call, _ in clients.seen} == {"send_vector", SHARE_KEYS, SEND_MASKED, SEND_SHARES}
    received = b"".join(blob for _, blob in clients.seen)
    decoded = [decode(blob)[1] for call, blob in clients.seen]
    for client in range(5):
        vector = (client + 1) * np.array([1.0, -0.5, 0.001])
        fixed = np.rint(vector / STEP).astype(np.int64)
        weighted = np.rint((client + 1) * vector / STEP).astype(np.int64)
        for secret in (vector.astype(np.float32), vector, fixed, weighted):
            assert secret[:1].tobytes() not in received and secret[1:].tobytes() not in received
        masked = [fields["masked"].numpy() for fields in decoded if "masked" in fields]
        assert len(masked) == 5
        assert all((np.abs(values[:4] - np.append(weighted, 0)) > 2**40).all() for values in masked)
    stored = Store(tmp_path / "000/000000", 1).get("secure_sum")
    assert stored["private"] == stored["seed"] == "" and not stored["shares"]  # forgotten after the sum


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ([(1, SHARE_KEYS)], [0, 2, 3, 4]),
        ([(1, SEND_MASKED)], [0, 2, 3, 4]),  # it has shared its keys
        ([(0, SEND_MASKED), (4, SEND_MASKED)], [1, 2, 3]),
        ([(1, SEND_MASKED), (3, SEND_SHARES)], [0, 2, 3, 4]),  # it has sent its values
        ([(0, "send_vector"), (2, SHARE_KEYS)], [1, 3, 4]),
    ],
)
def test_the_sum_of_the_others_is_recovered(tmp_path: Path, gone: list[tuple[int, str]], left: list[int]) -> None:
    clients = connect(tmp_path, gone=gone)
    answers = clients.ask(range(5), Vectors().send_vector, returns=RETURNS)
    sizes = [client + 1 for client in left]
    expected = sum(size**2 for size in sizes) / sum(sizes)
    assert average_by_size(answers)["w"].tolist() == pytest.approx(
        [expected, -0.5 * expected, 0.001 * expected], abs=1e-6
    )


def test_too_few_clients_stop_the_round(tmp_path: Path) -> None:
    clients = connect(tmp_path, gone=[(0, SEND_MASKED), (1, SEND_MASKED), (2, SEND_MASKED)])
    answers = clients.ask(range(5), Vectors().send_vector, returns=RETURNS)
    with pytest.raises(QuorumLost, match="2 of 5 clients sent masked values, 3 needed"):
        average_by_size(answers)
    clients = connect(tmp_path / "b", gone=[(client, SEND_SHARES) for client in range(3)])
    answers = clients.ask(range(5), Vectors().send_vector, returns=RETURNS)
    with pytest.raises(QuorumLost, match="2 of 5 clients sent shares, 3 needed"):
        average_by_size(answers)
    clients = connect(tmp_path / "c", quorum=0.9, gone=[(0, "send_vector")])
    with pytest.raises(QuorumLost, match="4 of 5 clients answered, 5 needed"):
        clients.ask(range(5), Vectors().send_vector, returns=RETURNS)
    clients = connect(tmp_path / "d", clients=2)
    answers = clients.ask(range(2), Vectors().send_vector, returns=RETURNS)
    with pytest.raises(QuorumLost, match="2 clients answered, a secure sum needs 3"):
        average_by_size(answers)


def test_single_answers_are_refused_in_one_line(tmp_path: Path) -> None:
    answers = connect(tmp_path).ask(range(5), Vectors().send_vector, returns=RETURNS)
    with pytest.raises(SettingError, match=r"secure_sum does not cover this method: its server reads 'size' of single"):
        answers[0]["size"]
    assert answers[0].fields == {}


@pytest.mark.parametrize(
    ("step", "field", "problem"),
    [("send_shares", "shares", "shares that do not belong together"), ("send_masked", "masked", "do not cancel")],
)
def test_wrong_shares_and_masks_are_noticed(
    step: str, field: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(SumMember, step)

    def send_wrong(self: SumMember, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = right(self, **fields)
        return {**answer, field: answer[field].flip(0)} if self.client == 1 else answer

    monkeypatch.setattr(SumMember, step, send_wrong)
    answers = connect(tmp_path).ask(range(5), Vectors().send_vector, returns=RETURNS)
    with pytest.raises(RunInterrupted, match=f"round 1: a client took part in a secure sum with .*{problem}"):
        average_by_size(answers)


# --- what a client refuses ------------------------------------------------------------------------------------


def make_member(folder: Path, client: int = 0, shares: int = 0) -> SumMember:
    member = SumMember(client, Store(folder / f"store-{client}", 1), KeyFiles(folder / "keys"), b"run")
    withhold(member.store, {"model": {"w": torch.ones(3)}, "size": 2}, shares)
    return member


def share(
    member: SumMember, name: str = "model", number: int = 1, peers: Sequence[int] = (0, 1, 2), weight: str = "size"
) -> dict[str, Any]:
    fields = {"name": name, "weight": weight, "number": number, "peers": torch.tensor(peers)}
    return member.answer(SHARE_KEYS, fields)


def test_a_client_sums_each_answer_once(tmp_path: Path) -> None:
    member = make_member(tmp_path)
    share(member)
    with pytest.raises(Refused, match="'model' of round 1 has been summed already"):
        share(member, number=2)
    with pytest.raises(Refused, match="no answer with 'other' in round 1"):
        share(member, "other", 2)
    with pytest.raises(Refused, match="out of order"):
        member.answer(SEND_SHARES, {"survivors": torch.tensor([0, 1, 2])})
    later = SumMember(0, Store(member.store.folder, 2), member.keys, b"run")
    with pytest.raises(Refused, match="no answer with 'model' in round 2"):  # never that of an earlier round
        share(later)


def test_a_client_refuses_small_and_repeated_sums(tmp_path: Path) -> None:
    member = make_member(tmp_path)
    for peers in ([0, 1], [0, 0, 1], [1, 2, 3]):
        with pytest.raises(Refused, match="needs 3 different clients"):
            share(member, peers=peers)
    share(member, number=5)
    withhold(member.store, {"model": {"w": torch.ones(3)}, "size": 2})
    with pytest.raises(Refused, match="a replayed question"):
        share(member, number=5)


def test_a_client_never_sends_both_shares_of_a_peer(tmp_path: Path) -> None:
    members = [make_member(tmp_path, client) for client in range(3)]
    parcels = [share(member) for member in members]
    cut = [torch.split(parcel["sealed"], parcel["lengths"].tolist()) for parcel in parcels]
    received = [part[0] for part in cut]
    fields = {"sealed": torch.cat(received), "lengths": torch.tensor([len(part) for part in received])}
    masked = members[0].answer(SEND_MASKED, fields)
    assert masked["masked"].shape == (4,)
    with pytest.raises(Refused, match="out of order"):
        members[0].answer(SEND_MASKED, fields)
    with pytest.raises(Refused, match="a secure sum of 1 clients, 2 needed"):
        members[0].answer(SEND_SHARES, {"survivors": torch.tensor([0])})
    with pytest.raises(Refused, match="a secure sum without the values that this client sent"):
        members[0].answer(SEND_SHARES, {"survivors": torch.tensor([1, 2])})
    first = members[0].answer(SEND_SHARES, {"survivors": torch.tensor([0, 1, 2])})
    assert first["shares"].shape == (3, 66)
    with pytest.raises(Refused, match="out of order"):
        members[0].answer(SEND_SHARES, {"survivors": torch.tensor([0, 1])})


def test_a_client_refuses_sums_with_less_noise_than_its_share_counts_on(tmp_path: Path) -> None:
    """The server says how many shares make up the noise, and may reveal no sum of fewer clients."""
    members = [make_member(tmp_path, client, shares=3) for client in range(3)]
    with pytest.raises(Refused, match="a sum weighted by 'size', but shares of noise have equal weights"):
        share(members[0])
    parcels = [share(member, weight="") for member in members]
    received = [torch.split(parcel["sealed"], parcel["lengths"].tolist())[0] for parcel in parcels]
    fields = {"sealed": torch.cat(received), "lengths": torch.tensor([len(part) for part in received])}
    members[0].answer(SEND_MASKED, fields)
    with pytest.raises(Refused, match="a secure sum of 2 clients, 3 needed"):
        members[0].answer(SEND_SHARES, {"survivors": torch.tensor([0, 1])})


def test_a_client_refuses_keys_that_the_server_made(tmp_path: Path) -> None:
    member, peers = make_member(tmp_path), [make_member(tmp_path, client) for client in (1, 2)]
    share(member)
    forger = SumMember(1, peers[0].store, KeyFiles(tmp_path / "other keys"), b"run")
    KeyFiles(tmp_path / "other keys").private(0)
    (tmp_path / "other keys/000/000000/key").write_bytes(member.keys.private(0))
    sealed = [share(forger), share(peers[1])]
    cut = [torch.split(parcel["sealed"], parcel["lengths"].tolist())[0] for parcel in sealed]
    fields = {"sealed": torch.cat(cut), "lengths": torch.tensor([0, *map(len, cut)])}
    with pytest.raises(Refused, match="the seal is broken"):
        member.answer(SEND_MASKED, fields)


# --- whole runs -----------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"data": "digits", "model": "mlp", "clients": 4, "alpha": 10.0, "rounds": 2}


def run_both(method: str, **settings: Any) -> tuple[Any, Any]:
    plain = run_experiment(build_experiment(parse_settings({**SMALL, "method": method, **settings})))
    secure = build_experiment(parse_settings({**SMALL, "method": method, **settings, "secure_sum": True}))
    return plain, run_experiment(secure, connect=connect_clients)  # a simulation, for tests only


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper"])
def test_a_run_equals_the_plain_run_within_the_step(method: str) -> None:
    plain, secure = run_both(method, method_options={"local_steps": 2}, rounds=2)
    for name, tensor in plain.state.shared.items():
        assert (secure.state.shared[name] - tensor).abs().max() < 1e-5, name
    assert secure.metrics["up"] > plain.metrics["up"]


def test_the_ledger_counts_every_step() -> None:
    _, secure = run_both("fedavg", method_options={"local_steps": 1}, rounds=1)
    kinds = {(entry.kind, entry.direction) for entry in secure.ledger.entries if entry.is_training}
    assert {(step, way) for step in (SHARE_KEYS, SEND_MASKED, SEND_SHARES) for way in ("up", "down")} <= kinds
    count = sum(tensor.numel() for tensor in secure.state.model.values())
    masked = [e.bytes for e in secure.ledger.entries if e.kind == SEND_MASKED and e.direction == "up"]
    assert len(masked) == 4 and all(8 * count < size < 8 * count + 1000 for size in masked)


@pytest.mark.parametrize("method", ["fedgen", "fedensemble"])
def test_a_method_that_reads_single_answers_is_refused(method: str) -> None:
    with pytest.raises(SettingError, match="secure_sum does not cover this method: its server reads"):
        run_both(method, method_options={"local_steps": 1}, rounds=1)


def test_settings_that_contradict_secure_sums() -> None:
    def build(**settings: Any) -> Experiment:
        return build_experiment(parse_settings({**SMALL, "secure_sum": True, **settings}))

    with pytest.raises(SettingError, match="secure_sum does not cover fedmk: it averages nothing"):
        build(method="fedmk")
    with pytest.raises(SettingError, match="secure_sum needs aggregate = mean"):
        build(aggregate="median")
    with pytest.raises(SettingError, match="secure_sum does not work with lie"):
        build(lie="noise:0.5")
    with pytest.raises(SettingError, match="secure_sum hides nothing in a simulation"):
        run_experiment(build())


def test_a_field_without_a_known_form_is_refused(tmp_path: Path) -> None:
    answers = connect(tmp_path).ask(range(5), Vectors().send_vector, returns=RETURNS)
    with pytest.raises(SettingError, match="the form of 'size' differs by client"):
        average_field(answers, "size")


# --- with differential privacy ------------------------------------------------------------------------------------


class Zeros(Vectors):
    """Clients change nothing, so that a sum has nothing but noise."""

    @on_client
    def send_zeros(self, client: Client) -> dict[str, Any]:
        return {"model": {"w": torch.zeros(20_000)}, "size": 1}


class ZeroTensor(Zeros):
    """As Zeros, but the answer is a tensor and not a model."""

    @on_client
    def send_tensor(self, client: Client) -> dict[str, Any]:
        return {"values": torch.zeros(20_000)}


ZEROS: dict[str, Any] = {"model": {"w": torch.zeros(20_000)}, "size": Number(int, 1, 10**9)}


def connect_private(folder: Path, dp: str, gone: Sequence[tuple[int, str]] = (), **settings: Any) -> Watched:
    pytest.importorskip("dp_accounting", reason="the accountant is not installed (pip install 'fewer[dp]')")
    data = fewer.data.load("digits", clients=5, alpha=10.0)
    experiment = build_experiment(parse_settings({"secure_sum": True, "dp": dp, **settings}), ZeroTensor(), data)
    options: dict[str, Any] = {"noise": open_noise(experiment, folder), "privacy": experiment.open_privacy()}
    handlers = build_handler_runner(experiment, folder)
    watched = Watched(**runtime_options(experiment), **options, handlers=handlers)
    watched.gone, watched.seen, watched.round = set(gone), [], 1
    return watched


@pytest.mark.parametrize(
    ("gone", "quorum", "shares"),
    [
        ([], 1.0, 1.0),
        ([], 0.0, 5 / 3),  # three of five clients must be in a sum, so their shares have all of the noise
        ([(4, SEND_MASKED)], 0.0, 4 / 3),
        ([(3, SHARE_KEYS), (4, "send_zeros")], 0.0, 1.0),
        ([(4, SEND_MASKED)], 0.8, 1.0),
    ],
)
def test_epsilon_counts_the_noise_of_the_clients_in_a_sum(
    gone: list[tuple[int, str]], quorum: float, shares: float, tmp_path: Path
) -> None:
    clients = connect_private(tmp_path, "user:clip=0.5,noise=2,distributed", gone, quorum=quorum)
    answers = clients.ask(range(5), Zeros().send_zeros, returns=ZEROS)
    total = 5 * average_by_size(answers)["w"]
    assert total.std().item() == pytest.approx(2 * 0.5 * math.sqrt(shares), rel=0.02)
    assert clients.privacy
    ((release, count),) = clients.privacy.releases.items()
    assert (release.asked, count) == (5, 1) and release.noise == pytest.approx(2 * math.sqrt(shares))


def test_a_single_tensor_has_noise_too(tmp_path: Path) -> None:
    clients = connect_private(tmp_path, "user:clip=0.5,noise=2,distributed", quorum=1.0)
    answers = clients.ask(range(5), ZeroTensor().send_tensor, returns={"values": Shaped((20_000,))})
    assert 5 * average_field(answers, "values")[""].std().item() == pytest.approx(2 * 0.5, rel=0.02)


def test_a_cohort_that_the_server_draws_hides_nothing_from_it(tmp_path: Path) -> None:
    clients = connect_private(tmp_path, "user:noise=2,distributed", quorum=1.0)
    average_by_size(clients.ask(clients.sample(4), Zeros().send_zeros, returns=ZEROS))
    assert clients.privacy and list(clients.privacy.releases) == [Release(4, 4, 2.0)]
    settings = {"secure_sum": True, "dp": "user:epsilon=8,distributed", "rounds": 1, "cohort": 4}
    data = fewer.data.load("digits", clients=5, alpha=10.0)
    planned = build_experiment(parse_settings({"method": "fedavg", **settings}), data=data).open_privacy()
    assert planned and planned.planned == (4, 4)


def test_no_sum_with_too_little_noise_is_revealed(tmp_path: Path) -> None:
    """Three of five clients must be in the sum. Two are, and the server never asks for the shares of their masks."""
    gone = [(0, "send_zeros"), (1, "send_zeros"), (2, SEND_MASKED)]
    clients = connect_private(tmp_path, "user:noise=2,distributed", gone)
    answers = clients.ask(range(5), Zeros().send_zeros, returns=ZEROS)
    with pytest.raises(QuorumLost, match="2 of 5 in a sum, 3 needed"):
        average_by_size(answers)
    assert clients.privacy and not clients.privacy.releases
    assert SEND_SHARES not in {call.handler for call, _ in clients.seen}


def test_a_client_that_is_told_of_more_shares_reveals_no_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = connect_private(tmp_path, "user:noise=2,distributed", [(4, SEND_MASKED)])
    monkeypatch.setattr(Watched, "_count_shares", lambda self, asked: asked)
    answers = clients.ask(range(5), Zeros().send_zeros, returns=ZEROS)
    assert answers.secure
    answers.secure.at_least = 0  # the server lies to its clients, and would reveal a sum of four
    with pytest.raises(QuorumLost, match="a secure sum of 4 clients, 5 needed"):
        average_by_size(answers)


def test_a_client_that_is_asked_again_draws_another_share(tmp_path: Path) -> None:
    """Otherwise the sums of four and of five clients would differ by one client's share."""
    clients = connect_private(tmp_path, "user:noise=2,distributed")
    sums = []
    for _ in range(2):
        clients._questions = (0, Counter())  # a server that does not count its questions
        answers = clients.ask(range(5), Zeros().send_zeros, returns=ZEROS)
        sums.append(average_by_size(answers)["w"])
    assert (sums[1] - sums[0]).std() > sums[0].std()


def test_an_interrupted_round_counts_twice() -> None:
    book = PrivacyLedger(PrivacySettings(noise=2.0, distributed=True), 2.0, 1.0)
    for round in (1, 2):
        book.record(5, 5, round)
    book.check_repeats(1)
    assert book.epsilon == pytest.approx(compute_epsilon(((Release(5, 5, 2.0), 3),), 1e-5))
    book.record(5, 50, 3, shares=0.25)
    drawn_twice = Release(5, 50, 1.0, sums=2)
    assert book.epsilon == pytest.approx(compute_epsilon(((Release(5, 5, 2.0), 2), (drawn_twice, 1)), 1e-5))
    twice = PrivacyLedger(PrivacySettings(noise=2.0, distributed=True), 2.0, 1.0)
    for round in (1, 1, 2, 2):  # as in SCAFFOLD
        twice.record(5, 5, round)
    restored = PrivacyLedger(twice.settings, 2.0, 1.0)
    restored.restore(twice.to_dict())
    restored.check_repeats(1)
    assert restored.epsilon == pytest.approx(compute_epsilon(((Release(5, 5, 2.0), 6),), 1e-5))
    records = PrivacyLedger(PrivacySettings(noise=2.0, distributed=True, level="record"), 2.0, 1.0, repeats=2)
    records.record_client(0, [(1.0, 2.0, 1)])
    assert records.epsilon == pytest.approx(compute_record_epsilon(((RecordRelease(1.0, 2.0), 3),), 1e-5))
    planned = PrivacyLedger(PrivacySettings(epsilon=8.0, distributed=True), 2.0, 1.0)
    planned.check_repeats(0)
    with pytest.raises(SettingError, match="epsilon = 8 was not planned for an interrupted round"):
        planned.check_repeats(1)


@pytest.mark.parametrize("dp", ["record:epsilon=8,distributed", "record:noise=1"])
def test_records_are_protected_in_secure_sums(dp: str, tmp_path: Path) -> None:
    """Class sums whose noise clients share, and models that each client trains with its own noise."""
    method = "fedncm" if "distributed" in dp else "fedavg"
    settings = {"method": method, "data": "digits", "model": "mlp", "clients": 5, "cohort": 5, "rounds": 1, "dp": dp}
    experiment = build_experiment(parse_settings({**settings, "secure_sum": True}))
    run: Any = run_experiment(experiment, tmp_path / "run", connect=connect_clients)
    assert run.accuracy > 0.3 and 4 < run.metrics["epsilon"] <= (8 if method == "fedncm" else 100)
    assert (tmp_path / "run/ledger.csv").read_text().count("up,secure_sum/") == (30 if method == "fedncm" else 15)


def test_which_noise_fits_secure_sums_and_machines() -> None:
    def build(**settings: Any) -> Experiment:
        return build_experiment(parse_settings({**SMALL, "rounds": 1, **settings}))

    with pytest.raises(SettingError, match="secure_sum with dp = user needs distributed noise"):
        build(secure_sum=True, dp="user:noise=1")
    with pytest.raises(SettingError, match="distributed noise needs secure_sum between machines"):
        build(runtime="flower", dp="user:noise=1,distributed")
    with pytest.raises(SettingError, match="public_noise needs simulated clients"):
        build(runtime="flower", dp="record:noise=1,public_noise")
    build(runtime="flower", secure_sum=True, dp="user:noise=1,distributed")
