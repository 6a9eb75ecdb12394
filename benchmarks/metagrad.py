"""A second-order MAML step, a plain training step on the same samples, and MAML by cloned modules.

`python -m benchmarks.metagrad NET STEPS REPEATS` times them in turn in a separate process and prints JSON.
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
from fewer.learning.adapt import Batch, meta_gradient, trainable_weights
from fewer.models.images import Conv4
from fewer.models.sequences import CharLSTM

LR, SUPPORT, QUERIES = 0.1, 25, 75
"""5-way tasks with 5 support samples and 15 queries per class, as usual in few-shot learning."""


def build_task(name: str) -> tuple[nn.Module, Batch, Batch]:
    """Builds a net, a support batch and a query batch."""
    torch.manual_seed(0)
    if name == "lstm":
        net: nn.Module = CharLSTM((80,), 80, 80)
        x, classes = torch.randint(80, (SUPPORT + QUERIES, 80)), 80
    else:
        net, x, classes = Conv4((1, 28, 28), 5, "group"), torch.randn(SUPPORT + QUERIES, 1, 28, 28), 5
    y = torch.arange(len(x)) % classes
    return net.train(), (x[:SUPPORT], y[:SUPPORT]), (x[SUPPORT:], y[SUPPORT:])


def take_plain_step(net: nn.Module, support: Batch, query: Batch) -> None:
    """Takes one training step on all samples together."""
    x, y = (torch.cat(both) for both in zip(support, query, strict=True))
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    torch._foreach_add_([p.detach() for p in net.parameters()], gradients, alpha=-0.0)


def fewer_gradient(net: nn.Module, support: Batch, query: Batch, steps: int, first_order: bool = False) -> list[Tensor]:
    """Computes the meta-gradient with Fewer."""
    return list(meta_gradient(net, trainable_weights(net), [support] * steps, query, LR, first_order).weights.values())


def cloned_gradient(net: nn.Module, support: Batch, query: Batch, steps: int) -> tuple[Tensor, ...]:
    """Computes the meta-gradient with a clone. Each inner step replaces its parameters by tensors of the graph."""
    clone = copy.deepcopy(net)
    slots = [(module, name) for module in clone.modules() for name in list(module._parameters)]
    initial: list[Any] = [module._parameters[name] for module, name in slots]
    values = initial
    for _ in range(steps):
        gradients = torch.autograd.grad(F.cross_entropy(clone(support[0]), support[1]), values, create_graph=True)
        values = [value - LR * gradient for value, gradient in zip(values, gradients, strict=True)]
        for (module, name), value in zip(slots, values, strict=True):
            module._parameters.pop(name, None)
            setattr(module, name, value)
    return torch.autograd.grad(F.cross_entropy(clone(query[0]), query[1]), initial)


def main() -> None:
    """Checks that both implementations give the same gradient, then times all of them in turn."""
    torch.set_num_threads(1)
    name, steps, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    net, support, query = build_task(name)
    ours, reference = fewer_gradient(net, support, query, steps), cloned_gradient(net, support, query, steps)
    largest = max(float(gradient.abs().max()) for gradient in reference)
    error = max(float((a - b).abs().max()) for a, b in zip(ours, reference, strict=True)) / largest
    if error > 1e-3:
        raise SystemExit(f"the two meta-gradients differ by {error:.1e}")

    def measure_seconds(action: Callable[[], object]) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    sides: dict[str, Callable[[], object]] = {
        "plain": partial(take_plain_step, net, support, query),
        "fewer": partial(fewer_gradient, net, support, query, steps),
        "first order": partial(fewer_gradient, net, support, query, steps, first_order=True),
        "cloned": partial(cloned_gradient, net, support, query, steps),
    }
    seconds = alternate(repeats, *(partial(measure_seconds, side) for side in sides.values()))
    print(json.dumps({**dict(zip(sides, seconds, strict=True)), "error": error}))


if __name__ == "__main__":
    main()
