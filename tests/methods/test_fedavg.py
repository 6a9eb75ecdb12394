"""FedAvg against a NumPy reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fewer
from fewer.errors import QuorumLost
from fewer.learning.augment import apply_affine, draw_affine
from fewer.methods import find, names
from fewer.methods.fedavg import FedAvg, FedAvgAugmented, LocalTraining
from fewer.models import get_weights
from fewer.runs.experiment import parse_settings
from fewer.runs.settings import neutral_options, settings_hash
from fewer.wire import decode
from tests.golden.test_golden import CASES
from tests.helpers import data_bytes, is_close
from tests.methods.fedmk_harness import make_client, make_task
from tests.methods.linear_harness import (
    CLASSES,
    FEATURES,
    PAIRS,
    SEED,
    SIZES,
    TEST,
    WEIGHT,
    client_batches,
    federation,
    linear,
    make_harness,
    run_sgd,
    trained_weight,
    weighted_average,
)

# --- augmentation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method_class", [FedAvg, FedAvgAugmented])
def test_augment_is_sgd_on_augmented_images(method_class: type[FedAvg], tmp_path: Path) -> None:
    method = method_class(local_steps=2, batch_size=3, lr=0.2, augment=True)
    client = make_client(tmp_path, 1)
    answer = method.local_train(client, model=client.initial_weights())["model"]
    net, draw = make_task().net(), client.stream("moves")
    net.load_state_dict(client.initial_weights())
    for indices in torch.randint(len(client.train), (2, 3), generator=client.stream("batches")):
        x, y = client.train.pick(indices)
        gradients = torch.autograd.grad(
            F.cross_entropy(net(apply_affine(x, draw_affine(3, draw))), y), list(net.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.2 * gradient)
    assert all(torch.allclose(answer[name], tensor, atol=1e-6) for name, tensor in get_weights(net).items())


def test_augment_is_neutral_in_hashes_and_on_for_fedavg_augmented() -> None:
    assert FedAvgAugmented().augment and not FedAvg().augment
    settings = parse_settings({})
    hashes = [settings_hash(settings, method) for method in (FedAvg(), FedAvg(augment=False), FedAvg(augment=True))]
    assert hashes[0] == hashes[1] != hashes[2]
    assert neutral_options(FedAvgAugmented()) >= {"augment"}


def test_augment_needs_images() -> None:
    with pytest.raises(QuorumLost, match=r"augment = true needs images, but inputs have shape \(3,\)"):
        fewer.run(FedAvg(rounds=1, augment=True), federation(), model=linear())


LOCAL_METHODS = [name for name in names() if issubclass(find(name), LocalTraining)]


@pytest.mark.parametrize("name", LOCAL_METHODS)
def test_every_method_with_local_training_augments(name: str) -> None:
    """No method accepts the option and ignores it."""
    runs = []
    for augment in (False, True):
        options = {**CASES[name].get("method_options", {}), "augment": augment}
        settings = {"data": "digits", "clients": 4, "rounds": 1, **CASES[name], "method_options": options}
        settings |= {"rounds": 2} if name == "fedavg-head" else {}  # its first round is not local training
        runs.append(fewer.run(name, **settings).metrics["loss"])
    assert runs[0] != runs[1]


# --- FedAvg -----------------------------------------------------------------------------------------------------


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
