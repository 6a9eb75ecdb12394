"""Settings are saved and hashed."""

import json
from pathlib import Path

import torch

import fewer
from fewer import FedAvg
from fewer.data import Data


def test_settings_are_saved_and_hashed(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "a", seed=1)
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "b", seed=1, runtime="pool")
    fewer.run(FedAvg(rounds=1, cohort=2, lr=0.2), digits, out=tmp_path / "c", seed=1)
    a, b, c = (json.loads((tmp_path / name / "settings.json").read_text()) for name in "abc")
    assert a["hash"] == b["hash"] != c["hash"]
    assert a["settings"]["method_options"]["lr"] == 0.1 and a["settings"]["clients"] == 6
    assert a["environment"]["torch"] == torch.__version__ and a["data"]["fingerprint"] == digits.fingerprint()
