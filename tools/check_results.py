"""Re-runs the cheapest cell of every published result and compares it with the published numbers.

    FEWER_DATA=DIR python -m tools.check_results [NAME…] [--out docs/results/checks.json]

For each result in docs/results it runs the first seed of the cell with the fewest recorded seconds, with the recorded
method options (a tuned row is not tuned again). It compares the accuracy of every evaluated round and of every client
or group exactly. Bytes may differ by the length of names in messages; the difference is recorded.

Floating-point results differ between processors. `--reference` names an output of this check, made on the same machine
with another version of the code. The digests of all accuracies must then be equal.

Results that the output file lists with the same settings hash are skipped, so an interrupted check resumes. At the
end, all pages are written again with a note on their check.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fewer.experiments import pages, recipes
from fewer.experiments.compare import read_unit_accuracies
from fewer.experiments.recipes import Cell
from fewer.runs.engine import run_experiment
from fewer.runs.experiment import build_experiment
from fewer.runs.result import Result
from tools.render_results import load_checks, render_all


def check_cell(content: Mapping[str, Any], index: int, reference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Runs the first seed of a cell and compares it with the recorded numbers."""
    plan, cells = recipes.read_results(content)
    cell, start = cells[index], time.perf_counter()
    ours = cell.ours
    result = run_experiment(build_experiment(recipes.cell_settings(plan, cell)), None, None)
    accuracy, units = recipes.MEASURES[plan.mean](result), read_unit_accuracies(result.metrics)
    curve = [[entry["round"], entry["accuracy"]] for entry in result.history if "accuracy" in entry]
    recorded = [[entry["round"], entry["accuracy"]] for entry in ours.curves[0]] if ours.curves else []
    different = {
        "accuracy": accuracy != ours.accuracies[0],
        "curve": bool(recorded) and curve != recorded,
        "unit_accuracies": bool(ours.unit_accuracies) and units != ours.unit_accuracies[0],
    }
    check = {
        "row": cell.row,
        "column": cell.column,
        "seed": ours.seeds[0],
        "hash": ours.hash,
        "seconds": round(time.perf_counter() - start, 1),
        "published_seconds": round(ours.seconds, 1),
        "machine": f"{pages.describe_machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "accuracy": {"published": ours.accuracies[0], "new": accuracy},
        "rounds_compared": len(curve),
        "units_compared": len(units),
        "agrees": not any(different.values()),
        "different": [name for name, differs in different.items() if differs],
        "digest": hash_accuracies(accuracy, curve, units),
        "bytes_up": _compare_bytes(cell, result, "up"),
        "bytes_down": _compare_bytes(cell, result, "down"),
    }
    if reference is not None:
        check["agrees_with_reference"] = check["digest"] == reference["digest"]
    return check


def hash_accuracies(accuracy: float, curve: list[list[Any]], units: Mapping[str, float]) -> str:
    """Hashes the final accuracy, the accuracy of all evaluated rounds, and those of all clients or groups."""
    return hashlib.sha256(json.dumps([accuracy, curve, units], sort_keys=True).encode()).hexdigest()[:16]


def _compare_bytes(cell: Cell, result: Result, direction: str) -> dict[str, int]:
    """Returns the published and the new total; a result without curves has only the mean over its seeds."""
    mean = cell.ours.mb_up if direction == "up" else cell.ours.mb_down
    published = cell.ours.curves[0][-1][direction] if cell.ours.curves else round(1e6 * mean)
    return {"published": published, "new": result.metrics[direction]}


def format_check(name: str, check: Mapping[str, Any]) -> str:
    """Formats a check as one line of a table."""
    traffic = [check[key]["new"] - check[key]["published"] for key in ("bytes_up", "bytes_down")]
    agrees = "yes" if check["agrees"] else "no: " + " ".join(check["different"])
    reference = {True: "yes", False: "NO", None: "–"}[check.get("agrees_with_reference")]
    cell = f"{check['row']}, {check['column']}"
    return f"{name} | {cell} | {check['seconds']} | {agrees} | {reference} | {traffic[0]:+d} | {traffic[1]:+d}"


def main() -> None:
    """Checks the results, cheapest first, and writes the pages again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results such as fedmk/table3 [default: all]")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--out", type=Path, help="[default: checks.json among the results]")
    parser.add_argument("--reference", type=Path, help="output of this check with another version of the code")
    args = parser.parse_args()
    out = args.out or args.results / "checks.json"
    done, references = load_checks(out), load_checks(args.reference) if args.reference else {}
    todo = []
    for path in sorted(args.results.glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        content = json.loads(path.read_text())
        index = min(range(len(content["cells"])), key=lambda i: content["cells"][i]["ours"]["seconds"])
        ours = content["cells"][index]["ours"]
        if (not args.names or name in args.names) and (name not in done or done[name]["hash"] != ours["hash"]):
            todo.append((ours["seconds"], name, content, index))
    print("result | cell | seconds | agrees with published | with reference | bytes up | bytes down")
    for _, name, content, index in sorted(todo, key=lambda item: item[:2]):
        done[name] = check_cell(content, index, references.get(name))
        out.write_text(json.dumps(dict(sorted(done.items())), indent=1, ensure_ascii=False) + "\n")
        print(format_check(name, done[name]), flush=True)
    render_all(args.results)


if __name__ == "__main__":
    main()
