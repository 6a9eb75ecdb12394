"""Messages, codecs, checks, ledger and trees: valid content survives a round trip, all else is refused."""

from __future__ import annotations

import ast
import copy
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
import safetensors.torch
import torch
from torch import Tensor

import fewer.wire
from fewer import FedAvg
from fewer.choices import Norm
from fewer.errors import SettingError
from fewer.models import SmallCNN, get_weights
from fewer.wire import (
    CODECS,
    Codec,
    Field,
    Ledger,
    Number,
    Refused,
    Schema,
    Shaped,
    TensorCodec,
    decode,
    encode,
    pack,
    unpack,
)
from fewer.wire.codecs import checksum

torch.set_num_threads(1)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
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


def round_trip(value: Tensor, codec: Codec | None = None) -> Tensor:
    """Returns the tensor that a receiver decodes."""
    kind, fields = decode(encode("k", {"t": value}, codec), {"t": value})
    assert kind == "k" and fields.keys() == {"t"}
    arrived = fields["t"]
    assert isinstance(arrived, Tensor) and arrived.dtype == value.dtype and arrived.shape == value.shape
    return arrived


def quantization_step(value: Tensor) -> float:
    return float(value.double().max() - value.double().min()) / 255


# --- round trips ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_round_trip(codec: Codec | None, dtype: torch.dtype) -> None:
    value = random_tensor(dtype, 7, 5, 3)
    arrived = round_trip(value, codec)
    if codec is None or not dtype.is_floating_point:
        assert torch.equal(arrived, value)
        return
    error, size = (arrived.double() - value.double()).abs(), value.double().abs()
    cast_error = torch.finfo(dtype).eps / 2  # added by casting back to the tensor's dtype
    if codec in SIGNIFICANT:
        normal = size >= torch.finfo(torch.float16).tiny
        assert bool((error[normal] <= size[normal] * 2.0 ** -SIGNIFICANT[codec]).all())
    else:
        assert float(error.max()) <= quantization_step(value) / 2 * (1 + 1e-9) + cast_error * float(size.max())
        assert float(error.max()) > 0


def test_codecs_are_registered() -> None:
    assert list(CODECS) == ["bfloat16", "float16", "float32", "int8", "uint8"]
    for name, codec in CODECS.items():
        assert issubclass(codec, TensorCodec) and codec.name == name


def test_an_unknown_codec_is_an_error_with_the_nearest_name() -> None:
    text = r"unknown codec 'int4', did you mean 'int8'\? \(allowed: bfloat16, float16, float32, int8, uint8\)"
    with pytest.raises(SettingError, match=text):
        encode("k", {"t": torch.ones(2)}, "int4")
    with pytest.raises(SettingError, match=text):
        FedAvg(codec="int4")


