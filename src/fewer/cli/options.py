"""Command-line options from `Settings`: one list of names, types, defaults and texts for all commands."""

from __future__ import annotations

import inspect
import json
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from fewer.errors import SettingError, unknown
from fewer.runs.settings import Settings

Command = Callable[..., None]


def with_settings(*, without: tuple[str, ...] = (), **texts: str) -> Callable[[Command], Command]:
    """Adds an option for each setting; the command gets those that were given as the dict `given`.

    `texts` are for options that mean something else to the command than to others.
    """

    def decorate(command: Command) -> Command:
        names = [name for name in Settings.model_fields if name not in without]

        def wrapped(**values: Any) -> None:
            given = {name: value for name in names if (value := values.pop(name, None)) not in (None, [])}
            command(given=_merge(values.pop("settings"), given), **values)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        file = inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_FILE)
        extra = [_parameter(name, Settings.model_fields[name], texts.get(name)) for name in names]
        wrapped.__signature__ = inspect.Signature([*own, file, *extra])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, file, *extra]}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate


_FILE = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE.toml", help="Settings from a TOML file; flags go before it."),
]


def _parameter(name: str, field: FieldInfo, text: str | None) -> inspect.Parameter:
    """The option of one setting. What it takes is checked by `Settings`, so that every way in gives one answer."""
    plain, choices = _plain(field.annotation)
    help = text or (field.description or "").replace("\n", " ")
    if choices:
        help += f" ({' | '.join(choices)})"
    if field.default not in (None, {}) and "[default" not in help:
        help += f" [default: {field.default:g}]" if isinstance(field.default, float) else f" [default: {field.default}]"
    pairs = field.default == {}
    kind: Any = list[str] if pairs else plain
    metavar = "NAME=VALUE" if pairs else {int: "N", float: "X"}.get(plain, "NAME")
    flags = [
        f"--{name.removesuffix('s' if pairs else '').replace('_', '-')}",
        *(["-o"] if name == "method_options" else []),
    ]
    option = typer.Option(
        *flags,
        help=help.replace("[", "\\["),
        metavar=metavar,
        rich_help_panel=field.title,
        show_default=False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _plain(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """int, float, str or Path for a field's annotation, and its choices if there are any."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain(get_args(annotation)[0])
    if origin is Literal:
        return str, get_args(annotation)
    if origin in (Union, types.UnionType):
        return _plain(next(part for part in get_args(annotation) if part is not type(None)))
    return (annotation if annotation in (int, float, Path) else str), ()


def _merge(file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags over file; of settings that are name=value pairs, both together."""
    settings = _read(file) if file else {}
    both = {**settings, **given}
    for name in ("method_options", "model_options", "data_options"):
        if name in given:
            before = settings.get(name, {})
            if not isinstance(before, dict):
                raise SettingError(f"{name} = {before!r} in {file} (allowed: a table of names and values)")
            both[name] = before | assignments(given[name])
    return both


def _read(file: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file} is not TOML: {error}") from error
    settings = {name.replace("-", "_"): value for name, value in found.items()}
    for name in settings:
        if name not in Settings.model_fields:
            raise unknown(f"setting in {file}", name, Settings.model_fields)
    return settings


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Values by name from `name=value` texts."""
    return dict(_assignment(text) for text in texts)


def _assignment(text: str) -> tuple[str, Any]:
    """`rate=0.1` as a name and a number, truth value or text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise SettingError(f"-o {text}: not of the form name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
