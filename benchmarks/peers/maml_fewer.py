"""Fewer's second-order MAML gradient, with the net, task, check and timing of the harness's metagrad.py."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import metagrad as M  # type: ignore[import-not-found]

from fewer.learning.adapt import meta_gradient, trainable_weights


def fewer_gradient(net: Any, task: Any, steps: int) -> list[Any]:
    sx, sy, qx, qy = task
    gradient = meta_gradient(net, trainable_weights(net), [(sx, sy)] * steps, (qx, qy), M.LR, first_order=False)
    return list(gradient.weights.values())


def main() -> None:
    net, task = M.conv4(), M.task()
    for steps in (1, 5):
        reference, ours = M.bare(net, task, steps), fewer_gradient(net, task, steps)
        error = max(float((a - b).abs().max()) for a, b in zip(reference, ours, strict=True))
        largest = max(float(t.abs().max()) for t in reference)
        assert error < 1e-3 * largest + 1e-7, (steps, error, largest)
        times: list[float] = []
        budget_start = time.time()
        for number in range(M.WARM + M.MAXN):
            start = time.perf_counter()
            fewer_gradient(net, task, steps)
            if number >= M.WARM:
                times.append(1e3 * (time.perf_counter() - start))
            if len(times) >= 5 and time.time() - budget_start > M.BUDGET:
                break
        line = {"workload": f"metagrad-{steps}", "ms_median": round(statistics.median(times), 2), "n": len(times)}
        print("PEER " + json.dumps({**line, "rel_err": round(error / largest, 8)}), flush=True)


if __name__ == "__main__":
    main()
