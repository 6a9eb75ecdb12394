"""Hooks of the docs site. They generate reference pages from the code when the site is built.

A comment `<!-- generated: NAME -->` in a page is replaced by the output of `GENERATORS[NAME]`. Outside the site, the
comment is invisible, and the text around it names the command that prints the same.
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

MARKER = re.compile(r"<!-- generated: (\w+) -->")
RESULTS, REST = "results/", "…"
"""Placeholders in the navigation: all results, and all pages that it does not list."""
RESULTS_FIRST = [RESULTS + "index.md", RESULTS + "browse.md"]
"""The first pages of the results."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds all results, by paper, and every unlisted page to the navigation."""
    root = Path(config.docs_dir)
    pages = sorted(page.relative_to(root).as_posix() for page in root.rglob("*.md"))
    by_paper = [page for page in pages if page.startswith(RESULTS) and page not in RESULTS_FIRST]
    papers = groupby(by_paper, lambda page: page.split("/")[1])
    results = [*RESULTS_FIRST, *({paper: list(paper_pages)} for paper, paper_pages in papers)]
    rest = [page for page in pages if not page.startswith(RESULTS) and page not in set(_walk_pages(config.nav))]
    config.nav = _fill_placeholders(config.nav, {RESULTS: results, REST: rest})
    return config


def _walk_pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _walk_pages(part)


def _fill_placeholders(nav: Any, entries: Mapping[str, list[Any]]) -> Any:
    """Replaces the placeholders in the navigation. `RESULTS` is a whole section, `REST` an entry of a section."""
    if isinstance(nav, dict):
        return {
            title: entries[part] if part == RESULTS else _fill_placeholders(part, entries)
            for title, part in nav.items()
        }
    if isinstance(nav, list):
        return [
            item for part in nav for item in (entries[REST] if part == REST else [_fill_placeholders(part, entries)])
        ]
    return nav


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the marked comments of a page by generated text."""
    return MARKER.sub(lambda marker: "\n".join(GENERATORS[marker[1]]()), markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Also writes the search index as a script, which pages opened as files can load."""
    index = Path(config.site_dir) / "search/search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def _render_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"
    yield ""


# --- the command line -------------------------------------------------------------------------------------------


def _render_commands() -> Iterator[str]:
    """Lists every command with its arguments and options; lists the shared settings once."""
    run = _get_command("run")
    shared = {option.name: option for option in _list_options(run) if option.name in Settings.model_fields}
    yield from ("## Settings of a run", "", "Commands that train accept these settings.")
    yield "So do TOML files (`--settings`) and, with underscores, `fewer.run`."
    for group in dict.fromkeys(field.title for field in Settings.model_fields.values()):
        yield from ("", f"### {group}")
        yield from _render_table(
            ("option", "meaning"),
            [_describe_option(option) for option in shared.values() if option.rich_help_panel == group],
        )
    commands = list(_walk_commands(_get_command()))
    for panel in dict.fromkeys(panel for panel, _, _ in commands):
        yield from ("", f"## {panel}")
        for _, name, command in (entry for entry in commands if entry[0] == panel):
            yield from ("", f"### {name}", *_render_help(command.help or ""), "", "```text")
            yield " ".join([name, *command.collect_usage_pieces(click.Context(command))])
            yield "```"
            options = _list_options(command)
            accepted = [option.name for option in options if _is_shared(option, shared)]
            specific = [option for option in options if not _is_shared(option, shared) and not option.hidden]
            if specific:
                yield from _render_table(("option", "meaning"), [_describe_option(option) for option in specific])
            if accepted:
                missing = [f"`{option.opts[0]}`" for name, option in shared.items() if name not in accepted]
                exceptions = f", except {', '.join(missing)}" if missing else ""
                yield f"It also accepts the [settings of a run](#settings-of-a-run){exceptions}."


def _get_command(name: str | None = None) -> click.Command:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    return group if name is None else group.commands[name]


def _walk_commands(
    group: click.Command, prefix: str = "fewer", panel: str = ""
) -> Iterator[tuple[str, str, click.Command]]:
    """Yields panel, full name and command, for all commands and subcommands."""
    for name, command in getattr(group, "commands", {}).items():
        command_panel = panel or command.rich_help_panel
        if isinstance(command, click.Group):
            yield from _walk_commands(command, f"{prefix} {name}", command_panel)
        else:
            yield command_panel, f"{prefix} {name}", command


def _list_options(command: click.Command) -> list[Any]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _is_shared(option: Any, shared: Mapping[str, Any]) -> bool:
    return option.name in shared and option.help == shared[option.name].help


