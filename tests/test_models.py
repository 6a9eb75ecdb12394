"""The models: published parameter counts, encoders and heads, second derivatives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fewer
from fewer import FedAvg
from fewer.data import Data
from fewer.errors import SettingError
from fewer.models import EncoderHead, Task, get_weights, net_factory, split_net
from fewer.models.images import Conv4, DropBlock
from fewer.models.split import find_head
from fewer.registry import MODELS

TASK_INFO: dict[str, dict[str, Any]] = {
    "cnn": {"shape": (1, 28, 28), "classes": 10},
    "lenet5": {"shape": (1, 28, 28), "classes": 10},
    "conv4": {"shape": (1, 28, 28), "classes": 5},
    "resnet12": {"shape": (3, 32, 32), "classes": 60},
    "femnist-cnn": {"shape": (1, 28, 28), "classes": 62},
    "alexnet": {"shape": (3, 64, 64), "classes": 1000},
    "sensor-cnn": {"shape": (6, 128), "classes": 6},
    "char-lstm": {"shape": (80,), "classes": 80, "vocabulary": 80},
    "text-bilstm": {"shape": (30,), "classes": 20, "vocabulary": 1000},
    "sentiment-lstm": {"shape": (25,), "classes": 2, "vocabulary": 1000},
    "mlp": {"shape": (103,), "classes": 40},
    "logistic": {"shape": (103,), "classes": 40},
}
COUNTS = {
    "cnn": 26_434,
    "lenet5": 61_706,
    "conv4": 640 + 128 + 3 * (36_928 + 128) + 64 * 5 + 5,
    "resnet12": 12_424_320 + 640 * 60 + 60,
    "femnist-cnn": 6_603_710,
    "alexnet": 61_100_840,
    "char-lstm": 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 256 * 80 + 80,
    "text-bilstm": 2 * 4 * 50 * (300 + 50 + 2) + 100 * 20 + 20,
    "sentiment-lstm": 4 * 100 * (300 + 100 + 2) + 4 * 100 * (100 + 100 + 2) + 100 * 2 + 2,
    "mlp": 103 * 64 + 64 + 64 * 40 + 40,
    "logistic": 103 * 40 + 40,
}


def build_net(name: str, **options: Any) -> nn.Module:
    task_info = {"norm": options.pop("norm", None), **TASK_INFO[name]}
    torch.manual_seed(0)
    return net_factory(MODELS.find(name), task_info, options)()


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


def test_options() -> None:
    narrow = build_net("resnet12", width=0.25)
    assert narrow.head.in_features == 160  # type: ignore[union-attr]
    assert build_net("conv4", width=8).encoder(inputs("conv4")).shape[1] == 8  # type: ignore[operator]
    rgb = net_factory(MODELS.find("conv4"), {"shape": (3, 32, 32), "classes": 5}, {})()
    assert rgb.head.in_features == 64 * 8 * 8  # type: ignore[union-attr]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in build_net("conv4", norm="group").modules())
    with pytest.raises(SettingError, match="unknown option of model ResNet12 'widht', did you mean 'width'"):
        build_net("resnet12", widht=2)
    with pytest.raises(SettingError, match="SmallCNN takes images .* but inputs have shape \\(103,\\)"):
        net_factory(MODELS.find("cnn"), {"shape": (103,), "classes": 2}, {})
    with pytest.raises(SettingError, match="takes text, but the data has no vocabulary"):
        net_factory(MODELS.find("char-lstm"), {"shape": (80,), "classes": 2, "vocabulary": None}, {})


def test_a_missing_encoder_and_head_are_reported() -> None:
    with pytest.raises(SettingError, match="Linear has no encoder and no head"):
        split_net(nn.Linear(2, 2))


def test_the_head_of_a_plain_net_is_its_last_linear_layer() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 5)).train()
    task = Task((3, 2, 2), 5, lambda: net, torch.device("cpu"))
    head, width = find_head(task, net)
    assert head is net[3] and width == 7 and net.training and not net[3]._forward_hooks
    for other in (nn.Sequential(*net, nn.Softmax(1)), nn.Sequential(nn.Flatten(), nn.ReLU())):
        with pytest.raises(SettingError, match="has no encoder and no head"):
            find_head(task, other)
    model = EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(12, 6)), 6, 5)
    assert find_head(task, model) == (model.head, 6)


def test_conv4_equals_blocks_with_relu_before_pooling() -> None:
    torch.manual_seed(0)
    net = Conv4((1, 12, 12), 3, width=4, pools=2)
    layers, x = list(net.encoder), torch.randn(6, 1, 12, 12)  # type: ignore[call-overload]
    for index in reversed(range(len(layers) - 1)):
        if isinstance(layers[index], nn.MaxPool2d):
            layers[index : index + 2] = reversed(layers[index : index + 2])
    results = []
    for encoder in (net.encoder, nn.Sequential(*layers)):
        features = encoder(x)
        results.append([features, *torch.autograd.grad(features.square().sum(), list(net.encoder.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert isinstance(layers[2], nn.ReLU) and isinstance(net.encoder[2], nn.MaxPool2d)  # type: ignore[index]


def test_initial_weights_are_drawn_once_and_copied() -> None:
    builds: list[int] = []

    def build_layer() -> nn.Module:
        builds.append(1)
        return nn.Linear(2, 2)

    task = Task((2,), 2, build_layer)
    first = task.initial_weights(1)
    again = task.initial_weights(1)
    assert len(builds) == 1 and all(torch.equal(first[name], again[name]) for name in first)
    first["weight"].zero_()
    assert float(task.initial_weights(1)["weight"].abs().sum()) > 0
    assert not torch.equal(task.initial_weights(2)["weight"], again["weight"]) and len(builds) == 2


@pytest.mark.parametrize("name", ["char-lstm", "text-bilstm", "sentiment-lstm", "conv4", "mlp"])
def test_second_derivatives_against_finite_differences(name: str) -> None:
    """The gradient of ‖∇loss‖² along a direction, in float64."""
    short_inputs = {"char-lstm": (6,), "text-bilstm": (5,), "sentiment-lstm": (5,)}
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


def test_padding_does_not_change_the_output() -> None:
    for name in ("text-bilstm", "sentiment-lstm"):
        net = build_net(name).eval()
        x = torch.zeros(1, 10, dtype=torch.int64)
        x[0, :4] = torch.tensor([5, 6, 7, 8])
        longer = F.pad(x, (0, 15))
        if name == "sentiment-lstm":  # reads forward only, so padding changes nothing
            assert torch.allclose(net(x), net(longer))
        assert "vectors" not in " ".join(get_weights(net))  # word vectors are never sent


def test_dropblock_drops_squares_and_keeps_the_sum() -> None:
    torch.manual_seed(0)
    layer = DropBlock(0.2, 5)
    x = torch.ones(20, 8, 16, 16)
    out = layer(x)
    assert float((out == 0).float().mean()) == pytest.approx(0.2, abs=0.05)
    assert float(out.mean()) == pytest.approx(1, abs=0.01)
    assert torch.equal(layer.eval()(x), x)


def test_a_frozen_encoder_stays_frozen(digits: Data) -> None:
    net = net_factory(MODELS.find("cnn"), {"shape": (1, 8, 8), "classes": 10}, {})()
    net.encoder.requires_grad_(False)
    before = get_weights(net)
    after = fewer.run(FedAvg(rounds=2, cohort=3), digits, model=net).state.model
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("encoder"))
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_a_text_model_learns() -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["good", "fine", "nice"] if n % 2 else ["bad", "poor", "sad"], 6)) for n in range(200)]
    data = fewer.data.from_arrays(texts, np.arange(200) % 2, clients=4, partition="iid")
    result = fewer.run(FedAvg(rounds=8, lr=1.0), data, model="text-bilstm", model_options={"width": 16})
    assert result.accuracy > 0.95


def test_word_vectors_from_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = tmp_path / "vectors.txt"
    file.write_text("good 1 0 0 0\nbad -1 0 0 0\n")
    texts = [" ".join(rng.choice(["good", "thing"] if n % 2 else ["bad", "thing"], 4)) for n in range(120)]
    data = fewer.data.from_arrays(texts, np.arange(120) % 2, clients=2, partition="iid")
    result = fewer.run(FedAvg(rounds=1), data, model="text-bilstm", model_options={"vectors": str(file)})
    vectors = result.model.encoder.words.vectors  # type: ignore[union-attr]
    assert vectors[data.tokens.index("good")].tolist() == [1, 0, 0, 0]  # type: ignore[index]
    with pytest.raises(SettingError, match="is not text"):
        digits = fewer.data.load("digits", clients=3)
        fewer.run(FedAvg(rounds=1), digits, model="mlp", model_options={"vectors": str(file)})
