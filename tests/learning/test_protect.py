"""Differential privacy of records: sensitivity by brute force on neighbors, the noise measured, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer.data import Samples
from fewer.errors import QuorumLost, SettingError
from fewer.learning import sgd
from fewer.learning.protect import (
    ProtectedBatches,
    ProtectedSamples,
    RecordGuard,
    clipped_class_sums,
    sum_clipped_gradients,
)
from fewer.privacy import NotCovered, PrivacyLedger, PrivacySettings, Protection
from fewer.runtime.noise import SeededStream
from fewer.runtime.streams import stream

pytest.importorskip("dp_accounting", reason="the accountant is not installed (pip install 'fewer[dp]')")
X = torch.tensor([[3.0, 4.0], [0.1, 0.2], [-2.0, 1.0], [1e6, -1e6], [0.0, 0.0]])
Y = torch.tensor([0, 1, 1, 0, 2])
CLIP = 0.7


@pytest.fixture(autouse=True)
def fixed_nets() -> None:
    torch.manual_seed(0)


def guard(noise: float, clip: float = CLIP, distributed: bool = False, shares: int = 1) -> RecordGuard:
    settings = PrivacySettings(clip, noise, distributed=distributed, level="record")
    return RecordGuard(
        Protection(settings, noise, 0), lambda purpose: SeededStream(stream(0, purpose)), "handler", shares
    )


def cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def without(index: int) -> tuple[Tensor, Tensor]:
    kept = torch.arange(len(X)) != index
    return X[kept], Y[kept]


# --- class sums ---------------------------------------------------------------------------------------------------


def test_blanking_out_one_record_changes_class_sums_by_at_most_the_sensitivity() -> None:
    everything = clipped_class_sums(Samples(X, Y), lambda x: x, 3, CLIP)
    changes = [everything - clipped_class_sums(Samples(*without(i)), lambda x: x, 3, CLIP) for i in range(len(X))]
    assert max(float(change.norm()) for change in changes) == pytest.approx(math.sqrt(17 / 16) * CLIP)


def test_class_sums_by_hand() -> None:
    """Class 0: (3, 4) clipped to 0.7 · (0.6, 0.8), and (10⁶, −10⁶) to 0.7 · (1, −1) / √2; two samples."""
    sums = clipped_class_sums(Samples(X, Y), lambda x: x, 3, CLIP)
    half = 0.7 / math.sqrt(2)
    assert sums[0].tolist() == pytest.approx([0.42 + half, 0.56 - half, 2 * CLIP / 4])
    fifth = 0.7 / math.sqrt(5)
    assert sums[1].tolist() == pytest.approx([0.1 - 2 * fifth, 0.2 + fifth, 2 * CLIP / 4])  # (0.1, 0.2) is not clipped
    assert sums[2].tolist() == pytest.approx([0, 0, CLIP / 4])


def test_an_input_that_is_not_finite_adds_nothing_but_its_count() -> None:
    sums = clipped_class_sums(Samples(X[:1], Y[:1]), lambda x: x * torch.inf, 1, CLIP)
    assert sums[0].tolist() == pytest.approx([0, 0, CLIP / 4])


@pytest.mark.parametrize(("distributed", "share"), [(False, 1.0), (True, 0.5)])
def test_the_noise_of_class_sums_has_its_standard_deviation(distributed: bool, share: float) -> None:
    samples = ProtectedSamples(Samples(X, Y), guard(1.5, distributed=distributed, shares=4))
    released = samples.release_class_sums(lambda x: torch.zeros(len(x), 20_000), 3)
    deviation = share * 1.5 * math.sqrt(17 / 16)
    assert float(released.sums.std()) == pytest.approx(deviation * CLIP, rel=0.02)
    assert released.deviation == pytest.approx(4 * deviation)
    many = samples.release_class_sums(lambda x: torch.zeros(len(x), 1), 20_000)
    assert float(many.counts.std()) == pytest.approx(4 * deviation, rel=0.02)
    assert float(many.counts[:3].sum()) == pytest.approx(5, abs=4 * math.sqrt(3) * many.deviation)
    again = samples.release_class_sums(lambda x: torch.zeros(len(x), 20_000), 3)
    assert not torch.equal(released.sums, again.sums)  # no two releases share noise


# --- gradients ----------------------------------------------------------------------------------------------------


def flat_gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parts = sum_clipped_gradients(net, cross_entropy, x, y, CLIP)
    return torch.cat([part.flatten() for part in parts])


def test_blanking_out_one_record_changes_the_gradient_sum_by_at_most_c() -> None:
    net = nn.Linear(2, 3)
    everything = flat_gradient(net, X, Y)
    lengths = [float((everything - flat_gradient(net, *without(i))).norm()) for i in range(len(X))]
    assert max(lengths) == pytest.approx(CLIP, rel=1e-4)


def test_gradients_of_single_samples_are_clipped_and_summed() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    expected = torch.zeros(sum(weight.numel() for weight in net.parameters()))
    for index in range(len(X)):
        loss = cross_entropy(net, X[index : index + 1], Y[index : index + 1])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))])
        expected += gradient * min(1.0, CLIP / float(gradient.norm()))
    assert torch.allclose(flat_gradient(net, X, Y), expected, atol=1e-5)


def test_a_step_divides_by_the_expected_batch_and_has_the_noise_of_its_standard_deviation() -> None:
    """A batch of 2 of 5 samples: the noise of a gradient has standard deviation z · C / 2."""
    net, zero = nn.Linear(200, 100, bias=False), Samples(torch.zeros(5, 200), torch.zeros(5, dtype=torch.int64))
    batches = ProtectedBatches(zero, guard(1.5), steps=2, batch_size=2)
    first, second = ([*step] for step in batches.noisy_gradients(net, cross_entropy))
    assert float(first[0].std()) == pytest.approx(1.5 * CLIP / 2, rel=0.02)
    assert not torch.equal(first[0], second[0])
    assert batches.guard.releases == [(0.4, 1.5, 2)]


def test_without_noise_and_sampling_a_step_is_that_of_clipped_gradients() -> None:
    net = nn.Linear(2, 3)
    before, gradient = net.weight.detach().clone(), sum_clipped_gradients(net, cross_entropy, X, Y, CLIP)[0]
    batches = ProtectedSamples(Samples(X, Y), guard(1e-9)).batches(torch.zeros(1, 5, dtype=torch.int64))
    sgd(net, batches, 0.5)
    assert torch.allclose(net.weight, before - 0.5 * gradient / 5, atol=1e-6)


def test_each_sample_is_in_a_batch_with_the_sampling_rate() -> None:
    """With inputs 1 and a linear loss, the gradient is minus the number of samples drawn over the expected number."""
    samples = Samples(torch.ones(40, 1), torch.zeros(40))
    batches = ProtectedBatches(samples, guard(1e-9, clip=1.0), steps=400, batch_size=10)
    net = nn.Linear(1, 1, bias=False)
    steps = batches.noisy_gradients(net, lambda net, x, y: net(x).sum())
    drawn = torch.tensor([10 * float(step[0]) for step in steps])
    assert float(drawn.mean()) == pytest.approx(10, abs=0.5)  # the deviation of the mean is 0.14
    assert float(drawn.std()) == pytest.approx(math.sqrt(40 * 0.25 * 0.75), rel=0.15)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_samples_show_nothing_but_their_number() -> None:
    samples: Any = ProtectedSamples(Samples(X, Y), guard(1.0))
    assert len(samples) == 5
    for read in ("labels", "x", "y", "rows", "all", "pick", "chunks", "select", "slice"):
        with pytest.raises(NotCovered, match=f"does not cover this method: its clients use '{read}' .*'handler'"):
            getattr(samples, read)
    with pytest.raises(NotCovered, match="single samples"):
        samples[0]
    with pytest.raises(NotCovered, match="batches other than in gradient steps"):
        list(samples.batches(torch.zeros(1, 2)))


def test_a_net_that_mixes_samples_is_refused() -> None:
    batches = ProtectedBatches(Samples(X, Y), guard(1.0), 1, 2)
    with pytest.raises(NotCovered, match="batch norm mixes: set norm = group"):
        next(batches.noisy_gradients(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), cross_entropy))


def test_a_loss_that_keeps_something_of_the_samples_is_refused() -> None:
    kept = torch.zeros(1, 2)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kept.add_(x)
        return cross_entropy(net, x, y)

    with pytest.raises(NotCovered, match="cannot compute their gradient sample by sample"):
        sum_clipped_gradients(nn.Linear(2, 3), loss, X, Y, CLIP)
    assert kept.abs().sum() == 0


SETTINGS: dict[str, Any] = {"data": "digits", "model": "mlp", "clients": 4, "rounds": 2, "seed": 1}
FAST: dict[str, Any] = {"method_options": {"local_steps": 2}}


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedgen", "its clients use 'labels'"),
        ("fedmk", "its clients use 'labels'"),
        ("fed3r", "its clients use 'chunks'"),
        ("dbe", "its clients read batches other than in gradient steps"),
        ("metafed", "."),
    ],
)
def test_a_method_that_is_not_covered_says_why(method: str, reason: str) -> None:
    with pytest.raises(SettingError, match=f"does not cover this method: .*{reason}"):
        fewer.run(method, **SETTINGS, dp="record:noise=1")


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_is_the_same_in_the_pool_and_its_epsilon_grows() -> None:
    inline, pool = (
        fewer.run("fedavg", **SETTINGS, **FAST, dp="record:noise=1,public_noise", runtime=runtime)
        for runtime in ("inline", "pool")
    )
    first, second = (line["epsilon"] for line in inline.history)
    assert 0 < first < second and [line["epsilon"] for line in pool.history] == [first, second]
    assert torch.equal(inline.state.model["head.weight"], pool.state.model["head.weight"])


def test_a_resumed_run_has_the_same_ledger(tmp_path: Path) -> None:
    result = fewer.run("fedavg", **SETTINGS, **FAST, dp="record:noise=1", out=tmp_path / "run")
    more = fewer.resume(tmp_path / "run", rounds=3)
    unbroken = fewer.run("fedavg", **{**SETTINGS, "rounds": 3}, **FAST, dp="record:noise=1")
    assert more.history[-1]["epsilon"] == unbroken.history[-1]["epsilon"] > result.history[-1]["epsilon"]


def test_a_target_epsilon_is_kept_by_every_client() -> None:
    result: Any = fewer.run("fedavg", **SETTINGS, **FAST, dp="record:epsilon=3")
    assert 2.9 < result.history[-1]["epsilon"] <= 3
    noises = {noise for spent in result.privacy.records.values() for _, noise in spent}
    assert len(noises) == 4  # smaller clients sample at higher rates, and need more


def test_a_client_declines_when_its_budget_is_spent() -> None:
    """With 1 of 4 clients in each of 12 rounds, a client answers at most ⌈3 + 3 √3⌉ = 9 times."""
    settings = {**SETTINGS, "rounds": 12, "cohort": 1, "evaluate_every": 12}
    result: Any = fewer.run("fedavg", **settings, method_options={"local_steps": 1}, dp="record:epsilon=3")
    assert result.privacy.uses == 9 and result.history[-1]["epsilon"] <= 3


@pytest.mark.parametrize("dp", ["record:epsilon=8", "record:epsilon=8,distributed", "user:noise=0.01,clip=10"])
def test_prototypes_are_covered(dp: str) -> None:
    result = fewer.run("fedncm", **{**SETTINGS, "rounds": 1}, dp=f"{dp},public_noise")
    assert result.accuracy > 0.5 and result.history[-1]["epsilon"] > 0


def test_clipping_alone_loses_no_prototype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's contribution is clipped to length 0.01, the 1 for each class with it."""
    result = fewer.run("fedncm", **{**SETTINGS, "rounds": 1}, dp="user:clip=0.01,noise=0.00001,public_noise")
    assert result.accuracy > 0.5
    monkeypatch.setattr("fewer.methods.private_prototypes.DEVIATIONS", 100.0)
    with pytest.raises(QuorumLost, match="no class has more samples than the noise; use a larger epsilon"):
        fewer.run("fedncm", **{**SETTINGS, "rounds": 1}, dp="user:noise=1,public_noise")


