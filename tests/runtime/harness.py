"""A small experiment with the clients of a runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fewer import FedAvg
from fewer.data import Data
from fewer.methods import Method
from fewer.runs.engine import connect_clients
from fewer.runs.experiment import Experiment, build_experiment, parse_settings
from fewer.runtime import Clients


def make_experiment(
    data: Data, method: Method | None = None, **settings: Any
) -> tuple[Experiment, Callable[[Path], Clients]]:
    experiment = build_experiment(parse_settings(settings), method or FedAvg(), data)
    return experiment, lambda folder: connect_clients(experiment, folder)
