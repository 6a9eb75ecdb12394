"""Speed, memory and scaling, as ratios within one run: `python -m benchmarks --help`."""

import os

for library in ("OMP", "MKL", "OPENBLAS"):  # one thread per process
    os.environ[f"{library}_NUM_THREADS"] = "1"
