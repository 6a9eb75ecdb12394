"""Damaged and malicious messages are refused."""

from __future__ import annotations

import ast
import json
import math
import random
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fewer.wire
from fewer.wire import (
    Number,
    Refused,
    Schema,
    Shaped,
    decode,
    encode,
)
from tests.wire.harness import (
    BATCH,
    LIKE,
    change_length,
    edit_json,
    edit_outer_header,
    flip_bits,
    frame,
    insert_bytes,
    splice,
    truncate,
)


class Parts(NamedTuple):
    """A message taken apart: the JSON text, and the dtype, shape and bytes of each entry."""

    text: str
    entries: dict[str, tuple[Any, Any, bytes]]

    def assemble(self, checksum: str | None = None, extra: str = "") -> bytes:
        """Builds the message without the library; the checksum is correct unless one is given."""
        total = zlib.crc32(self.text.encode(errors="surrogatepass"))
        header: dict[str, Any] = {}
        data = b""
        for name in sorted(self.entries):
            dtype, shape, content = self.entries[name]
            total = zlib.crc32(content, total)
            offsets = [len(data), len(data) + len(content)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += content
        header["__metadata__"] = {"fewer": self.text, "crc": f"{total:08x}" if checksum is None else checksum}
        return frame(json.dumps(header)[:-1] + extra + "}", data)


def take_apart(blob: bytes) -> Parts:
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    text = header.pop("__metadata__")["fewer"]
    data = blob[8 + length :]
    return Parts(text, {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()})


SCHEMA: Schema = {
    "model": {"w": torch.zeros(3, 4), "b": torch.zeros(4), "n": torch.tensor(0)},
    "images": Shaped((None, 1, 3, 3)),
    "labels": Shaped((None,), torch.int64),
    "size": Number(int, 1),
    "loss": float,
    "done": bool,
    "note": str,
}


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and [*first] == [*second]
            and all(is_same(first[key], second[key]) for key in first)
        )
    return type(first) is type(second) and bool(first == second)


def test_a_message_can_be_rebuilt_from_its_parts() -> None:
    blob = encode("k", BATCH, "int8", exact=("images",))
    assert is_same(decode(take_apart(blob).assemble(), SCHEMA)[1], decode(blob, SCHEMA)[1])


