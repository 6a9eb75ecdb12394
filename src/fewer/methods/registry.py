"""Methods by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fewer.errors import SettingError, nearest_name
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


def find_option(name: str, settings: Collection[str], methods: Iterable[str] = ()) -> str | None:
    """The option of a method that an unknown setting probably means; None if one of the settings is nearer.

    A misspelled name is one of these methods, if there are any, and else of any method.
    """
    every = options_of(names())
    if name in every:
        return name
    nearest = nearest_name(name, [*settings, *sorted(options_of(methods) or every)])
    return nearest if nearest in every and nearest not in settings else None


def options_of(methods: Iterable[str]) -> set[str]:
    """The names of all options of these methods."""
    return {option for method in methods for option in find(method).model_fields}
