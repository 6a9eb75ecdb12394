"""Nets, each an encoder to a feature vector and a head, and the task that a federation learns."""

from fewer.models.nets import NETS, SmallCNN, build
from fewer.models.task import Task
from fewer.models.weights import Weights, is_norm, load_weights, weights_of

__all__ = ["NETS", "SmallCNN", "Task", "Weights", "build", "is_norm", "load_weights", "weights_of"]
