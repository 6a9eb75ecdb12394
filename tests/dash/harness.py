"""Synthetic run directories, and a dashboard on them in a thread."""

from __future__ import annotations

import fcntl
import http.client
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import fewer
from fewer.dash.server import create_server, listen
from fewer.runs.reader import FORMAT

SETTINGS = {"seed": 0, "runtime": "inline", "data": "digits"}
RESTORE_CTRL_C = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background processes ignore Ctrl-C


def describe_run(method: str, rounds: int = 10, objects: list[str] | None = None, **settings: Any) -> str:
    metadata = {
        "format": FORMAT,
        "settings": {**SETTINGS, "method": method, **settings},
        "hash": "abc",
        "objects": objects or [],
        "method": {"rounds": rounds, "lr": 0.1},
        "data": {"name": settings.get("data", "digits"), "clients": 6, "fingerprint": "f"},
        "environment": {"python": "3.11"},
    }
    return json.dumps(metadata)


def metrics(number: int, accuracy: float | None = 0.5) -> dict[str, Any]:
    evaluation = {} if accuracy is None else {"accuracy": accuracy, "loss": 1.0}
    return {
        "round": number,
        "absent": 0,
        **evaluation,
        "up": 1000 * number,
        "down": 2000 * number,
        "seconds": 0.5 * number,
    }


def write_run(
    path: Path, method: str = "fedavg", done: int = 3, events: list[dict[str, Any]] | None = None, **more: Any
) -> Path:
    """Writes a run directory."""
    path.mkdir(parents=True)
    (path / "settings.json").write_text(describe_run(method, **more))
    lines = [metrics(number, 0.1 * number) for number in range(1, done + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    all_events = [{"time": 1.0, "event": "start", "method": method}, *(events or [])]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in all_events))
    messages = "".join(f"{number},0,up,train,1000\n{number},0,down,evaluate/score,9\n" for number in range(1, done + 1))
    (path / "ledger.csv").write_text("round,client,direction,kind,bytes\n" + messages)
    (path / "lock").touch()
    return path


STOPPED = {"time": 2.0, "event": "stop", "round": 3, "reason": "KeyboardInterrupt: "}
FINISHED = {"time": 2.0, "event": "finish", "round": 3}


class DashboardClient:
    """Sends requests to a dashboard."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}"

    def ask(
        self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: str = ""
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, answer and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, body or None, dict(headers or {}))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text, response.headers

    def get(self, path: str) -> Any:
        status, answer, _ = self.ask(f"/api/{path}")
        assert status == 200, answer
        return answer

    def post(self, path: str) -> tuple[int, Any]:
        return self.ask(f"/api/{path}", "POST", {"Origin": self.address})[:2]

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.get("runs")["rows"] if row["name"] == name)


@contextmanager
def serving(root: Path, **options: Any) -> Iterator[DashboardClient]:
    """A dashboard on a directory, in a thread."""
    with listen("127.0.0.1", 0) as listening:
        server = create_server(root, listening, **options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield DashboardClient(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


@contextmanager
def running(path: Path, cue: Event | None = None) -> Iterator[BaseProcess]:
    """A real run in its own process, long enough to watch; it waits until `cue` is set, if given.

    The process inherits torch and all open sockets, so start it before the server.
    """

    def work() -> None:
        if cue:
            cue.wait()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            fewer.run("fedavg", "digits", clients=6, rounds=5000, out=path)

    process = get_context("fork").Process(target=work)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@contextmanager
def hold_lock(run: Path) -> Iterator[None]:
    with (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
