"""Differential privacy: the accountant against published values, the sensitivity by brute force, the noise measured."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

import fewer
from fewer import privacy
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.learning.aggregate import add_share, private_mean
from fewer.methods import ModelState
from fewer.methods.fedavg import FedAvg, train_models
from fewer.privacy import (
    PrivacyLedger,
    PrivacySettings,
    RecordRelease,
    Release,
    choose_noise,
    compute_epsilon,
    round_up_rate,
)
from fewer.runs import engine
from fewer.runtime import Clients
from fewer.runtime.clients import PrivateSum, reveal
from fewer.runtime.noise import SECRET, NoiseSource, SeededStream, hash_fields, open_secret
from fewer.runtime.streams import stream
from tests.helpers import run_contents

pytest.importorskip("dp_accounting", reason="the accountant is not installed (pip install 'fewer[dp]')")
SETTINGS: dict[str, Any] = {"data": "digits", "model": "mlp", "clients": 6, "cohort": 3, "rounds": 2, "seed": 1}


def ledger(noise: float = 1.0, clip: float = 1.0, quantile: float | None = None) -> PrivacyLedger:
    return PrivacyLedger(PrivacySettings(clip, noise, quantile=quantile), noise, clip)


def seeded(*key: int | str) -> SeededStream:
    return SeededStream(stream(*key))


# --- the accountant ---------------------------------------------------------------------------------------------


def test_one_gaussian_release_costs_what_theory_says() -> None:
    """Noise s = z / 2 has δ = Φ(1 / 2s − ε s) − e^ε Φ(−1 / 2s − ε s): Balle, Wang 2018, Theorem 8."""
    for noise in (2.0, 4.0, 8.0):
        epsilon, s, cdf = compute_epsilon(((Release(5, 5, noise), 1),), 1e-5), noise / 2, NormalDist().cdf
        delta = cdf(1 / (2 * s) - epsilon * s) - math.exp(epsilon) * cdf(-1 / (2 * s) - epsilon * s)
        assert delta == pytest.approx(1e-5, rel=1e-3)


def test_several_gaussian_releases_cost_as_much_as_one_with_less_noise() -> None:
    """Four releases with twice the noise. Rényi differential privacy bounds ε from above, by at most 15 %."""
    one, four = (compute_epsilon(((Release(5, 5, noise), count),), 1e-5) for noise, count in ((2.0, 1), (4.0, 4)))
    assert one == pytest.approx(four)
    records = privacy.compute_record_epsilon(((RecordRelease(1.0, 2.0), 4),), 1e-5)
    assert records == pytest.approx(one)
    curve = privacy.compute_curve(1.0, 1.0)
    bounds = [  # Canonne, Kamath, Steinke 2020, Proposition 12
        value + math.log((a - 1) / a) - (math.log(1e-5) + math.log(a)) / (a - 1)
        for a, value in zip(privacy.ORDERS, curve, strict=True)
    ]
    assert one < min(bounds) < 1.15 * one


def test_sampling_rounds_and_noise_change_epsilon_as_they_should() -> None:
    all_clients, sampled = (compute_epsilon(((Release(10, n, 2.0), 10),), 1e-5) for n in (10, 1000))
    assert sampled < all_clients / 3
    assert compute_epsilon(((Release(10, 10, 2.0), 20),), 1e-5) > all_clients
    assert compute_epsilon(((Release(10, 10, 4.0), 10),), 1e-5) < all_clients
    assert compute_epsilon((), 1e-5) == 0


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "published"),
    [
        (0.01, 4.0, 10_000, 1.26),  # Abadi et al., 2016, Section 3.2
        (256 / 60_000, 1.12, 60 * 60_000 // 256, 2.92),  # TensorFlow Privacy, tutorials/README.md, MNIST
        (256 / 60_000, 0.6, 30 * 60_000 // 256, 9.74),
        (256 / 60_000, 1.2, 10 * 60_000 // 256, 1.20),
        (256 / 60_000, 1.3, 15 * 60_000 // 256, 1.19),  # the same table in 2019
        (256 / 60_000, 1.1, 60 * 60_000 // 256, 3.01),
        (256 / 60_000, 0.7, 45 * 60_000 // 256, 7.10),
    ],
)
def test_sampled_records_cost_what_was_published(rate: float, noise: float, steps: int, published: float) -> None:
    """These values use ε = RDP + log(1 / δ) / (α − 1). We convert tighter (Canonne et al., 2020), so ours are less."""
    curve = steps * privacy.compute_curve(rate, noise)
    classic = min(value - math.log(1e-5) / (order - 1) for order, value in zip(privacy.ORDERS, curve, strict=True))
    assert classic == pytest.approx(published, rel=0.005)
    ours = privacy.compute_record_epsilon(((RecordRelease(rate, noise), steps),), 1e-5)
    assert 0.75 * published < ours < published


@pytest.mark.parametrize(("asked", "clients", "noise", "rounds"), [(10, 1000, 2.0, 1000), (100, 1000, 4.0, 100)])
def test_drawn_cohorts_cost_what_was_published(asked: int, clients: int, noise: float, rounds: int) -> None:
    """The bound of Wang, Balle, Kasiviswanathan 2019, Theorem 9, written out. The sensitivity is 2 C."""
    rate = asked / clients

    def divergence(order: int) -> float:
        return order / (2 * (noise / 2) ** 2)

    def sampled(order: int) -> float:
        first = min(4 * math.expm1(divergence(2)), 2 * math.exp(divergence(2)))
        terms = [rate**2 * math.comb(order, 2) * first]
        terms += [rate**j * math.comb(order, j) * 2 * math.exp((j - 1) * divergence(j)) for j in range(3, order + 1)]
        return math.log1p(sum(terms)) / (order - 1)

    published = min(rounds * sampled(order) + math.log(1e5) / (order - 1) for order in range(2, 33))
    ours = compute_epsilon(((Release(asked, clients, noise), rounds),), 1e-5)
    assert 0.75 * published < ours < published


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.5, 2.0), (0.01, 0.5)])
def test_a_drawn_cohort_costs_at_least_what_the_worst_pair_of_changes_costs(rate: float, noise: float) -> None:
    """A client sends C or −C if it is drawn. δ follows from both densities: it is at most 1e-5 at the ε printed."""
    epsilon = compute_epsilon(((Release(round(1000 * rate), 1000, noise), 1),), 1e-5)
    x = torch.linspace(-40, 40, 400_001, dtype=torch.float64)

    def density(change: float) -> torch.Tensor:
        normal = [torch.exp(-((x - center) ** 2) / (2 * noise**2)) for center in (0.0, change)]
        return ((1 - rate) * normal[0] + rate * normal[1]) / (noise * math.sqrt(2 * math.pi))

    delta = torch.trapezoid((density(1.0) - math.exp(epsilon) * density(-1.0)).clamp(min=0), x).item()
    assert 0 < delta <= 1e-5


def test_sampling_rates_are_rounded_up_a_little() -> None:
    for rate in (1.0, 0.999, 0.5, 0.031, 1e-4):
        rounded = round_up_rate(rate)
        assert rate <= rounded <= 1.02 * rate * (1 + 1e-9) and round_up_rate(rounded) == rounded


def test_the_records_of_a_run_cost_as_much_as_those_of_the_worst_client() -> None:
    book = PrivacyLedger.open(PrivacySettings(noise=1.0, level="record"), 2, 2, 2)
    book.record_client(0, [(0.1, 1.0, 5)])
    alone = book.epsilon
    book.record_client(1, [(0.5, 1.0, 5)])
    worst = privacy.compute_record_epsilon(((RecordRelease(round_up_rate(0.5), 1.0), 5),), 1e-5)
    assert alone < book.epsilon == worst


def test_a_target_chooses_the_smallest_noise() -> None:
    noise = choose_noise(8.0, 1e-5, 10, 10, 100)
    spent, more = (compute_epsilon(((Release(10, 100, z), 10),), 1e-5) for z in (noise, 0.99 * noise))
    assert 7.8 < spent <= 8.0 < more


# --- the mechanism ----------------------------------------------------------------------------------------------


def noiseless_sum(changes: tuple[tuple[float, float], ...]) -> torch.Tensor:
    updates = [{"w": torch.tensor(change) + 5} for change in changes]
    start = {"w": torch.full((2,), 5.0)}
    mean = private_mean(updates, start, start, ledger(noise=1e-12, clip=1.5), 3, seeded(0))
    return (mean["w"] - 5).double() * 3


def test_replacing_one_client_changes_the_sum_by_at_most_twice_the_clipping_norm() -> None:
    values = [(0.0, 0.0), (9.0, -9.0), (-9.0, 9.0), (0.2, 0.3), (1e6, 1e6)]
    largest = 0.0
    for others in product(values, repeat=2):
        for first, second in product(values, repeat=2):
            distance = float((noiseless_sum((first, *others)) - noiseless_sum((second, *others))).norm())
            largest = max(largest, distance)
    assert 2.9 < largest <= 3.0 + 1e-4


def test_the_mean_is_clipped_and_divided_by_the_clients_asked() -> None:
    """Changes (3, 4) and (0, 1) clipped to length 1, of 4 clients asked, two of which are absent."""
    start = {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(7)}
    updates = [
        {"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(9)},
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(8)},
    ]
    mean = private_mean(updates, start, start, ledger(noise=1e-12), 4, seeded(0))
    assert mean["w"].tolist() == pytest.approx([1 + 0.6 / 4, 1 + 1.8 / 4]) and mean["n"].item() == 7


def test_no_two_releases_share_noise() -> None:
    book, streams = ledger(), []
    private = PrivateSum(book, 3, 3, 1, lambda *key: streams.append(key) or seeded(*key))  # type: ignore[func-returns-value]
    update = {"w": torch.zeros(2)}
    private.noise_stream([update])
    book.record(3, 3, 1)
    private.noise_stream([update])
    private.noise_stream([update, update])
    assert len({*streams}) == 3


def test_two_sums_over_one_draw_cost_as_much_as_one_with_less_noise() -> None:
    """Who was drawn hides a client once, not once for each sum: two sums over a draw have noise z / √2 together."""
    book = ledger(noise=2.0)
    for round in (1, 2):
        for _ in range(2):
            book.record(100, 1000, round)
    assert book.count_sums() == 4
    assert book.epsilon == pytest.approx(compute_epsilon(((Release(100, 1000, 2.0 / math.sqrt(2)), 2),), 1e-5))
    assert book.epsilon > 1.05 * compute_epsilon(((Release(100, 1000, 2.0), 4),), 1e-5)
    again = ledger(noise=2.0)
    again.restore(json.loads(json.dumps(book.to_dict())))
    again.record(100, 1000, 3)
    assert again.count_sums() == 5 and again.epsilon > book.epsilon


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_a_draw_hides_no_client_that_keeps_state(runtime: str) -> None:
    """What such a client sends depends on the rounds in which it was drawn before."""
    settings = {**SETTINGS, "cohort": 2, "clients": 6, "runtime": runtime}
    for method, release, sums in (("scaffold", Release(2, 2, 2.0), 2), ("fedavg", Release(2, 6, 2.0), 1)):
        run = fewer.run(method, **settings, dp="user:noise=2")
        expected = ((release, sums * SETTINGS["rounds"]),)
        assert run.metrics["epsilon"] == pytest.approx(compute_epsilon(expected, 1e-5)), method


def test_methods_that_ask_all_clients_once_reach_a_target_epsilon() -> None:
    run = fewer.run("fedncm", "digits", clients=20, rounds=1, model="mlp", dp="user:epsilon=50,public_noise")
    assert 40 < run.metrics["epsilon"] <= 50


def test_the_noise_has_its_standard_deviation() -> None:
    start = {"w": torch.zeros(20_000)}
    mean = private_mean([start], start, start, ledger(noise=0.8, clip=2.5), 4, seeded(0))
    assert mean["w"].std().item() == pytest.approx(0.8 * 2.5 / 4, rel=0.03)
    adaptive = private_mean([start], start, start, ledger(noise=0.8, clip=2.5, quantile=0.5), 40, seeded(0))
    factor = (0.8**-2 - (2 * 2) ** -2) ** -0.5  # σ_b = 40 / 20
    assert adaptive["w"].std().item() == pytest.approx(factor * 2.5 / 40, rel=0.03)


def distributed_sum(answered: int) -> torch.Tensor:
    """The noise of a sum of zero changes, of 4 clients asked, z = 0.8 and C = 2.5."""
    start = {"w": torch.zeros(20_000)}
    book = PrivacyLedger(PrivacySettings(2.5, 0.8, distributed=True), 0.8, 2.5)
    noise = 0.8 / math.sqrt(4)
    sent = [add_share(start, start, 2.5, noise, seeded(client)) for client in range(answered)]
    return 4 * private_mean(sent, start, start, book, 4, seeded("server"))["w"]


@pytest.mark.parametrize("answered", [1, 3, 4])
def test_shares_of_noise_add_up_also_if_clients_are_absent(answered: int) -> None:
    assert distributed_sum(answered).std().item() == pytest.approx(0.8 * 2.5, rel=0.03)


def test_a_client_clips_its_own_change() -> None:
    start = {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(7)}
    update = {"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(9)}
    sent = add_share(update, start, 1.0, 1e-12, seeded(0))
    assert sent["w"].tolist() == pytest.approx([1.6, 1.8]) and sent["n"].item() == 7


def test_a_distributed_run_sends_noisy_models_and_costs_the_same() -> None:
    central, distributed = (fewer.run("fedavg", **SETTINGS, dp=f"noise=2{more}") for more in ("", ",distributed"))
    assert central.history[-1]["epsilon"] == distributed.history[-1]["epsilon"]
    assert not torch.equal(central.state.model["head.weight"], distributed.state.model["head.weight"])


def test_adaptive_clipping_moves_toward_the_quantile() -> None:
    book = ledger(clip=1.0, quantile=0.5)
    book.move_clip(1.0)  # no client was clipped
    assert book.clip == pytest.approx(math.exp(-0.2 * 0.5))
    with pytest.raises(SettingError, match="noise = 1 is too much for adaptive clipping with 10 clients"):
        book.noise_of_sum(10)


# --- runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("device:noise=1", "unknown level 'device' .allowed: user, record"),
        ("record:noise=1,quantile=0.5", "quantile needs noise that the server adds"),
        ("noise=1,quantile=0.5,distributed", "quantile needs noise that the server adds"),
        ("noise=1,distributed=1", "unknown 'distributed'"),
        ("user:noise=1,epsilon=2", "pass either noise or epsilon"),
        ("clip=1", "pass either noise or epsilon"),
        ("user:nose=1", "unknown 'nose' .allowed: clip, noise, epsilon, delta, quantile, distributed, public_noise"),
        ("user:noise=x", "noise must be a number"),
        ("user:noise=0", "noise must be > 0, got 0"),
        ("user:noise=1e-200", "noise must be between 1e-06 and 1e.06, got 1e-200"),
        ("record:noise=1e200", "noise must be between 1e-06 and 1e.06"),
        ("user:noise=1,delta=2", "delta must be between 0 and 1"),
    ],
)
def test_a_wrong_setting_is_reported(text: str, problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        PrivacySettings.parse(text)


@pytest.mark.parametrize("dp", ["record:noise=1", "user:noise=1,distributed"])
def test_clients_of_a_resumed_run_draw_the_same_noise(dp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"s" * count)
    settings = {**SETTINGS, "dp": dp, "method_options": {"local_steps": 2}}
    fewer.run("fedavg", out=tmp_path / "unbroken", **settings, runtime="pool")
    with pytest.raises(KeyboardInterrupt):
        fewer.run("fedavg", out=tmp_path / "run", callbacks=[StopInRound(2)], **settings)
    monkeypatch.undo()  # the secret comes from the run's directory
    fewer.resume(tmp_path / "run")
    assert run_contents(tmp_path / "run") == run_contents(tmp_path / "unbroken")


@pytest.mark.parametrize("dp", ["user:noise=1", "user:epsilon=20"])
def test_other_answers_after_an_interruption_have_other_noise_and_count(
    dp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise, the two models that clients evaluate would differ by what the absent clients sent."""
    evaluate, models = engine._evaluate, []

    def stop_in_evaluation(run: Any, clients: Any, state: Any, *more: Any) -> None:
        models.append(state.model["head.weight"])
        if len(models) in (2, 3):
            raise KeyboardInterrupt
        evaluate(run, clients, state, *more)

    monkeypatch.setattr(engine, "_evaluate", stop_in_evaluation)
    with pytest.raises(KeyboardInterrupt):
        fewer.run("fedavg", out=tmp_path / "run", **{**SETTINGS, "cohort": 6}, dp=dp)
    with pytest.raises(KeyboardInterrupt):
        fewer.resume(tmp_path / "run")
    assert torch.equal(models[1], models[2])
    if "epsilon" in dp:
        with pytest.raises(SettingError, match="epsilon = 20 was not planned for an interrupted round"):
            fewer.resume(tmp_path / "run", drop=0.5)
        return
    result = fewer.resume(tmp_path / "run", drop=0.5)
    assert (models[3] - models[2]).std() > 0.1
    assert result.metrics["epsilon"] == pytest.approx(compute_epsilon(((Release(6, 6, 1.0), 3),), 1e-5))


