"""Many runs that were never run, and a dashboard on them in a process of its own."""

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
LONG = "run-0"
WATCHED = "run-1"


class Ask(NamedTuple):
    """A dashboard that is asked."""

    address: str

    def __call__(self, path: str) -> tuple[float, Any]:
        """Seconds, and the answer."""
        begun = time.perf_counter()
        with urllib.request.urlopen(f"{self.address}api/{path}") as answer:
            text = answer.read()
        return time.perf_counter() - begun, json.loads(text)


def made(root: Path, runs: int, events: int, long: int) -> None:
    """So many run directories with so many events each, and many more in the first."""
    absent = (
        json.dumps({"time": 1.0, "event": "absent", "round": 1, "client": 3, "reason": "late", "handler": "train"}) + "\n"
    )
    figures = "".join(_line(number) for number in range(1, 51))
    ledger = "round,client,direction,kind,bytes\n" + "1,3,up,train,106400\n" * events
    for number in range(runs):
        run = root / f"run-{number}"
        run.mkdir()
        method = METHODS[number % len(METHODS)]
        about = {
            "format": 2,
            "settings": {"method": method, "seed": number, "runtime": "inline"},
            "hash": "",
            "own": [],
            "method": {"rounds": 100},
            "data": {"name": "digits", "clients": 10, "fingerprint": ""},
            "environment": {},
        }
        (run / "settings.json").write_text(json.dumps(about))
        (run / "metrics.jsonl").write_text(figures)
        (run / "ledger.csv").write_text(ledger)
        (run / "events.jsonl").write_text(absent * events)
        (run / "lock").touch()
    with (root / LONG / "events.jsonl").open("a") as file:
        file.write(absent * long)


def _line(number: int) -> str:
    figures = {"round": number, "accuracy": number / 100, "loss": 1.0, "up": number, "down": number, "seconds": number}
    return json.dumps(figures) + "\n"


@contextmanager
def served(root: Path) -> Iterator[Ask]:
    """A dashboard on them, ready to be asked."""
    program = Path(sys.executable).with_name("fewer")
    command = [str(program), "dash", str(root), "--port", "0", "--read-only"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            yield Ask(process.stdout.readline().split()[-1])
        finally:
            process.terminate()


def long_run(ask: Ask) -> str:
    """What the run with most events is called."""
    return _id(ask, LONG)


def _id(ask: Ask, name: str) -> str:
    rows = ask(f"runs?find={name}&sort=name&down=0&limit=200")[1]["rows"]
    return next(str(row["id"]) for row in rows if row["name"] == name)


def follow(root: Path, ask: Ask) -> float:
    """Seconds from the end of a round until whoever follows the run is told."""
    address = f"{ask.address}api/follow?ids={_id(ask, WATCHED)}"
    with urllib.request.urlopen(address) as stream:
        stream.readline()
        begun = time.perf_counter()
        with (root / WATCHED / "metrics.jsonl").open("a") as file:
            file.write(_line(51))
        while WATCHED.encode() not in stream.readline():
            pass
        return time.perf_counter() - begun
