"""Loads objects from a user's own file, given as `path/to/file.py:Name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fewer.errors import SettingError


def needs_import(spec: str) -> bool:
    """True if `spec` names an object in a file that is not imported yet. Loading it would run that file."""
    file, colon, _ = spec.rpartition(":")
    path = Path(file).resolve()
    return bool(colon) and _module_path(sys.modules.get(path.stem)) != path


def load_from_file(spec: str) -> Any:
    """Imports FILE.py as a module and returns `Name` from it. Adds its directory to `sys.path`, as for a script."""
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise SettingError(f"no file '{file}' (in '{spec}'; expected: FILE.py:Name)")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that user files never shadow installed modules
    try:
        module = importlib.import_module(path.stem)
    except Exception as error:
        raise SettingError(f"cannot import '{file}': {type(error).__name__}: {error}") from error
    if (existing := _module_path(module)) != path:
        raise SettingError(f"'{file}' has the same name as another module ({existing}); rename it")
    if not hasattr(module, name):
        public = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == path.stem and key.isidentifier() and not key.startswith("_")
        ]
        raise SettingError(f"'{file}' has no '{name}' (it has: {', '.join(public)})")
    return getattr(module, name)


def _module_path(module: ModuleType | None) -> Path | None:
    """The file of a module; None for built-in modules."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
