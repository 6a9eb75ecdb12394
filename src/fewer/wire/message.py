"""Messages: named tensors and a small typed header, encoded with safetensors.

Layout. Each field is a tensor, a dict of tensors (a model), a number, a string or a bool. The tensors of a field that
share a dtype on the wire are concatenated into one safetensors entry. A model of many small tensors then costs one
entry, and decoding is one copy. The safetensors metadata holds two texts. `fewer` is JSON with the kind, the plain
values, and the name, shape and dtype of every tensor. `crc` is the CRC-32 of that JSON and the data, which reveals
damage in transit.

`decode` trusts nothing. It checks size, checksum, names, shapes, dtypes and finiteness against the receiver's schema.
It raises `Refused` with a reason for anything unexpected. Pickle is never involved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import safetensors.torch
import torch
from torch import Tensor

from fewer.choices import Codec
from fewer.registry import CODECS
from fewer.wire.codecs import TensorCodec, checksum, find_codec

VERSION = 1
MAX_BYTES = 1 << 30
MAX_HEADER = 1 << 20
MAX_VALUES = 1 << 40
MAX_DIMENSIONS = 64
MAX_REASON = 500

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Refused(Exception):
    """The receiver rejects a message. `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + " …"
        super().__init__(self.reason)


Plain = bool | int | float | str
Field = Tensor | Mapping[str, Tensor] | Plain
"""A value that can be sent."""
Value = Any
"""A received value: a tensor, a dict of tensors, or a plain value."""


@dataclass(frozen=True)
class Number:
    """Schema of a number between `low` and `high`, both included."""

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Shaped:
    """Schema of one tensor."""

    shape: tuple[int | range | None, ...]
    """The length of each dimension; None for any length, a range for a bounded one."""
    dtype: torch.dtype = torch.float32
    max_value: float = math.inf
    """The largest absolute value allowed."""

    def matches(self, shape: Sequence[int], dtype: str) -> bool:
        """True if a tensor of this shape and dtype fits the schema."""
        return (
            dtype == _NAMES[self.dtype]
            and len(shape) == len(self.shape)
            and all(
                allowed is None or (length in allowed if isinstance(allowed, range) else length == allowed)
                for length, allowed in zip(shape, self.shape, strict=True)
            )
        )


Schema = Mapping[str, Tensor | Mapping[str, Tensor] | Mapping[str, Shaped] | Shaped | Number | type]
"""What a receiver expects by field: an example tensor or model, a `Shaped`, a `Number`, or a plain type."""


# --- encoding -------------------------------------------------------------------------------------------------


def encode(kind: str, fields: Mapping[str, Field], codec: Codec | None = None, exact: Collection[str] = ()) -> bytes:
    """Encodes a message. The codec applies to floating-point tensors, except those of the fields in `exact`.

    Raises Refused if a value is not finite and the codec cannot represent that.
    """
    values: dict[str, Plain] = {}
    layout: dict[str, Any] = {}
    entries: dict[str, Tensor] = {}
    for name, field in fields.items():
        if isinstance(field, bool | int | float | str):
            values[name] = field
            continue
        if not isinstance(field, Tensor | Mapping):
            raise TypeError(
                f"field '{name}' must be a tensor, a dict of tensors or a plain value, got {type(field).__name__}"
            )
        form, tensors = ("tensor", {"": field}) if isinstance(field, Tensor) else ("tree", field)
        coded = codec and name not in exact and any(tensor.is_floating_point() for tensor in tensors.values())
        layout[name] = {form: _write_tensors(name, tensors, codec if coded else None, entries)}
        if coded:
            layout[name]["codec"] = codec
    text = json.dumps({"v": VERSION, "kind": kind, "values": values, "fields": layout}, separators=(",", ":"))
    return safetensors.torch.save(entries, {"fewer": text, "crc": checksum(text, entries)})


def _write_tensors(
    field: str, tensors: Mapping[str, Tensor], codec: Codec | None, entries: dict[str, Tensor]
) -> list[Any]:
    """Adds the tensors to `entries`, concatenated by dtype on the wire. Returns the header items that describe them."""
    tensor_codec = find_codec(codec) if codec else None
    items: list[Any] = []
    groups: dict[torch.dtype, list[Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if tensor.dtype not in _NAMES:
            raise TypeError(f"field '{field}': dtype {tensor.dtype} cannot be sent")
        item: list[Any] = [name, list(tensor.shape), _NAMES[tensor.dtype]]
        if tensor_codec and tensor.dtype.is_floating_point:
            if tensor_codec.scaled:
                _check_finite(field, tensor)
            tensor, scaling = tensor_codec.encode(tensor)
            item += scaling
        items.append(item)
        groups.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    for dtype, parts in groups.items():
        entries[f"{field}:{_NAMES[dtype]}"] = torch.cat(parts)
    return items


# --- decoding -------------------------------------------------------------------------------------------------


def decode(blob: bytes, schema: Schema | None = None, limit: int = MAX_BYTES) -> tuple[str, dict[str, Value]]:
    """Decodes the kind and fields of a message. Raises Refused for anything that does not match the schema exactly.

    Without a schema any fields are allowed, but the message must still be consistent.
    """
    header, entries = _read_header(blob, limit)
    kind, values, layout = header["kind"], header["values"], header["fields"]
    if schema is not None and (names := {*values, *layout}) != {*schema}:
        _refuse(f"expected fields {sorted(schema)}, got {sorted(names)}")
    fields: dict[str, Value] = {}
    for name, value in values.items():
        _check_plain(name, value, schema and schema[name])
        fields[name] = float(value) if schema and _plain_type(schema[name]) is float else value
    used: set[str] = set()
    for name, entry in layout.items():
        form = "tensor" if "tensor" in entry else "tree"
        items = entry.get(form)
        _check_items(name, items, form)
        if schema is not None:
            _check_shapes(name, items, form, schema[name])
        fields[name] = _read_tensors(name, items, entry.get("codec"), entries, used)
        if schema is not None:
            _check_bounds(name, fields[name], schema[name])
        if form == "tensor":
            fields[name] = fields[name][""]
    if used != set(entries):
        _refuse("some data belongs to no field")
    return kind, fields


def _refuse(reason: str) -> NoReturn:
    raise Refused(reason)


def _read_header(blob: bytes, limit: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the header and the raw entries, and checks the checksum and the form of both."""
    if len(blob) > limit:
        _refuse(f"message of {len(blob)} bytes exceeds the limit of {limit}")
    length = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or length > min(MAX_HEADER, len(blob) - 8):
        _refuse("header is longer than allowed or than the message")
    try:
        metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
        text, expected = metadata["fewer"], metadata["crc"]
        header = json.loads(text, parse_constant=lambda name: _refuse(f"{name} in the header"))
        entries = safetensors.torch.load(blob)
        actual = checksum(text, entries)
    except Refused:
        raise
    except Exception as error:  # the parsers raise all kinds of exceptions on hostile bytes
        raise Refused(f"malformed: {type(error).__name__}") from error
    if actual != expected:
        _refuse("checksum does not match")
    if not (isinstance(header, dict) and header.get("v") == VERSION and isinstance(header.get("kind"), str)):
        _refuse(f"not a message of version {VERSION}")
    for part in ("values", "fields"):
        if not isinstance(header.get(part), dict):
            _refuse(f"header has no '{part}'")
    if not all(isinstance(entry, dict) for entry in header["fields"].values()):
        _refuse("a field has no layout")
    if header["values"].keys() & header["fields"].keys():
        _refuse("a field appears twice")
    return header, entries


def _plain_type(expected: Any) -> Any:
    return expected.kind if isinstance(expected, Number) else expected


def _check_plain(name: str, value: Any, expected: Any) -> None:
    if type(value) not in (bool, int, float, str):
        _refuse(f"'{name}' is not a plain value")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse(f"'{name}' does not fit in 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(f"'{name}' is not finite")
    if expected is None:
        return
    kind = _plain_type(expected)
    if not isinstance(kind, type) or kind not in (bool, int, float, str):
        _refuse(f"'{name}': expected tensors, got a plain value")
    if type(value) is not kind and not (kind is float and type(value) is int):
        _refuse(f"'{name}': expected {kind.__name__}, got {type(value).__name__}")
    bounded = isinstance(expected, Number) and isinstance(value, int | float)
    if bounded and not expected.low <= value <= expected.high:
        _refuse(f"'{name}' is {value}, outside {expected.low} … {expected.high}")


def _check_items(name: str, items: Any, form: str) -> None:
    """Checks that each item has a name, a shape, a dtype and, if quantized, a finite scale and offset."""
    if not isinstance(items, list) or (form == "tensor" and len(items) != 1):
        _refuse(f"'{name}' has no list of tensors")
    for item in items:
        if not (isinstance(item, list) and len(item) in (3, 5) and isinstance(item[0], str)):
            _refuse(f"'{name}' has a tensor without name, shape and dtype")
        shape, dtype, scaling = item[1], item[2], item[3:]
        if not _is_shape(shape):
            _refuse(f"'{name}' has a tensor with an invalid shape")
        if not (isinstance(dtype, str) and dtype in _DTYPES):
            _refuse(f"'{name}' has a tensor of an unknown dtype")
        if not all(type(value) is float and math.isfinite(value) for value in scaling):
            _refuse(f"'{name}' has a scale that is not a finite number")
    if len({item[0] for item in items}) != len(items) or (form == "tensor" and items[0][0] != ""):
        _refuse(f"'{name}' has duplicate or unexpected tensor names")


def _is_shape(shape: Any) -> bool:
    """True if a tensor can have this shape. Strides must stay small even if a length is 0."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return False
    return all(type(n) is int and n >= 0 for n in shape) and math.prod(max(n, 1) for n in shape) <= MAX_VALUES


def _check_shapes(name: str, items: list[Any], form: str, expected: Any) -> None:
    if not isinstance(expected, Tensor | Shaped | Mapping):
        _refuse(f"'{name}': expected a plain value, got tensors")
    expected_form = "tree" if isinstance(expected, Mapping) else "tensor"
    if form != expected_form:
        _refuse(f"'{name}': expected a {expected_form}, got a {form}")
    if isinstance(expected, Shaped):
        shape, dtype = items[0][1], items[0][2]
        if not expected.matches(shape, dtype):
            _refuse(f"'{name}': expected {_NAMES[expected.dtype]} {list(expected.shape)}, got {dtype} {shape}")
        return
    if isinstance(expected, Tensor):
        expected = {"": expected}
    schemas = {
        key: value if isinstance(value, Shaped) else Shaped(tuple(value.shape), value.dtype)
        for key, value in expected.items()
    }
    if [item[0] for item in items] != list(schemas) or not all(schemas[item[0]].matches(*item[1:3]) for item in items):
        _refuse(f"'{name}' has unexpected names, shapes or dtypes")


def _check_bounds(name: str, tensors: Mapping[str, Tensor], expected: Any) -> None:
    schemas = expected if isinstance(expected, Mapping) else {"": expected}
    for key, tensor in tensors.items():
        max_value = schemas[key].max_value if isinstance(schemas[key], Shaped) else math.inf
        if max_value < math.inf and tensor.numel() and max(map(abs, torch.aminmax(tensor))) > max_value:
            _refuse(f"'{name}' has values beyond {max_value:g}")


def _read_tensors(
    field: str, items: list[Any], codec: Any, entries: Mapping[str, Tensor], used: set[str]
) -> dict[str, Tensor]:
    """Splits the entries of a field into its tensors and decodes them. Adds the entries it reads to `used`."""
    if codec is not None and not (isinstance(codec, str) and codec in CODECS):
        _refuse(f"'{field}' has an unknown codec")
    tensor_codec = None if codec is None else find_codec(codec)
    sizes_by_entry: dict[str, list[int]] = {}
    for _, shape, dtype_name, *_ in items:
        key = f"{field}:{_NAMES[_wire_dtype(_DTYPES[dtype_name], tensor_codec)]}"
        sizes_by_entry.setdefault(key, []).append(math.prod(shape))
    parts: dict[str, list[Tensor]] = {}
    for key, sizes in sizes_by_entry.items():
        flat = entries.get(key)
        if flat is None or flat.ndim != 1 or _NAMES.get(flat.dtype) != key.rpartition(":")[2]:
            _refuse(f"the data of '{field}' is missing")
        if sum(sizes) != flat.numel():
            _refuse(f"'{field}' has {flat.numel()} values, but its shapes need {sum(sizes)}")
        _check_finite(field, flat)
        parts[key] = list(torch.split(flat, sizes))[::-1]
        used.add(key)
    tensors: dict[str, Tensor] = {}
    for name, shape, dtype_name, *scaling in items:
        dtype = _DTYPES[dtype_name]
        wire_dtype = _wire_dtype(dtype, tensor_codec)
        values = parts[f"{field}:{_NAMES[wire_dtype]}"].pop()
        applied = tensor_codec if dtype.is_floating_point else None
        if bool(scaling) != (applied is not None and applied.scaled):
            _refuse(f"'{field}' has a scale that its codec does not use, or lacks one that it needs")
        if applied:
            values = applied.decode(values, scaling, dtype)
        if wire_dtype != dtype:  # a value can be finite in one dtype and overflow in the other
            _check_finite(field, values)
        tensors[name] = values.view(shape)
    return tensors


def _wire_dtype(dtype: torch.dtype, codec: type[TensorCodec] | None) -> torch.dtype:
    return codec.dtype if codec and dtype.is_floating_point else dtype


def _check_finite(field: str, tensor: Tensor) -> None:
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)  # both are NaN if any value is; much faster than isfinite
    if not (math.isfinite(low) and math.isfinite(high)):
        _refuse(f"'{field}' is not finite")