def test_the_checksum_detects_every_flipped_bit_in_the_data() -> None:
    blob = encode("k", {"a": torch.arange(20, dtype=torch.int32), "b": torch.zeros(5, dtype=torch.uint8)})
    for index in range(len(blob) - 85, len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[index] ^= 1 << bit
            with pytest.raises(Refused, match="checksum does not match"):
                decode(bytes(damaged))


def test_the_checksum_detects_a_changed_header() -> None:
    parts = take_apart(encode("k", {"size": 12, "t": torch.ones(3)}))
    checksum = f"{zlib.crc32(parts.entries['t:F32'][2], zlib.crc32(parts.text.encode())):08x}"
    assert decode(parts.assemble(checksum))[1]["size"] == 12
    with pytest.raises(Refused, match="checksum does not match"):
        decode(parts._replace(text=parts.text.replace("12", "13")).assemble(checksum))


def test_no_single_flipped_bit_changes_the_decoded_fields() -> None:
    blob = encode("k", {"a": torch.arange(4.0), "size": 3}, "int8")
    kind, fields = decode(blob)
    for index in range(len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[index] ^= 1 << bit
            try:
                decoded = decode(bytes(damaged))
            except Refused:
                continue
            assert decoded[0] == kind and is_same(decoded[1], fields)


@pytest.mark.parametrize(
    "blob", [b"", b"\0", b"\0" * 8, b"\0" * 9, b"\xff" * 8, b"\xff" * 100, frame("{}"), frame("[]")]
)
def test_junk_is_refused(blob: bytes) -> None:
    with pytest.raises(Refused, match=r"malformed|header is longer"):
        decode(blob)


def header(**fields: Any) -> dict[str, Any]:
    return {"v": 1, "kind": "k", "values": {}, "fields": fields}


U8 = {"a:U8": ("U8", [4], b"\0\1\2\3")}
F32 = {"a:F32": ("F32", [1], struct.pack("<f", 1e38))}


@pytest.mark.parametrize(
    ("inner", "entries", "reason"),
    [
        ([], {}, "not a message of version 1"),
        ({**header(), "v": 2}, {}, "not a message of version 1"),
        ({**header(), "kind": 3}, {}, "not a message of version 1"),
        ({**header(), "values": []}, {}, "header has no 'values'"),
        ({"v": 1, "kind": "k", "values": {}}, {}, "header has no 'fields'"),
        (header(a=[]), {}, "a field has no layout"),
        ({**header(a={"tree": []}), "values": {"a": 1}}, {}, "a field appears twice"),
        ({**header(), "values": {"a": None}}, {}, "'a' is not a plain value"),
        ({**header(), "values": {"a": {}}}, {}, "'a' is not a plain value"),
        (header(a={}), {}, "'a' has no list of tensors"),
        (header(a={"tensor": []}), {}, "'a' has no list of tensors"),
        (header(a={"tensor": [["", [4], "U8"]] * 2}), U8, "'a' has no list of tensors"),
        (header(a={"tree": [["x", [2], "U8"]] * 2}), U8, "'a' has duplicate or unexpected tensor names"),
        (header(a={"tensor": [["x", [4], "U8"]]}), U8, "'a' has duplicate or unexpected tensor names"),
        (header(a={"tensor": [[1, [4], "U8"]]}), U8, "without name, shape and dtype"),
        (header(a={"tensor": [["", [4], "U8", 1.0]]}), U8, "without name, shape and dtype"),
        (header(a={"tensor": [["", 4, "U8"]]}), U8, "'a' has a tensor with an invalid shape"),
        (header(a={"tensor": [["", [-4], "U8"]]}), U8, "'a' has a tensor with an invalid shape"),
        (header(a={"tensor": [["", [4.0], "U8"]]}), U8, "'a' has a tensor with an invalid shape"),
        (header(a={"tensor": [["", [4, True], "U8"]]}), U8, "'a' has a tensor with an invalid shape"),
        (header(a={"tensor": [["", [2**41], "U8"]]}), U8, "'a' has a tensor with an invalid shape"),
        (header(a={"tensor": [["", [2**39] * 50_000, "U8"]]}), U8, "'a' has a tensor with an invalid shape"),
        (header(a={"tensor": [["", [1] * 65, "U8"]]}), {"a:U8": ("U8", [1], b"\0")}, "invalid shape"),
        (header(a={"tensor": [["", [0, 2**39, 2**39], "U8"]]}), {"a:U8": ("U8", [0], b"")}, "invalid shape"),
        (header(a={"tensor": [["", [2**40], "U8"]]}), U8, f"'a' has 4 values, but its shapes need {2**40}"),
        (header(a={"tensor": [["", [5], "U8"]]}), U8, "'a' has 4 values, but its shapes need 5"),
        (header(a={"tensor": [["", [4], "U16"]]}), U8, "'a' has a tensor of an unknown dtype"),
        (header(a={"tensor": [["", [4], ["U8"]]]}), U8, "'a' has a tensor of an unknown dtype"),
        (header(a={"tensor": [["", [4], "U8"]], "codec": "zip"}), U8, "'a' has an unknown codec"),
        (header(a={"tensor": [["", [4], "U8"]], "codec": ["int8"]}), U8, "'a' has an unknown codec"),
        (header(a={"tensor": [["", [4], "F32"]], "codec": "int8"}), U8, "the data of 'a' is missing"),
        (
            header(a={"tensor": [["", [4], "F32"]], "codec": "uint8"}),
            U8,
            "a scale that its codec does not use, or lacks one",
        ),
        (header(a={"tensor": [["", [4], "U8", 1.0, 0.0]]}), U8, "a scale that its codec does not use, or lacks one"),
        (header(a={"tensor": [["", [4], "F32", 1, 0]], "codec": "uint8"}), U8, "scale that is not a finite number"),
        (header(a={"tensor": [["", [4], "F32", 10**400, 0.0]], "codec": "uint8"}), U8, "scale that is not a finite"),
        (header(a={"tensor": [["", [4], "F32", "1", 0.0]], "codec": "uint8"}), U8, "scale that is not a finite number"),
        (header(a={"tensor": [["", [4], "F32", 1e300, 0.0]], "codec": "uint8"}), U8, "'a' is not finite"),
        (header(a={"tensor": [["", [1], "F16"]], "codec": "float32"}), F32, "'a' is not finite"),
        (header(a={"tensor": [["", [4], "U8"]]}), {"a:U8": ("I8", [4], b"\0" * 4)}, "the data of 'a' is missing"),
        (header(a={"tensor": [["", [4], "U8"]]}), {"a:U8": ("U8", [2, 2], b"\0" * 4)}, "the data of 'a' is missing"),
        (header(a={"tensor": [["", [4], "U8"]]}), {**U8, "b:U8": ("U8", [1], b"\0")}, "some data belongs to no field"),
        (header(), U8, "some data belongs to no field"),
    ],
)
def test_malicious_headers_with_a_correct_checksum_are_refused(
    inner: Any, entries: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        decode(Parts(json.dumps(inner), entries).assemble())


def edit_header(blob: bytes, rng: random.Random) -> bytes:
    """Edits the inner JSON and corrects the checksum."""
    parts = take_apart(blob)
    return parts._replace(text=edit_json(parts.text, rng)).assemble()


def edit_entries(blob: bytes, rng: random.Random) -> bytes:
    """Edits the entries and corrects the checksum."""
    parts = take_apart(blob)
    entries = dict(parts.entries)
    if not entries:
        return edit_header(blob, rng)
    name = rng.choice(sorted(entries))
    dtype, shape, content = entries.pop(name)
    match rng.randrange(6):
        case 0:
            dtype = rng.choice(
                ["F64", "F32", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "U64", "C64", "F4", "X", 3, None]
            )
        case 1:
            shape = rng.choice(
                [[], [0], [1, *shape], [2**62, 4], [0, 2**62, 2**62], [-1], ["1"], [2**64], None, [1] * 80]
            )
        case 2:
            content = rng.choice([b"", content[1:], content + b"\0", rng.randbytes(len(content))])
        case 3:
            name = rng.choice([name + "x", "a", "", ":", "model:F32", "model:I8", "\ud800"])
        case 4:
            content = struct.pack("<d", rng.choice([math.nan, math.inf, 1e300])) * (len(content) // 8)
        case _:
            dtype, shape, content = "F32", [0, 2**40], b""
    extra = rng.choice(
        ["", "", f',"{name}":{{}}', ',"__metadata__":{}', ',"z":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}']
    )
    entries[name] = dtype, shape, content
    return parts._replace(entries=entries).assemble(extra=extra)


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    *(
        flip_bits,
        truncate,
        insert_bytes,
        change_length,
        edit_header,
        edit_header,
        edit_header,
        edit_header,
        edit_header,
        edit_entries,
        splice,
        edit_outer_header,
    )
]


def is_valid(value: Any) -> bool:
    """True for a plain value within 64 bits and for finite tensors."""
    if isinstance(value, dict):
        return all(isinstance(tensor, Tensor) and is_valid(tensor) for tensor in value.values())
    if isinstance(value, Tensor):
        return not value.dtype.is_floating_point or bool(torch.isfinite(value).all())
    return (
        isinstance(value, str | bool)
        or (isinstance(value, int | float) and abs(value) <= 2**63)
        or math.isfinite(value)
    )


def matches_schema(fields: dict[str, Any]) -> bool:
    """True if the fields match `SCHEMA`, checked without the code under test."""
    model = fields["model"]
    return (
        fields.keys() == SCHEMA.keys()
        and [(name, tuple(t.shape), t.dtype) for name, t in model.items()]
        == [("w", (3, 4), torch.float32), ("b", (4,), torch.float32), ("n", (), torch.int64)]
        and (fields["images"].ndim, fields["images"].shape[1:]) == (4, (1, 3, 3))
        and (fields["labels"].ndim, fields["labels"].dtype) == (1, torch.int64)
        and [type(fields[name]) for name in ("size", "loss", "done", "note")] == [int, float, bool, str]
        and fields["size"] >= 1
    )


def test_ten_thousand_mutated_messages_are_valid_or_refused() -> None:
    rng = random.Random(7)
    seeds = [
        (encode("k", BATCH, "int8", exact=("images",)), SCHEMA),
        (encode("k", {"t": LIKE["w"], "size": 3}), None),
        (encode("k", {"m": LIKE}), None),
    ]
    accepted = refused = 0
    reasons: set[str] = set()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        blob, schema = rng.choice(seeds)
        blob = rng.choice(MUTATIONS)(blob, rng)
        if blob and rng.random() < 0.1:
            blob = rng.choice([flip_bits, truncate, insert_bytes, change_length])(blob, rng)
        schema = rng.choice([schema, None])
        try:
            fields = decode(blob, schema)[1]
        except Refused as error:
            refused += 1
            reasons.add(error.reason)
            assert 0 < len(error.reason) < 600
            continue
        accepted += 1
        assert all(is_valid(value) for value in fields.values())
        assert schema is None or matches_schema(fields)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100, f"{grown:.0f} MB"
    assert refused > 5_000 and accepted > 200 and len(reasons) > 100, (refused, accepted, len(reasons))


def test_wire_never_imports_pickle() -> None:
    forbidden = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "copyreg"}
    for path in sorted(Path(fewer.wire.__file__).parent.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & forbidden, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
        assert "torch.load" not in text.replace("safetensors.torch.load", "") and "import_module" not in text, path
        assert "torch.save" not in text.replace("safetensors.torch.save", "") and "__import__" not in text, path
