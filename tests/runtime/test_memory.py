"""Settings of the memory allocator."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

COUNT_NEW_PAGES = """
import resource
import torch
from fewer.learning.adapt import meta_gradient, trainable_weights
from fewer.models.images import Conv4

net, batch = Conv4((1, 28, 28), 5, "group"), (torch.randn(25, 1, 28, 28), torch.arange(25) % 5)
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    meta_gradient(net, trainable_weights(net), [batch], batch, 0.1, first_order=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_a_training_step_reuses_the_memory_of_the_one_before() -> None:
    output = subprocess.run([sys.executable, "-c", COUNT_NEW_PAGES], check=True, capture_output=True, text=True).stdout
    counts = [int(line) for line in output.split()]
    assert max(counts[3:]) < counts[0] / 4, counts
