"""MetaFed against a NumPy reference, its ablations, different nets and wrong settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fewer
from fewer import MetaFed
from fewer.data import Data
from fewer.data.federated import from_arrays
from fewer.errors import QuorumLost
from fewer.learning import Counts
from fewer.learning.distill import distill, feature_loss, fit_feature_map
from fewer.methods import federation
from fewer.methods.federation import MAX_MAP_SAMPLES, SingleClient, Teacher, replace_client_net
from fewer.methods.metafed import adaptive_distill_weight
from fewer.models import EncoderHead, Weights, get_weights, norm_weight_names
from fewer.runtime import stream
from fewer.runtime.handlers import FETCH_OUTGOING
from fewer.wire import decode
from tests.helpers import DIGITS, Array, call, is_close
from tests.methods.metafed_harness import (
    CLASSES,
    COUNT,
    DATA,
    FEATURES,
    HIDDEN,
    INITIAL,
    SEED,
    SMALL,
    Model,
    RingHarness,
    X,
    Y,
    all_sevens,
    linear,
    make_harness,
    normed,
    run_sgd,
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


def validate(model: Model, client: int) -> tuple[float, float]:
    """Accuracy and summed loss on the validation samples."""
    x, y = load_samples(client, "validation")
    scores = x @ model[0].T @ model[1].T
    loss = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]
    return float((scores.argmax(1) == y).mean()), float(loss.sum())


def is_close_model(weights: Weights, model: Model) -> bool:
    return is_close(weights["encoder.weight"], model[0], 1e-5) and is_close(weights["head.weight"], model[1], 1e-5)


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


# --- ablations --------------------------------------------------------------------------------------------------


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


# --- different nets ---------------------------------------------------------------------------------------------


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
        SingleClient(client, "mlp", MetaFed(lr=0.1, local_steps=1, batch_size=4)).distill(
            replace_client_net(client, "mlp").initial_weights(), teacher
        )
        assert seen.pop() == count and MAX_MAP_SAMPLES >= 100


# --- edge cases and wrong settings ------------------------------------------------------------------------------


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
        (["-o", 'inner_options={"rats":1}'], "inner_options: fedavg has no option 'rats'"),
    ],
)
def test_a_wrong_option_is_reported_in_one_line(args: list[str], text: str) -> None:
    result = call("run", "metafed", *args, *DIGITS, code=2)
    assert result.stderr.startswith("fewer: ") and result.stderr.count("\n") == 1 and text in result.stderr
