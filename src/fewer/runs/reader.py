"""Reads a run directory without torch and without its lock. All readers of runs use it: reports, the dashboard, audits,
resuming and `open_run`."""

from __future__ import annotations

import fcntl
import json
import shlex
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fewer.errors import RunError
from fewer.ledger import Entry
from fewer.runs.metric import PrimaryMetric
from fewer.runs.records import GrowingFile, parse_line, read_last_lines
from fewer.runs.settings import METHOD_SETTINGS, RUNTIME_SETTINGS, settings_in_group

K = TypeVar("K")

FORMAT = 2
PARTS = {"settings", "hash", "objects", "method", "data", "environment"}
"""Entries that settings.json must have."""
SETTINGS = "settings.json"
SCHEMA = "schema.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
LEDGER = "ledger.csv"
CHECKPOINT = "checkpoint.safetensors"
CLIENTS = "clients"
"""Folder of the clients' private state."""
LOCK = "lock"
MAX_POINTS = 500
"""Maximum number of points of a curve."""
CURVE_METRICS = ("round", "value", "loss", "up", "down", "seconds", "absent")
_NO_TASK = (*RUNTIME_SETTINGS, *METHOD_SETTINGS, "method", "method_options", "seed", "data_seed", "evaluate_every")
"""Settings that do not affect results, that the method's options repeat, or that differ between seeds."""


class Absence(NamedTuple):
    """An absent answer."""

    client: int | None
    handler: str | None
    reason: str


class Status(NamedTuple):
    """The state of a run, why it stopped, and the time of its last event."""

    state: str
    """running, finished, stopped or crashed."""
    reason: str
    time: float


