"""The noise of differential privacy, and the draws that its guarantee needs to be secret.

A guarantee holds only if no one can subtract the noise. So noise follows from a secret of the operating system, and
not from the seed of the run, which settings and clients know. torch's generators on the CPU have seeds of 32 bits, and
their state follows from their output. SHAKE-256 has neither weakness (NIST FIPS 202).

The secret is a file next to the private state of clients, which only its owner can read. A run that resumes draws the
same noise as an unbroken run. No setting, message, metric or report contains the secret. Clients on other machines have
their own.

With `public_noise`, noise follows from the seed: for tables and tests that others repeat, on public data.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fewer.errors import RunError
from fewer.runtime.store import write_private
from fewer.runtime.streams import stream

SECRET = "noise.secret"
"""File with the secret."""
SECRET_BYTES = 32
RELEASES = "noise.releases"
"""File next to the secret with a hash of each sum that the server has added noise to."""


class NoiseStream(Protocol):
    """Random numbers of one release, or of the steps of one release."""

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal numbers in float64."""

    def uniform(self, count: int) -> Tensor:
        """Numbers between 0 and 1."""


@dataclass(frozen=True)
class SeededStream:
    """Numbers that follow from a seed."""

    generator: torch.Generator

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal numbers in float64."""
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)

    def uniform(self, count: int) -> Tensor:
        """Numbers between 0 and 1."""
        return torch.rand(count, generator=self.generator)


@dataclass
class SecretStream:
    """Numbers that no one can predict without the key."""

    key: bytes = field(repr=False)
    draws: int = 0

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal numbers in float64, by Box and Muller."""
        count = math.prod(shape)
        radius, angle = self._open_uniform(2 * -(-count // 2)).reshape(2, -1)
        radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
        values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
        return torch.from_numpy(values).reshape(tuple(shape))

    def uniform(self, count: int) -> Tensor:
        """Numbers between 0 and 1, in float64."""
        return torch.from_numpy(self._open_uniform(count))

    def _open_uniform(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Multiples of 2⁻⁵³ plus 2⁻⁵⁴: neither 0 nor 1."""
        blob = hashlib.shake_256(self.key + self.draws.to_bytes(8, "little")).digest(8 * count)
        self.draws += 1
        integers = np.frombuffer(blob, np.dtype("<u8")) >> np.uint64(11)
        return np.asarray((integers.astype(np.float64) + 0.5) * 2.0**-53)


@dataclass(frozen=True)
class NoiseSource:
    """Where the noise of a run comes from."""

    seed: int
    secret: bytes | None = field(repr=False)
    """None if noise follows from the seed."""
    folder: Path | None = None
    """Where the secret is."""

    def stream(self, *key: int | str, question: str = "") -> NoiseStream:
        """The stream with this key. Answers to different questions share no secret noise, whatever their key."""
        if self.secret is None:
            return SeededStream(stream(self.seed, *key))
        return SecretStream(self.derive(*key, question))

    def count_repeats(self, release: str, content: str) -> int:
        """Notes what a release contains. Returns how many releases so far were repeated with other content."""
        if self.secret is None or self.folder is None:
            return 0
        path = self.folder / RELEASES
        noted: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}
        if content not in noted.setdefault(release, []):
            noted[release].append(content)
            write_private(path, json.dumps(noted).encode())
        return sum(len(contents) - 1 for contents in noted.values())

    def derive(self, *key: int | str) -> bytes:
        """A key that follows from the secret and from every part of `key`."""
        assert self.secret is not None
        return hashlib.blake2b("/".join(map(str, key)).encode(), key=self.secret, digest_size=SECRET_BYTES).digest()


def hash_fields(fields: Any) -> str:
    """A hash of the fields of a message. Encoded bytes would not do: the order of their metadata is not fixed."""
    if isinstance(fields, Mapping):
        parts = [part for name in sorted(fields) for part in (name, hash_fields(fields[name]))]
        content = "/".join(parts).encode()
    elif isinstance(fields, Tensor):
        values = fields.cpu().contiguous().view(-1).view(torch.uint8)  # NumPy has no bfloat16
        content = f"{fields.dtype} {list(fields.shape)} ".encode() + values.numpy().tobytes()
    else:
        content = repr(fields).encode()
    return hashlib.sha256(content).hexdigest()


def open_secret(folder: Path) -> bytes:
    """The secret in a folder, which is drawn at first use. Only the owner of the file can read it."""
    path = folder / SECRET
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_private(path, secrets.token_bytes(SECRET_BYTES))
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise RunError(f"{path} is damaged: it has {len(secret)} bytes, expected {SECRET_BYTES}")
    return secret
