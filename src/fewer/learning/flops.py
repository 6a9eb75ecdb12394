"""Floating-point operations, counted by torch as they are done."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

MAX_FLOPS = 1 << 60
"""What a client can claim to have done in a round."""


class FlopCounter:
    """What was counted."""

    flops: int = 0


_known: dict[Hashable, int] = {}


@contextmanager
def counted(wanted: bool = True, like: Hashable = None) -> Iterator[FlopCounter]:
    """Counts all matrix products and convolutions inside, forward and backward; a multiplication and an addition are 2.

    Element-wise work is not counted, as is usual. Where it is not `wanted` nothing is counted, and nothing slower.
    Counting makes work several times slower: what is `like` work that was counted before in this process is taken to
    be the same.
    """
    tally = FlopCounter()
    if not wanted or like in _known:
        tally.flops = _known[like] if wanted else 0
        yield tally
        return
    with FlopCounterMode(display=False, custom_mapping=_RECURRENT) as counter:
        yield tally
    tally.flops = counter.get_total_flops()
    if like is not None:
        _known[like] = tally.flops


# oneDNN's fused recurrent layers hide their matrix products, and torch's own table does not know them.


def _forward(x: Any, w_ih: Any, w_hh: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Each of time × batch inputs meets both matrices of the layer."""
    return int(2 * prod(x[:-1]) * (prod(w_ih) + prod(w_hh)))


def _backward(x: Any, w_ih: Any, w_hh: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """By inputs and by weights: twice the forward."""
    return 2 * _forward(x, w_ih, w_hh)


_RECURRENT = {
    torch.ops.aten.mkldnn_rnn_layer: _forward,
    torch.ops.aten.mkldnn_rnn_layer_backward: _backward,
}