@dataclass(repr=False)
class RunReader:
    """A run directory. Each part is read on first use; RunError if it is damaged."""

    path: Path

    def __repr__(self) -> str:
        """Three lines: the directory, the experiment, and its state."""
        try:
            state = f"{self.status().state}, {len(self.history)} of {self.rounds} rounds"
            lines = [f"{self.method_name} on {self.data_summary}", state]
        except RunError as error:
            lines = [str(error)]
        return "\n  ".join([f"{type(self).__name__} of {self.path}", *lines])

    # --- settings -------------------------------------------------------------------------------------------

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The content of settings.json; RunError if the directory is not a run or has another format."""
        try:
            metadata: dict[str, Any] = json.loads((self.path / SETTINGS).read_text())
            version = metadata["format"]
            if version == FORMAT and (missing := PARTS - metadata.keys()):
                raise ValueError(f"'{min(missing)}' is missing")
        except FileNotFoundError:
            problem = f"has no {SETTINGS}" if self.path.is_dir() else "does not exist"
            if any(self.path.glob(f"*/{SETTINGS}")):
                problem += ", but its folders are runs; to resume a comparison, repeat its command with the same --out"
            raise RunError(f"{self.path} is not a run directory: it {problem}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(SETTINGS, error) from error
        if version != FORMAT:
            raise RunError(f"{self.path} has format {version}; this version of Fewer reads format {FORMAT}")
        return metadata

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, with the method's options as they were given."""
        settings: dict[str, Any] = self.metadata["settings"]
        return settings

    @cached_property
    def schema(self) -> dict[str, Any] | None:
        """The schema of the data, as JSON values; None for a run of an older version."""
        try:
            content: dict[str, Any] = json.loads((self.path / SCHEMA).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._damaged(SCHEMA, error) from error
        return content

    @property
    def method_name(self) -> str:
        """Name of the method."""
        try:
            with (self.path / EVENTS).open("rb") as file:
                name = parse_line(file.readline(1 << 16)).get("method")
        except OSError:  # not started yet
            name = None
        return str(name or str(self.settings["method"]).rpartition(":")[2])

    @property
    def rounds(self) -> int:
        """Number of planned rounds."""
        return int(self.metadata["method"]["rounds"])

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    @property
    def data_seed(self) -> int:
        """Seed of the partition."""
        return self.seed if self.settings["data_seed"] is None else int(self.settings["data_seed"])

    @property
    def task_settings(self) -> dict[str, Any]:
        """Settings that affect results, except the method's own and the seeds."""
        return {key: value for key, value in self.settings.items() if key not in _NO_TASK}

    @property
    def data_settings(self) -> dict[str, Any]:
        """Settings of the data and its partition."""
        names = settings_in_group("Data")
        return {key: value for key, value in self.task_settings.items() if key in names}

    @property
    def data_summary(self) -> str:
        """Name of the data without its directory, number of clients and partition."""
        format, colon, path = self.metadata["data"]["name"].partition(":")
        name = f"{format}{colon}{Path(path).name if Path(path).is_absolute() else path}"
        clients = self.metadata["data"]["clients"]
        if "data" in self.metadata["objects"] or self.settings["runtime"] == "flower":
            return f"{name}, {clients} clients"
        partition, alpha = self.settings["partition"], self.settings["alpha"]
        skew = f" (alpha {alpha:g})" if partition in ("dirichlet", "dirichlet-pairs", "quantity") else ""
        return f"{name}, {clients} clients, {partition}{skew}"

    def check_objects(self, **given: Any) -> None:
        """Raises RunError if the run used a Python object that is not among the given ones."""
        for part in self.metadata["objects"]:
            if part in given and given[part] is None:
                raise RunError(f"{self.path} was run with your own {part}: pass {part}=… in Python")

    # --- rounds ---------------------------------------------------------------------------------------------

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of all rounds so far. An incomplete last line is ignored."""
        file = self.path / METRICS
        if not file.exists() and not (self.path / CHECKPOINT).exists():  # the run has just started
            return []
        try:
            *lines, _ = file.read_text().split("\n")
            return [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise self._damaged(METRICS, error) from error

    def progress(self) -> dict[str, Any]:
        """Metrics of the last round now; `value` is the last primary metric measured."""
        progress: dict[str, Any] = {"round": 0, "value": None, "up": 0, "down": 0, "seconds": 0.0}
        metric = self.metric.name
        lines, before = read_last_lines(self.path / METRICS, 1)
        for line in lines:
            metrics = parse_line(line)
            metrics["value"] = metrics.get(metric)
            names = (*progress, "epsilon", "delta")
            progress |= {name: metrics[name] for name in names if isinstance(metrics.get(name), int | float)}
        if progress["round"] and progress["value"] is None:
            older = map(parse_line, read_last_lines(self.path / METRICS, 200, before).lines)
            progress["value"] = next((metrics[metric] for metrics in older if metric in metrics), None)
        return progress

    def last_evaluation(self) -> dict[str, Any]:
        """Metrics of the last evaluated round now; empty if none of the last 200 rounds was evaluated."""
        lines = map(parse_line, read_last_lines(self.path / METRICS, 200).lines)
        return next((metrics for metrics in lines if self.metric.name in metrics), {})

    @property
    def metric(self) -> PrimaryMetric:
        """The metric that ranks runs."""
        return PrimaryMetric(**self.metadata.get("metric", {}))

    @property
    def other_metrics(self) -> list[str]:
        """Names of the metrics that were asked for, without the primary one."""
        names = [str(name).rpartition(":")[2].strip("()") for name in self.settings.get("metrics", ())]
        return [name for name in names if name != self.metric.name]

    @property
    def value(self) -> float | None:
        """Last measured primary metric."""
        name = self.metric.name
        return next((entry[name] for entry in reversed(self.history) if name in entry), None)

    @property
    def global_value(self) -> float | None:
        """The primary metric of each client's model on all clients' test samples; known once a run has finished."""
        default = None if self.unfinished else self.value
        value: float | None = self.history[-1].get(f"global_{self.metric.name}", default)
        return value

    @property
    def unfinished(self) -> str:
        """How far an unfinished run has come, and why it stopped; empty for a finished run."""
        done = len(self.history)
        if done == self.rounds or (self.events and self.events[-1]["event"] == "finish"):  # a callback may end it early
            return ""
        reason = self.events[-1].get("reason") if self.events else None
        return f"is at round {done} of {self.rounds}" + (f"; it stopped: {reason}" if reason else "")

    @property
    def ended_early(self) -> bool:
        """True if a callback ended the run before its last planned round."""
        return not self.unfinished and len(self.history) < self.rounds

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The state after the last finished round, which needs torch; None if no round has finished."""
        from fewer.wire import unpack

        try:
            checkpoint: dict[str, Any] = unpack((self.path / CHECKPOINT).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._damaged(CHECKPOINT, error) from error
        return checkpoint

    # --- events ---------------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All events, without lines that a kill cut short."""
        try:
            lines = (self.path / EVENTS).read_bytes().splitlines()
        except OSError as error:
            raise self._damaged(EVENTS, error) from error
        return [event for event in map(parse_line, lines) if "event" in event]

    @cached_property
    def absences(self) -> Counter[Absence]:
        """Absent answers. If a round was repeated after a resume, only its last attempt counts."""
        return sum_counts(count_absences(self.events).values())

    @property
    def absent_counts(self) -> Counter[str]:
        """Number of absent answers by reason."""
        return sum_counts({absence.reason: count} for absence, count in self.absences.items())

    @property
    def interruptions(self) -> int:
        """How often the run was stopped or killed before its end and then resumed."""
        resumed = [event for before, event in pairwise(self.events) if before["event"] != "finish"]
        return sum(event["event"] == "resume" and event.get("round", 0) < len(self.history) for event in resumed)

    @property
    def transport_bytes(self) -> tuple[int, int] | None:
        """Bytes up and down of all messages on the wire, if the runtime records them."""
        if not any("transport_up" in event for event in self.events):
            return None
        up, down = (sum(event.get(f"transport_{way}", 0) for event in self.events) for way in ("up", "down"))
        return up, down

    # --- messages -------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[Entry]:
        """Training messages of completed rounds, in the order they were sent; RunError if the ledger is damaged."""
        try:
            with (self.path / LEDGER).open() as lines:
                next(lines, None)
                for line in lines:
                    entry = Entry.parse(line) if line.endswith("\n") else None
                    if entry is None or entry.round > len(self.history):  # a round in progress
                        return
                    if entry.is_training:
                        yield entry
        except (OSError, ValueError) as error:
            raise self._damaged(LEDGER, error) from error

    @property
    def participants(self) -> list[int]:
        """Clients that sent a training message in a completed round."""
        return sorted({entry.client for entry in self.messages() if entry.direction == "up"})

    @cached_property
    def traffic(self) -> Counter[tuple[str, str]]:
        """Training bytes by direction and kind, over the completed rounds."""
        traffic: Counter[tuple[str, str]] = Counter()
        for entry in self.messages():
            traffic[entry.direction, entry.kind] += entry.bytes
        return traffic

    @cached_property
    def hops(self) -> Counter[tuple[int, int, str]]:
        """Relayed messages by source, target and kind. A relayed message goes up, then directly down."""
        hops: Counter[tuple[int, int, str]] = Counter()
        for sent, received in pairwise(self.messages()):
            same_content = (sent.round, sent.kind, sent.bytes) == (received.round, received.kind, received.bytes)
            if same_content and (sent.direction, received.direction) == ("up", "down"):
                hops[sent.client, received.client, sent.kind] += 1
        return hops

    # --- the writing process --------------------------------------------------------------------------------

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        path = shlex.quote(str(self.path))
        if self.settings["runtime"] == "flower":
            return f"fewer server --resume {path} --keys DIR"
        return f"fewer resume {path}"

    @property
    def can_resume(self) -> bool:
        """True if the run has stopped, and not for a reason that would stop it again."""
        return self.status().state in ("stopped", "crashed") and self._last_event().get("resumable", True)

    def _last_event(self) -> dict[str, Any]:
        return next(filter(None, map(parse_line, read_last_lines(self.path / EVENTS, 5).lines)), {})

    def status(self) -> Status:
        """The state of the run now."""
        last = self._last_event()
        kind, time = last.get("event"), last.get("time", 0.0)
        if self.in_use:
            return Status("running", "", time)
        if kind == "finish" or (kind == "resume" and last.get("round") == self.rounds):
            return Status("finished", "", time)
        return Status("stopped", str(last.get("reason", "")), time) if kind == "stop" else Status("crashed", "", time)

    @property
    def in_use(self) -> bool:
        """True if a process is writing to this run."""
        try:
            with (self.path / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once; a process that wants it retries
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def writer_pid(self) -> int:
        """The id of the process that writes the run; RunError if it cannot be identified on this machine.

        The id in the lock file may be from another machine, or reused. So the process must have the lock file open.
        """
        if not self.in_use:
            raise RunError(f"{self.path} is not running")
        lock = self.path / LOCK
        try:
            pid = int(lock.read_text())
            files = list(Path(f"/proc/{pid}/fd").iterdir())
        except (OSError, ValueError):
            raise RunError(f"{self.path} is written by a process that is not on this machine: stop it there") from None
        if not any(_is_same_file(file, lock) for file in files):
            raise RunError(f"{self.path} is written by a process other than {pid}, the one in its lock file")
        return pid

    def _damaged(self, name: str, error: Exception) -> RunError:
        return RunError(f"{self.path} is damaged: {name} cannot be read ({error})")


@dataclass
class RunFollower:
    """Follows a run while it is written: its curve, absent answers and traffic. It reads nothing twice."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Metrics by round."""
    absent: dict[int, Counter[Absence]] = field(default_factory=dict)
    """Absent answers by round."""
    traffic: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Messages and bytes by direction and kind."""

    def __post_init__(self) -> None:
        files = (GrowingFile(self.path / name) for name in (METRICS, EVENTS, LEDGER))
        self._metrics, self._events, self._ledger = files
        self._lock = threading.Lock()

    @cached_property
    def metric(self) -> PrimaryMetric:
        """The metric that is the `value` of a round."""
        return RunReader(self.path).metric

    def curve(self) -> list[dict[str, Any]]:
        """The rounds so far, thinned out evenly if there are many; the last round is always included."""
        with self._lock:
            while True:
                lines, rewritten = self._metrics.read_new_lines()
                if rewritten:
                    self.rows = []
                if not lines:
                    break
                for metrics in map(parse_line, lines):
                    metrics["value"] = metrics.get(self.metric.name)
                    self.rows.append({name: metrics[name] for name in CURVE_METRICS if metrics.get(name) is not None})
            step = -(-len(self.rows) // MAX_POINTS) or 1
            return self.rows[::-1][::step][::-1]

    def totals(self) -> dict[str, Any]:
        """Reads the next slice of events and messages, and returns the totals so far."""
        with self._lock:
            lines, rewritten = self._events.read_new_lines()
            self.absent = count_absences(map(parse_line, lines), {} if rewritten else self.absent)
            lines, rewritten = self._ledger.read_new_lines()
            if rewritten:
                self.traffic = {}
            for entry in parse_messages(lines):
                counts = self.traffic.setdefault((entry.direction, entry.kind), [0, 0])
                counts[0] += 1
                counts[1] += entry.bytes
            reasons = ({absence.reason: n} for round in self.absent.values() for absence, n in round.items())
            size, read = (sum(getattr(f, part) for f in (self._events, self._ledger)) for part in ("size", "offset"))
            largest_first = sorted(self.traffic.items(), key=lambda item: -item[1][1])
            return {
                "absent": dict(sum_counts(reasons).most_common()),
                "traffic": [
                    {"direction": direction, "kind": kind, "messages": messages, "bytes": count}
                    for (direction, kind), (messages, count) in largest_first
                ],
                "fraction_read": read / size if size else 1.0,
                "complete": self._events.complete and self._ledger.complete,
            }


def count_absences(
    events: Iterable[Mapping[str, Any]], counted: Mapping[int, Counter[Absence]] | None = None
) -> dict[int, Counter[Absence]]:
    """Counts absent answers by round, in addition to those of earlier events. Repeated rounds count once."""
    by_round = dict(counted or {})
    for event in events:
        number = event.get("round")
        number = number if isinstance(number, int) else 0
        if event.get("event") == "absent":
            absence = Absence(event.get("client"), event.get("handler"), str(event.get("reason", "?")))
            by_round.setdefault(number, Counter())[absence] += 1
        elif event.get("event") in ("start", "resume"):  # rounds after the last checkpoint are repeated
            by_round = {other: counts for other, counts in by_round.items() if other <= number}
    return by_round


def sum_counts(counts: Iterable[Mapping[K, int]]) -> Counter[K]:
    """Adds counts, in place: the sum of many `Counter`s takes quadratic time."""
    total: Counter[K] = Counter()
    for part in counts:
        total.update(part)
    return total


def parse_messages(lines: Iterable[bytes]) -> Iterator[Entry]:
    """Parses lines of a ledger that is being written; skips the header and incomplete lines."""
    for line in lines:
        try:
            yield Entry.parse(line.decode(errors="replace"))
        except ValueError:
            continue


def _is_same_file(file: Path, lock: Path) -> bool:
    try:
        return file.samefile(lock)
    except OSError:  # closed in the meantime
        return False
