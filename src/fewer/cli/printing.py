"""What commands share: telling the user of mistakes, and printing figures."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewer.errors import FewerError, QuorumLost

if TYPE_CHECKING:
    from fewer.runs import Result

RUNS = Path("runs")
"""Where runs are kept that are not told otherwise."""
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to keep it. \\[default: runs/…]")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write an HTML page with pictures beside the run.")]

Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Send figures to tensorboard or mlflow too; may be repeated."),
]


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
            if isinstance(error, QuorumLost) and GO_ON:  # nobody's mistake, and not the end
                print(GO_ON[-1], file=sys.stderr)
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


def fresh(name: str) -> Path:
    """A run directory that is not there yet."""
    base = "".join(c if c.isalnum() or c in "-._" else "-" for c in name)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    options = [RUNS / f"{base}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100)))]
    return next(path for path in options if not path.exists())


def write_page(runs: list[Path], where: Path) -> Path:
    """A page with pictures on these runs."""
    from fewer.report import write_report

    return write_report(runs, where / "report", pictures=False)[0]


def finish(result: Result, where: Path, json_file: Path | None, report: bool) -> None:
    """The last word on a run."""
    from fewer.cli.progress import duration, megabytes
    from fewer.runs.settings import settings_hash
    from fewer.runs.statistics import half_width

    page = write_page([where], where) if report else None
    scores = result.scores
    figures = {
        "method": result.method.name,
        **{key: value for key, value in scores.items() if key != "clients"},
        "hash": settings_hash(result.settings, result.method),
        "run": str(where),
        "history": result.history,
    }
    if write_json(json_file, figures):
        return
    print(
        f"{result.method.name}: accuracy {scores['accuracy']:.2%} after {scores['round']} rounds, "
        f"{megabytes(scores['up'])} up, {megabytes(scores['down'])} down, {duration(scores['seconds'])}"
    )
    if fair := scores.get("fairness"):
        print(
            f"New clients, each adapted to its support: mean {fair['mean']:.2%}, "
            f"standard deviation {fair['variance'] ** 0.5:.2%}, worst tenth {fair['worst']:.2%}"
        )
    if groups := scores.get("groups"):
        half = half_width(groups)
        sure = "" if half is None else f", ± {100 * half:.2f} (95 % CI)"
        what = "tasks" if "tasks" in scores else "groups that began from the prepared model"
        print(f"Mean over {len(groups)} {what}{sure}")
    if scores.get("global_accuracy") is not None:
        print(f"Each client's model on all clients' test samples: {scores['global']:.2%}")
    print(f"Kept in {where}" + (f", see {page}" if page else ""))
    if groups and "tasks" not in scores:
        print(f"For groups: fewer deploy {where} --data …")