@pytest.mark.parametrize("codec", [None, "float32"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_wider_codec_is_lossless(codec: Codec | None, dtype: torch.dtype) -> None:
    value = random_tensor(dtype, 100)
    exact = dtype != torch.float64 or codec is None
    assert torch.equal(round_trip(value, codec), value) == exact


@pytest.mark.parametrize("codec", ["int8", "uint8"])
def test_quantization_keeps_minimum_and_maximum_exactly(codec: Codec) -> None:
    for seed in range(20):
        value = random_tensor(torch.float32, 300, seed=seed) * 10.0 ** (seed - 10)
        arrived = round_trip(value, codec)
        assert arrived.min() == value.min() and arrived.max() == value.max()


@pytest.mark.parametrize(("codec", "lowest"), [("int8", -128), ("uint8", 0)])
def test_quantization_uses_all_levels(codec: Codec, lowest: int) -> None:
    value = torch.arange(256, dtype=torch.float32) / 4 - 3
    blob = encode("k", {"t": value}, codec)
    levels = safetensors.torch.load(blob)[{"int8": "t:I8", "uint8": "t:U8"}[codec]]
    assert torch.equal(levels.int(), torch.arange(256, dtype=torch.int32) + lowest)
    assert torch.equal(round_trip(value, codec), value)


@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.parametrize("constant", [0.0, 1.0, -0.5, 2.0**-10, 1024.0])
def test_constant_tensor_is_exact(codec: Codec | None, constant: float) -> None:
    value = torch.full((3, 4), constant)
    assert torch.equal(round_trip(value, codec), value)


@pytest.mark.parametrize("constant", [1e-20, 0.1, -1e30, 3.4e38])
@pytest.mark.parametrize("codec", ["int8", "uint8"])
def test_constant_of_any_size_is_exact_when_quantized(codec: Codec, constant: float) -> None:
    value = torch.full((5,), constant)
    assert torch.equal(round_trip(value, codec), value)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_empty_and_scalar(codec: Codec | None, dtype: torch.dtype) -> None:
    for shape in ((0,), (0, 3), (2, 0, 3)):
        assert round_trip(torch.zeros(shape, dtype=dtype), codec).numel() == 0
    assert round_trip(torch.ones((), dtype=dtype), codec).item() == 1


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_negative_zero(codec: Codec | None) -> None:
    arrived = round_trip(torch.tensor([-0.0, 0.0]), codec)
    assert arrived.tolist() == [0.0, 0.0]
    if codec in (None, "float32", "float16", "bfloat16"):
        assert torch.signbit(arrived).tolist() == [True, False]


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_model_round_trip_keeps_names_order_and_integers(codec: Codec | None) -> None:
    model = get_weights(SmallCNN((1, 28, 28), 10, "batch"))
    model["encoder.1.num_batches_tracked"] += 300
    arrived = decode(encode("k", {"model": model}, codec), {"model": model})[1]["model"]
    assert list(arrived) == list(model)
    for name, tensor in model.items():
        assert arrived[name].shape == tensor.shape and arrived[name].dtype == tensor.dtype
        error = float((arrived[name].double() - tensor.double()).abs().max())
        size = float(tensor.abs().max())
        assert error <= (
            2.0 ** -SIGNIFICANT.get(codec or "float32", 8) * size
            if codec in (None, *SIGNIFICANT)
            else quantization_step(tensor) * 0.501
        )
        assert error == 0 or codec not in (None, "float32")
    assert int(arrived["encoder.1.num_batches_tracked"]) == 300


def test_fields_of_all_kinds_in_one_message() -> None:
    strided = random_tensor(torch.float32, 6, 4).t()[::2]
    fields: dict[str, Field] = {
        "model": {
            "a": random_tensor(torch.float32, 2, 3),
            "b.c": torch.tensor(4),
            "d": random_tensor(torch.float64, 2),
        },
        "none": {},
        "image": strided,
        "count": -(2**63),
        "share": 0.1,
        "yes": True,
        "text": "η ≈ 0.1 \ud800",
    }
    kind, arrived = decode(encode("a kind", fields))
    assert kind == "a kind" and arrived.keys() == fields.keys()
    for name in ("count", "share", "yes", "text", "none"):
        assert arrived[name] == fields[name] and type(arrived[name]) is type(fields[name])
    assert torch.equal(arrived["image"], strided)
    model = fields["model"]
    assert isinstance(model, dict) and list(arrived["model"]) == list(model)
    assert all(torch.equal(arrived["model"][name], tensor) for name, tensor in model.items())


def test_decoded_tensors_are_copies() -> None:
    value = torch.ones(3)
    blob = encode("k", {"t": value})
    decode(blob)[1]["t"].zero_()
    assert decode(blob)[1]["t"].tolist() == [1, 1, 1] and value.tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [[1, 2], None, b"bytes", torch.zeros(2, dtype=torch.complex64)])
def test_only_tensors_and_plain_values_can_be_sent(bad: Any) -> None:
    with pytest.raises(TypeError, match="field 'x'"):
        encode("k", {"x": bad})


# --- size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_framing_of_a_model_is_below_one_percent(norm: Norm) -> None:
    net = SmallCNN((1, 28, 28), 10, norm)
    assert sum(parameter.numel() for parameter in net.parameters()) == 26_434
    weights = get_weights(net)
    payload = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    assert 26_434 * 4 <= payload <= 26_434 * 4 + 44 * 4 + 16
    assert payload < len(encode("train", {"model": weights}, "float32")) <= payload * 1.01


def test_framing_of_one_tensor_is_below_one_percent() -> None:
    assert 102_400 < len(encode("train", {"images": random_tensor(torch.float32, 25_600)})) <= 102_400 * 1.01


@pytest.mark.parametrize(("codec", "bytes_each"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1)])
def test_codec_decides_the_size(codec: Codec, bytes_each: int) -> None:
    blob = encode("k", {"t": random_tensor(torch.float32, 25_600)}, codec)
    assert 0 < len(blob) - 25_600 * bytes_each < 300


