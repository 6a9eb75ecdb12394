"""FL-MAML."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fewer.data import ArrayData
from fewer.methods.fl_maml import FLMAML
from tests.methods.f2l_harness import FAST, make_client


def test_fl_maml_applies_weight_decay(data: ArrayData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(data, tmp_path)
    method = FLMAML(**FAST | {"tasks": 1, "weight_decay": 0.5, "lr": 0.01, "zero_head": False})
    start = {name: tensor + 0.1 for name, tensor in method.initial_weights(client.task, 0).items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    monkeypatch.setattr(FLMAML, "task_gradient", lambda *args: zeros)
    for name, tensor in method.fit(client, start).items():
        assert torch.allclose(tensor, start[name] - 0.01 * start[name].sign(), atol=1e-5), name
