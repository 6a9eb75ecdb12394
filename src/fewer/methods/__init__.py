"""Federated algorithms, one file each."""

from fewer.methods.base import Client, ImageGrid, Method, ModelState, PersonalMethod, Scores, Server
from fewer.methods.registry import find, names

__all__ = [
    "Client",
    "ImageGrid",
    "Method",
    "ModelState",
    "PersonalMethod",
    "Scores",
    "Server",
    "find",
    "names",
]
