"""The baselines of FRL against explicit loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fewer
from fewer.data import from_clients
from fewer.data.episodes import split_support_query
from fewer.errors import SettingError
from fewer.learning.sgd import epoch_batches
from fewer.methods.frl import (
    FRL,
)
from fewer.methods.frl_baselines import FRLFineTuning, FRLPerFedAvg, FRLScratch, FRLWarmStart
from fewer.models import Weights, get_weights, load_weights
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.runtime import stream
from tests.methods.frl_harness import (
    PAIRS,
    UNSEEN,
    compute_gradients,
    descend,
    episode,
    federation,
    initial_net,
    load_net,
    to_double,
)


def test_keep_best_averages_the_best_models_on_held_out_samples() -> None:
    method = FRLScratch(keep_best=2, head="gpal", way=2, group_size=2)
    group = method.empty_group(build_experiment(parse_settings({}), method, federation(), initial_net()).task)
    updates = [
        {
            "model": {"w": torch.tensor([float(index)])},
            "size": index + 1,
            "score": score,
            "classes": torch.tensor([index]),
            "means": torch.full((1, 3), float(index)),
            "counts": torch.tensor([1]),
        }
        for index, score in enumerate([0.5, 0.9, 0.1, 0.9])
    ]
    merged = method.aggregate(group, updates)
    assert float(merged.model["w"]) == pytest.approx((2 * 1 + 4 * 3) / 6) and merged.classes.tolist() == [1, 3]
    samples = federation().client(1).train
    for head in ("linear", "gpal"):
        prototypes = (torch.tensor([1, 2]), torch.zeros(2, 0)) if head == "linear" else None
        answer = FRLScratch(keep_best=2, head=head).fit_support(initial_net(), samples, prototypes, True, stream(0))
        assert answer["size"] == 10 and answer["score"] in (0.0, 0.5, 1.0)  # two of twelve are held out


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fine_tuning_pretrains_with_fedavg_and_per_fedavg_with_first_order_steps(decay: float) -> None:
    options: dict[str, Any] = {
        "rounds": 1,
        "cohort": 5,
        "batch_size": None,
        "lr": 0.3,
        "pretrain_lr": 0.2,
        "eval_groups": 1,
        "weight_decay": decay,
    }
    options |= {"way": 2, "group_size": 2, "head": "linear"}
    models: dict[str, list[Weights]] = {"fine": [], "per": []}
    for client in range(5):
        x, y = (torch.from_numpy(array) for array in PAIRS[client])
        net = load_net(to_double(initial_net().state_dict()))
        start = get_weights(net)
        gradients = compute_gradients(F.cross_entropy(net(x.double()), y), net)
        models["fine"].append(descend(start, gradients, 0.2, decay))
        generator = stream(0, 1, client, "batches")
        inner, outer = split_support_query(federation().client(client).train, 0.5, generator, by_class=True)
        gradients = compute_gradients(F.cross_entropy(net(inner.slice(0, 99)[0].double()), inner.labels), net)
        adapted = load_net(descend(start, gradients, 0.3, decay))
        gradients = compute_gradients(F.cross_entropy(adapted(outer.slice(0, 99)[0].double()), outer.labels), adapted)
        models["per"].append(descend(start, gradients, 0.2, decay))
    sizes = np.array([len(y) for _, y in PAIRS]) / sum(len(y) for _, y in PAIRS)
    for method_class, kind in ((FRLFineTuning, "fine"), (FRLPerFedAvg, "per")):
        model = fewer.run(method_class(**options), federation(), model=initial_net()).state.model
        for name, tensor in model.items():
            mean = sum(share * model_weights[name] for share, model_weights in zip(sizes, models[kind], strict=True))
            assert torch.allclose(tensor.double(), mean, atol=1e-6), (kind, name)


def test_a_warm_start_is_fedavg_followed_by_frl() -> None:
    options: dict[str, Any] = {"cohort": 5, "batch_size": None, "lr": 0.2, "pretrain_lr": 0.2, "meta_lr": 0.5}
    options |= {"eval_groups": 1, "way": 2, "group_size": 2, "optimizer": "sgd"}
    warm = fewer.run(FRLWarmStart(rounds=8, warmup_rounds=4, **options), federation(), model=initial_net())
    pretrain_options = {name: value for name, value in options.items() if name not in ("meta_lr", "optimizer")}
    pretrained = fewer.run(FRLFineTuning(rounds=4, **pretrain_options), federation(), model=initial_net()).state.model
    gradients, theta, _ = episode(
        FRL(rounds=4, **{name: value for name, value in options.items() if name != "pretrain_lr"}),
        to_double(pretrained),
    )
    for name, tensor in warm.state.model.items():
        assert torch.allclose(tensor.double(), theta[name], atol=2e-5), name
    for name, gradient in gradients.items():
        expected = pretrained[name].double() - 0.5 * gradient
        assert torch.allclose(warm.state.initial[name].double(), expected, atol=2e-5), name
    for wrong in (3, 8):
        with pytest.raises(
            SettingError, match=rf"warmup_rounds must be a multiple of 4 .* below rounds = 8, got {wrong}"
        ):
            fewer.run(FRLWarmStart(rounds=8, warmup_rounds=wrong, **options), federation(), model=initial_net())


def test_with_keep_best_a_client_reports_its_held_out_accuracy() -> None:
    x = np.concatenate([np.tile([-2.0, 2.0], (10, 1)), np.tile([2.0, -2.0], (10, 1))]).astype(np.float32)
    samples = from_clients([(x, np.repeat([0, 1], 10))], test=UNSEEN).client(0).train
    answer = FRLScratch(keep_best=1, head="distance", lr=1e-6).fit_support(
        initial_net(), samples, None, True, stream(0)
    )
    assert answer["score"] == 1


def test_per_fedavg_steps_continue_from_the_last_step() -> None:
    client: Any = SimpleNamespace(train=federation().client(1).train, task=SimpleNamespace(classes=6))
    client.stream = lambda purpose: stream(0, 1, 1, purpose)
    method = FRLPerFedAvg(head="linear", batch_size=3, lr=0.3, pretrain_lr=0.2)
    net, expected, generator = initial_net(), initial_net(), stream(0, 1, 1, "batches")
    method.fit(net, client)
    inner, outer = split_support_query(client.train, 0.5, generator, by_class=True)
    for (x_inner, y_inner), (x_outer, y_outer) in zip(
        epoch_batches(inner, 1, 3, generator), epoch_batches(outer, 1, 3, generator), strict=True
    ):
        start = get_weights(expected)
        gradients = compute_gradients(F.cross_entropy(expected(x_inner), y_inner), expected)
        load_weights(expected, {name: start[name] - 0.3 * gradients[name] for name in start})
        gradients = compute_gradients(F.cross_entropy(expected(x_outer), y_outer), expected)
        load_weights(expected, {name: start[name] - 0.2 * gradients[name] for name in start})
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(net.state_dict().values(), expected.state_dict().values(), strict=True)
    )
