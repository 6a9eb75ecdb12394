"""What commands share: options, error messages and printed results."""

from __future__ import annotations

import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Option

from fewer.errors import FewerError

if TYPE_CHECKING:
    from fewer.runs.result import Result

RUNS = Path("runs")
SETTINGS = "settings.json"
"""The default directory of runs."""
Out = Annotated[Path | None, Option(metavar="DIR", help="The run directory. \\[default: runs/…]")]
Report = Annotated[bool, Option("--report/--no-report", help="Write an HTML report next to the run.")]
Track = Annotated[
    list[str] | None, Option(metavar="NAME", help="Also send metrics to tensorboard or mlflow; may be repeated.")
]


def _check_writable(file: Path | None) -> Path | None:
    """Rejects a JSON file that cannot be written, before a long run rather than after it."""
    if file is not None and str(file) != "-" and not file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {file.parent}")
    return file


Json = Annotated[
    Path | None,
    Option("--json", metavar="FILE", help="Write the output as JSON; - for standard output.", callback=_check_writable),
]


class Output(NamedTuple):
    """The options of every command that trains: where its results go."""

    report: Report = True
    track: Track = None
    out: Out = None
    json_file: Json = None


@contextmanager
def resumable(hint: str, path: Path | None = None) -> Iterator[None]:
    """Adds a hint how to continue to what stops this block, if that can help and the run at `path` has started."""
    try:
        yield
    except (KeyboardInterrupt, FewerError) as stop:
        can_help = isinstance(stop, KeyboardInterrupt) or stop.resumable
        if can_help and (path is None or (path / SETTINGS).exists()):
            stop.add_note(hint)
        raise


def quote(path: Path) -> str:
    """A path as an argument in a shell."""
    return shlex.quote(str(path))


def resume_hint(path: Path) -> str:
    """How to resume the run at `path`."""
    return f"Resume with: fewer resume {quote(path)}"


def print_if_finished(path: Path, rounds: int | None, command: str) -> bool:
    """Says if a run is finished already, and how to add rounds; False if it is not, or gets more `rounds`."""
    from fewer.runs.reader import RunReader

    run = RunReader(path)
    if is_finished := run.status().state == "finished" and rounds in (None, done := len(run.history)):
        print(f"{path} is already finished: {done} rounds. To add some: {command} --rounds {done + 5}", file=sys.stderr)
    return is_finished


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Prints an error as one line, with exit code 2; after Ctrl-C, a hint how to continue, with exit code 130.

    An error in the user's code keeps its traceback.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            sys.stderr.close()
            raise typer.Exit(1) from None
        except (FewerError, OSError) as error:
            problem = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
            print("\n".join([f"fewer: {problem}", *_hints(error)]), file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            print(" ".join(["\nStopped.", *_hints(stop)]), file=sys.stderr)
            raise typer.Exit(130) from None

    return guarded


def _hints(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a plain table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def write_json(file: Path | None, value: Any) -> bool:
    """Writes a value as JSON. Returns True if it went to standard output; then nothing else may be printed."""
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


def short_name(data: str) -> str:
    """A name of data for files and directories: of FORMAT:PATH, the file's name without its suffix."""
    format, colon, path = data.partition(":")
    return _safe_name(Path(path.removesuffix(".gz")).stem if colon else format)


def _safe_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)


def new_run_path(name: str, data: str = "") -> Path:
    """Returns the path of a new run directory, named after a method (or "compare") and its data."""
    base = f"{_safe_name(name)}-{short_name(data)}" if data else name
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = [RUNS / f"{base}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100)))]
    return next(path for path in candidates if not path.exists())


def write_report_page(runs: list[Path], folder: Path) -> Path:
    """Writes the HTML report of these runs."""
    from fewer.report.page import write_report

    return write_report(runs, folder / "report", pictures=False)[0]


def print_shortfalls(runs: list[Path]) -> None:
    """Prints which methods are at or below the majority baseline."""
    from fewer.report.groups import group_runs
    from fewer.runs.figures import describe_baseline

    for group in group_runs(runs)[0]:
        if shortfall := describe_baseline(group.last_metrics, group.metric):
            print(f"{group.label}: {shortfall}")


def print_result(result: Result, path: Path, output: Output) -> None:
    """Prints the result of a finished run and writes its report."""
    from fewer.models.artifact import ARTIFACT_FILE
    from fewer.runs.figures import describe_baseline
    from fewer.runs.settings import settings_hash
    from fewer.statistics import format_duration, format_interval, format_megabytes, interval

    page = write_report_page([path], path) if output.report else None
    metrics, metric = result.metrics, result.metric
    content = {
        "method": result.method.name,
        **{name: value for name, value in metrics.items() if name not in ("clients", "client_metrics")},
        "hash": settings_hash(result.settings, result.method),
        "run": str(path),
        "history": result.history,
    }
    if write_json(output.json_file, content):
        return
    print(
        f"{result.method.name}: {metric.name} {metric.format(result.value)} after {metrics['round']} rounds, "
        f"{format_megabytes(metrics['up'])} up, {format_megabytes(metrics['down'])} down, "
        f"{format_duration(metrics['seconds'])}"
    )
    if shortfall := describe_baseline([metrics], metric):
        print(shortfall)
    if result.stopped:
        print(f"Ended before round {result.method.rounds}: {result.stopped}")
    if fairness := metrics.get("fairness"):
        print(
            f"New clients, each adapted to its support set: mean {metric.format(fairness['mean'])}, standard deviation "
            f"{metric.format(fairness['variance'] ** 0.5)}, worst tenth {metric.format(fairness['worst'])}"
        )
    if groups := metrics.get("groups"):
        unit = "tasks" if "tasks" in metrics else "groups"
        print(f"Mean over {len(groups)} {unit}: {format_interval(interval(groups))} % (95 % CI)")
    if (global_value := metrics.get(f"global_{metric.name}")) is not None:
        print(f"Each client's model on all clients' test samples: {metric.format(global_value)}")
    if (new_value := metrics.get(f"unseen_clients_{metric.name}")) is not None:
        print(f"Clients that never trained, after they joined: {metric.format(new_value)}")
    print(f"Run directory: {path}" + (f", report: {page}" if page else ""))
    if (path / ARTIFACT_FILE).is_file():
        print(f"To deploy it to a group: fewer deploy {quote(path)} --data …")
