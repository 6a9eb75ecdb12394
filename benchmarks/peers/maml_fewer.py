"""Fewer: its second-order MAML gradient, on the net, task, check and timing of the harness's metagrad.py."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import metagrad as M  # type: ignore[import-not-found]

from fewer.learning.adapt import trainable_weights, meta_gradient


def ours(net: Any, task: Any, steps: int) -> list[Any]:
    sx, sy, qx, qy = task
    found = meta_gradient(net, trainable_weights(net), [(sx, sy)] * steps, (qx, qy), M.LR, first_order=False)
    return list(found.weights.values())


def main() -> None:
    net, task = M.conv4(), M.task()
    for steps in (1, 5):
        theirs, mine = M.bare(net, task, steps), ours(net, task, steps)
        apart = max(float((a - b).abs().max()) for a, b in zip(theirs, mine, strict=True))
        top = max(float(t.abs().max()) for t in theirs)
        assert apart < 1e-3 * top + 1e-7, (steps, apart, top)
        times: list[float] = []
        begun = time.time()
        for number in range(M.WARM + M.MAXN):
            start = time.perf_counter()
            ours(net, task, steps)
            if number >= M.WARM:
                times.append(1e3 * (time.perf_counter() - start))
            if len(times) >= 5 and time.time() - begun > M.BUDGET:
                break
        line = {"workload": f"metagrad-{steps}", "ms_median": round(statistics.median(times), 2), "n": len(times)}
        print("PEER " + json.dumps({**line, "rel_err": round(apart / top, 8)}), flush=True)


if __name__ == "__main__":
    main()
