"""Methods by name."""

from __future__ import annotations

from fewer.errors import SettingError
from fewer.methods.base import Method
from fewer.registry import METHODS


def names() -> list[str]:
    """All installed methods."""
    return list(METHODS)


def find(name: str) -> type[Method]:
    """The method with this name, or the one in a user's file (`FILE.py:Name`)."""
    method = METHODS.find(name)
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise SettingError(f"'{name}' is not a method: it must be a subclass of fewer.Method")
    return method
