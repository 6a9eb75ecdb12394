"""Adapters: which parameters are trained and sent, LoRA by formula, and frozen weights that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fewer
from fewer.data import ArrayData
from fewer.errors import RunError, SettingError
from fewer.models import EncoderHead, Task, get_weights, load_weights
from fewer.models.adapters import LowRank, train_only

HEAD = {"head.weight", "head.bias"}


def make_net() -> EncoderHead:
    layers = nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5)
    return EncoderHead(nn.Sequential(*layers), 5, 10)


def make_task(trained: str) -> tuple[Task, Task]:
    task = Task((1, 8, 8), 10, make_net)
    return task, train_only(task, trained, 3)


@pytest.mark.parametrize(
    ("trained", "names"),
    [
        ("head", HEAD),
        ("bias", {*HEAD, "encoder.1.bias", "encoder.2.bias", "encoder.4.bias"}),
        ("norm", {*HEAD, *(f"encoder.2.{n}" for n in ("weight", "bias", "running_mean", "running_var"))}),
        (r"encoder\.4", {"encoder.4.weight", "encoder.4.bias"}),
        ("lora:rank=2", {*HEAD, *(f"encoder.{n}.parametrizations.weight.0.{ab}" for n in (1, 4) for ab in "ab")}),
    ],
)
def test_only_trained_tensors_are_weights(trained: str, names: set[str]) -> None:
    task, restricted = make_task(trained)
    weights = restricted.initial_weights(3)
    assert {name for name in weights if "num_batches" not in name} == names
    net, full = restricted.net(), task.net()
    load_weights(net, weights)
    load_weights(full, task.initial_weights(3))
    x = torch.randn(7, 1, 8, 8)
    assert torch.allclose(net.eval()(x), full.eval()(x), atol=1e-6)  # training starts where it would


def test_lora_adds_b_times_a() -> None:
    weight = torch.arange(6.0).view(2, 3)
    low_rank = LowRank(weight, 1)
    assert torch.equal(low_rank(weight), weight)
    with torch.no_grad():
        low_rank.a.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        low_rank.b.copy_(torch.tensor([[10.0], [0.5]]))
    assert torch.equal(low_rank(weight) - weight, torch.tensor([[10.0, 20.0, 30.0], [0.5, 1.0, 1.5]]))


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedadam", "ditto"])
def test_methods_train_and_send_the_adapter_only(method: str, digits: ArrayData) -> None:
    net = make_net()
    options: dict[str, Any] = {"rounds": 2, "method_options": {"local_steps": 3}}
    result = fewer.run(method, digits, model=net, train="lora:rank=2", **options)
    model = result.state.shared
    assert len(model) == 6 and model["encoder.1.parametrizations.weight.0.b"].any()
    frozen = result.trained_net.encoder[1].parametrizations.weight.original  # type: ignore[index, union-attr]
    assert torch.equal(frozen, get_weights(net)["encoder.1.weight"])
    assert result.metrics["up"] < fewer.run(method, digits, model=net, **options).metrics["up"]


def test_train_head_is_freeze_encoder_without_a_cache(digits: ArrayData) -> None:
    net = make_net()
    head = fewer.run("fedavg", digits, model=net, train="head", rounds=2)
    frozen = fewer.run("fedavg", digits, model=net, freeze="encoder", rounds=2)
    assert head.state.model.keys() == frozen.state.model.keys() == HEAD
    for name, tensor in frozen.state.model.items():
        assert torch.allclose(head.state.model[name], tensor, atol=1e-5)


def test_a_run_does_not_resume_with_other_frozen_weights(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 2, "rounds": 1, "train": "lora:rank=2", "out": tmp_path / "run"}
    net = make_net()
    fewer.run("fedavg", "digits", model=net, **settings)
    assert fewer.resume(tmp_path / "run", model=net).history
    with pytest.raises(RunError, match="other frozen weights"):
        fewer.resume(tmp_path / "run", model=make_net())


def test_errors_name_the_setting(digits: ArrayData) -> None:
    with pytest.raises(SettingError, match=r"train = decoder matches no parameter of the model \(it has: encoder"):
        fewer.run("fedavg", digits, model=make_net(), train="decoder")
    with pytest.raises(SettingError, match="neither lora:rank=N, bias, norm, head nor a regular expression"):
        fewer.run("fedavg", digits, model=make_net(), train="(")
    with pytest.raises(SettingError, match="leave out train"):
        fewer.run("fedavg", digits, model=make_net(), train="head", freeze="encoder")
