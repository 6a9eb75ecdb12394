"""What commands share: telling the user of mistakes, and printing figures."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fewer.errors import FewerError


def _writable(file: Path | None) -> Path | None:
    """Say before a long run, not after it, that its figures have nowhere to go."""
    if file is not None and str(file) != "-" and not file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {file.parent}")
    return file


Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the figures as JSON; - for standard output.", callback=_writable
    ),
]


def told(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake gets one line and exit code 2; Ctrl-C gets a word on how to go on, and 130."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FewerError as error:
            print(f"fewer: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except BrokenPipeError:
            sys.stderr.close()
            raise typer.Exit(1) from None
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            print(f"fewer: {what}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print(f"\nStopped. {GO_ON[-1]}" if GO_ON else "\nStopped.", file=sys.stderr)
            raise typer.Exit(130) from None

    return guarded


GO_ON: list[str] = []
"""What to say when the user stops the command now."""


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write_json(file: Path | None, value: Any) -> bool:
    """Write the figures; True where standard output is taken by them."""
    if file is None:
        return False
    text = json.dumps(value, indent=2, default=str) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
        return True
    try:
        file.write_text(text)
    except OSError as error:
        raise FewerError(f"--json {file} cannot be written: {error.strerror}") from error
    return False
