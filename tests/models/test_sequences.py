"""Nets for text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fewer
from fewer import FedAvg
from fewer.errors import SettingError
from fewer.models import get_weights
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


def test_word_vectors_from_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = tmp_path / "vectors.txt"
    file.write_text("good 1 0 0 0\nbad -1 0 0 0\n")
    texts = [" ".join(rng.choice(["good", "thing"] if n % 2 else ["bad", "thing"], 4)) for n in range(120)]
    data = fewer.data.from_arrays(texts, np.arange(120) % 2, clients=2, partition="iid")
    result = fewer.run(FedAvg(rounds=1), data, model="text-bilstm", model_options={"vectors": str(file)})
    vectors = result.model.encoder.vectors  # type: ignore[union-attr]
    assert vectors[data.tokens.index("good")].tolist() == [1, 0, 0, 0]  # type: ignore[index]
    with pytest.raises(SettingError, match="is not text"):
        digits = fewer.data.load("digits", clients=3)
        fewer.run(FedAvg(rounds=1), digits, model="mlp", model_options={"vectors": str(file)})
