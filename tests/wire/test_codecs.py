"""Codecs: each is exact up to its precision."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fewer import FedAvg
from fewer.errors import SettingError
from fewer.wire import (
    CODECS,
    Codec,
    TensorCodec,
    decode,
    encode,
)
from tests.wire.harness import SIGNIFICANT, quantization_step, random_tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def round_trip(value: Tensor, codec: Codec | None = None) -> Tensor:
    """Returns the tensor that a receiver decodes."""
    kind, fields = decode(encode("k", {"t": value}, codec), {"t": value})
    assert kind == "k" and fields.keys() == {"t"}
    arrived = fields["t"]
    assert isinstance(arrived, Tensor) and arrived.dtype == value.dtype and arrived.shape == value.shape
    return arrived


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_tensors_survive_a_round_trip_within_precision(codec: Codec | None, dtype: torch.dtype) -> None:
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
def test_empty_tensors_and_scalars_survive_a_round_trip(codec: Codec | None, dtype: torch.dtype) -> None:
    for shape in ((0,), (0, 3), (2, 0, 3)):
        assert round_trip(torch.zeros(shape, dtype=dtype), codec).numel() == 0
    assert round_trip(torch.ones((), dtype=dtype), codec).item() == 1


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_negative_zero_keeps_its_sign_without_quantization(codec: Codec | None) -> None:
    arrived = round_trip(torch.tensor([-0.0, 0.0]), codec)
    assert arrived.tolist() == [0.0, 0.0]
    if codec in (None, "float32", "float16", "bfloat16"):
        assert torch.signbit(arrived).tolist() == [True, False]
