"""Messages: valid content survives a round trip, all else is refused with a reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fewer.choices import Norm
from fewer.models import SmallCNN, get_weights
from fewer.wire import (
    CODECS,
    Codec,
    Field,
    Number,
    Refused,
    Schema,
    Shaped,
    decode,
    encode,
)
from tests.wire.harness import LIKE, SIGNIFICANT, quantization_step, random_tensor

# --- round trips ------------------------------------------------------------------------------------------------


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


# --- size -------------------------------------------------------------------------------------------------------


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


# --- schema -----------------------------------------------------------------------------------------------------


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
def test_a_value_beyond_the_range_of_the_codec_is_refused(value: torch.Tensor, codec: Codec) -> None:
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
