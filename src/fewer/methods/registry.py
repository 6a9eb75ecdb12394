"""Methods by name."""

from __future__ import annotations

from fewer.errors import SettingError
from fewer.methods.method import Method
from fewer.registry import METHODS


def names() -> list[str]:
    """All installed methods."""
    return list(METHODS)


def names_with(capability: type[object]) -> list[str]:
    """All installed methods with this capability (`fewer.methods.capabilities`)."""
    return [name for name in names() if issubclass(find(name), capability)]


def find(name: str) -> type[Method]:
    """The method with this name, or the one in a user's file (`FILE.py:Name`)."""
    method = METHODS.find(name)
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise SettingError(f"'{name}' is not a method: it must be a subclass of fewer.Method")
    return method
