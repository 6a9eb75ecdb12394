"""Methods by name: the package's own, those of installed plug-ins, and `FILE.py:Name`."""

from __future__ import annotations

from importlib.metadata import entry_points

from fewer.errors import SettingError, unknown
from fewer.methods.base import Method
from fewer.plugins import from_file

GROUP = "fewer.methods"


def names() -> list[str]:
    """All methods that are installed: plug-ins add theirs to the entry-point group `fewer.methods`."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find(name: str) -> type[Method]:
    """The method of this name."""
    if ":" in name:
        found = from_file(name)
    else:
        entries = [entry for entry in entry_points(group=GROUP) if entry.name == name]
        if not entries:
            raise unknown("method", name, [*names(), "FILE.py:Name"])
        found = entries[0].load()
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise SettingError(f"'{name}' is not a method (a subclass of fewer.Method)")
    return found
