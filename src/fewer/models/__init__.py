"""Nets, each with an encoder and a head, and the task that all clients share."""

from fewer.models.images import SmallCNN
from fewer.models.nets import net_factory
from fewer.models.preprocess import Preprocess
from fewer.models.split import EncoderHead, split_net
from fewer.models.task import Task
from fewer.models.weights import Weights, all_finite, get_weights, load_weights, norm_weight_names, split_buffers

__all__ = [
    "EncoderHead",
    "Preprocess",
    "SmallCNN",
    "Task",
    "Weights",
    "all_finite",
    "get_weights",
    "load_weights",
    "net_factory",
    "norm_weight_names",
    "split_buffers",
    "split_net",
]
