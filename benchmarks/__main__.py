"""`python -m benchmarks [NAME...]`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from benchmarks.measure import Figure
from benchmarks.suite import SUITE


def main() -> None:
    """Run the named benchmarks, or all, and print their figures."""
    names = "\n".join(f"  {name:<12} {run.__doc__}" for name, run in SUITE.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed, memory and scaling: ratios within one run, medians of repetitions taken in turn.",
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run [default: all]")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        default=os.environ.get("FEWER_DATA"),
        help="directory with mnist/ in it [default: $FEWER_DATA, or else synthetic images of the same shape]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    args = parser.parse_args()
    if odd := [name for name in args.names if name not in SUITE]:
        parser.error(f"no benchmark '{odd[0]}' (allowed: {', '.join(SUITE)})")
    load = os.getloadavg()[0]
    images = "MNIST" if args.data_dir else "synthetic images"
    print(f"{images}, {os.cpu_count()} cores with a load of {load:.1f}, one torch thread a process")
    found: dict[str, list[Figure]] = {}
    for name in args.names or SUITE:
        print(name, flush=True)
        found[name] = SUITE[name](args.data_dir)
        for figure in found[name]:
            print(figure.line(), flush=True)
    goals = [figure.met for figures in found.values() for figure in figures if figure.met is not None]
    print(f"{sum(goals)} of {len(goals)} goals met")
    if args.json:
        rows = {name: [figure.row() for figure in figures] for name, figures in found.items()}
        content = {"images": images, "cores": os.cpu_count(), "load": load, "figures": rows}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