def _describe_option(option: Any) -> tuple[str, str]:
    """Returns the flags of an option and their meaning."""
    text = Text.from_markup(option.help or "").plain
    if option.show_default and option.default not in (None, False, True, ()) and "[default" not in text:
        text += f" [default: {option.default}]"
    flags = "/".join([*option.opts, *option.secondary_opts])
    return f"`{flags}`" if option.is_flag else f"`{flags} {option.metavar}`", text


def _render_help(help: str) -> Iterator[str]:
    """Renders a command's help; its dim parts are examples."""
    for part in inspect.cleandoc(help).split("\n\n"):
        if "[dim]" in part:
            yield from ("", "```text", Text.from_markup(part).plain, "```")
        else:
            yield from ("", Text.from_markup(part).plain)


# --- methods and recipes ----------------------------------------------------------------------------------------


def _render_methods() -> Iterator[str]:
    """Lists every method: what it does, its options, and what its file says about the paper."""
    yield from _render_table(("method", "class", "what it does"), [_summarize_method(name) for name in names()])
    yield from ("Every method has these options:", *_render_options(Method, Method.model_fields))
    for name in names():
        method = find(name)
        yield from ("", f"## {name}", "", inspect.cleandoc(method.__doc__ or ""))
        options = [key for key in method.model_fields if _is_specific_option(method, key)]
        yield from _render_options(method, options)
        if method.tunable:
            search_space = "; ".join(
                f"`{key}` from {', '.join(f'{v:g}' for v in grid)}" for key, grid in method.tunable.items()
            )
            yield f"`--tune` chooses {search_space}."
        yield from ("", f'??? note "Paper and departures (`{method.__module__}`)"')
        yield from (f"    {line}" for line in _separate_lists(inspect.getdoc(sys.modules[method.__module__]) or ""))


def _separate_lists(text: str) -> Iterator[str]:
    """Yields the lines of a docstring, with the empty line that the site needs before a list."""
    before, in_list = "", False
    for line in text.splitlines():
        if line.startswith("- "):
            if before and not in_list:
                yield ""
            in_list = True
        yield line
        before, in_list = line, in_list and bool(line)


def _summarize_method(name: str) -> tuple[str, str, str]:
    """Returns a method's name with a link, its class, and the first sentence of its docstring."""
    method = find(name)
    return f"[`{name}`](#{name})", f"`fewer.{method.__name__}`", inspect.cleandoc(method.__doc__ or "").splitlines()[0]


def _is_specific_option(method: type[Method], key: str) -> bool:
    """Returns whether a method adds this option or changes its default."""
    return key not in Method.model_fields or method.model_fields[key].default != Method.model_fields[key].default


def _render_options(method: Any, keys: Iterable[str]) -> Iterator[str]:
    schema, fields = method.model_json_schema()["properties"], method.model_fields
    rows = [
        (f"`{key}`", _describe_type(schema[key]), _describe_default(schema[key]), fields[key].description)
        for key in keys
    ]
    yield from _render_table(("option", "values", "default", "meaning"), rows) if rows else ()


def _describe_default(schema: Mapping[str, Any]) -> str:
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


def _describe_type(schema: Mapping[str, Any]) -> str:
    """Describes the values of an option: its choices, or its type with its bounds."""
    if "anyOf" in schema:
        return " or ".join(map(_describe_type, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    bounds = " and ".join(f"{word} {schema[key]:g}" for key, word in BOUNDS.items() if key in schema)
    return TYPES[schema["type"]] + (f" {bounds}" if bounds else "")


def _render_recipes() -> Iterator[str]:
    """Lists every recipe: what it runs, at which size, and where its result is."""
    results = Path(__file__).parents[1] / "docs/results"
    for name in recipes.list_recipes():
        plan = recipes.load_recipe(name)
        yield from ("", f"## {name}", "", f"**{plan.title}.** {plan.about.strip()}", "", f"*{plan.paper}.*")
        rows, columns = ("; ".join(item.name for item in items) for items in (plan.row, plan.column))
        seeds = "one seed" if plan.seeds == 1 else f"{plan.seeds} seeds"
        yield from ("", f"Rows: {rows}. Columns: {columns}; {seeds}.", "", "```text")
        yield from (f"fewer reproduce {name}", "```", "")
        if pages := sorted(results.glob(f"{name}*.md")):
            links = [f"[{page.stem}](../{page.relative_to(results.parent).as_posix()})" for page in pages]
            yield f"Results: {', '.join(links)}."


GENERATORS = {"commands": _render_commands, "methods": _render_methods, "recipes": _render_recipes}
