"""Nets, each an encoder to a feature vector and a head, and the task that a federation learns."""

from fewer.models.images import SmallCNN
from fewer.models.nets import maker
from fewer.models.split import Split, parts_of
from fewer.models.task import Task
from fewer.models.weights import Weights, finite, is_norm, load_weights, weights_of

__all__ = [
    "SmallCNN",
    "Split",
    "Task",
    "Weights",
    "finite",
    "is_norm",
    "load_weights",
    "maker",
    "parts_of",
    "weights_of",
]
