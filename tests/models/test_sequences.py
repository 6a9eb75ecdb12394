"""Nets for text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fewer
from fewer import FedAvg
from fewer.errors import DataError, SettingError
from fewer.models import get_weights
from fewer.runs.experiment import warn_once
from tests.models.harness import build_net


def test_padding_does_not_change_the_output() -> None:
    for name in ("text-bilstm", "sentiment-lstm"):
        net = build_net(name).eval()
        x = torch.zeros(1, 10, dtype=torch.int64)
        x[0, :4] = torch.tensor([5, 6, 7, 8])
        longer = F.pad(x, (0, 15))
        if name == "sentiment-lstm":  # reads forward only, so padding changes nothing
            assert torch.allclose(net(x), net(longer))
        assert "vectors" not in " ".join(get_weights(net))  # word vectors are never sent


def test_a_text_model_learns() -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["good", "fine", "nice"] if n % 2 else ["bad", "poor", "sad"], 6)) for n in range(200)]
    data = fewer.data.from_arrays(texts, np.arange(200) % 2, clients=4, partition="iid")
    result = fewer.run(FedAvg(rounds=8, lr=1.0), data, model="text-bilstm", model_options={"width": 16})
    assert result.accuracy > 0.95


def reviews() -> fewer.data.ArrayData:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["good", "thing"] if n % 2 else ["bad", "thing"], 4)) for n in range(120)]
    return fewer.data.from_arrays(texts, np.arange(120) % 2, clients=2, partition="iid")


def test_word_vectors_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "glove").mkdir()
    file = tmp_path / "glove" / "glove.6B.100d.txt"
    file.write_text("good 1 0 0 0\nbad -1 0 0 0\n")
    data = reviews()
    for vectors in (str(file), "glove"):
        warn_once.cache_clear()
        caplog.clear()
        options = {"vectors": vectors, "width": 4}
        result = fewer.run(FedAvg(rounds=1), data, model="text-bilstm", model_options=options, data_dir=tmp_path)
        loaded = result.model.encoder.vectors  # type: ignore[union-attr]
        assert loaded[data.tokens.index("good")].tolist() == [1, 0, 0, 0]  # type: ignore[index]
        assert "word vectors: glove.6B.100d.txt has 2 of 5 words of the vocabulary (40%)" in caplog.messages
    with pytest.raises(SettingError, match="is not text"):
        digits = fewer.data.load("digits", clients=3)
        fewer.run(FedAvg(rounds=1), digits, model="mlp", model_options={"vectors": str(file)})
    with pytest.raises(SettingError, match="width = 300, but vectors = .* has 4 values per word"):
        fewer.run(FedAvg(rounds=1), data, model="text-bilstm", model_options={"vectors": str(file), "width": 300})
    file.write_text("gut 1 0 0 0\n")
    with pytest.raises(DataError, match="has none of the words of data 'arrays'"):
        fewer.run(FedAvg(rounds=1), data, model="text-bilstm", model_options={"vectors": str(file)})


def test_own_word_vectors_warn(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    options = {"vectors": "own", "width": 2}
    result = fewer.run(FedAvg(rounds=1), reviews(), model="text-bilstm", model_options=options)
    assert result.model.encoder.vectors.shape == (5, 2)  # type: ignore[union-attr]
    assert "raw training text of all clients, which a real federation never has" in caplog.messages[0]
