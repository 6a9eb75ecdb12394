"""Federated algorithms, one file each."""

from fewer.methods.base import Client, ImageGrid, Method, Metrics, ModelState, PersonalMethod, Server
from fewer.methods.registry import find, names

__all__ = [
    "Client",
    "ImageGrid",
    "Method",
    "Metrics",
    "ModelState",
    "PersonalMethod",
    "Server",
    "find",
    "names",
]
