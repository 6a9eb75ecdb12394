"""Federated algorithms, one file each."""

from fewer.methods.base import Coordinator, Method, ModelState, Party, Scores, Sheet
from fewer.methods.registry import find, names

__all__ = ["Coordinator", "Method", "ModelState", "Party", "Scores", "Sheet", "find", "names"]
