"""Federated algorithms, one file each."""

from fewer.methods.capabilities import ImageGrid
from fewer.methods.context import Client, Context, ContextFactory, Server
from fewer.methods.method import Group, Method, ModelState, Needs, PersonalMethod, SearchSpace, State, StateT
from fewer.methods.registry import find, names
from fewer.methods.scores import MAX_SAMPLES, Metrics, Scores

__all__ = [
    "MAX_SAMPLES",
    "Client",
    "Context",
    "ContextFactory",
    "Group",
    "ImageGrid",
    "Method",
    "Metrics",
    "ModelState",
    "Needs",
    "PersonalMethod",
    "Scores",
    "SearchSpace",
    "Server",
    "State",
    "StateT",
    "find",
    "names",
]
