"""A message: named tensors and a small typed header, encoded with safetensors.

Layout. Each field is a tensor, a dict of tensors (a model) or a plain number, text or truth value. The tensors
of a field that share a stored dtype are written end to end as one safetensors entry, so that a model of many
small tensors costs one entry and decoding is one copy. The safetensors metadata holds `fewer`, a JSON text with
the kind, the plain values and the name, shape and dtype of every tensor, and `crc`, the CRC-32 of that text and
the data, so that damage in transit is seen.

Decoding trusts nothing. It checks size, checksum, names, shapes, dtypes and finiteness against a schema that the
receiver gives, and raises `Refused` with a reason for anything else. Pickle is never involved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import safetensors.torch
import torch
from torch import Tensor

from fewer.choices import Codec
from fewer.wire.codecs import CODECS, checksum, dequantize, is_affine, quantize, stored_dtype

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
    """A message that will not be used, and why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + " …"
        super().__init__(self.reason)


@dataclass(frozen=True)
class Coded:
    """A field with the codec that its floating-point tensors are to be sent in."""

    value: Tensor | Mapping[str, Tensor]
    codec: Codec | None


Plain = bool | int | float | str
Field = Tensor | Mapping[str, Tensor] | Plain | Coded
"""What can be sent."""
Value = Any
"""What arrives: a tensor, a dict of tensors, or a plain value."""


@dataclass(frozen=True)
class Number:
    """Schema of a plain number within bounds."""

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Shaped:
    """Schema of one tensor: its shape, None where a length is free, a range where it has bounds, and its dtype."""

    shape: tuple[int | range | None, ...]
    dtype: torch.dtype = torch.float32
    max_value: float = math.inf
    """No value may be further from 0."""

    def takes(self, lengths: Sequence[int], dtype: str) -> bool:
        """Whether a tensor of these lengths and this dtype is meant."""
        return (
            dtype == _NAMES[self.dtype]
            and len(lengths) == len(self.shape)
            and all(
                wanted is None or (given in wanted if isinstance(wanted, range) else given == wanted)
                for given, wanted in zip(lengths, self.shape, strict=True)
            )
        )


Schema = Mapping[str, Tensor | Mapping[str, Tensor] | Mapping[str, Shaped] | Shaped | Number | type]
"""What a receiver expects of each field: a tensor or dict of tensors like these, or a plain type."""


# --- encoding -------------------------------------------------------------------------------------------------


def encode(kind: str, fields: Mapping[str, Field]) -> bytes:
    """The bytes of a message; Refused where a field is not finite and its codec cannot say so."""
    values: dict[str, Plain] = {}
    layout: dict[str, Any] = {}
    entries: dict[str, Tensor] = {}
    for name, field in fields.items():
        codec = field.codec if isinstance(field, Coded) else None
        field = field.value if isinstance(field, Coded) else field
        if isinstance(field, Tensor):
            layout[name] = {"tensor": _write(name, {"": field}, codec, entries)}
        elif isinstance(field, Mapping):
            layout[name] = {"tree": _write(name, field, codec, entries)}
        elif isinstance(field, bool | int | float | str):
            values[name] = field
        else:
            raise TypeError(f"field '{name}' is {type(field).__name__}: only tensors, dicts of them and plain values")
        if codec:
            layout[name]["codec"] = codec
    text = json.dumps({"v": VERSION, "kind": kind, "values": values, "fields": layout}, separators=(",", ":"))
    return safetensors.torch.save(entries, {"fewer": text, "crc": checksum(text, entries)})