def test_epsilon_grows_by_round_and_a_resumed_run_has_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"s" * count)
    settings = {**SETTINGS, "dp": "user:clip=0.5,noise=0.1,quantile=0.5", "cohort": 3, "rounds": 3}
    result = fewer.run("fedavg", out=tmp_path / "unbroken", **settings)
    epsilons = [line["epsilon"] for line in result.history]
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2] and result.history[0]["delta"] == 1e-5
    with pytest.raises(KeyboardInterrupt):
        fewer.run("fedavg", out=tmp_path / "run", callbacks=[StopInRound(3)], **settings)
    monkeypatch.undo()  # the secret comes from the run's directory
    fewer.resume(tmp_path / "run")
    assert run_contents(tmp_path / "run") == run_contents(tmp_path / "unbroken")


class StopInRound(fewer.Callback):
    """Interrupts a run in the middle of a round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_answer(self, run: fewer.Run, answered: int, asked: int) -> None:
        if run.round == self.number:
            raise KeyboardInterrupt


def test_a_target_epsilon_is_kept() -> None:
    result = fewer.run("fedavg", **SETTINGS, dp="epsilon=20")
    assert 19 < result.history[-1]["epsilon"] <= 20


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedgen", "reads 'model' of single clients"),
        ("feddistill", "reads 'logits' of single clients"),
        ("feddistill-logits", "reads 'logits' of single clients"),
        ("fedensemble", "reads 'model' of single clients"),
        ("metafed", "no server adds noise"),
    ],
)
def test_a_method_that_is_not_covered_says_why(method: str, reason: str) -> None:
    with pytest.raises(SettingError, match=f"dp does not cover this method.*{reason}"):
        fewer.run(method, **SETTINGS, dp="user:noise=1")


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "feddyn", "scaffold", "fedrep", "fedrod", "ditto", "lg-fedavg"]
)
def test_all_data_of_a_client_moves_a_model_by_at_most_the_sensitivity(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs almost without noise. Client 2 has half of its samples, with wrong labels, in one of them."""
    load, settings = fewer.data.ArrayData.client, {**SETTINGS, "cohort": 6, "rounds": 1}
    dp = "user:clip=0.01,noise=0.000001,public_noise"

    def replaced(data: fewer.data.ArrayData, client: int) -> Any:
        samples = load(data, client)
        half = samples.train.select(torch.arange(len(samples.train) // 2)).flip_labels(data.classes)
        return samples._replace(train=half) if client == 2 else samples

    def train() -> dict[str, torch.Tensor]:
        model: dict[str, torch.Tensor] = fewer.run(method, **settings, dp=dp).state.model
        return model

    before = train()
    monkeypatch.setattr(fewer.data.ArrayData, "client", replaced)
    after = train()
    distance = math.sqrt(sum(float((before[name] - after[name]).double().square().sum()) for name in before))
    factor = 2 if method == "feddyn" else 1  # its server adds h, which follows from the same sum
    assert 0 < distance <= factor * 1.01 * 2 * 0.01 / 6


def test_several_sums_in_a_round_need_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "choose_noise", lambda *_: 2.0)
    with pytest.raises(SettingError, match="releases several sums in a round.*pass noise"):
        fewer.run("scaffold", **SETTINGS, dp="epsilon=8")


def test_a_run_with_a_target_epsilon_gets_no_more_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "choose_noise", lambda *_: 2.0)
    fewer.run("fedavg", out=tmp_path / "run", **SETTINGS, dp="epsilon=8")
    with pytest.raises(SettingError, match="the noise was chosen for 2 rounds"):
        fewer.resume(tmp_path / "run", rounds=3)