# --- schema ---------------------------------------------------------------------------------------------------

LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}


@pytest.mark.parametrize(
    ("fields", "schema", "reason"),
    [
        ({"a": 1}, {"a": int, "b": int}, r"expected fields \['a', 'b'\], got \['a'\]"),
        ({"a": 1, "b": 2}, {"a": int}, r"expected fields \['a'\], got \['a', 'b'\]"),
        ({"a": 1}, {}, r"expected fields \[\], got \['a'\]"),
        ({}, {"a": int}, r"expected fields \['a'\], got \[\]"),
        ({"A": 1}, {"a": int}, r"expected fields \['a'\], got \['A'\]"),
        ({"a": True}, {"a": int}, "'a': expected int, got bool"),
        ({"a": 1}, {"a": bool}, "'a': expected bool, got int"),
        ({"a": True}, {"a": float}, "'a': expected float, got bool"),
        ({"a": 1.0}, {"a": int}, "'a': expected int, got float"),
        ({"a": "1"}, {"a": int}, "'a': expected int, got str"),
        ({"a": 1}, {"a": str}, "'a': expected str, got int"),
        ({"a": True}, {"a": Number(int, 0)}, "'a': expected int, got bool"),
        ({"a": 0.5}, {"a": Number(int, 0)}, "'a': expected int, got float"),
        ({"a": "0"}, {"a": Number(float)}, "'a': expected float, got str"),
        ({"a": 0}, {"a": Number(int, 1)}, "'a' is 0, outside 1 … inf"),
        ({"a": 11}, {"a": Number(int, 1, 10)}, "'a' is 11, outside 1 … 10"),
        ({"a": -0.1}, {"a": Number(float, 0, 1)}, "'a' is -0.1, outside 0 … 1"),
        ({"a": 2**63}, {"a": int}, "'a' does not fit in 64 bits"),
        ({"a": math.nan}, {"a": float}, "NaN in the header"),
        ({"a": -math.inf}, {"a": float}, "-Infinity in the header"),
        ({"a": 1}, {"a": torch.zeros(1)}, "'a': expected tensors, got a plain value"),
        ({"a": 1}, {"a": LIKE}, "'a': expected tensors, got a plain value"),
        ({"a": 1}, {"a": Shaped(())}, "'a': expected tensors, got a plain value"),
        ({"a": torch.zeros(1)}, {"a": int}, "'a': expected a plain value, got tensors"),
        ({"a": torch.zeros(1)}, {"a": Number(int)}, "'a': expected a plain value, got tensors"),
        ({"a": torch.zeros(3)}, {"a": torch.zeros(2)}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": torch.zeros(1)}, {"a": torch.zeros(())}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": torch.zeros(2).double()}, {"a": torch.zeros(2)}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": torch.zeros(2).int()}, {"a": torch.zeros(2)}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": {"": torch.zeros(2)}}, {"a": torch.zeros(2)}, "'a': expected a tensor, got a tree"),
        ({"a": {}}, {"a": torch.zeros(2)}, "'a': expected a tensor, got a tree"),
        ({"a": {}}, {"a": Shaped((2,))}, "'a': expected a tensor, got a tree"),
        ({"a": {"": torch.zeros(2)}}, {"a": Shaped((2,))}, "'a': expected a tensor, got a tree"),
        ({"a": torch.zeros(2)}, {"a": {"": torch.zeros(2)}}, "'a': expected a tree, got a tensor"),
        ({"a": {"w": LIKE["w"]}}, {"a": LIKE}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": {**LIKE, "c": LIKE["b"]}}, {"a": LIKE}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": {"w": LIKE["w"], "B": LIKE["b"]}}, {"a": LIKE}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": {"b": LIKE["b"], "w": LIKE["w"]}}, {"a": LIKE}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": {**LIKE, "w": torch.zeros(3, 2)}}, {"a": LIKE}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": {**LIKE, "b": torch.zeros(3).half()}}, {"a": LIKE}, "'a' has unexpected names, shapes or dtypes"),
        ({"a": torch.zeros(2, 4)}, {"a": Shaped((None, 3))}, r"'a': expected F32 \[None, 3\], got F32 \[2, 4\]"),
        ({"a": torch.zeros(3)}, {"a": Shaped((None, 3))}, r"'a': expected F32 \[None, 3\], got F32 \[3\]"),
        ({"a": torch.zeros(2, 3)}, {"a": Shaped((None, 3), torch.uint8)}, r"'a': expected U8 .*, got F32 \[2, 3\]"),
        ({"a": torch.tensor([1.0, math.nan])}, {"a": Shaped((2,))}, "'a' is not finite"),
        ({"a": torch.tensor([1.0, -math.inf])}, None, "'a' is not finite"),
        ({"a": {"w": torch.tensor(math.inf)}}, None, "'a' is not finite"),
        ({"a": torch.tensor(math.nan, dtype=torch.bfloat16)}, None, "'a' is not finite"),
    ],
)
def test_invalid_fields_are_refused_with_a_reason(fields: dict[str, Field], schema: Schema | None, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        decode(encode("k", fields), schema)


@pytest.mark.parametrize(
    ("value", "codec"),
    [
        (torch.tensor([1e5]), "float16"),
        (torch.tensor([3.4028e38]), "bfloat16"),
        (torch.tensor([1e39], dtype=torch.float64), "float32"),
    ],
)
def test_a_value_beyond_the_range_of_the_codec_is_refused(value: Tensor, codec: Codec) -> None:
    with pytest.raises(Refused, match="'a' is not finite"):
        decode(encode("k", {"a": value}, codec), {"a": value})


@pytest.mark.parametrize("codec", ["int8", "uint8"])
def test_quantizing_non_finite_values_is_refused(codec: Codec) -> None:
    with pytest.raises(Refused, match="'a' is not finite"):
        encode("k", {"a": torch.tensor([0.0, math.inf])}, codec)


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({}, {}),
        ({"a": 1, "b": True, "c": "x", "d": 0.5}, {"d": float, "c": str, "b": bool, "a": int}),
        ({"a": 1}, {"a": Number(int, 1, 1)}),
        ({"a": -5}, {"a": Number(int)}),
        ({"a": 0.0}, {"a": Number(float, 0, 1)}),
        ({"a": torch.zeros(0, 3)}, {"a": Shaped((None, 3))}),
        ({"a": torch.zeros(9, 3)}, {"a": Shaped((None, 3))}),
        ({"a": torch.zeros(2, dtype=torch.int64)}, {"a": Shaped((2,), torch.int64)}),
        ({"a": {}}, {"a": {}}),
        ({"a": LIKE}, {"a": LIKE}),
    ],
)
def test_valid_fields_are_accepted(fields: dict[str, Field], schema: Schema) -> None:
    assert decode(encode("k", fields), schema)[1].keys() == fields.keys()


