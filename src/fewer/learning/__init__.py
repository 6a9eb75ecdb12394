"""Building blocks shared by methods: local training, averaging, evaluation, a feature generator."""

from fewer.learning.aggregate import weighted_mean
from fewer.learning.evaluate import Counts, Evaluation, evaluate_net, measure_net
from fewer.learning.generator import Generator, diversity_loss
from fewer.learning.sgd import LocalOptimizer, draw_batches, sgd, task_loss

__all__ = [
    "Counts",
    "Evaluation",
    "Generator",
    "LocalOptimizer",
    "diversity_loss",
    "draw_batches",
    "evaluate_net",
    "measure_net",
    "sgd",
    "task_loss",
    "weighted_mean",
]
