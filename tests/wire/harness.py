"""Tensors, messages, and ways to damage them."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

import torch
from torch import Tensor

from fewer.wire import (
    Field,
    encode,
)

SIGNIFICANT = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of the significand: rounding is off by at most 2^-bits of the value."""


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    bounds = torch.iinfo(dtype)
    return torch.randint(max(bounds.min, -(2**62)), min(bounds.max, 2**62), shape, generator=generator, dtype=dtype)


def quantization_step(value: Tensor) -> float:
    return float(value.double().max() - value.double().min()) / 255


LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}


def frame(header: str, data: bytes = b"") -> bytes:
    raw = header.encode(errors="surrogatepass")
    return struct.pack("<Q", len(raw)) + raw + data


BATCH: dict[str, Field] = {
    "model": {"w": random_tensor(torch.float32, 3, 4), "b": random_tensor(torch.float32, 4), "n": torch.tensor(7)},
    "images": random_tensor(torch.float32, 2, 1, 3, 3),
    "labels": torch.tensor([3, 4]),
    "size": 12,
    "loss": 0.25,
    "done": True,
    "note": "text",
}

RAW = {
    "@nan": "NaN",
    "@inf": "-Infinity",
    "@big": "1e999",
    "@digits": "9" * 400,
    "@toomany": "9" * 5000,
    "@deep": "[" * 3000 + "]" * 3000,
    "@deeper": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "@twice": '{"tree":[],"tensor":[["",[2],"I64"]],"tensor":[["",[9],"I64"]]}',
    "@surrogate": '"\\ud800"',
    "@control": '"\x01"',
    "@open": "[",
}
HOSTILE: list[Any] = [
    *RAW,
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**40, 2**63, 2**64, -(2**63) - 1, 0.5, -0.0, 1e308, 5e-324),
    *("", "a", "tensor", "tree", "F32", "F16", "I64", "BOOL", "F8_E4M3", "int8", "float16", "gzip", "__metadata__"),
    *([], {}, [[]], [None], ["", [2], "I64"], ["", [1, 3], "F32", 1.0, 0.0], {"tensor": []}, {"codec": "int8"}),
    *([2**40, 2**40], [0, 2**40, 2**40], [-1], [1] * 100, [0] * 70, {"": ["", [1], "F64"]}, [1e400]),
]


def container_keys(node: Any) -> list[tuple[Any, Any]]:
    """All pairs of a container in a JSON value and a key in it."""
    pairs: list[tuple[Any, Any]] = []
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, value in items:
        pairs += [(node, key), *container_keys(value)]
    return pairs


def edit_json(text: str, rng: random.Random) -> str:
    """Returns JSON with one to three hostile edits."""
    tree = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        pairs = container_keys(tree)
        if rng.random() < 0.9:  # rarely at the top, where an edit hides everything below it
            pairs = [pair for pair in pairs if pair[0] is not tree] or pairs
        if not pairs:
            break
        node, key = rng.choice(pairs)
        match rng.randrange(6):
            case 0:
                del node[key]
            case 1 if isinstance(node, list):
                node.insert(key, copy.deepcopy(rng.choice(HOSTILE)))
            case 1:
                node[rng.choice(["a", "model", "codec", "tensor", "tree", "v"])] = copy.deepcopy(rng.choice(HOSTILE))
            case 2:
                other, name = rng.choice(pairs)
                node[key] = (
                    copy.deepcopy(other[name])
                    if name in (other if isinstance(other, dict) else range(len(other)))
                    else 0
                )
            case 3 if isinstance(node[key], dict):
                node[key] = [list(pair) for pair in node[key].items()]
            case _:
                node[key] = copy.deepcopy(rng.choice(HOSTILE))
    text = json.dumps(tree)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    if rng.random() < 0.1:  # duplicate keys
        text = (
            text[:-1]
            + ","
            + rng.choice(['"values":{}', '"fields":[]', '"v":1', '"kind":"x"', '"fields":{"a":1}'])
            + "}"
        )
    return text


def flip_bits(blob: bytes, rng: random.Random) -> bytes:
    data = bytearray(blob)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(blob: bytes, rng: random.Random) -> bytes:
    return blob[: rng.randrange(len(blob))]


def insert_bytes(blob: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(blob) + 1)
    return blob[:position] + rng.randbytes(rng.randint(1, 20)) + blob[position + rng.choice([0, 0, 3]) :]


def change_length(blob: bytes, rng: random.Random) -> bytes:
    length = rng.choice([0, 1, 7, len(blob), len(blob) - 8, 1 << 20, 2**31, 2**63, 2**64 - 1, 2**64 - 8])
    return struct.pack("<Q", length) + blob[8:]


def splice(blob: bytes, rng: random.Random) -> bytes:
    """Joins the header of one message and the data of another."""
    other = encode("other", rng.choice([BATCH, {"size": 3}, {"t": random_tensor(torch.float32, 5)}]), "uint8")
    first, second = (message[8 + int.from_bytes(message[:8], "little") :] for message in (blob, other))
    return rng.choice(
        [other[: len(other) - len(second)] + first, blob[: len(blob) - len(first)] + second, blob + other]
    )


def edit_outer_header(blob: bytes, rng: random.Random) -> bytes:
    """Edits the outer header as JSON."""
    length = int.from_bytes(blob[:8], "little")
    return frame(edit_json(blob[8 : 8 + length].decode(), rng), blob[8 + length :])
