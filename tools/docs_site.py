"""Hooks of the docs site: pages that are made of the code when the site is built, so that they say what it does.

A page with a comment `<!-- made of the code: NAME -->` has there what `MAKERS[NAME]` makes. Where the docs are read
without the site, the comment is not seen, and the text around it says which command tells the same.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from rich.text import Text

from fewer.cli.app import app
from fewer.experiments import recipes
from fewer.methods import Method, find, names
from fewer.runs.settings import Settings

MARK = re.compile(r"<!-- made of the code: (\w+) -->")
RESULTS, REST = "results/", "…"
"""Places in the navigation: of all results, and of pages that it does not name."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put all results into the navigation, by paper, and every page that it does not name."""
    root = Path(config.docs_dir)
    pages = sorted(page.relative_to(root).as_posix() for page in root.rglob("*.md"))
    papers = groupby((page for page in pages if page.startswith(RESULTS)), lambda page: page.split("/")[1])
    results = [{paper: list(some)} for paper, some in papers]
    rest = [page for page in pages if not page.startswith(RESULTS) and page not in set(_named(config.nav))]
    config.nav = _filled(config.nav, {RESULTS: results, REST: rest})
    return config


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(part)


def _filled(nav: Any, places: Mapping[str, list[Any]]) -> Any:
    """The navigation with what belongs into its places: a section of its own, or more entries of a section."""
    if isinstance(nav, dict):
        return {title: places[part] if part == RESULTS else _filled(part, places) for title, part in nav.items()}
    if isinstance(nav, list):
        return [one for part in nav for one in (places[REST] if part == REST else [_filled(part, places)])]
    return nav


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is made of the code."""
    return MARK.sub(lambda mark: "\n".join(MAKERS[mark[1]]()), markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """The index of the search as a script, which a page can load that was opened as a file."""
    index = Path(config.site_dir) / "search/search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"
    yield ""


# --- the command line -------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    """Every command with its arguments and options; the settings that many share, once."""
    shared = {option.name: option for option in _options(_command("run")) if option.name in Settings.model_fields}
    yield from ("## Settings of a run", "", "Commands that train take these settings. So do TOML files (`--settings`)")
    yield "and, with underscores, `fewer.run`."
    for group in dict.fromkeys(field.title for field in Settings.model_fields.values()):
        yield from ("", f"### {group}")
        yield from _table(
            ("option", "meaning"), [_told(one) for one in shared.values() if one.rich_help_panel == group]
        )
    everything = list(_all(_command()))
    for panel in dict.fromkeys(panel for panel, _, _ in everything):
        yield from ("", f"## {panel}")
        for _, name, command in (one for one in everything if one[0] == panel):
            yield from ("", f"### {name}", *_prose(command.help or ""), "", "```text")
            yield " ".join([name, *command.collect_usage_pieces(click.Context(command))])
            yield "```"
            same = [one.name for one in _options(command) if _same(one, shared)]
            own = [one for one in _options(command) if not _same(one, shared) and not one.hidden]
            if own:
                yield from _table(("option", "meaning"), [_told(one) for one in own])
            if same:
                without = [f"`{one.opts[0]}`" for name, one in shared.items() if name not in same]
                but = f", except {', '.join(without)}" if without else ""
                yield f"It also takes the [settings of a run](#settings-of-a-run){but}."


def _command(name: str | None = None) -> click.Command:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    return group if name is None else group.commands[name]


def _all(group: click.Command, before: str = "fewer", panel: str = "") -> Iterator[tuple[str, str, click.Command]]:
    """Panel, whole name and command, of commands and of those below them."""
    for name, command in getattr(group, "commands", {}).items():
        where = panel or command.rich_help_panel
        if isinstance(command, click.Group):
            yield from _all(command, f"{before} {name}", where)
        else:
            yield where, f"{before} {name}", command


def _options(command: click.Command) -> list[Any]:
    return [one for one in command.params if isinstance(one, click.Option)]


def _same(one: Any, shared: Mapping[str, Any]) -> bool:
    return one.name in shared and one.help == shared[one.name].help


def _told(one: Any) -> tuple[str, str]:
    """An option, and what it is for."""
    text = Text.from_markup(one.help or "").plain
    if one.show_default and one.default not in (None, False, True, ()) and "[default" not in text:
        text += f" [default: {one.default}]"
    flags = "/".join([*one.opts, *one.secondary_opts])
    return f"`{flags}`" if one.is_flag else f"`{flags} {one.metavar}`", text


def _prose(help: str) -> Iterator[str]:
    """A command's text; what is dim in it are examples."""
    for part in inspect.cleandoc(help).split("\n\n"):
        if "[dim]" in part:
            yield from ("", "```text", Text.from_markup(part).plain, "```")
        else:
            yield from ("", Text.from_markup(part).plain)


