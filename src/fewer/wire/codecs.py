"""Codecs: how floating-point tensors are written on the wire. Integer tensors are always sent unchanged."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fewer.errors import unknown_name
from fewer.registry import CODECS


class TensorCodec(ABC):
    """Writes a floating-point tensor with `dtype` on the wire, and reads it back."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]
    """The dtype on the wire."""
    scaled: ClassVar[bool] = False
    """True if the message header holds a scale and an offset for each tensor."""

    @classmethod
    @abstractmethod
    def encode(cls, values: Tensor) -> tuple[Tensor, list[float]]:
        """Returns the tensor to send and, if `scaled`, its scale and offset."""

    @classmethod
    @abstractmethod
    def decode(cls, stored: Tensor, scaling: list[float], dtype: torch.dtype) -> Tensor:
        """Returns the values that `encode` wrote, as `dtype`."""


class CastCodec(TensorCodec):
    """Casts to another floating-point dtype."""

    @classmethod
    def encode(cls, values: Tensor) -> tuple[Tensor, list[float]]:
        """The tensor, cast."""
        return values.to(cls.dtype), []

    @classmethod
    def decode(cls, stored: Tensor, scaling: list[float], dtype: torch.dtype) -> Tensor:
        """The tensor, cast back."""
        return stored.to(dtype)


class AffineCodec(TensorCodec):
    """Quantizes to 256 levels between the smallest and the largest value: values ≈ levels · scale + offset.

    The error is at most scale / 2.
    """

    scaled = True
    steps: ClassVar[int] = 255

    @classmethod
    def encode(cls, values: Tensor) -> tuple[Tensor, list[float]]:
        """Levels, scale and offset."""
        if values.numel() == 0:
            return values.to(cls.dtype), [1.0, 0.0]
        lowest = torch.iinfo(cls.dtype).min
        wide = values.double()
        low, high = (bound.item() for bound in torch.aminmax(wide))
        scale = (high - low) / cls.steps  # 0 if all values are equal: then the offset alone gives the value
        levels = ((wide - low) / (scale or 1.0)).round_().clamp_(0, cls.steps).add_(lowest)
        return levels.to(cls.dtype), [scale, low - lowest * scale]

    @classmethod
    def decode(cls, stored: Tensor, scaling: list[float], dtype: torch.dtype) -> Tensor:
        """The quantized values."""
        scale, offset = scaling
        return (stored.double() * scale + offset).to(dtype)


@CODECS.register("float32")
class Float32Codec(CastCodec):
    """4 bytes per value; exact for float32 tensors."""

    dtype = torch.float32


@CODECS.register("float16")
class Float16Codec(CastCodec):
    """2 bytes per value, 11 significant bits, magnitudes up to 65504."""

    dtype = torch.float16


@CODECS.register("bfloat16")
class BFloat16Codec(CastCodec):
    """2 bytes per value, 8 significant bits, the range of float32."""

    dtype = torch.bfloat16


@CODECS.register("int8")
class Int8Codec(AffineCodec):
    """1 byte per value, levels -128 … 127."""

    dtype = torch.int8


@CODECS.register("uint8")
class UInt8Codec(AffineCodec):
    """1 byte per value, levels 0 … 255."""

    dtype = torch.uint8


def find_codec(name: str) -> type[TensorCodec]:
    """The codec with this name. Raises SettingError if it is not registered."""
    if name not in CODECS:
        raise unknown_name("codec", name, CODECS)
    codec: type[TensorCodec] = CODECS[name]
    return codec


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of a text and of the bytes of tensors, in the order of their names."""
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
