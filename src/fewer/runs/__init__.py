"""A run: one training, recorded in a directory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewer.runs.callbacks import Callback as Callback
    from fewer.runs.callbacks import EarlyStopping as EarlyStopping
    from fewer.runs.callbacks import Run as Run
    from fewer.runs.directory import RunDirectory as RunDirectory
    from fewer.runs.engine import resume as resume
    from fewer.runs.engine import run as run
    from fewer.runs.result import Result as Result
    from fewer.runs.result import open_run as open_run
    from fewer.runs.settings import Settings as Settings

_MODULES = {
    "Callback": "callbacks",
    "EarlyStopping": "callbacks",
    "Run": "callbacks",
    "RunDirectory": "directory",
    "resume": "engine",
    "run": "engine",
    "Result": "result",
    "open_run": "result",
    "Settings": "settings",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:  # importing the settings must not load torch
    if name not in _MODULES:
        raise AttributeError(f"module 'fewer.runs' has no attribute '{name}'")
    return getattr(import_module(f"fewer.runs.{_MODULES[name]}"), name)
