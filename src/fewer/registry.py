"""Registries: methods, models, sources of models, data formats, codecs, trackers and report views by name.

A built-in registers where it is defined:

    @METHODS.register("fedavg")
    class FedAvg(Method): ...

A registry reads the names of built-ins from the source of their package, so listing them imports nothing. Other
packages add theirs through entry points in the group of that registry (`fewer.methods`, `fewer.models`, …). Users refer
to an object in their own file as `FILE.py:Name`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fewer.errors import SettingError, unknown_name
from fewer.plugins import load_from_file

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_ROOT = Path(__file__).parent


class Builtin(NamedTuple):
    """The module and the name of a built-in."""

    module: str
    attribute: str


class Registry(Mapping[str, Any]):
    """Objects by name. A lookup imports the object."""

    def __init__(self, variable: str, kind: str, package: str, group: str) -> None:
        self.variable, self.kind, self.package, self.group = variable, kind, package, group
        self._registered: dict[str, Any] = {}
        """What users registered in this process."""

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: registers a class or function under `name`, and sets its attribute `name`."""

        def decorate(registered: T) -> T:
            registered.name = name  # type: ignore[attr-defined]
            module: str = registered.__module__
            if not module.startswith(f"{self.package}."):
                if name in self.builtins:
                    raise SettingError(f"{self.kind} '{name}' exists already: register yours under another name")
                self._registered[name] = registered
            return registered

        return decorate

    @cached_property
    def builtins(self) -> dict[str, Builtin]:
        """The built-ins by name, read from the source of the package."""
        pattern = re.compile(rf'^@{self.variable}\.register\("([^"]+)"\)\n(?:@.*\n)*(?:class|def) (\w+)', re.MULTILINE)
        folder = _ROOT.joinpath(*self.package.split(".")[1:])
        return {
            name: Builtin(f"{self.package}.{file.stem}", attribute)
            for file in sorted(folder.glob("*.py"))
            for name, attribute in pattern.findall(file.read_text(encoding="utf-8"))
        }

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # slow to import, and rarely needed

        return {entry.name: entry for entry in entry_points(group=self.group)}

    def __getitem__(self, name: str) -> Any:
        if name in self.builtins:
            module, attribute = self.builtins[name]
            return getattr(import_module(module), attribute)
        return self._registered[name] if name in self._registered else self._plugins[name].load()

    def __contains__(self, name: object) -> bool:
        return name in self.builtins or name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names()))

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> set[str]:
        return {*self.builtins, *self._registered, *self._plugins}

    def is_installed(self, name: str) -> bool:
        """True if other processes find this name, too."""
        return name in self.builtins or name in self._plugins

    def find(self, name: str) -> Any:
        """The object with this name, or the object in a user's file: `FILE.py:Name`."""
        if ":" in name:
            return load_from_file(name)
        if name.endswith(".py"):
            raise SettingError(f"{self.kind} '{name}' is a file: add the name of an object in it, {name}:Name")
        if name not in self:
            raise unknown_name(self.kind, name, [*self, "FILE.py:Name"])
        return self[name]


METHODS = Registry("METHODS", "method", "fewer.methods", "fewer.methods")
MODELS = Registry("MODELS", "model", "fewer.models", "fewer.models")
MODEL_SOURCES = Registry("MODEL_SOURCES", "source of models", "fewer.models", "fewer.model_sources")
"""Models of other libraries. `SOURCE:NAME` names one; the source is called with the name first."""
FORMATS = Registry("FORMATS", "data format", "fewer.data.formats", "fewer.formats")
CODECS = Registry("CODECS", "codec", "fewer.wire", "fewer.codecs")
TRACKERS = Registry("TRACKERS", "tracker", "fewer.runs.trackers", "fewer.trackers")
VIEWS = Registry("VIEWS", "view", "fewer.report", "fewer.views")


def find_model(name: str) -> Callable[..., Any]:
    """The model with this name: a registered one, one of another library (`hf:NAME`), or one in a user's file."""
    source, colon, rest = name.partition(":")
    if not colon or source not in MODEL_SOURCES:
        if name in MODEL_SOURCES:
            raise SettingError(f"model '{name}' needs a name: {name}:NAME")
        found: Callable[..., Any] = MODELS.find(name)
        return found
    if not rest:
        raise SettingError(f"model '{name}' needs a name: {source}:NAME")
    bound = partial(MODEL_SOURCES[source], rest)
    bound.__name__ = name  # type: ignore[attr-defined]
    return bound
