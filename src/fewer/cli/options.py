"""Command-line options generated from `Settings`: one list of names, types, defaults and texts for all commands."""

from __future__ import annotations

import inspect
import json
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import typer
from typer import Option
from typer.core import TyperCommand
from typer.main import get_click_param
from typer.models import ParamMeta

from fewer.cli.printing import Output, report_errors
from fewer.errors import SettingError, unknown_name
from fewer.registry import METHODS, MODELS

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Command = Callable[..., None]


def complete_methods(incomplete: str) -> list[str]:
    """Method names for shell completion."""
    return [name for name in METHODS if name.startswith(incomplete)]


def complete_models(incomplete: str) -> list[str]:
    """Model names for shell completion."""
    return [name for name in MODELS if name.startswith(incomplete)]


class SettingsCommand(TyperCommand):
    """A command that makes its options for settings on first use, so that `fewer --help` loads no settings."""

    @property
    def params(self) -> list[click.Parameter]:
        """Arguments and options."""
        if make_options := vars(self.callback).pop(_MAKE_OPTIONS, None):
            self._params += make_options()
        return self._params

    @params.setter
    def params(self, params: list[click.Parameter]) -> None:
        self._params = params

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments. For an unknown option that is nearest to one of a method, the error names -o."""
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            if (option := self._find_method_option(error.option_name, args)) is not None:
                raise click.UsageError(_explain_method_option(error.option_name, option, args), ctx) from error
            raise

    def _find_method_option(self, flag: str, args: Sequence[str]) -> str | None:
        """The option of a method that an unknown flag probably means, if this command takes any."""
        from fewer.methods.registry import find_option

        settings = [str(parameter.name) for parameter in self.params]
        if "method_options" not in settings:
            return None
        name = flag.removeprefix("--").replace("-", "_")
        return find_option(name, settings, [method for method in METHODS if method in args])


def _explain_method_option(flag: str, option: str, args: Sequence[str]) -> str:
    """Says how to write an option of a method that was given as a flag, perhaps misspelled."""
    value = next((text.partition("=")[2] for text in args if text.startswith(f"{flag}=")), "")
    if flag in args[:-1] and not args[args.index(flag) + 1].startswith("--"):
        value = args[args.index(flag) + 1]
    written = "--" + option.replace("_", "-")
    known = f"{flag} is" if flag == written else f"No such option {flag}. {written} is"
    return (
        f"{known} an option of a method: write -o {option}={value or 'VALUE'} (fewer methods NAME lists its options)."
    )


class App(typer.Typer):
    """Commands that report errors as one line, some of them `with_settings`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(suggest_commands=not hasattr(click.exceptions, "NoSuchCommand"), **options)  # else click does

    def command(self, name: str | None = None, **options: Any) -> Callable[[Command], Command]:  # type: ignore[override]
        """Adds a command."""
        add = super().command(name, cls=SettingsCommand, **options)
        return lambda command: add(report_errors(command))


_MAKE_OPTIONS = "make_options"
"""The attribute of a command that makes its options for settings."""


def with_settings(
    *, without: tuple[str, ...] = (), group: str | None = None, **texts: str
) -> Callable[[Command], Command]:
    """Adds an option for each setting. The command receives the given ones as the dict `given`.

    A command with a parameter `output` also gets the options of `Output`. With `group`, only settings of this group and
    the seed have an option. `texts` replace the help texts of options that have another meaning in this command.
    """

    def list_names() -> list[str]:
        fields = _settings_fields()
        in_group = [name for name in fields if group in (None, fields[name].title) or name == "seed"]
        return [name for name in in_group if name not in without]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        outputs = _OUTPUT_TYPES if "output" in own else {}

        def wrapped(**values: Any) -> None:
            given = {name: value for name in list_names() if (value := values.pop(name, None)) not in (None, ())}
            if outputs:
                values["output"] = Output(**{name: values.pop(name) for name in outputs})
            command(given=_merge_settings(values.pop("settings"), given), **values)

        parameters = [
            *(parameter for name, parameter in own.items() if name not in ("given", "output")),
            *(_keyword(name, Output._field_defaults[name], kind) for name, kind in outputs.items()),
            _keyword("settings", None, _SETTINGS_FILE),
        ]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        setattr(wrapped, _MAKE_OPTIONS, lambda: [_make_option(name, texts.get(name)) for name in list_names()])
        return wrapped

    return decorate


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_OUTPUT_TYPES = get_type_hints(Output, include_extras=True)
_SETTINGS_FILE = Annotated[
    Path | None, Option("--settings", metavar="FILE.toml", help="Read settings from a TOML file; flags override it.")
]


def _settings_fields() -> dict[str, FieldInfo]:
    from fewer.runs.settings import Settings

    return Settings.model_fields


def _make_option(name: str, text: str | None) -> click.Parameter:
    """Makes the option of one setting. `Settings` validates the value, so errors are the same everywhere."""
    field = _settings_fields()[name]
    plain, choices = _plain_type(field.annotation)
    help = text or (field.description or "").replace("\n", " ")
    if choices:
        help += f" ({' | '.join(choices)})"
    if plain is not bool and field.default not in (None, {}) and "[default" not in help:
        help += f" [default: {field.default:g}]" if isinstance(field.default, float) else f" [default: {field.default}]"
    pairs = field.default == {}
    flag = f"--{name.replace('_', '-')}"
    flags = [flag.removesuffix("s") if pairs else flag, *(["-o"] if name == "method_options" else [])]
    kind: Any = list[str] if pairs else plain
    metavar = "NAME=VALUE" if pairs else {int: "N", float: "X", Path: "DIR", bool: None}.get(plain, "NAME")
    option = Option(
        None,
        *flags,
        help=help.replace("[", "\\["),
        metavar=metavar,
        rich_help_panel=field.title,
        show_default=False,
        autocompletion=complete_models if name == "model" else None,
    )
    return get_click_param(ParamMeta(name=name, default=option, annotation=kind | None))[0]


def _plain_type(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """Returns int, float, bool, str or Path for a field's annotation, and its choices if it has any."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain_type(get_args(annotation)[0])
    if origin is Literal:
        return str, get_args(annotation)
    if origin in (Union, types.UnionType):
        return _plain_type(next(part for part in get_args(annotation) if part is not type(None)))
    return (annotation if annotation in (int, float, bool, Path) else str), ()


def _merge_settings(file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merges flags and a file: flags override the file, and name=value options are combined."""
    settings = _read_settings(file) if file else {}
    merged = {**settings, **given}
    for name in ("method_options", "model_options", "data_options"):
        if name in given:
            options = settings.get(name, {})
            if not isinstance(options, dict):
                raise SettingError(f"{name} = {options!r} in {file} (allowed: a table of names and values)")
            merged[name] = options | parse_assignments(given[name])
    return merged


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file} is not TOML: {error}") from error
    settings = {name.replace("-", "_"): value for name, value in content.items()}
    for name in settings:
        if name not in _settings_fields():
            raise unknown_name(f"setting in {file}", name, _settings_fields())
    if not isinstance(settings.get("method", ""), str):
        raise SettingError(f"method in {file} must be a name; its options belong to the table [method_options]")
    return settings


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Parses texts such as `lr=0.1` into names and their values: numbers, booleans, lists or texts."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SettingError(f"option '{text}' is not of the form name=value")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
