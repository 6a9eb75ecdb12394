"""Random streams. A draw depends only on (seed, round, client, purpose), so all runtimes give the same results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

SERVER = "coordinator"
"""The server's name in the keys of random streams. Another name would change every published number."""


def seed_of(*key: int | str) -> int:
    """A 63-bit seed that depends only on the key, and on every part of it."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream(*key: int | str) -> torch.Generator:
    """A torch generator for this key. It is on the CPU, so that every device draws the same numbers."""
    return torch.Generator().manual_seed(seed_of(*key))


def seed_globals(*key: int | str) -> None:
    """Seeds the global generators of torch, NumPy and Python from the key.

    Dropout and user code draw from the global generators. This makes them reproducible too.
    """
    seed = seed_of(*key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Restores the global generators of torch, NumPy and Python on exit."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@contextmanager
def global_streams(*key: int | str) -> Iterator[None]:
    """Seeds the global generators from the key, and restores them on exit."""
    with preserve_global_rng():
        seed_globals(*key)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread. Floating-point sums depend on the number of threads, and workers share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def server_key(item: int) -> int:
    """The key of an item of the server's work in random streams. Clients have the keys 0, 1, …"""
    return -1 - item
