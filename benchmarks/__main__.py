"""The command `python -m benchmarks [NAME...]`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from benchmarks.measure import Measurement
from benchmarks.suite import SUITE


def main() -> None:
    """Runs the named benchmarks, or all, and prints their measurements."""
    names = "\n".join(f"  {name:<12} {run.__doc__}" for name, run in SUITE.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed, memory and scaling: ratios within one run, medians of alternating repetitions.",
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run [default: all]")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        default=os.environ.get("FEWER_DATA"),
        help="directory that contains mnist/ [default: $FEWER_DATA, or synthetic images of the same shape]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to FILE")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in SUITE]:
        parser.error(f"unknown benchmark '{unknown[0]}' (allowed: {', '.join(SUITE)})")
    load = os.getloadavg()[0]
    images = "MNIST" if args.data_dir else "synthetic images"
    print(f"{images}, {os.cpu_count()} cores with a load of {load:.1f}, one torch thread per process")
    results: dict[str, list[Measurement]] = {}
    for name in args.names or SUITE:
        print(name, flush=True)
        results[name] = SUITE[name](args.data_dir)
        for measurement in results[name]:
            print(measurement.format_line(), flush=True)
    goals = [result.met for measurements in results.values() for result in measurements if result.met is not None]
    print(f"{sum(goals)} of {len(goals)} goals met")
    if args.json:
        metrics = {name: [result.to_json() for result in measurements] for name, measurements in results.items()}
        content = {"images": images, "cores": os.cpu_count(), "load": load, "metrics": metrics}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
