"""A frozen encoder: cached features, messages with the head only, and models that take raw inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer.data import ArrayData, Samples
from fewer.errors import RunError, SettingError
from fewer.methods.fedavg import FedAvg
from fewer.models import EncoderHead, Task
from fewer.models.frozen import PROBES, FrozenEncoder, HeadBuilder, HeadNet, freeze_encoder
from fewer.models.split import find_activation
from fewer.runs.experiment import build_experiment, parse_settings, warn_once
from fewer.runs.inference import predict
from fewer.runs.machines import ClientDaemon, _describe_session
from fewer.runs.result import open_run
from tests.runs.test_machines import write_client_data

METHOD = FedAvg(rounds=2, cohort=3, local_steps=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_net(seed: int = 0) -> EncoderHead:
    torch.manual_seed(seed)
    return EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.ReLU()), 5, 10)


def run(data: Any = "digits", net: nn.Module | None = None, **settings: Any) -> Any:
    named: dict[str, Any] = {"clients": 6, "alpha": 1.0} if data == "digits" else {}
    return fewer.run(METHOD, data, model=net or make_net(), freeze="encoder", **named, **settings)


@pytest.mark.parametrize(
    ("model", "warns"), [("mlp", True), (lambda: make_net(3), False), (make_net(), False), (EncoderHead, True)]
)
def test_random_encoders_are_frozen_with_a_warning(model: Any, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    if model is EncoderHead:
        model = lambda: EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), 5, 10)  # noqa: E731
    fewer.run(METHOD, "digits", model=model, freeze="encoder", clients=6, alpha=1.0)
    assert ("starts from random weights" in caplog.text) == warns


def feature_arrays(data: ArrayData, net: EncoderHead) -> list[tuple[Any, Any]]:
    """The features of each client's training samples."""
    encoder = net.encoder.eval()
    with torch.no_grad():
        return [
            (encoder(x).numpy(), y.numpy()) for x, y in (data.client(index).train.all() for index in range(len(data)))
        ]


def test_only_the_head_is_trained_and_sent_as_if_the_data_were_features(digits: ArrayData) -> None:
    net = make_net()
    result = run(digits, net)
    test = net.encoder.eval()(digits.test.all()[0]).detach().numpy(), digits.test.labels.numpy()
    data = fewer.data.from_clients(feature_arrays(digits, net), test=test)
    expected = fewer.run(METHOD, data, model=HeadNet(net.head))
    assert result.state.model.keys() == {"head.weight", "head.bias"}
    for name, tensor in expected.state.model.items():
        assert torch.allclose(result.state.model[name], tensor, atol=1e-6)
    assert result.accuracy == expected.accuracy
    assert result.metrics["up"] == expected.metrics["up"] and result.metrics["down"] == expected.metrics["down"]


def test_features_are_computed_once_for_all_runs_and_partitions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, counts = FrozenEncoder.encode, []

    def count(encoder: FrozenEncoder, samples: Samples) -> torch.Tensor:
        counts.append(len(samples.x))
        return encode(encoder, samples)

    monkeypatch.setattr(FrozenEncoder, "encode", count)
    first = run()
    assert len(list(cache.glob("features-*.lock"))) == 2 and max(counts) > PROBES  # training and test samples
    counts.clear()
    assert run().history[-1]["accuracy"] == first.accuracy
    assert run(data_seed=5).history and max(counts) <= PROBES  # another partition
    run(net=make_net(1))  # other weights
    assert len(list(cache.glob("features-*.lock"))) == 4
    run(data_options={"normalization": [0.5, 0.5]})  # another preprocessing
    assert len(list(cache.glob("features-*.lock"))) == 6


