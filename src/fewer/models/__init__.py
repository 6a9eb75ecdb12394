"""Nets, each an encoder to a feature vector and a head, and the task that a federation learns."""

from fewer.models.images import SmallCNN
from fewer.models.nets import NETS, find_net, maker
from fewer.models.split import Split, parts_of
from fewer.models.task import Task
from fewer.models.weights import Weights, finite, is_norm, load_weights, weights_of

__all__ = [
    "NETS",
    "SmallCNN",
    "Split",
    "Task",
    "Weights",
    "find_net",
    "finite",
    "is_norm",
    "load_weights",
    "maker",
    "parts_of",
    "weights_of",
]
