"""Counts floating-point operations with torch's own formulas."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

MAX_FLOPS = 1 << 60
"""The largest count that a client may report for one round."""


class FlopCounter(TorchDispatchMode):
    """Adds up the operations in a block. torch's `FlopCounterMode` gives the same sum and takes twice as long."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation, and counts it if it is a matrix product or a convolution."""
        out = func(*args, **(kwargs or {}))
        if formula := _FORMULAS.get(func._overloadpacket):
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


_cache: dict[Hashable, int] = {}


@contextmanager
def count_flops(enabled: bool = True, cache_key: Hashable = None) -> Iterator[FlopCounter]:
    """Counts the matrix products and convolutions in the block, forward and backward; a multiply-add counts as 2.

    Element-wise operations are not counted, as usual. If not `enabled`, the count is 0 and costs nothing. Counting
    slows small nets down by a factor of up to 2. A block with the `cache_key` of an earlier one in this process reuses
    its count.
    """
    counter = FlopCounter()
    if not enabled or cache_key in _cache:
        counter.flops = _cache[cache_key] if enabled else 0
        yield counter
        return
    with counter:
        yield counter
    if cache_key is not None:
        _cache[cache_key] = counter.flops


# oneDNN's fused recurrent layers hide their matrix products, and torch's counter does not know them.


def _forward(x: Any, w_ih: Any, w_hh: Any, *_: Any, **__: Any) -> int:
    """Each of the time × batch inputs is multiplied by both matrices of the layer."""
    return int(2 * prod(x.shape[:-1]) * (prod(w_ih.shape) + prod(w_hh.shape)))


def _backward(x: Any, w_ih: Any, w_hh: Any, *_: Any, **__: Any) -> int:
    """Twice the forward pass: gradients of inputs and of weights."""
    return 2 * _forward(x, w_ih, w_hh)


_FORMULAS = {
    **flop_registry,
    torch.ops.aten.mkldnn_rnn_layer: _forward,
    torch.ops.aten.mkldnn_rnn_layer_backward: _backward,
}
