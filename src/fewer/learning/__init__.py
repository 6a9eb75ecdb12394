"""Building blocks shared by methods: local training, averaging, evaluation, a feature generator."""

from fewer.learning.aggregate import weighted_mean
from fewer.learning.evaluate import Counts, evaluate_net
from fewer.learning.generator import Generator, diversity_loss
from fewer.learning.sgd import draw_batches, sgd

__all__ = ["Counts", "Generator", "diversity_loss", "draw_batches", "evaluate_net", "sgd", "weighted_mean"]
