"""A second-order step of MAML, a plain training step on the same samples, and the way by cloned modules.

`python -m benchmarks.metagrad NET STEPS REPEATS` times them in turn in a process of its own and prints JSON.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import alternate
from fewer.learning.adapt import Batch, trainable_weights, meta_gradient
from fewer.models.images import Conv4
from fewer.models.sequences import CharLSTM

LR, SUPPORT, QUERIES = 0.1, 25, 75
"""5-way, 5 samples of each class to adapt on and 15 to answer, as few-shot work has it."""


def work(net: str) -> tuple[nn.Module, Batch, Batch]:
    """A net, a support batch and a query batch."""
    torch.manual_seed(0)
    if net == "lstm":
        made: nn.Module = CharLSTM((80,), 80, 80)
        x, classes = torch.randint(80, (SUPPORT + QUERIES, 80)), 80
    else:
        made, x, classes = Conv4((1, 28, 28), 5, "group"), torch.randn(SUPPORT + QUERIES, 1, 28, 28), 5
    y = torch.arange(len(x)) % classes
    return made.train(), (x[:SUPPORT], y[:SUPPORT]), (x[SUPPORT:], y[SUPPORT:])


def plain(net: nn.Module, support: Batch, query: Batch) -> None:
    """One training step on all the samples together."""
    x, y = (torch.cat(both) for both in zip(support, query, strict=True))
    slopes = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    torch._foreach_add_([p.detach() for p in net.parameters()], slopes, alpha=-0.0)


def ours(net: nn.Module, support: Batch, query: Batch, steps: int, exact: bool = True) -> list[Tensor]:
    """Fewer's meta-gradient."""
    return list(meta_gradient(net, trainable_weights(net), [support] * steps, query, LR, not exact).weights.values())


def cloned(net: nn.Module, support: Batch, query: Batch, steps: int) -> tuple[Tensor, ...]:
    """A clone whose parameters are tensors of the graph: each step puts in new ones, one pass goes back over all."""
    clone = copy.deepcopy(net)
    places = [(module, name) for module in clone.modules() for name in list(module._parameters)]
    begin: list[Any] = [module._parameters[name] for module, name in places]
    values = begin
    for _ in range(steps):
        slopes = torch.autograd.grad(F.cross_entropy(clone(support[0]), support[1]), values, create_graph=True)
        values = [value - LR * slope for value, slope in zip(values, slopes, strict=True)]
        for (module, name), value in zip(places, values, strict=True):
            module._parameters.pop(name, None)
            setattr(module, name, value)
    return torch.autograd.grad(F.cross_entropy(clone(query[0]), query[1]), begin)


def main() -> None:
    """Seconds of each, in turn, after a check that both ways give the same gradient."""
    torch.set_num_threads(1)
    net, steps, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    made, support, query = work(net)
    mine, theirs = ours(made, support, query, steps), cloned(made, support, query, steps)
    largest = max(float(t.abs().max()) for t in theirs)
    apart = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True)) / largest
    if apart > 1e-3:
        raise SystemExit(f"the two ways disagree by {apart:.1e}")

    def timed(action: Callable[[], object]) -> float:
        begun = time.perf_counter()
        action()
        return time.perf_counter() - begun

    sides: dict[str, Callable[[], object]] = {
        "plain": partial(plain, made, support, query),
        "ours": partial(ours, made, support, query, steps),
        "first order": partial(ours, made, support, query, steps, exact=False),
        "cloned": partial(cloned, made, support, query, steps),
    }
    found = alternate(repeats, *(partial(timed, side) for side in sides.values()))
    print(json.dumps({**dict(zip(sides, found, strict=True)), "apart": apart}))


if __name__ == "__main__":
    main()
