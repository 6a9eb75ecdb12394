"""Objects from a user's own file: `path/to/file.py:Name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fewer.errors import SettingError


def in_file(where: str) -> bool:
    """Whether this names something in a file that this process has not imported: taking it would run that file."""
    file, colon, _ = where.rpartition(":")
    path = Path(file).resolve()
    return bool(colon) and _home(sys.modules.get(path.stem)) != path


def from_file(where: str) -> Any:
    """Import the file as a module, its directory on the path as for a script, and take `Name` from it."""
    file, _, name = where.rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise SettingError(f"no file '{file}' (in '{where}'; allowed: FILE.py:Name)")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: a file of theirs must not take the place of another module
    try:
        module = importlib.import_module(path.stem)
    except Exception as error:
        raise SettingError(f"'{file}' cannot be imported: {type(error).__name__}: {error}") from error
    if _home(module) != path:
        raise SettingError(f"'{file}' has the name of another module ({_home(module)}): rename it")
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if isinstance(value, type) and not key.startswith("_")]
        raise SettingError(f"'{file}' has no '{name}' (it has: {', '.join(public)})")
    return getattr(module, name)


def _home(module: ModuleType | None) -> Path | None:
    """The file of a module; None where it has none, as those that are part of Python."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
