"""The arithmetic of secure sums: numbers as integers of a ring, masks that cancel, and secrets in shares.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical Secure Aggregation for
Privacy-Preserving Machine Learning, CCS 2017.

- **Fixed point.** A value x becomes the integer round(x · 2²⁸) modulo 2⁶⁴. The step is 2⁻²⁸ ≈ 3.7e-9, so that rounding
  changes x by at most 2⁻²⁹. Sums are exact as long as Σ |x| < 2³⁵ ≈ 3.4e10. Each of n clients checks |x| < 2³⁵ / n.
- **Masks.** ChaCha20 expands a seed of 32 bytes to integers modulo 2⁶⁴. Adding a mask makes a value uniformly random.
  Two clients derive the seed of their common mask by X25519. One adds it, the other subtracts it.
- **Shares.** Shamir: How to Share a Secret, CACM 1979. Any t of n shares restore a secret of 32 bytes, and fewer say
  nothing about it. Shares are values of a random polynomial of degree t − 1 modulo the prime 2⁵²¹ − 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fewer.wire.message import Refused
from fewer.wire.sealing import KEY_BYTES, shared_secret

FRACTION_BITS = 28
STEP = 2.0**-FRACTION_BITS
"""The difference between neighboring values."""
RANGE = 2.0 ** (63 - FRACTION_BITS)
"""The absolute value that no sum may reach."""
PRIME = 2**521 - 1
SHARE_BYTES = 66
"""Length of a share."""

Ring = NDArray[np.uint64]
"""Integers modulo 2⁶⁴; NumPy's sums wrap around."""


# --- fixed point ----------------------------------------------------------------------------------------------


def to_ring(values: NDArray[np.float64], clients: int) -> Ring:
    """Values as integers of the ring, such that the sum of this many clients cannot overflow.

    Raises Refused if a value is not finite or too large.
    """
    if not np.isfinite(values).all():
        raise Refused("a value to sum is not finite")
    largest, limit = float(np.abs(values).max(initial=0.0)), RANGE / clients
    if largest >= limit:
        raise Refused(f"a value to sum is {largest:.3g}, but a secure sum of {clients} clients allows {limit:.3g}")
    return np.rint(values / STEP).astype(np.int64).view(np.uint64)


def from_ring(total: Ring) -> NDArray[np.float64]:
    """The values of a sum."""
    return total.view(np.int64).astype(np.float64) * STEP


# --- masks ----------------------------------------------------------------------------------------------------


def expand_mask(seed: bytes, length: int) -> Ring:
    """A mask of this many integers. No seed expands to two masks that are used."""
    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, np.dtype("<u8")).astype(np.uint64)


def pair_mask(own: int, peer: int, private: bytes, public: bytes, length: int) -> Ring:
    """What client `own` adds to hide its values. The peer adds the negative. Keys are new in each sum."""
    seed = HKDF(SHA256(), KEY_BYTES, None, b"fewer pair mask").derive(shared_secret(private, public))
    mask = expand_mask(seed, length)
    return mask if own < peer else np.uint64(0) - mask


# --- shares ---------------------------------------------------------------------------------------------------


def split_secret(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """Shares of a secret; any `threshold` of them restore it. Share i has the position i + 1."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_evaluate(coefficients, position).to_bytes(SHARE_BYTES, "big") for position in range(1, count + 1)]


def _evaluate(coefficients: Sequence[int], position: int) -> int:
    """The value of a polynomial modulo the prime (Horner)."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * position + coefficient) % PRIME
    return value


def join_secret(shares: Mapping[int, bytes]) -> bytes:
    """The secret of these shares, by position: Lagrange's polynomial at 0. Raises Refused if they do not fit."""
    total = 0
    for position, share in shares.items():
        others = [other for other in shares if other != position]
        weight = 1
        for other in others:
            weight = weight * other * pow(other - position, -1, PRIME) % PRIME
        total = (total + int.from_bytes(share, "big") * weight) % PRIME
    if total >> (8 * KEY_BYTES):
        raise Refused("shares that do not belong together")
    return total.to_bytes(KEY_BYTES, "big")
