"""Many runs: comparing methods, choosing settings."""

from fewer.experiments.compare import Comparison, Row, compare
from fewer.experiments.tune import Trial, tune

__all__ = ["Comparison", "Row", "Trial", "compare", "tune"]
