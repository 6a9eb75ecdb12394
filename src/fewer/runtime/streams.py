"""Random streams: every draw comes from (seed, round, client, purpose), so it is the same wherever it runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def seed_of(*key: int | str) -> int:
    """A 63-bit seed that depends on every part of the key and on nothing else."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream(*key: int | str) -> torch.Generator:
    """A torch generator (on the CPU, so that every device draws alike) for this key."""
    return torch.Generator().manual_seed(seed_of(*key))


def seed_globals(*key: int | str) -> None:
    """Make the global generators of torch, NumPy and Python those of the key.

    Dropout and users' own code draw from the global ones: this keeps them reproducible too.
    """
    seed = seed_of(*key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Whatever is drawn inside, outside the global generators of torch, NumPy and Python are as before."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@contextmanager
def global_streams(*key: int | str) -> Iterator[None]:
    """Inside, the global generators are those of the key; outside, as before."""
    with kept_streams():
        seed_globals(*key)
        yield
