"""All models: published parameter counts, encoders and heads, second derivatives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fewer
from fewer.errors import SettingError
from fewer.methods.fedavg import FedAvg
from fewer.models import (
    EncoderHead,
    net_factory,
    split_net,
)
from fewer.models.nets import default_model
from fewer.registry import MODELS
from tests.methods.linear_harness import federation
from tests.models.harness import TASK_INFO, build_net

COUNTS = {
    "cnn": 26_434,
    "lenet5": 61_706,
    "conv4": 640 + 128 + 3 * (36_928 + 128) + 64 * 5 + 5,
    "resnet12": 12_424_320 + 640 * 60 + 60,
    "femnist-cnn": 6_603_710,
    "alexnet": 61_100_840,
    "char-lstm": 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 256 * 80 + 80,
    "embedding-bag": 1000 * 32 + 32 * 64 + 64 + 64 * 20 + 20,
    "text-bilstm": 2 * 4 * 50 * (300 + 50 + 2) + 100 * 20 + 20,
    "sentiment-lstm": 4 * 100 * (300 + 100 + 2) + 4 * 100 * (100 + 100 + 2) + 100 * 2 + 2,
    "mlp": 103 * 64 + 64 + 64 * 40 + 40,
    "logistic": 103 * 40 + 40,
}


def inputs(name: str, count: int = 2) -> torch.Tensor:
    task_info = TASK_INFO[name]
    if "vocabulary" in task_info:
        return torch.randint(
            1, task_info["vocabulary"], (count, *task_info["shape"]), generator=torch.Generator().manual_seed(0)
        )
    return torch.randn(count, *task_info["shape"], generator=torch.Generator().manual_seed(0))


def test_every_model_is_tested() -> None:
    assert TASK_INFO.keys() == MODELS.keys()


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name: str) -> None:
    assert sum(p.numel() for p in build_net(name).parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_a_head_on_an_encoder(name: str) -> None:
    net = build_net(name).eval()
    assert isinstance(net, EncoderHead)
    encoder, head = split_net(net)
    x = inputs(name)
    features = encoder(x)
    assert features.ndim == 2 and net(x).shape == (2, TASK_INFO[name]["classes"])
    assert torch.equal(head(features), net(x))


def test_options_change_a_model() -> None:
    narrow = build_net("resnet12", width=0.25)
    assert narrow.head.in_features == 160  # type: ignore[union-attr]
    assert build_net("conv4", width=8).encoder(inputs("conv4")).shape[1] == 8  # type: ignore[operator]
    rgb = net_factory(MODELS.find("conv4"), {"shape": (3, 32, 32), "classes": 5}, {})()
    assert rgb.head.in_features == 64 * 8 * 8  # type: ignore[union-attr]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in build_net("conv4", norm="group").modules())
    with pytest.raises(SettingError, match="model ResNet12 has no option 'widht', did you mean 'width'"):
        build_net("resnet12", widht=2)
    with pytest.raises(SettingError, match="SmallCNN takes images .* but inputs have shape \\(103,\\)"):
        net_factory(MODELS.find("cnn"), {"shape": (103,), "classes": 2}, {})
    with pytest.raises(SettingError, match="takes text, but the data has no vocabulary"):
        net_factory(MODELS.find("char-lstm"), {"shape": (80,), "classes": 2, "vocabulary": None}, {})


@pytest.mark.parametrize("name", ["char-lstm", "embedding-bag", "text-bilstm", "sentiment-lstm", "conv4", "mlp"])
def test_second_derivatives_against_finite_differences(name: str) -> None:
    """The gradient of ‖∇loss‖² along a direction, in float64."""
    short_inputs = {"char-lstm": (6,), "embedding-bag": (5,), "text-bilstm": (5,), "sentiment-lstm": (5,)}
    task_info = {**TASK_INFO[name], "shape": short_inputs.get(name, TASK_INFO[name]["shape"])}
    torch.manual_seed(0)
    net = net_factory(MODELS.find(name), task_info, {"width": 4} if name == "conv4" else {})().double()
    x = inputs(name, 3)[:, : task_info["shape"][0]] if name in short_inputs else inputs(name, 3).double()
    y = torch.tensor([0, 1, 1])
    parameters = list(net.parameters())

    def squared_norm() -> torch.Tensor:
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters, create_graph=True)
        return torch.stack([(gradient**2).sum() for gradient in gradients]).sum()

    exact = torch.autograd.grad(squared_norm(), parameters, allow_unused=True, materialize_grads=True)
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    directional = sum(float((g * d).sum()) for g, d in zip(exact, direction, strict=True))

    def squared_norm_at(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=step)
        value = float(squared_norm().detach())
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(d, alpha=step)
        return value

    step = 1e-6
    assert directional == pytest.approx((squared_norm_at(step) - squared_norm_at(-step)) / (2 * step), rel=2e-3)


def test_unknown_or_unsuitable_models_are_rejected() -> None:
    with pytest.raises(SettingError, match="unknown model 'cnm', did you mean 'cnn'"):
        fewer.run(FedAvg(rounds=1), federation(), model="cnm")
    with pytest.raises(SettingError, match=r"images .* but inputs have shape \(3,\)"):
        fewer.run(FedAvg(rounds=1), federation(), model="cnn")
    with pytest.raises(SettingError, match=r"rejects inputs of shape \(3,\)"):
        fewer.run(FedAvg(rounds=1), federation(), model=nn.Linear(4, 2))
    with pytest.raises(SettingError, match="at least 2 classes"):
        fewer.run(FedAvg(rounds=1), federation(), model=nn.Linear(3, 1))


# --- lazy layers --------------------------------------------------------------------------------------------------


class LazyNet(nn.Sequential):
    """Layers that learn their sizes from the first input. Dropout must not draw from the streams of the weights."""

    def __init__(self) -> None:
        norm, head = nn.LazyBatchNorm1d(), nn.LazyLinear(2)
        super().__init__(nn.LazyLinear(4), norm, nn.Dropout(0.5), nn.ReLU(), head)


class PlainNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("model", [LazyNet, LazyNet(), lambda: LazyNet()], ids=["class", "instance", "function"])
def test_lazy_layers_train_like_others(model: Any, tmp_path: Path) -> None:
    method = FedAvg(rounds=2, cohort=2)
    plain = fewer.run(method, federation(), model=PlainNet)
    random_state = torch.get_rng_state()
    lazy = fewer.run(method, federation(), model=model, out=tmp_path / "run")
    pool = fewer.run(method, federation(), model=model, runtime="pool")
    for result in (lazy, pool):
        assert result.state.model.keys() == plain.state.model.keys()
        assert all(torch.equal(weight, plain.state.model[name]) for name, weight in result.state.model.items())
    assert torch.equal(torch.get_rng_state(), random_state)
    stopped = Stop()
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, federation(), model=model, out=tmp_path / "stopped", callbacks=[stopped])
    resumed = fewer.resume(tmp_path / "stopped", data=federation(), model=model)
    assert all(torch.equal(weight, plain.state.model[name]) for name, weight in resumed.state.model.items())
    opened = fewer.open_run(tmp_path / "run", data=federation(), model=model)
    assert torch.equal(opened.model(torch.ones(1, 3)), plain.model(torch.ones(1, 3)))


class Stop(fewer.Callback):
    def on_round_start(self, run: fewer.Run) -> None:
        if run.round == 2:
            raise KeyboardInterrupt


def test_a_lazy_net_keeps_the_modes_and_weights_of_its_other_layers() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval(), nn.LazyLinear(2))
    task = fewer.run(FedAvg(rounds=1), federation(), model=net).task
    built = task.net()
    assert [layer.training for layer in built] == [True, False, True]  # type: ignore[attr-defined]
    assert torch.equal(task.initial_weights(5)["0.weight"], net.state_dict()["0.weight"])
    assert not torch.equal(task.initial_weights(5)["2.weight"], task.initial_weights(6)["2.weight"])
    assert isinstance(net[2], nn.LazyLinear)  # the user's net is unchanged
    with pytest.raises(SettingError, match="the model cannot be built: .*shapes cannot be multiplied"):
        fewer.run(FedAvg(rounds=1), federation(), model=nn.Sequential(nn.LazyLinear(4), nn.Linear(3, 2)))


# --- the default model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "name"),
    [
        ((1, 28, 28), {}, "cnn"),
        ((6, 128), {}, "sensor-cnn"),
        ((6, 3), {}, "mlp"),
        ((30,), {}, "mlp"),
        ((30,), {"vocabulary": 100}, "embedding-bag"),
        ((80,), {"vocabulary": 80, "next_token": True}, "char-lstm"),
    ],
)
def test_the_default_model_fits_the_data(shape: tuple[int, ...], options: dict[str, Any], name: str) -> None:
    assert default_model(shape, **options) == name
    facts = {"shape": shape, "classes": 3, "vocabulary": options.get("vocabulary")}
    x = torch.zeros(1, *shape, dtype=torch.int64 if options else torch.float32)
    assert net_factory(MODELS.find(name), facts, {})().eval()(x).shape == (1, 3)


def test_a_run_records_its_default_model(tmp_path: Path) -> None:
    default = fewer.run(FedAvg(rounds=1), federation(), out=tmp_path / "run")
    named = fewer.run(FedAvg(rounds=1), federation(), model="mlp")
    assert default.settings.model == "mlp" and default.hash == named.hash and default.value == named.value
    assert json.loads((tmp_path / "run/settings.json").read_text())["settings"]["model"] == "mlp"
    own = fewer.run(FedAvg(rounds=1), federation(), model=PlainNet)
    assert own.settings.model == "(PlainNet)" and own.hash != named.hash
    texts = [f"{'good' if n % 2 else 'bad'} word{n % 7}" for n in range(40)]
    text = fewer.data.from_arrays(texts, [n % 2 for n in range(40)], clients=2, partition="iid")
    table = fewer.compare(["fedavg", "local"], text, rounds=3, method_options={"lr": 0.5})
    assert table.settings["model"] == "embedding-bag" and min(row.accuracy for row in table.rows) > 0.9
    with pytest.raises(SettingError, match=r"CharLSTM takes text, but inputs have shape \(1, 8, 8\); cnn fits"):
        fewer.run("fedavg", "digits", model="char-lstm")