@pytest.mark.parametrize("expected", [float, Number(float, 0)])
def test_an_integer_is_accepted_for_a_float(expected: Any) -> None:
    value = decode(encode("k", {"a": 2}), {"a": expected})[1]["a"]
    assert type(value) is float and value == 2


def test_oversize_is_refused() -> None:
    blob = encode("k", {"t": torch.zeros(100)})
    assert decode(blob, limit=len(blob))[0] == "k"
    with pytest.raises(Refused, match=f"message of {len(blob)} bytes exceeds the limit of {len(blob) - 1}"):
        decode(blob, limit=len(blob) - 1)


def test_a_header_beyond_a_megabyte_is_refused() -> None:
    assert decode(encode("k", {"text": "x" * 1_000_000}))[0] == "k"
    with pytest.raises(Refused, match="header is longer than allowed"):
        decode(encode("k", {"text": "x" * 1_050_000}))


def test_a_reason_is_short() -> None:
    blob = encode("k", {f"field {number}": number for number in range(5000)})
    with pytest.raises(Refused) as refused:
        decode(blob, {})
    assert len(refused.value.reason) < 600 and str(refused.value) == refused.value.reason


# --- damage and attacks ---------------------------------------------------------------------------------------


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


def frame(header: str, data: bytes = b"") -> bytes:
    raw = header.encode(errors="surrogatepass")
    return struct.pack("<Q", len(raw)) + raw + data


