"""Encoders of timm and transformers: loading, preprocessing, words as tokens, and errors. Nothing is fetched."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fewer
from fewer.data import ArrayData
from fewer.errors import SettingError
from fewer.models import Preprocess, pretrained
from fewer.models.pretrained import SplitWords, TimmNet, TransformersNet
from fewer.registry import find_model
from fewer.runs.experiment import parse_settings
from tests.tiny_models import save_tiny_text_model, save_tiny_vision_model

TEXTS = ["good fine film", "bad poor film", "fine good", "poor bad"] * 10


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FEWER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    for loader in (pretrained._load_timm, pretrained._load_transformer, pretrained._split_words):
        loader.cache_clear()


def make_texts() -> ArrayData:
    labels = np.tile([1, 0, 1, 0], 10)
    return fewer.data.from_arrays(TEXTS, labels, clients=2, partition="iid", max_length=5)


def make_images() -> ArrayData:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 1, 6, 6), dtype=np.uint8)
    return fewer.data.from_arrays(pixels, np.arange(40) % 2, clients=2, partition="iid")


# --- words as tokens ------------------------------------------------------------------------------------------


def test_words_become_tokens_between_a_start_and_an_end() -> None:
    table = torch.tensor([[-1, -1], [9, -1], [3, -1], [4, 5]])  # padding, unknown, a word of one token, one of two
    split = SplitWords(table, torch.tensor([7]), torch.tensor([8]), 10)
    ids, mask = split(torch.tensor([[2, 3, 1, 0], [3, 0, 0, 0]]))
    assert mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert (ids * mask).tolist() == [[7, 3, 4, 5, 9, 8], [7, 4, 5, 8, 0, 0]]
    shorter, mask = SplitWords(table, torch.tensor([7]), torch.tensor([8]), 4)(torch.tensor([[2, 3, 1, 0]]))
    assert shorter.tolist() == [[7, 3, 4, 8]] and mask.all()


# --- transformers ---------------------------------------------------------------------------------------------


def test_a_text_model_gives_the_features_of_its_own_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save_tiny_text_model(tmp_path / "tiny")
    data = make_texts()
    net = TransformersNet(str(folder), data.shape, 2, tokens=data.tokens).eval()
    texts = ["good film", "bad"]
    x = torch.zeros(2, 5, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids = [data.tokens.index(word) for word in text.split()]
        x[row, : len(ids)] = torch.tensor(ids)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, text in enumerate(texts):
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = reference(**encoded).last_hidden_state[0]
            assert torch.allclose(net.encoder(x)[row], hidden.mean(0), atol=1e-5)
            first = TransformersNet(str(folder), data.shape, 2, tokens=data.tokens, pooling="first").eval()
            assert torch.allclose(first.encoder(x)[row], hidden[0], atol=1e-5)


def test_a_text_without_tokens_has_finite_features(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save_tiny_text_model(tmp_path / "tiny", kind="gpt2", ends=False)  # GPT-2 puts no token around a text
    texts = fewer.data.from_arrays(["", *TEXTS], np.tile([1, 0, 1, 0, 1], 9)[:41], clients=2, max_length=5)
    net = TransformersNet(str(folder), texts.shape, 2, tokens=texts.tokens).eval()
    x = torch.tensor([[0, 0], [2, 0]])
    assert net(x).isfinite().all() and net(x[:1]).isfinite().all()
    result = fewer.run("fedncm", texts, model=f"hf:{folder}", freeze="encoder", rounds=1)
    assert result.state.head["head.weight"].isfinite().all()


def test_a_text_model_trains_and_its_run_resumes_and_predicts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save_tiny_text_model(tmp_path / "tiny")
    file = tmp_path / "texts.jsonl"
    lines = [{"text": text, "label": label} for text, label in zip(TEXTS, "+-+-" * 10, strict=True)]
    file.write_text("\n".join(map(json.dumps, lines)))
    settings: dict[str, Any] = {"model": f"hf:{folder}", "clients": 2, "partition": "iid", "rounds": 2}
    result = fewer.run("fedncm", f"jsonl:{file}", freeze="encoder", out=tmp_path / "run", **settings)
    assert result.accuracy == 1.0 and result.state.head.keys() == {"head.weight", "head.bias"}
    assert len(fewer.resume(tmp_path / "run", rounds=3).history) == 3
    assert fewer.open_run(tmp_path / "run").predict(["good fine", "bad poor"]).classes == ["+", "-"]
    adapted = fewer.run("fedavg", f"jsonl:{file}", train="lora:rank=2", **settings)
    assert all("lora" in name or "parametrizations" in name or name.startswith("head") for name in adapted.state.model)


def test_an_image_model_is_preprocessed_as_its_files_say(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save_tiny_vision_model(tmp_path / "tiny")
    data = make_images()
    net = find_model(f"hf:{folder}")(data.shape, 2)
    prepare = next(module for module in net.modules() if isinstance(module, Preprocess))
    assert prepare.size == 8 and prepare.mode == "bicubic" and prepare.mean.flatten().tolist() == [0.25, 0.5, 0.75]
    result = fewer.run("fedncm", data, model=f"hf:{folder}", freeze="encoder", rounds=1)
    assert result.state.head["head.weight"].shape == (2, 16)


def test_errors_of_transformers_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save_tiny_text_model(tmp_path / "tiny")
    with pytest.raises(SettingError, match=r"takes texts of words, but inputs have shape \(1, 6, 6\)"):
        fewer.run("fedncm", make_images(), model=f"hf:{folder}")
    with pytest.raises(SettingError, match="no model hf:nobody/nothing: it is neither a directory .* download=true"):
        fewer.run("fedncm", make_texts(), model="hf:nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError, match=f"cannot load model hf:{tmp_path}/empty"):
        fewer.run("fedncm", make_texts(), model=f"hf:{tmp_path}/empty")
    with pytest.raises(SettingError, match="pooling must be 'mean' or 'first', got 'last'"):
        fewer.run("fedncm", make_texts(), model=f"hf:{folder}", model_options={"pooling": "last"})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    pretrained._split_words.cache_clear()
    with pytest.raises(SettingError, match="the tokenizer of model .* knows no word of the data"):
        fewer.run("fedncm", make_texts(), model=f"hf:{folder}")
    save_tiny_vision_model(tmp_path / "images")
    shutil.copy(tmp_path / "images/model.safetensors", folder)
    pretrained._load_transformer.cache_clear()
    with pytest.raises(SettingError, match=r"its file of weights lacks \d+ of 23 tensors"):
        fewer.run("fedncm", make_texts(), model=f"hf:{folder}")


# --- without the libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "library"), [("hf", "transformers"), ("timm", "timm")])
def test_a_missing_library_names_its_extra(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SettingError, match=rf"models of {name} need {library}: pip install 'fewer\[{name}\]'"):
        fewer.run("fedncm", make_images(), model=f"{name}:resnet")


def test_timm_without_torchvision_says_what_it_needs_and_what_pip_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(library: str) -> Any:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setattr(pretrained, "import_module", fail)
    with pytest.raises(
        SettingError, match=r"\(No module named 'torchvision'\); first install .* or pip replaces torch"
    ):
        TimmNet("resnet18", (3, 6, 6), 2)


def test_a_source_needs_a_name_and_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hf", "timm:"):
        with pytest.raises(SettingError, match="needs a name"):
            find_model(name)
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_settings({"model": "hf:tiny"}).model == f"hf:{tmp_path}/tiny"
    assert parse_settings({"model": "hf:org/name"}).model == "hf:org/name"


# --- timm, which needs torchvision, as a fake -----------------------------------------------------------------


class FakeEncoder(nn.Module):
    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)
        self.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "input_size": (3, 12, 12)}

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layer(x).mean((2, 3))
        return features


@pytest.fixture
def timm_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        calls.append({"name": name, **options})
        torch.manual_seed(0)
        return FakeEncoder()

    timm, hub = ModuleType("timm"), ModuleType("huggingface_hub")
    known: dict[str, Any] = {"is_model": lambda name: name == "resnet18", "create_model": create_model}
    known["get_pretrained_cfg"] = lambda name: SimpleNamespace(hf_hub_id="timm/resnet18")
    vars(timm).update(known)
    vars(hub)["try_to_load_from_cache"] = lambda repository, file: None
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


def test_a_timm_model_loads_a_file_once_and_resizes_as_it_declares(
    tmp_path: Path, timm_calls: list[dict[str, Any]]
) -> None:
    file = tmp_path / "weights.safetensors"
    file.touch()
    options = {"weights": str(file), "size": 10}
    data = make_images()
    result = fewer.run("fedavg", data, model="timm:resnet18", model_options=options, rounds=2)
    overlay = {"pretrained_cfg_overlay": {"file": str(file)}}
    assert timm_calls == [{"name": "resnet18", "pretrained": True, "num_classes": 0, **overlay}]
    assert result.state.model["head.weight"].shape == (2, 4)
    net = TimmNet("resnet18", (1, 6, 6), 2, weights=str(file))
    assert net.encoder[0].size == 12 and net.encoder[0].std.flatten()[0] == pytest.approx(0.2)  # type: ignore[index]


def test_timm_weights_are_fetched_only_when_asked(tmp_path: Path, timm_calls: list[dict[str, Any]]) -> None:
    with pytest.raises(SettingError, match="timm:resnet18 are not in the cache: pass --model-option weights=FILE, or"):
        fewer.run("fedncm", make_images(), model="timm:resnet18")
    assert not timm_calls
    TimmNet("resnet18.a1_in1k", (3, 6, 6), 2, download=True)
    assert timm_calls == [{"name": "resnet18.a1_in1k", "pretrained": True, "num_classes": 0}]
    with pytest.raises(SettingError, match="timm has no model 'nonet'"):
        TimmNet("nonet", (3, 6, 6), 2)
    with pytest.raises(SettingError, match="no file of weights"):
        TimmNet("resnet18", (3, 6, 6), 2, weights=str(tmp_path / "none"))
    with pytest.raises(SettingError, match=r"takes images with 1 or 3 channels, but inputs have shape \(5,\)"):
        fewer.run("fedncm", make_texts(), model="timm:resnet18", model_options={"download": True})


# --- adapters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_lora_of_peft_changes_all_linear_layers_of_a_transformer(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = save_tiny_text_model(tmp_path / "tiny", kind=kind)
    data = make_texts()
    options: dict[str, Any] = {"rounds": 1, "method_options": {"local_steps": 2}}
    result = fewer.run("fedavg", data, model=f"hf:{folder}", train="lora:rank=2", **options)
    names = [name for name in result.state.model if not name.startswith("head.")]
    assert names and all(".lora_" in name for name in names)
    attention = "query" if kind == "bert" else "c_attn"  # queries, keys and values in one Conv1D
    assert any(f"{attention}.lora_B" in name and result.state.model[name].any() for name in names)
    assert 0 < result.metrics["up"] < fewer.run("fedavg", data, model=f"hf:{folder}", **options).metrics["up"]
    net = result.trained_net
    base = next(module for name, module in net.named_modules() if name.endswith(f"{attention}.base_layer"))
    saved = pretrained._load_transformer(str(folder), False)
    unchanged = next(module for name, module in saved.named_modules() if name.endswith(attention))
    assert torch.equal(base.weight, unchanged.weight)


def test_a_lora_round_of_a_small_bert_sends_two_percent_of_its_bytes(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder, data = save_tiny_text_model(tmp_path / "tiny", width=256), make_texts()
    options: dict[str, Any] = {"model": f"hf:{folder}", "rounds": 1, "method_options": {"local_steps": 1}}
    lora = fewer.run("fedavg", data, train="lora:rank=1", **options).metrics
    assert lora["up"] <= 0.02 * fewer.run("fedavg", data, **options).metrics["up"]


def test_lora_of_a_transformer_without_linear_layers_says_so(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from transformers import ResNetConfig, ResNetModel

    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    ResNetModel(ResNetConfig(image_size=8, **sizes)).save_pretrained(tmp_path / "tiny")
    with pytest.raises(SettingError, match="train = lora finds no linear layer in ResNetModel: use norm, bias or"):
        fewer.run("fedavg", make_images(), model=f"hf:{tmp_path}/tiny", train="lora")


def test_lora_without_peft_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    folder = save_tiny_text_model(tmp_path / "tiny")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SettingError, match=r"models of hf need peft: pip install 'fewer\[hf\]'"):
        fewer.run("fedavg", make_texts(), model=f"hf:{folder}", train="lora")