class Twice(FedAvg):
    """Asks the same clients the same question twice in a round."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        SENT.clear()
        for _ in range(2):
            answers = train_models(clients, [0, 1], self.local_train, state.model)
            SENT.append([reveal(answer, "model")["head.weight"] for answer in answers])
        return state


SENT: list[list[torch.Tensor]] = []


@pytest.mark.parametrize("dp", ["record:noise=1", "user:noise=1,distributed"])
def test_two_questions_in_a_round_do_not_share_noise(dp: str) -> None:
    """The difference of two answers with the same noise would have none."""
    data = fewer.data.load("digits", clients=2, alpha=10.0)
    fewer.run(Twice(rounds=1, local_steps=1, cohort=2, lr=1e-6), data, model="mlp", dp=dp)
    for first, second in zip(*SENT, strict=True):
        assert not torch.equal(first, second)


def test_cohorts_that_depend_on_earlier_ones_have_no_discount() -> None:
    """FedNCM asks each client once. Round 2 can draw only the clients that round 1 has left."""
    result = fewer.run("fedncm", **SETTINGS, dp="user:noise=2,public_noise")
    expected = [compute_epsilon(((Release(3, 3, 2.0), rounds),), 1e-5) for rounds in (1, 2)]
    assert [line["epsilon"] for line in result.history] == pytest.approx(expected)


def test_settings_that_contradict_privacy_are_refused() -> None:
    with pytest.raises(SettingError, match="dp needs aggregate = mean"):
        fewer.run("fedavg", **SETTINGS, dp="epsilon=8", aggregate="median")


# --- the secret -------------------------------------------------------------------------------------------------


def test_secret_numbers_are_normal_and_uniform_and_differ_by_draw() -> None:
    stream = NoiseSource(0, b"s" * 32).stream(1, "privacy")
    first, second = stream.normal([200, 501]), stream.normal([200, 501])
    assert first.dtype == torch.float64 and first.shape == (200, 501)
    for values in (first, second, first * second):
        assert values.mean().item() == pytest.approx(0, abs=0.015) and values.std().item() == pytest.approx(1, rel=0.02)
    assert (first.abs() > 3).double().mean().item() == pytest.approx(2 * NormalDist().cdf(-3), rel=0.2)
    share = stream.uniform(100_000)
    assert share.min() > 0 and share.max() < 1 and (share < 0.3).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert stream.normal([]).shape == ()


def test_noise_depends_on_the_secret_the_key_and_the_question() -> None:
    source = NoiseSource(0, b"s" * 32)
    streams = [source.stream(1, "a"), source.stream(2, "a"), source.stream(1, "a", question="other")]
    streams.append(NoiseSource(0, b"t" * 32).stream(1, "a"))
    assert len({float(stream.normal([])) for stream in streams}) == 4
    again = NoiseSource(1, b"s" * 32).stream(1, "a")
    assert torch.equal(again.normal([3]), source.stream(1, "a").normal([3]))


@pytest.mark.parametrize("dp", ["user:noise=1", "user:noise=1,distributed", "record:noise=1"])
def test_runs_with_one_seed_share_no_noise_unless_it_is_public(dp: str) -> None:
    settings = {**SETTINGS, "rounds": 1, "cohort": 6}
    secret, public = (
        [fewer.run("fedavg", **settings, dp=dp + more).state.model["head.weight"] for _ in range(2)]
        for more in ("", ",public_noise")
    )
    assert not torch.equal(*secret) and torch.equal(*public)


def test_cohorts_that_epsilon_counts_on_do_not_follow_from_the_seed() -> None:
    settings = {**SETTINGS, "clients": 40, "cohort": 10, "rounds": 1}
    drawn = []
    for dp in ("user:noise=1", "user:noise=1", "user:noise=1,public_noise", None, "record:noise=1"):
        run: Any = fewer.run("fedavg", **settings, dp=dp)
        drawn.append({entry.client for entry in run.ledger.entries if entry.is_training})
    assert drawn[0] != drawn[1] != drawn[2] == drawn[3] == drawn[4]  # ε of records does not count on it


def test_only_the_owner_can_read_the_secret_and_no_other_file_has_it(tmp_path: Path) -> None:
    for runtime in ("inline", "pool"):
        path = tmp_path / runtime
        fewer.run("fedavg", out=path, **SETTINGS, dp="user:noise=1,distributed", runtime=runtime)
        (file,) = path.rglob(SECRET)
        secret = file.read_bytes()
        assert len(secret) == 32 and file.stat().st_mode & 0o777 == 0o600
        others = [other.read_bytes() for other in path.rglob("*") if other.is_file() and other != file]
        assert not any(form in content for content in others for form in (secret, secret.hex().encode()))
    fewer.run("fedavg", out=tmp_path / "public", **SETTINGS, dp="user:noise=1,public_noise")
    assert not [*(tmp_path / "public").rglob(SECRET)]


def test_questions_have_hashes_whatever_their_tensors() -> None:
    tensors = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), torch.ones(2), torch.zeros(()), torch.zeros(2, 0)]
    tensors += [torch.zeros(2, dtype=torch.bool), torch.arange(6).view(2, 3).t()]
    assert len({hash_fields({"model": {"w": tensor}, "size": 1}) for tensor in tensors}) == len(tensors)


def test_a_damaged_secret_is_reported(tmp_path: Path) -> None:
    (tmp_path / SECRET).write_bytes(b"short")
    with pytest.raises(RunError, match=r"noise.secret is damaged: it has 5 bytes, expected 32"):
        open_secret(tmp_path)


def test_gradients_that_are_clipped_by_sample_are_not_clipped_again() -> None:
    method = FedAvg(rounds=1, clip_norm=0.1)
    with pytest.raises(QuorumLost, match="clips the gradient of each sample; leave out clip_norm"):
        fewer.run(method, "digits", clients=2, model="mlp", dp="record:noise=1,clip=1,public_noise")
