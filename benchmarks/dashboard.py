"""Many simulated run directories, and a dashboard on them in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

METHODS = ("fedavg", "fedprox", "fedbn", "fedmk", "local")
LONG_RUN = "run-0"
FOLLOWED_RUN = "run-1"


class Dashboard(NamedTuple):
    """The URL of a dashboard; calling it sends a request."""

    address: str

    def __call__(self, path: str) -> tuple[float, Any]:
        """Returns the seconds and the response."""
        start = time.perf_counter()
        with urllib.request.urlopen(f"{self.address}api/{path}") as response:
            text = response.read()
        return time.perf_counter() - start, json.loads(text)


def make_runs(root: Path, runs: int, events: int, long_events: int) -> None:
    """Writes `runs` run directories with `events` events each, and `long_events` more in the first."""
    absent = (
        json.dumps({"time": 1.0, "event": "absent", "round": 1, "client": 3, "reason": "late", "handler": "train"})
        + "\n"
    )
    metrics = "".join(_format_metrics(number) for number in range(1, 51))
    ledger = "round,client,direction,kind,bytes\n" + "1,3,up,train,106400\n" * events
    for number in range(runs):
        run = root / f"run-{number}"
        run.mkdir()
        method = METHODS[number % len(METHODS)]
        metadata = {
            "format": 2,
            "settings": {"method": method, "seed": number, "runtime": "inline"},
            "hash": "",
            "objects": [],
            "method": {"rounds": 100},
            "data": {"name": "digits", "clients": 10, "fingerprint": ""},
            "environment": {},
        }
        (run / "settings.json").write_text(json.dumps(metadata))
        (run / "metrics.jsonl").write_text(metrics)
        (run / "ledger.csv").write_text(ledger)
        (run / "events.jsonl").write_text(absent * events)
        (run / "lock").touch()
    with (root / LONG_RUN / "events.jsonl").open("a") as file:
        file.write(absent * long_events)


def _format_metrics(number: int) -> str:
    """Returns the line of metrics.jsonl for a round."""
    metrics = {"round": number, "accuracy": number / 100, "loss": 1.0, "up": number, "down": number, "seconds": number}
    return json.dumps(metrics) + "\n"


@contextmanager
def serve(root: Path) -> Iterator[Dashboard]:
    """Starts a dashboard on these runs and stops it at the end."""
    program = Path(sys.executable).with_name("fewer")
    command = [str(program), "dash", str(root), "--port", "0", "--read-only"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            yield Dashboard(process.stdout.readline().split()[-1])
        finally:
            process.terminate()


def find_long_run(dashboard: Dashboard) -> str:
    """Returns the id of the run with the most events."""
    return _find_id(dashboard, LONG_RUN)


def _find_id(dashboard: Dashboard, name: str) -> str:
    rows = dashboard(f"runs?find={name}&sort=name&down=0&limit=200")[1]["rows"]
    return next(str(row["id"]) for row in rows if row["name"] == name)


def measure_follow(root: Path, dashboard: Dashboard) -> float:
    """Returns the seconds from the end of a round until a follower of the run receives it."""
    address = f"{dashboard.address}api/follow?ids={_find_id(dashboard, FOLLOWED_RUN)}"
    with urllib.request.urlopen(address) as stream:
        stream.readline()
        start = time.perf_counter()
        with (root / FOLLOWED_RUN / "metrics.jsonl").open("a") as file:
            file.write(_format_metrics(51))
        while FOLLOWED_RUN.encode() not in stream.readline():
            pass
        return time.perf_counter() - start