def take_apart(blob: bytes) -> Parts:
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    text = header.pop("__metadata__")["fewer"]
    data = blob[8 + length :]
    return Parts(text, {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()})


BATCH: dict[str, Field] = {
    "model": {"w": random_tensor(torch.float32, 3, 4), "b": random_tensor(torch.float32, 4), "n": torch.tensor(7)},
    "images": random_tensor(torch.float32, 2, 1, 3, 3),
    "labels": torch.tensor([3, 4]),
    "size": 12,
    "loss": 0.25,
    "done": True,
    "note": "text",
}
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


# --- ledger ---------------------------------------------------------------------------------------------------


def test_ledger_totals_by_direction_without_evaluation() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "down", "train", 100)
    ledger.add(1, 3, "down", "train", 100)
    ledger.add(1, 3, "up", "train", 70)
    ledger.add(1, 3, "down", "evaluate/score", 1000)
    ledger.add(1, 3, "up", "evaluate/score", 10)
    ledger.add(2, 3, "up", "evaluated", 5)
    assert ledger.total == {"down": 200, "up": 75}
    assert len(ledger.entries) == 6


def test_ledger_drain_gives_each_entry_once_and_keeps_totals() -> None:
    ledger = Ledger()
    assert ledger.drain() == [] and ledger.total["up"] == 0
    ledger.add(1, 2, "up", "train", 7)
    ledger.add(1, 4, "up", "evaluate/score", 9)
    first = ledger.drain()
    assert first == [(1, 2, "up", "train", 7), (1, 4, "up", "evaluate/score", 9)]
    assert (first[0].round, first[0].client, first[0].direction, first[0].kind, first[0].bytes) == (
        1,
        2,
        "up",
        "train",
        7,
    )
    ledger.add(2, 2, "up", "train", 8)
    assert ledger.drain() == [(2, 2, "up", "train", 8)]
    assert ledger.drain() == []
    assert ledger.total["up"] == 15


def test_ledgers_share_nothing() -> None:
    Ledger().add(1, 0, "up", "train", 1)
    assert Ledger().total["up"] == 0 and Ledger().entries == []


# --- trees ----------------------------------------------------------------------------------------------------

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


def test_tree_round_trip() -> None:
    assert bitwise_equal(TREE, unpack(pack(TREE)))


@pytest.mark.parametrize("tree", [None, 0, True, "", 0.5, [], (), {}, torch.tensor(1.0), (None,), {0: ()}])
def test_small_trees(tree: Any) -> None:
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