class Scaled(nn.Module):
    """An encoder with a setting that neither its weights nor its description show."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) ** self.factor


def test_features_of_an_encoder_with_other_code_are_not_taken_from_the_cache() -> None:
    def fit(factor: float) -> torch.Tensor:
        pixels = {"normalization": [0.0, 1.0]}
        net = EncoderHead(Scaled(factor), 64, 10)
        result = fewer.run("fedncm", "digits", model=net, clients=2, freeze="encoder", rounds=1, data_options=pixels)
        head: torch.Tensor = result.state.head["head.weight"]
        return head

    first = fit(1.0)
    assert torch.equal(fit(1.0), first) and not torch.allclose(fit(3.0), first, atol=0.01)


def test_the_model_of_a_run_takes_raw_inputs(tmp_path: Path, digits: ArrayData) -> None:
    net = make_net()
    result = run(net=net, out=tmp_path / "run")
    x = digits.test.all()[0]
    with torch.no_grad():
        features = net.encoder.eval()(x)
        expected = features @ result.state.model["head.weight"].T + result.state.model["head.bias"]
        assert torch.allclose(result.model(x), expected, atol=1e-5)
    opened = open_run(tmp_path / "run", model=make_net())
    assert torch.equal(opened.model(x), result.model(x))
    assert opened.schema.shape == (1, 8, 8)
    raw = digits.test.x[:5].numpy()
    assert torch.allclose(opened.predict(raw).outputs, expected[:5].cpu(), atol=1e-5)


def test_a_model_by_name_predicts_from_its_run_directory_and_resumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 4, "model": "cnn", "freeze": "encoder", "rounds": 2, "out": tmp_path / "run"}
    result = fewer.run("fedncm", "digits", **settings)
    forecast = predict(tmp_path / "run", "digits")
    assert forecast.metrics is not None and f"{result.accuracy:.2%}" in forecast.metrics
    extended = fewer.resume(tmp_path / "run", rounds=3)
    assert len(extended.history) == 3 and extended.accuracy == result.accuracy


def test_a_pool_gives_the_same_numbers() -> None:
    inline, pool = run(), run(runtime="pool")
    assert all(torch.equal(pool.state.model[name], tensor) for name, tensor in inline.state.model.items())


def test_a_run_does_not_resume_with_other_frozen_weights(tmp_path: Path) -> None:
    run(out=tmp_path / "run")
    with pytest.raises(RunError, match="other frozen weights"):
        fewer.resume(tmp_path / "run", model=make_net(1))
    assert fewer.resume(tmp_path / "run", model=make_net()).history


def test_data_held_out_for_tuning_has_the_features_of_its_samples(digits: ArrayData) -> None:
    net = make_net()
    experiment = build_experiment(parse_settings({"freeze": "encoder"}), METHOD, digits, net)
    held_out, raw = experiment.data.hold_out(0.3, 1), digits.hold_out(0.3, 1)
    assert held_out.fingerprint() == raw.fingerprint() != digits.fingerprint() == experiment.data.fingerprint()
    with torch.no_grad():
        assert torch.allclose(held_out.test.all()[0], net.encoder.eval()(raw.test.all()[0]), atol=1e-6)
    again = build_experiment(parse_settings({"freeze": "encoder"}), METHOD, held_out, net)
    assert again.data.shape == (5,) and again.data.fingerprint() == raw.fingerprint()


def test_a_remote_client_keeps_the_features_of_its_own_data_in_its_folder(tmp_path: Path, cache: Path) -> None:
    settings = {"data": "digits", "clients": 3, "model": "cnn", "freeze": "encoder", "runtime": "flower"}
    server = build_experiment(parse_settings(settings))
    description = _describe_session(server, tmp_path, 0)
    computed = len(list(cache.glob("*.lock")))
    daemon = ClientDaemon(tmp_path / "store", write_client_data(tmp_path))
    client = daemon._build_experiment(description["settings"], description["data_info"])
    assert client.data.client(1).train.all()[0].shape == (40, *server.task.shape)
    assert list((tmp_path / "store").glob("features-*")) and len(list(cache.glob("*.lock"))) == computed == 1
    description["data_info"]["frozen"] = "0" * 16
    with pytest.raises(fewer.DataError, match="frozen weights of the model differ"):
        daemon._build_experiment(description["settings"], description["data_info"])


def test_a_remote_client_checks_the_frozen_weights_of_an_adapter(tmp_path: Path) -> None:
    settings = {"data": "digits", "clients": 3, "model": "mlp", "train": "lora:rank=1", "runtime": "flower"}
    description = _describe_session(build_experiment(parse_settings(settings)), tmp_path, 0)
    daemon = ClientDaemon(tmp_path / "store", write_client_data(tmp_path))
    client = daemon._build_experiment(description["settings"], description["data_info"])
    assert all(name.startswith("head.") or ".parametrizations." in name for name in client.task.initial_weights(0))
    for wrong in ("0" * 16, ""):
        description["data_info"]["frozen"] = wrong
        with pytest.raises(fewer.DataError, match="frozen weights of the model differ"):
            daemon._build_experiment(description["settings"], description["data_info"])


class CountedNet(EncoderHead):
    """A net that counts how often it is built."""

    built = 0

    def __init__(self) -> None:
        type(self).built += 1
        super().__init__(nn.Flatten(), 64, 10)


def test_generated_features_have_the_range_of_a_frozen_encoder() -> None:
    net = make_net()
    task, _ = freeze_encoder(Task((1, 8, 8), 10, lambda: net), 0)
    assert (
        type(find_activation(task, task.net()))
        is type(find_activation(Task((1, 8, 8), 10, lambda: net), net))
        is nn.ReLU
    )


def test_the_encoder_is_not_built_for_every_client(digits: ArrayData) -> None:
    fewer.run(METHOD.model_copy(update={"rounds": 1}), digits, model=CountedNet, freeze="encoder")
    once = CountedNet.built
    fewer.run(METHOD.model_copy(update={"rounds": 3}), digits, model=CountedNet, freeze="encoder")
    assert CountedNet.built == 2 * once


def test_heads_draw_new_weights_or_are_built_with_the_whole_net() -> None:
    linear = HeadBuilder(make_net, nn.Sequential(nn.Linear(5, 10), nn.ReLU()))
    torch.manual_seed(0)
    first, second = linear(), linear()
    assert not torch.equal(first.head[0].weight, second.head[0].weight)  # type: ignore[index]
    scale = nn.ParameterList([torch.ones(1)])  # it cannot draw new weights
    assert isinstance(HeadBuilder(make_net, nn.Sequential(nn.Linear(5, 10), scale))().head, nn.Linear)


def test_errors_say_what_to_do(digits: ArrayData) -> None:
    with pytest.raises(SettingError, match="has no encoder and no head"):
        run(digits, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    x = np.random.default_rng(0).normal(size=(60, 3))
    table = fewer.data.from_arrays(x, np.arange(60) % 2, standardize=True, clients=2)
    with pytest.raises(SettingError, match="does not work with standardize"):
        fewer.run("fedncm", table, model="mlp", freeze="encoder")
    with pytest.raises(SettingError, match="freeze must be 'none' or 'encoder', got 'head'"):
        fewer.run(METHOD, digits, freeze="head")


def test_a_frozen_encoder_solves_tasks_without_training() -> None:
    options: dict[str, Any] = {"way": 2, "shot": 1, "queries": 2, "tasks": 2, "test_tasks": 4, "head": "fedcof"}
    settings: dict[str, Any] = {"clients": 4, "partition": "iid", "data_options": {"split": "4/3/3"}, "rounds": 1}
    result = fewer.run("fl-proto", "digits", model="cnn", freeze="encoder", method_options=options, **settings)
    assert not result.state.model and result.accuracy > 0.5


def test_a_method_without_anything_to_train_says_so() -> None:
    with pytest.raises(fewer.QuorumLost, match="unable .*nothing to train: the loss depends on frozen parameters only"):
        fewer.run("fedrep", "digits", clients=4, model="cnn", freeze="encoder", rounds=1)
