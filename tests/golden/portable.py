"""A process whose torch gives the same bits on every x86-64 processor.

Fast kernels choose vector instructions, block sizes and approximations by processor, and so round differently. Torch
chooses its kernels when it is imported, so portable arithmetic needs a separate process.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",  # torch: no wide vector instructions
    "MKL_CBWR": "COMPATIBLE",  # MKL: the same sums on all processors
    "OMP_NUM_THREADS": "1",
}
_OVERRIDES: list[Any] = []
"""The overridden kernels; they are valid as long as this list has them."""


def start_portable_process() -> ProcessPoolExecutor:
    """Starts a process with portable arithmetic. Worker processes that it forks have it, too."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), use_portable_kernels)
        process.submit(int).result()  # the process starts with its first task
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return process


def use_portable_kernels() -> None:
    """Turns off libraries that choose kernels by processor and cache size, and MKL's approximate square root."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    torch.backends.nnpack.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this replaces its own kernels
        library.impl("sqrt", exact_sqrt, "CPU")
        library.impl("sqrt_", lambda x: _assign(x, exact_sqrt(x)), "CPU")
        library.impl("sqrt.out", lambda x, *, out: _assign(out.resize_(x.shape), exact_sqrt(x)), "CPU")
    _OVERRIDES.append(library)


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root. MKL's refines an approximation that differs between processors."""
    return torch.from_numpy(np.asarray(np.sqrt(x.detach().numpy())))


def _assign(target: Tensor, value: Tensor) -> Tensor:
    target.detach().copy_(value)
    return target
