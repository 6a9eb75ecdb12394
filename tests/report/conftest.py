"""Small runs that several tests report on."""

from pathlib import Path

import pytest

import fewer
from fewer import FedAvg, Local
from fewer.data import from_arrays
from fewer.methods.fedmk import FedMK
from fewer.methods.metafed import MetaFed
from tests.report.harness import Bold


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small runs to report on."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        data = fewer.data.load("digits", clients=4, alpha=1.0, seed=seed)
        fewer.run(FedAvg(rounds=2, cohort=3), data, seed=seed, out=folder / f"fedavg-{seed}")
    data = fewer.data.load("digits", clients=4, alpha=1.0)
    fewer.run(Local(rounds=2, cohort=3), data, out=folder / "local-0")
    fewer.run(FedAvg(rounds=3, cohort=3), data, out=folder / "sparse", evaluate_every=2)
    fewer.run(Bold(rounds=3, cohort=4), data, out=folder / "bold", drop=0.3)
    user_data = from_arrays(data.source.x, data.source.y, clients=3, partition="iid", name="<i>own</i>")
    fewer.run(FedAvg(rounds=1, cohort=3), user_data, out=folder / "own")
    small = {
        "per_class": 3,
        "matching_steps": 1,
        "outer_steps": 0,
        "server_steps": 1,
        "pseudo_weight": 0,
        "codec": "float32",
    }
    fewer.run(FedMK(rounds=3, cohort=4, **small), data, out=folder / "fedmk")
    held = fewer.data.load("digits", clients=5, alpha=1.0, validation=0.2)
    fewer.run(MetaFed(rounds=3, local_steps=2), held, out=folder / "metafed", drop=0.2)
    return folder
