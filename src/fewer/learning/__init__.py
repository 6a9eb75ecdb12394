"""Pieces that methods share: local training, averaging, scoring."""

from fewer.learning.aggregate import weighted_mean
from fewer.learning.score import Counts, score
from fewer.learning.sgd import draw_batches, sgd

__all__ = ["Counts", "draw_batches", "score", "sgd", "weighted_mean"]
