"""Injected lies, against values by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewer.errors import SettingError
from fewer.runtime.lies import Lies, alie_factor
from fewer.runtime.streams import stream

SENT = {"model": {"w": torch.tensor([1.0, 1.0])}}
ANSWER: dict[str, Any] = {"model": {"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(7)}, "size": 9}
HONEST: list[dict[str, Any]] = [{"model": {"w": torch.tensor(values)}} for values in ([2.0, 3.0], [4.0, 3.0])]
"""Changes of (1, 2) and (3, 2)."""


def false_weights(kind: str, **others: Any) -> Tensor:
    false = Lies.parse(f"{kind}:0.5").falsify({**ANSWER, **others}, SENT, stream(0), HONEST, 4)
    assert false["size"] == 9 and false["model"]["n"].item() == 7
    weights: Tensor = false["model"]["w"]
    return weights


def test_each_lie_by_hand() -> None:
    assert false_weights("sign-flip").tolist() == [-2.0, -3.0]
    assert false_weights("scale").tolist() == [31.0, 41.0]
    assert false_weights("ipm").tolist() == [0.0, 0.0]  # 1 - 0.5 * 2
    assert false_weights("label-flip").tolist() == [4.0, 5.0]
    noise = false_weights("noise") - 1
    assert noise.norm().item() == pytest.approx(50) and noise.tolist() != [30.0, 40.0]  # ten times (3, 4)


def test_alie_by_hand() -> None:
    # With 24 liars of 50 clients, 2 more supporters make a majority: Phi(z) = 24 / 26.
    assert alie_factor(50, 24) == pytest.approx(1.43, abs=0.005)
    # Two liars of four clients need one honest supporter of two: Phi(z) = 1/2, so they send the mean.
    assert alie_factor(4, 2) == 0 and false_weights("alie").tolist() == [3.0, 3.0]
    honest = [{"g": torch.tensor([value])} for value in (0.0, 2.0)]  # mean 1, standard deviation 1
    false = Lies("alie", 0.5).falsify({"g": torch.zeros(1)}, {}, stream(0), honest, 5)
    assert false["g"].item() == pytest.approx(1 - alie_factor(5, 3)) and alie_factor(5, 3) > 0.5


def test_what_clients_did_not_get_is_a_change() -> None:
    false = Lies("sign-flip", 1.0).falsify({"gradient": torch.tensor([2.0])}, SENT, stream(0))
    assert false["gradient"].item() == -2


def test_liars_are_a_share_of_all_clients_and_depend_on_the_seed() -> None:
    liars = Lies("scale", 0.25).liars(20, 1)
    assert len(liars) == 5 and liars <= {*range(20)}
    assert liars == Lies("noise", 0.25).liars(20, 1) != Lies("scale", 0.25).liars(20, 2)
    assert Lies("scale", 0.125).liars(20, 1) == Lies("scale", 0.15).liars(20, 1)  # 2.5 is rounded up


@pytest.mark.parametrize("text", ["lies:0.1", "scale", "scale:", "scale:1.5", "scale:-1", "scale:nan", "0.1"])
def test_a_wrong_lie_is_reported(text: str) -> None:
    with pytest.raises(SettingError, match=r"lie must be KIND:SHARE .*sign-flip.*got"):
        Lies.parse(text)
