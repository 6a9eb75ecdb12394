"""Shared by all tests: a single torch thread and a small real dataset."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import fewer
from fewer.data import Data

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> Data:
    return fewer.data.load("digits", clients=6, alpha=1.0)