# --- methods and recipes ----------------------------------------------------------------------------------------


def _methods() -> Iterator[str]:
    """Every method: what it does, its options, and what its file says about the paper."""
    yield from _table(("method", "class", "what it does"), [_overview(name) for name in names()])
    yield from ("Every method has these options:", *_settings(Method, Method.model_fields))
    for name in names():
        kind = find(name)
        yield from ("", f"## {name}", "", inspect.cleandoc(kind.__doc__ or ""))
        own = [key for key in kind.model_fields if _own(kind, key)]
        yield from _settings(kind, own)
        if kind.tunable:
            search_space = "; ".join(
                f"`{key}` from {', '.join(f'{v:g}' for v in grid)}" for key, grid in kind.tunable.items()
            )
            yield f"`--tune` chooses {search_space}."
        yield from ("", f'??? note "Paper and departures (`{kind.__module__}`)"')
        yield from (f"    {line}" for line in _lists_apart(inspect.getdoc(sys.modules[kind.__module__]) or ""))


def _lists_apart(text: str) -> Iterator[str]:
    """The lines of a docstring, with the empty line that the site needs before a list."""
    before, in_list = "", False
    for line in text.splitlines():
        if line.startswith("- "):
            if before and not in_list:
                yield ""
            in_list = True
        yield line
        before, in_list = line, in_list and bool(line)


def _overview(name: str) -> tuple[str, str, str]:
    """A method's name with a link, its class, and the first sentence of its docstring."""
    kind = find(name)
    return f"[`{name}`](#{name})", f"`fewer.{kind.__name__}`", inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def _own(kind: type[Method], key: str) -> bool:
    """Whether a method has this setting, or another default of it, beyond what every method has."""
    return key not in Method.model_fields or kind.model_fields[key].default != Method.model_fields[key].default


def _settings(kind: Any, keys: Iterable[str]) -> Iterator[str]:
    schema, fields = kind.model_json_schema()["properties"], kind.model_fields
    rows = [(f"`{key}`", _kind(schema[key]), _default(schema[key]), fields[key].description) for key in keys]
    yield from _table(("option", "values", "default", "meaning"), rows) if rows else ()


def _default(schema: Mapping[str, Any]) -> str:
    return f"`{json.dumps(schema['default']).strip(chr(34))}`" if "default" in schema else "required"


TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true, false",
    "null": "null",
    "string": "text",
    "array": "list",
    "object": "names and values",
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _kind(schema: Mapping[str, Any]) -> str:
    """What a setting takes: its choices, or its type with its bounds."""
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    bounds = " and ".join(f"{word} {schema[key]:g}" for key, word in BOUNDS.items() if key in schema)
    return TYPES[schema["type"]] + (f" {bounds}" if bounds else "")


def _recipes() -> Iterator[str]:
    """Every recipe: what it runs, at which size, and where its result is."""
    results = Path(__file__).parents[1] / "docs/results"
    for name in recipes.list_recipes():
        plan = recipes.load_recipe(name)
        yield from ("", f"## {name}", "", f"**{plan.title}.** {plan.about.strip()}", "", f"*{plan.paper}.*")
        rows, columns = ("; ".join(one.name for one in some) for some in (plan.row, plan.column))
        seeds = "one seed" if plan.seeds == 1 else f"{plan.seeds} seeds"
        yield from ("", f"Rows: {rows}. Columns: {columns}; {seeds}.", "", "```text")
        yield from (f"fewer reproduce {name}", "```", "")
        if done := sorted(results.glob(f"{name}*.md")):
            links = [f"[{page.stem}](../{page.relative_to(results.parent).as_posix()})" for page in done]
            yield f"Results: {', '.join(links)}."


MAKERS = {"commands": _commands, "methods": _methods, "recipes": _recipes}
