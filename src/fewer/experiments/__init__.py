"""Experiments with many runs: comparisons, tuning, and recipes for papers' tables."""

from fewer.experiments.compare import Comparison, Row, compare
from fewer.experiments.tune import Trial, Tuning, tune, tune_experiment

__all__ = ["Comparison", "Row", "Trial", "Tuning", "compare", "tune", "tune_experiment"]
