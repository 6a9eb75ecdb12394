"""Trees survive a round trip, and damaged ones are refused."""

from __future__ import annotations

import json
import math
import random
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fewer.wire import (
    encode,
    pack,
    unpack,
)
from fewer.wire.codecs import checksum
from tests.wire.harness import (
    change_length,
    edit_json,
    edit_outer_header,
    flip_bits,
    frame,
    insert_bytes,
    random_tensor,
    splice,
    truncate,
)

TREE: dict[Any, Any] = {
    "model": {"w": random_tensor(torch.float32, 2, 3), "n": torch.tensor(5), "none": torch.zeros(0, 4)},
    "nested": [1, (2, (3,)), [], (), {}, [[None, True, False]], "tensor", ["tensor", "0"], ["dict", []]],
    3: {-1: "minus", 0: None, 2**70: 1.5},
    "3": "text, not number",
    "half": random_tensor(torch.bfloat16, 3),
    "flags": torch.tensor([True, False]),
    "floats": [0.1, -0.0, math.inf, 1e-320, -(10**30)],
    "ends": torch.tensor([math.nan, -math.inf, -0.0]),
}


def bitwise_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)]
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*raw)
    if isinstance(first, dict):
        keys = [(type(key), key) for key in first] == [(type(key), key) for key in second]
        return type(second) is dict and keys and all(bitwise_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(bitwise_equal, first, second))
    return type(first) is type(second) and bool(first == second) and str(first) == str(second)


def test_a_tree_survives_a_round_trip() -> None:
    assert bitwise_equal(TREE, unpack(pack(TREE)))


@pytest.mark.parametrize("tree", [None, 0, True, "", 0.5, [], (), {}, torch.tensor(1.0), (None,), {0: ()}])
def test_small_trees_survive_a_round_trip(tree: Any) -> None:
    assert bitwise_equal(tree, unpack(pack(tree)))


def test_trees_may_contain_views_and_named_tuples() -> None:
    class Pair(NamedTuple):
        first: Tensor
        second: Tensor

    base = random_tensor(torch.float32, 4, 4)
    first, second = unpack(pack(Pair(base.t(), base[1:, ::2])))
    assert torch.equal(first, base.t()) and torch.equal(second, base[1:, ::2])
    assert type(unpack(pack(Pair(base, base)))) is tuple


@pytest.mark.parametrize("bad", [object(), {1, 2}, b"bytes", {"a": [lambda: None]}, {(1, 2): 3}, {None: 1}])
def test_unsupported_values_cannot_be_packed(bad: Any) -> None:
    with pytest.raises(TypeError, match="cannot store"):
        pack(bad)


def encode_tree(text: str, outer: str = "") -> bytes:
    return frame(json.dumps({"__metadata__": {"tree": checksum(text, {}) + text}})[:-1] + outer + "}")


@pytest.mark.parametrize(
    "blob",
    [
        *(b"", b"junk", b"\xff" * 40, frame("{}"), frame("[]"), encode_tree("")),
        *(
            encode_tree('["tensor","0"]'),
            encode_tree('["tensor",[]]'),
            encode_tree('["method_options",[1]]'),
            encode_tree("[1]"),
            encode_tree("[[],[]]"),
        ),
        *(
            encode_tree('["dict",[[[],1]]]'),
            encode_tree('["dict",[[1]]]'),
            encode_tree('["dict",3]'),
            encode_tree('["list",3]'),
        ),
        *(encode_tree("[" * 100_000), encode_tree('["list",[' * 3000 + "]]" * 3000), encode_tree("9" * 5000)),
        encode_tree(
            '["tensor","0"]',
            ',"0":{"dtype":"F32","shape":[0,4611686018427387904,4611686018427387904],"data_offsets":[0,0]}',
        ),
        encode_tree('["tensor","0"]', ',"0":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}'),
        encode("k", {"size": 3}),
    ],
    ids=lambda blob: f"{len(blob)} bytes",
)
def test_invalid_bytes_cannot_be_unpacked(blob: bytes) -> None:
    with pytest.raises(ValueError, match="not a tree of tensors") as raised:
        unpack(blob)
    assert "\n" not in str(raised.value)


def edit_tree(blob: bytes, rng: random.Random) -> bytes:
    """Edits the JSON of a tree and corrects the checksum."""
    length = int.from_bytes(blob[:8], "little")
    outer = json.loads(blob[8 : 8 + length])
    text = edit_json(outer["__metadata__"]["tree"][8:], rng)
    outer["__metadata__"]["tree"] = checksum(text, safetensors.torch.load(blob)) + text
    return frame(json.dumps(outer), blob[8 + length :])


def test_mutated_trees_give_a_tree_or_a_value_error() -> None:
    rng = random.Random(11)
    seed = pack(TREE)
    valid = invalid = 0
    for _ in range(3_000):
        blob = rng.choice(
            [flip_bits, truncate, insert_bytes, change_length, edit_outer_header, edit_tree, edit_tree, splice]
        )(seed, rng)
        try:
            unpack(blob)
            valid += 1
        except ValueError:
            invalid += 1
    assert valid > 100 and invalid > 1_000