def test_one_release_costs_what_its_noise_says() -> None:
    """One Gaussian release with z = 1 costs 4.38 at δ = 1e-5, for every client."""
    result = fewer.run("fedcof", **{**SETTINGS, "rounds": 1}, dp="record:noise=1")
    assert result.history[-1]["epsilon"] == pytest.approx(4.38, abs=0.01)


def test_fedproto_pays_for_its_gradients_and_its_prototypes() -> None:
    settings: dict[str, Any] = {**SETTINGS, "rounds": 1, **FAST, "dp": "record:noise=2"}
    both, gradients = (fewer.run(method, **settings).history[-1]["epsilon"] for method in ("fedproto", "fedavg"))
    assert both > gradients


@pytest.mark.parametrize("method", ["fedproto", "ditto"])
def test_a_target_refuses_two_releases_in_an_answer_before_any_round_ends(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "rounds": 20, **FAST, "dp": "record:epsilon=2"}
    with pytest.raises(
        SettingError, match=r"releases more than epsilon was planned for.*pass noise instead .'(local_)?train"
    ):
        fewer.run(method, **settings, out=tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").read_text()


def test_a_target_refuses_two_answers_of_a_client_in_a_round() -> None:
    book = PrivacyLedger.open(PrivacySettings(epsilon=2.0, level="record"), 5, 2, 2)
    book.record_client(0, [(0.1, 9.0, 5)], 1)
    book.record_client(0, [], 1)  # it released nothing
    book.record_client(0, [(0.1, 9.0, 5)], 2)
    with pytest.raises(SettingError, match="once for each client and round: pass noise instead"):
        book.record_client(0, [(0.1, 9.0, 5)], 2)


def test_methods_that_read_single_clients_refuse_shared_noise() -> None:
    with pytest.raises(NotCovered, match="reads 'sums' of single clients"):
        fewer.run("fedcof", **SETTINGS, dp="record:noise=1,distributed")
    with pytest.raises(NotCovered, match="distributed noise protects sums of statistics"):
        fewer.run("fedavg", **SETTINGS, dp="record:noise=1,distributed")