def _write(field: str, tensors: Mapping[str, Tensor], codec: Codec | None, entries: dict[str, Tensor]) -> list[Any]:
    """Add the tensors to `entries`, end to end by stored dtype; return what the receiver must know of each."""
    items: list[Any] = []
    groups: dict[torch.dtype, list[Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if tensor.dtype not in _NAMES:
            raise TypeError(f"field '{field}': {tensor.dtype} cannot be sent")
        item: list[Any] = [name, list(tensor.shape), _NAMES[tensor.dtype]]
        if is_affine(tensor.dtype, codec):
            assert codec is not None
            _finite(field, tensor)
            tensor, scale, offset = quantize(tensor, codec)
            item += [scale, offset]
        else:
            tensor = tensor.to(stored_dtype(tensor.dtype, codec))
        items.append(item)
        groups.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    for dtype, parts in groups.items():
        entries[f"{field}:{_NAMES[dtype]}"] = torch.cat(parts)
    return items


# --- decoding -------------------------------------------------------------------------------------------------


def decode(blob: bytes, schema: Schema | None = None, limit: int = MAX_BYTES) -> tuple[str, dict[str, Value]]:
    """Kind and fields of a message; Refused for anything that is not exactly what the schema says.

    Without a schema the fields may be any, but must still be sound in themselves.
    """
    header, entries = _open(blob, limit)
    kind, values, layout = header["kind"], header["values"], header["fields"]
    if schema is not None and (given := {*values, *layout}) != {*schema}:
        _refuse(f"fields {sorted(given)} where {sorted(schema)} were expected")
    fields: dict[str, Value] = {}
    for name, value in values.items():
        _check_plain(name, value, schema and schema[name])
        fields[name] = float(value) if schema and _kind(schema[name]) is float else value
    used: set[str] = set()
    for name, entry in layout.items():
        shape = "tensor" if "tensor" in entry else "tree"
        items = entry.get(shape)
        _check_items(name, items, shape)
        if schema is not None:
            _check_shapes(name, items, shape, schema[name])
        fields[name] = _read(name, items, entry.get("codec"), entries, used)
        if schema is not None:
            _check_bounds(name, fields[name], schema[name])
        if shape == "tensor":
            fields[name] = fields[name][""]
    if used != set(entries):
        _refuse("data that no field names")
    return kind, fields


def _refuse(reason: str) -> NoReturn:
    raise Refused(reason)


def _open(blob: bytes, limit: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the raw entries, both sound in form; the checksum holds."""
    if len(blob) > limit:
        _refuse(f"{len(blob)} bytes where at most {limit} are taken")
    length = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or length > min(MAX_HEADER, len(blob) - 8):
        _refuse("header longer than allowed, or than the message")
    try:
        metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
        text, told = metadata["fewer"], metadata["crc"]
        header = json.loads(text, parse_constant=lambda name: _refuse(f"{name} in the header"))
        entries = safetensors.torch.load(blob)
        sums = checksum(text, entries)
    except Refused:
        raise
    except Exception as error:  # whatever the parsers raise at hostile bytes, the message is not one of ours
        raise Refused(f"malformed: {type(error).__name__}") from error
    if sums != told:
        _refuse("checksum does not match")
    if not (isinstance(header, dict) and header.get("v") == VERSION and isinstance(header.get("kind"), str)):
        _refuse(f"not a message of version {VERSION}")
    for part in ("values", "fields"):
        if not isinstance(header.get(part), dict):
            _refuse(f"header without '{part}'")
    if not all(isinstance(entry, dict) for entry in header["fields"].values()):
        _refuse("a field without a layout")
    if header["values"].keys() & header["fields"].keys():
        _refuse("a field given twice")
    return header, entries


def _kind(expected: Any) -> Any:
    return expected.kind if isinstance(expected, Number) else expected


def _check_plain(name: str, value: Any, expected: Any) -> None:
    if type(value) not in (bool, int, float, str):
        _refuse(f"'{name}' is not a plain value")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse(f"'{name}' does not fit 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(f"'{name}' is not finite")
    if expected is None:
        return
    kind = _kind(expected)
    if not isinstance(kind, type) or kind not in (bool, int, float, str):
        _refuse(f"'{name}' is a plain value where tensors were expected")
    if type(value) is not kind and not (kind is float and type(value) is int):
        _refuse(f"'{name}' is {type(value).__name__} where {kind.__name__} was expected")
    bounded = isinstance(expected, Number) and isinstance(value, int | float)
    if bounded and not expected.low <= value <= expected.high:
        _refuse(f"'{name}' is {value}, outside {expected.low} … {expected.high}")


def _check_items(name: str, items: Any, shape: str) -> None:
    """Each item: a name, a list of lengths, a dtype, and for quantized ones a finite scale and offset."""
    if not isinstance(items, list) or (shape == "tensor" and len(items) != 1):
        _refuse(f"'{name}' without a list of tensors")
    for item in items:
        if not (isinstance(item, list) and len(item) in (3, 5) and isinstance(item[0], str)):
            _refuse(f"'{name}' has a tensor without name, shape and dtype")
        lengths, dtype, affine = item[1], item[2], item[3:]
        if not _is_shape(lengths):
            _refuse(f"'{name}' has a tensor with a wrong shape")
        if not (isinstance(dtype, str) and dtype in _DTYPES):
            _refuse(f"'{name}' has a tensor of an unknown dtype")
        if not all(type(v) is float and math.isfinite(v) for v in affine):
            _refuse(f"'{name}' has a scale that is not a finite number")
    if len({item[0] for item in items}) != len(items) or (shape == "tensor" and items[0][0] != ""):
        _refuse(f"'{name}' names a tensor twice")


def _is_shape(lengths: Any) -> bool:
    """Whether a tensor can have these lengths; strides must stay small even where a length is 0."""
    if not isinstance(lengths, list) or len(lengths) > MAX_DIMENSIONS:
        return False
    return all(type(n) is int and n >= 0 for n in lengths) and math.prod(max(n, 1) for n in lengths) <= MAX_VALUES


def _check_shapes(name: str, items: list[Any], shape: str, expected: Any) -> None:
    if not isinstance(expected, Tensor | Shaped | Mapping):
        _refuse(f"'{name}' holds tensors where a plain value was expected")
    form = "tree" if isinstance(expected, Mapping) else "tensor"
    if shape != form:
        _refuse(f"'{name}' is a {shape} where a {form} was expected")
    if isinstance(expected, Shaped):
        given, dtype = items[0][1], items[0][2]
        if not expected.takes(given, dtype):
            wanted = f"{_NAMES[expected.dtype]} {list(expected.shape)}"
            _refuse(f"'{name}' is {dtype} {given} where {wanted} was expected")
        return
    if isinstance(expected, Tensor):
        expected = {"": expected}
    like = {
        key: value if isinstance(value, Shaped) else Shaped(tuple(value.shape), value.dtype)
        for key, value in expected.items()
    }
    if [item[0] for item in items] != list(like) or not all(like[item[0]].takes(*item[1:3]) for item in items):
        _refuse(f"'{name}' has other names, shapes or dtypes than expected")


def _check_bounds(name: str, tensors: Mapping[str, Tensor], expected: Any) -> None:
    bounds = expected if isinstance(expected, Mapping) else {"": expected}
    for key, tensor in tensors.items():
        max_value = bounds[key].max_value if isinstance(bounds[key], Shaped) else math.inf
        if max_value < math.inf and tensor.numel() and max(map(abs, torch.aminmax(tensor))) > max_value:
            _refuse(f"'{name}' has values beyond {max_value:g}")


def _read(field: str, items: list[Any], codec: Any, entries: Mapping[str, Tensor], used: set[str]) -> dict[str, Tensor]:
    """Cut the entries of a field into its tensors; undo the codec; all of it finite and nothing left over."""
    if codec is not None and codec not in CODECS:
        _refuse(f"'{field}' has an unknown codec")
    plan: dict[str, list[int]] = {}
    for _, lengths, code, *_ in items:
        key = f"{field}:{_NAMES[stored_dtype(_DTYPES[code], codec)]}"
        plan.setdefault(key, []).append(math.prod(lengths))
    parts: dict[str, list[Tensor]] = {}
    for key, sizes in plan.items():
        flat = entries.get(key)
        if flat is None or flat.ndim != 1 or _NAMES.get(flat.dtype) != key.rpartition(":")[2]:
            _refuse(f"'{field}' without its data")
        if sum(sizes) != flat.numel():
            _refuse(f"'{field}' has {flat.numel()} values where its shapes need {sum(sizes)}")
        _finite(field, flat)
        parts[key] = list(torch.split(flat, sizes))[::-1]
        used.add(key)
    tensors: dict[str, Tensor] = {}
    for name, lengths, code, *affine in items:
        dtype = _DTYPES[code]
        stored = stored_dtype(dtype, codec)
        values = parts[f"{field}:{_NAMES[stored]}"].pop()
        if is_affine(dtype, codec) != bool(affine):
            _refuse(f"'{field}' has a scale without a codec for it, or the reverse")
        values = dequantize(values, affine[0], affine[1], dtype) if affine else values.to(dtype)
        if stored != dtype:  # a value may be finite as it was stored, but not as the dtype that it is meant to be
            _finite(field, values)
        tensors[name] = values.view(lengths)
    return tensors


def _finite(field: str, tensor: Tensor) -> None:
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)  # both are NaN where anything is: far quicker than isfinite on everything
    if not (math.isfinite(low) and math.isfinite(high)):
        _refuse(f"'{field}' is not finite")
