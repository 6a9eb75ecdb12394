"""Pieces that methods share: local training, averaging, scoring, a generator of features."""

from fewer.learning.aggregate import weighted_mean
from fewer.learning.generator import Generator, diversity
from fewer.learning.score import Counts, score
from fewer.learning.sgd import draw_batches, sgd

__all__ = ["Counts", "Generator", "diversity", "draw_batches", "score", "sgd", "weighted_mean"]
