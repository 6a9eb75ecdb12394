"""The store of a client."""

from pathlib import Path

import torch

from fewer.runtime import Store
from fewer.runtime.store import client_folder, delete_state_after


def test_the_store_returns_the_value_of_the_latest_earlier_round(tmp_path: Path) -> None:
    folder = client_folder(tmp_path, 7)
    assert Store(folder, 1).get("model") is None and not folder.exists()
    for round in (1, 2, 5):
        Store(folder, round).put("model", {"w": torch.tensor([float(round)]), "n": round})
    assert Store(folder, 9).get("model")["n"] == 5
    assert Store(folder, 4).get("model")["n"] == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.00000002.safetensors",
        "model.00000005.safetensors",
    ]
    delete_state_after(tmp_path, 4)
    assert Store(folder, 9).get("model")["n"] == 2
    Store(folder, 9).put("model", None)
    assert Store(folder, 9).get("model") is None
