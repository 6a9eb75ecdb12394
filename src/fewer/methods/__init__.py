"""Federated algorithms, one file each."""

from fewer.methods.capabilities import ImageGrid
from fewer.methods.context import Client, Context, ContextFactory, Server
from fewer.methods.method import Method, ModelState, PersonalMethod, State
from fewer.methods.registry import find, names
from fewer.methods.scores import Metrics, Scores

__all__ = [
    "Client",
    "Context",
    "ContextFactory",
    "ImageGrid",
    "Method",
    "Metrics",
    "ModelState",
    "PersonalMethod",
    "Scores",
    "Server",
    "State",
    "find",
    "names",
]
