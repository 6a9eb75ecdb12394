"""Adapters: which parameters are trained and sent, LoRA by formula, and frozen weights that stay."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fewer
from fewer.data import ArrayData
from fewer.errors import RunError, SettingError
from fewer.models import EncoderHead, Task, get_weights, load_weights
from fewer.models.adapters import LowRank, train_only
from fewer.models.frozen import hash_frozen
from fewer.wire import decode, encode

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


@pytest.mark.parametrize("trained", ["head", "bias", "norm", r"encoder\.2\.(weight|bias)", "lora:rank=2"])
def test_batch_statistics_change_only_if_they_are_sent(trained: str) -> None:
    _, restricted = make_task(trained)
    net, sent = restricted.net().train(), "encoder.2.running_mean" in restricted.initial_weights(3)
    layer = net.get_submodule("encoder.2")
    before = layer.get_buffer("running_mean").clone()
    net(torch.randn(7, 1, 8, 8))
    assert torch.equal(layer.get_buffer("running_mean"), before) == (not sent) and sent == (trained == "norm")


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


def test_messages_contain_the_adapter_and_the_head_only(digits: ArrayData, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[dict[str, Any]] = []

    def record(*args: Any) -> bytes:
        blob = encode(*args)
        messages.append(decode(blob)[1])
        return blob

    monkeypatch.setattr(fewer.runtime.clients, "encode", record)
    monkeypatch.setattr(fewer.runtime.handlers, "encode", record)
    net, options = make_net(), {"local_steps": 3, "cohort": 3}
    result = fewer.run("fedavg", digits, model=net, train="lora:rank=2", rounds=1, method_options=options)
    matrices = {f"encoder.{layer}.parametrizations.weight.0.{ab}" for layer in (1, 4) for ab in "ab"}
    assert all(fields["model"].keys() == HEAD | matrices for fields in messages if "model" in fields)
    first, answers = messages[0]["model"], [fields for fields in messages if "size" in fields]
    for name, tensor in result.state.model.items():
        mean = sum(fields["size"] * fields["model"][name] for fields in answers) / sum(f["size"] for f in answers)
        assert torch.allclose(tensor, mean, atol=1e-6) and not torch.equal(tensor, first[name])
    kept, before = dict(result.trained_net.named_buffers()), get_weights(net)
    frozen = {name.replace("parametrizations.weight.original", "weight"): tensor for name, tensor in kept.items()}
    assert frozen.keys() == before.keys() - HEAD
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.items())


@pytest.mark.parametrize("trained", ["lora:rank=2", "bias", "norm", "head", r"encoder\.4"])
def test_the_hash_of_frozen_weights_covers_all_that_is_not_sent(trained: str) -> None:
    task, restricted = make_task(trained)
    full = task.initial_weights(3)
    hashes = {hash_frozen(restricted)}
    for name in full:
        changed = replace(task, pretrained={**full, name: full[name] + 1})
        hashes.add(hash_frozen(train_only(changed, trained, 3)))
    sent = full.keys() & restricted.initial_weights(3).keys()
    assert len(hashes) == 1 + len(full) - len(sent)


class Block(nn.Module):
    """Attention and a feed-forward net, with residual connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v)
        out: Tensor = x + self.feed_forward(self.norms[1](x))
        return out


class TransformerEncoder(nn.Module):
    """A small transformer over the rows of an image."""

    def __init__(self, row: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(row, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.embed(x.squeeze(1))).mean(1)
        return features


def make_transformer(width: int = 8, layers: int = 1) -> EncoderHead:
    torch.manual_seed(0)
    return EncoderHead(TransformerEncoder(8, width, layers), width, 10)


def test_a_lora_round_of_a_small_transformer_sends_two_percent_of_its_bytes(digits: ArrayData) -> None:
    net = make_transformer(256, 2)  # 1.6 million parameters
    options: dict[str, Any] = {"rounds": 1, "cohort": 2, "method_options": {"local_steps": 1}}
    lora = fewer.run("fedavg", digits, model=net, train="lora:rank=2", **options).metrics
    full = fewer.run("fedavg", digits, model=net, **options).metrics
    assert lora["up"] <= 0.02 * full["up"] and lora["down"] <= 0.02 * full["down"]


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "ditto", "fedmeta", "metafed"]
)
def test_methods_train_the_adapter_of_a_transformer(method: str) -> None:
    settings: dict[str, Any] = {"data": "digits", "clients": 10, "alpha": 5.0, "rounds": 1, "model": make_transformer()}
    result, full = fewer.run(method, train="lora:rank=1", **settings), fewer.run(method, **settings)
    assert 0 < result.metrics["up"] < 0.6 * full.metrics["up"]
    weights = _find_weights(result.state)
    assert weights or method == "metafed"  # whose models stay on clients
    for name, tensor in weights.items():
        assert name.removeprefix("α ").startswith("head.") or ".parametrizations.weight.0." in name, name
        assert tensor.isfinite().all()


def _find_weights(state: Any) -> dict[str, torch.Tensor]:
    """All tensors of a state that have the name of a weight."""
    found: dict[str, torch.Tensor] = {}
    for value in vars(state).values():
        for part in [value, *value.values()] if isinstance(value, dict) else []:
            if isinstance(part, dict):
                found |= {name: t for name, t in part.items() if isinstance(t, torch.Tensor) and "." in str(name)}
    return found


def test_lora_changes_the_fused_projection_of_torch_attention() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = EncoderHead(nn.Sequential(layer, nn.Flatten()), 24, 10)
    restricted = train_only(Task((3, 8), 10, lambda: copy.deepcopy(net)), "lora:rank=1", 0)
    adapted = restricted.net()
    matrices = {name.rpartition(".parametrizations.")[2] for name in restricted.initial_weights(0)}
    assert {"in_proj_weight.0.a", "in_proj_weight.0.b", "weight.0.a", "weight.0.b"} <= matrices
    x, attention = torch.randn(2, 3, 8), adapted.get_submodule("encoder.0.self_attn")
    before = adapted(x)
    with torch.no_grad():
        attention.get_parameter("parametrizations.in_proj_weight.0.b").add_(1.0)
    assert torch.allclose(before, net(x), atol=1e-5) and not torch.allclose(adapted(x), before, atol=1e-3)


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
    for wrong in ("decoder", "lora:rank=0", "lora:r=4", "LORA"):
        with pytest.raises(
            SettingError, match=f"train = {wrong} matches no parameter .*; allowed: lora:rank=N"
        ) as caught:
            fewer.run("fedavg", digits, model=make_net(), train=wrong)
        assert "(it has encoder.1.weight, " in str(caught.value) and "and 3 more;" in str(caught.value)
    with pytest.raises(
        SettingError, match=r"train = \( is no regular expression: .* \(allowed: lora:rank=N with N ≥ 1"
    ):
        fewer.run("fedavg", digits, model=make_net(), train="(")
    with pytest.raises(SettingError, match="train = norm finds no normalization layer before the head: use head or"):
        fewer.run("fedavg", digits, model="mlp", train="norm")
    flat = EncoderHead(nn.Flatten(), 64, 10)
    with pytest.raises(SettingError, match="train = lora:rank=2 finds no linear layer before the head: use norm"):
        fewer.run("fedavg", digits, model=flat, train="lora:rank=2")
    with pytest.raises(SettingError, match="leave out train"):
        fewer.run("fedavg", digits, model=make_net(), train="head", freeze="encoder")
