"""How a floating-point tensor is written on the wire. Integer tensors always travel as they are."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from fewer.choices import Codec

CODECS: tuple[Codec, ...] = get_args(Codec)

_CAST = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LEVELS = 255
_LOWEST = {"int8": -128, "uint8": 0}


def stored_dtype(dtype: torch.dtype, codec: Codec | None) -> torch.dtype:
    """The dtype on the wire of a tensor of this dtype under this codec."""
    if codec is None or not dtype.is_floating_point:
        return dtype
    return _CAST.get(codec) or (torch.int8 if codec == "int8" else torch.uint8)


def is_affine(dtype: torch.dtype, codec: Codec | None) -> bool:
    """Whether the codec writes such a tensor as levels of one scale and offset."""
    return codec in _LOWEST and dtype.is_floating_point


def quantize(values: Tensor, codec: Codec) -> tuple[Tensor, float, float]:
    """Levels, scale and offset with values ≈ levels · scale + offset; off by at most scale / 2."""
    lowest = _LOWEST[codec]
    if values.numel() == 0:
        return values.to(stored_dtype(values.dtype, codec)), 1.0, 0.0
    wide = values.double()
    low, high = (bound.item() for bound in torch.aminmax(wide))
    scale = (high - low) / _LEVELS  # 0 if all are equal: then the offset alone says what they are
    levels = ((wide - low) / (scale or 1.0)).round_().clamp_(0, _LEVELS).add_(lowest)
    return levels.to(stored_dtype(values.dtype, codec)), scale, low - lowest * scale


def dequantize(levels: Tensor, scale: float, offset: float, dtype: torch.dtype) -> Tensor:
    """The values that `quantize` wrote."""
    return (levels.double() * scale + offset).to(dtype)


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of a text and of the bytes of tensors, in the order of their names."""
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
