"""A user's type checker sees the types of the installed package (`py.typed`), without the plugins of this project."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USER_FILE = """
import fewer
from fewer import FedAvg, FedMK, Local, MetaFed, Result, Settings


class Patient(FedAvg):
    patience: int = 3


def train() -> Result:
    data = fewer.data.load("fashion-mini", clients=20)
    return fewer.run(Patient(rounds=2, lr=0.1, patience=4), data)


accuracy: float = train().accuracy
table = fewer.compare([FedAvg(lr=0.1), FedMK(per_class=5), MetaFed(), Local()], seeds=2)
settings = Settings(method="fedavg", clients=5)
FedAvg(rounds="two")  # line 18
train().acuracy  # line 19
"""


@pytest.mark.timeout(600)  # without a cache it reads all of torch
def test_a_users_file_is_checked_with_the_types_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER_FILE)
    cache = ROOT / ".mypy_cache/user"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(cache), "user.py"]
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        'user.py:18: error: Argument "rounds" to "FedAvg" has incompatible type "str"; expected "int"  [arg-type]',
        'user.py:19: error: "Result" has no attribute "acuracy"; maybe "accuracy"?  [attr-defined]',
    ], done.stdout + done.stderr
