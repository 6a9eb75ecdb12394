"""Fixed point, masks and shares by arithmetic."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fewer.wire import Refused
from fewer.wire.masking import (
    PRIME,
    RANGE,
    STEP,
    expand_mask,
    from_ring,
    join_secret,
    pair_mask,
    split_secret,
    to_ring,
)
from fewer.wire.sealing import new_key, public_key


def test_fixed_point_by_arithmetic() -> None:
    values = np.array([0.0, 1.0, -1.0, 0.4 * STEP, -1.6 * STEP])
    assert to_ring(values, 2).tolist() == [0, 2**28, 2**64 - 2**28, 0, 2**64 - 2]
    assert from_ring(to_ring(values, 2)).tolist() == [0, 1, -1, 0, -2 * STEP]
    assert STEP == 1 / 268435456 and RANGE == 2.0**35


def test_the_largest_sum_does_not_wrap_around() -> None:
    edge = np.nextafter(RANGE / 4, 0)
    total = to_ring(np.array([edge, -edge]), 4) * np.uint64(4)
    assert from_ring(total) == pytest.approx([4 * edge, -4 * edge], rel=1e-12)
    with pytest.raises(Refused, match=r"a value to sum is 8.59e\+09, but a secure sum of 4 clients allows 8.59e\+09"):
        to_ring(np.array([RANGE / 4]), 4)
    for value in (np.nan, np.inf):
        with pytest.raises(Refused, match="not finite"):
            to_ring(np.array([value]), 3)


def test_masks_of_a_pair_cancel() -> None:
    keys = {client: new_key() for client in (2, 7)}
    one = pair_mask(2, 7, keys[2], public_key(keys[7]), 100)
    other = pair_mask(7, 2, keys[7], public_key(keys[2]), 100)
    assert not (one + other).any() and len(set(one.tolist())) == 100
    third = pair_mask(2, 7, keys[2], public_key(new_key()), 100)
    assert (one != third).all()


def test_a_mask_is_the_stream_of_chacha20() -> None:
    # RFC 7539, appendix A.1, test vector 1: key, nonce and counter are zero.
    first = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28")
    assert expand_mask(bytes(32), 2).tolist() == [int.from_bytes(first[i : i + 8], "little") for i in (0, 8)]


def test_any_majority_restores_a_secret_and_fewer_do_not() -> None:
    secret = new_key()
    shares = dict(enumerate(split_secret(secret, 5, 3), 1))
    for chosen in combinations(shares, 3):
        assert join_secret({position: shares[position] for position in chosen}) == secret
    for few in combinations(shares, 2):
        with pytest.raises(Refused, match="do not belong together"):
            join_secret({position: shares[position] for position in few})


def test_shares_by_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fewer.wire.masking.secrets.randbelow", lambda limit: limit - 2)  # the coefficient −2
    shares = split_secret((10).to_bytes(32, "big"), 3, 2)  # 10 − 2x
    assert [int.from_bytes(share, "big") for share in shares] == [8, 6, 4] and PRIME == 2**521 - 1
    # Lagrange at 0 from (1, 8) and (3, 4): 8 · 3/2 − 4 · 1/2 = 10
    assert int.from_bytes(join_secret({1: shares[0], 3: shares[2]}), "big") == 10
