"""Counts floating-point operations with torch's own counter."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

MAX_FLOPS = 1 << 60
"""The largest count that a client may report for one round."""


class FlopCounter:
    """The result of `count_flops`."""

    flops: int = 0


_cache: dict[Hashable, int] = {}


@contextmanager
def count_flops(enabled: bool = True, cache_key: Hashable = None) -> Iterator[FlopCounter]:
    """Counts the matrix products and convolutions in the block, forward and backward; a multiply-add counts as 2.

    Element-wise operations are not counted, as usual. If not `enabled`, the count is 0 and costs nothing. Counting
    slows a block down several times. A block with the `cache_key` of an earlier one in this process reuses its count.
    """
    result = FlopCounter()
    if not enabled or cache_key in _cache:
        result.flops = _cache[cache_key] if enabled else 0
        yield result
        return
    with FlopCounterMode(display=False, custom_mapping=_RECURRENT) as counter:
        yield result
    result.flops = counter.get_total_flops()
    if cache_key is not None:
        _cache[cache_key] = result.flops


# oneDNN's fused recurrent layers hide their matrix products, and torch's counter does not know them.


def _forward(x: Any, w_ih: Any, w_hh: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Each of the time × batch inputs is multiplied by both matrices of the layer."""
    return int(2 * prod(x[:-1]) * (prod(w_ih) + prod(w_hh)))


def _backward(x: Any, w_ih: Any, w_hh: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Twice the forward pass: gradients of inputs and of weights."""
    return 2 * _forward(x, w_ih, w_hh)


_RECURRENT = {torch.ops.aten.mkldnn_rnn_layer: _forward, torch.ops.aten.mkldnn_rnn_layer_backward: _backward}
