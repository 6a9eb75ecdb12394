"""The HTTP server: the page, a JSON API, and changes as server-sent events."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import socket
import threading
import webbrowser
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import fewer
from fewer.dash.catalog import STATES, Catalog, RunEntry
from fewer.dash.control import LOG, Control, why_not_resumable
from fewer.dash.guard import Guard, choose_token
from fewer.errors import FewerError, RunError, SettingError
from fewer.report.style import assign_label_styles
from fewer.runs.figures import CLASS_METRICS, LABELS, PERCENT, class_rows, client_rows, describe_baseline
from fewer.runs.reader import EVENTS, LEDGER, parse_messages
from fewer.runs.records import parse_line, read_last_lines
from fewer.runs.settings import RUNTIME_SETTINGS

REPORT = "report/report.html"
"""Path in a run directory of the page that `fewer run` and `fewer resume` write."""
MAX_ROWS = 200
"""Maximum number of rows in a response."""
MAX_OFFSET = 1 << 60
FOLLOW_INTERVAL = 0.5
"""Seconds between two checks for changes while a page follows runs."""
KEEPALIVE_INTERVAL = 15.0
"""Seconds without changes after which a comment is sent, to detect closed connections."""
MAX_COMPARED = 24
"""Maximum number of runs compared at once."""
HIDDEN_SETTINGS = ("method", "method_options", *RUNTIME_SETTINGS)
"""Settings left out of comparisons: results do not depend on them, or other settings repeat them."""
STATIC_FILES = {file.name: file for file in (Path(__file__).parent / "static").iterdir()}
SORT_KEYS: Mapping[str, Callable[[RunEntry], Any]] = {
    "changed": lambda run: run.row["changed"],
    "metric": lambda run: run.row.get("value") or 0.0,
    "bytes": lambda run: run.row.get("up", 0) + run.row.get("down", 0),
    "seconds": lambda run: run.row.get("seconds", 0.0),
    "name": lambda run: run.name,
    "method": lambda run: (run.row["method"], run.name),
}
_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
"""A report is self-contained; its scripts may not send requests."""


@dataclass
class Dashboard:
    """The API of the dashboard."""

    catalog: Catalog
    control: Control
    read_only: bool = False
    closing: Callable[[], bool] = lambda: False
    resuming: threading.Lock = field(default_factory=threading.Lock)
    """Prevents two requests from starting the same run."""

    def routes(self) -> list[Route]:
        """All routes. Runs are addressed by their id in the catalog, never by a path."""
        run = "/api/runs/{id}"
        routes = [
            Route("/", partial(self.static_file, name="index.html")),
            Route("/static/{name}", self.static_file),
            Route("/api/runs", self.list_runs),
            Route("/api/follow", self.follow),
            Route("/api/compare", self.compare),
            Route(run, self.show_run),
        ]
        for part in (self.curve, self.figures, self.tally, self.events, self.ledger, self.log, self.report):
            routes.append(Route(f"{run}/{part.__name__}", part))
        for action in () if self.read_only else (self.stop, self.resume):
            routes.append(Route(f"{run}/{action.__name__}", action, methods=["POST"]))
        return routes

    def _find_run(self, request: Request) -> RunEntry:
        id = request.path_params["id"]
        if id not in self.catalog.runs:
            self.catalog.refresh(now=True)
        try:
            return self.catalog.runs[id]
        except KeyError:
            raise RunError("no such run: it may have been moved or deleted") from None

    # --- reading ------------------------------------------------------------------------------------------------

    def static_file(self, request: Request, name: str = "") -> Response:
        """The page and its scripts, styles and icons."""
        file = STATIC_FILES.get(name or request.path_params["name"])
        if file is None:
            return JSONResponse({"error": "no such file"}, 404)
        return FileResponse(file, headers={"cache-control": "no-cache"})

    def list_runs(self, request: Request) -> Response:
        """A page of the list, filtered and sorted."""
        query = request.query_params
        self.catalog.refresh()
        words, state, sort = query.get("find", "").lower().split(), query.get("state", ""), query.get("sort", "changed")
        if sort not in SORT_KEYS:
            raise SettingError(f"sort must be one of {', '.join(SORT_KEYS)}, got {sort[:20]!r}")
        if state and state not in STATES:
            raise SettingError(f"state must be one of {', '.join(STATES)}, got {state[:20]!r}")
        runs = [run for run in self.catalog.entries() if run.row]
        matches = [run for run in runs if (not state or run.state == state) and _contains(run, words)]
        matches.sort(key=SORT_KEYS[sort], reverse=query.get("down", "1") == "1")
        first = _parse_number(query.get("from"), 0, MAX_OFFSET)
        page = matches[first : first + _parse_number(query.get("limit"), 50)]
        return json_response(
            rows=[run.row for run in page],
            matches=len(matches),
            **self._totals(),
            root=str(self.catalog.root),
            read_only=self.read_only,
            version=fewer.__version__,
        )

    def _totals(self) -> dict[str, Any]:
        counts = Counter(run.state for run in self.catalog.entries())
        by_state = {state: counts[state] for state in STATES}
        return {"total": counts.total(), "discovered": self.catalog.discovered, "counts": by_state}

    def show_run(self, request: Request) -> Response:
        """A run's row, settings and environment."""
        run = self._find_run(request)
        self.catalog.refresh_run(run)
        metadata = run.reader.metadata if run.state != "damaged" else {}
        return json_response(
            row=run.row,
            path=str(run.path),
            settings=metadata.get("settings", {}),
            method=metadata.get("method", {}),
            environment={
                "hash": metadata.get("hash"),
                **metadata.get("environment", {}),
                "data": metadata.get("data"),
                "command": " ".join(map(str, metadata.get("command", []))),
            },
            why_not_resumable=why_not_resumable(run.reader) if metadata else "it is damaged",
            report=(run.path / REPORT).is_file(),
            log=(run.path / LOG).is_file(),
            read_only=self.read_only,
        )

    def compare(self, request: Request) -> Response:
        """Several runs, each with its own line style, and the settings in which they differ."""
        runs = [self.catalog.runs[id] for id in _run_ids(request) if id in self.catalog.runs]
        runs = [run for run in runs if run.row["state"] != "damaged"][:MAX_COMPARED]
        styles = assign_label_styles({run.id: run.row["method"] for run in runs}, self.catalog.styles)
        settings = [{**run.reader.settings, **run.reader.metadata["method"]} for run in runs]
        names = dict.fromkeys(name for values in settings for name in values if name not in HIDDEN_SETTINGS)
        differing = [name for name in names if len({json.dumps(s[name]) for s in settings if name in s}) > 1]
        siblings = len(runs) > 1 and len({run.path.parent for run in runs}) == 1
        return json_response(
            runs=[{**run.row, **styles[run.id]._asdict()} for run in runs],
            max_runs=MAX_COMPARED,
            report=siblings and self._comparison_report(runs[0]).is_file(),
            differing=[{"name": name, "values": [s.get(name) for s in settings]} for name in differing],
        )

    def _comparison_report(self, run: RunEntry) -> Path:
        """The page that `fewer compare` writes next to its runs, unless it is outside the root."""
        inside = run.path.parent.is_relative_to(self.catalog.root)
        return (run.path.parent if inside else run.path) / REPORT

    def curve(self, request: Request) -> Response:
        """Metrics by round."""
        return json_response(points=self.catalog.follow(self._find_run(request)).curve())

    def figures(self, request: Request) -> Response:
        """Further metrics of the last evaluated round, with their kinds, and the tables by class and by client."""
        run = self._find_run(request)
        if run.state == "damaged":
            return json_response(metrics=[], classes=[], clients=[], shortfall="")
        reader, metrics = run.reader, run.reader.last_evaluation()
        names = [*(CLASS_METRICS if reader.metric.name == "accuracy" else ()), *reader.other_metrics]
        return json_response(
            metrics=[
                {"name": LABELS.get(name, name), "value": metrics.get(name), "percent": name in PERCENT}
                for name in names
            ],
            classes=class_rows(metrics),
            clients=client_rows(metrics),
            shortfall=describe_baseline([metrics], reader.metric),
        )

    def tally(self, request: Request) -> Response:
        """Totals of faults and messages, as far as they have been read."""
        return json_response(**self.catalog.follow(self._find_run(request)).totals())

    def events(self, request: Request) -> Response:
        """Events, newest first."""
        lines, before = self._read_page(request, EVENTS)
        return json_response(events=[event for line in lines if (event := parse_line(line))], before=before)

    def ledger(self, request: Request) -> Response:
        """Messages, newest first."""
        lines, before = self._read_page(request, LEDGER)
        return json_response(rows=list(parse_messages(lines)), before=before)

    def log(self, request: Request) -> Response:
        """The last lines of output of a `fewer resume` started by the dashboard."""
        lines, _ = self._read_page(request, LOG)
        return json_response(lines=[line.decode(errors="replace") for line in reversed(lines)])

    def _read_page(self, request: Request, name: str) -> tuple[Sequence[bytes], int]:
        before = request.query_params.get("before")
        limit = _parse_number(request.query_params.get("limit"), 50)
        offset = None if before is None else _parse_number(before, 0, MAX_OFFSET)
        return read_last_lines(self._find_run(request).path / name, limit, offset)

    def report(self, request: Request) -> Response:
        """The report of a run, or of the comparison that it belongs to."""
        run = self._find_run(request)
        path = self._comparison_report(run) if request.query_params.get("together") else run.path / REPORT
        try:
            page = path.read_bytes()
        except OSError:
            raise RunError("this run has no report: write one with fewer report RUN --out RUN/report") from None
        return Response(page, media_type="text/html", headers={"content-security-policy": _REPORT_POLICY})

    async def follow(self, request: Request) -> Response:
        """Streams the rows of the given runs whenever they change."""
        ids = _run_ids(request)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream_changes(ids), media_type="text/event-stream", headers=headers)

    async def _stream_changes(self, ids: Sequence[str]) -> AsyncIterator[str]:
        revisions: dict[str, int] = {}
        totals: dict[str, Any] = {}
        quiet = 0.0
        while not self.closing():
            await run_in_threadpool(self.catalog.refresh)
            runs = [run for id in ids if (run := self.catalog.runs.get(id)) and run.revision != revisions.get(id)]
            new_totals = self._totals()
            if runs or new_totals != totals:
                revisions |= {run.id: run.revision for run in runs}
                totals, quiet = new_totals, 0.0
                yield f"data: {_dump_json({'rows': [run.row for run in runs], **totals})}\n\n"
            elif (quiet := quiet + FOLLOW_INTERVAL) >= KEEPALIVE_INTERVAL:
                quiet = 0.0
                yield ": keepalive\n\n"
            await asyncio.sleep(FOLLOW_INTERVAL)

    # --- control ------------------------------------------------------------------------------------------------

    def stop(self, request: Request) -> Response:
        """Stops a run."""
        return json_response(process=self.control.stop(self._find_run(request).reader))

    def resume(self, request: Request) -> Response:
        """Resumes a run."""
        run = self._find_run(request)
        with self.resuming:
            self.catalog.refresh_run(run)
            if run.state not in ("stopped", "crashed"):
                raise RunError(f"cannot resume {run.path}: it is {run.state}")
            process = self.control.resume(run.reader)
            self.catalog.refresh_run(run)
        return json_response(process=process)


def _run_ids(request: Request) -> list[str]:
    return list(dict.fromkeys(filter(None, request.query_params.get("ids", "").split(","))))[:MAX_ROWS]


def _contains(run: RunEntry, words: Sequence[str]) -> bool:
    text = f"{run.name} {run.row['method']} {run.row['data']} {run.state}".lower()
    return all(word in text for word in words)


def _parse_number(text: str | None, default: int, maximum: int = MAX_ROWS) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise SettingError(f"expected a number, got '{text[:20]}'")
    return min(int(text[:20]), maximum)


def json_response(**values: Any) -> Response:
    """Creates a JSON response that browsers do not cache."""
    return Response(_dump_json(values), media_type="application/json", headers={"cache-control": "no-store"})


def _dump_json(value: Any) -> str:
    return json.dumps(_replace_nonfinite(value), separators=(",", ":"), default=str)


def _replace_nonfinite(value: Any) -> Any:
    """Replaces NaN and infinity with null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_nonfinite(item) for key, item in value.items()}
    return [_replace_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


# --- serving ----------------------------------------------------------------------------------------------------


def create_app(dashboard: Dashboard, token: str | None, names: Sequence[str], port: int) -> Guard:
    """Creates the application, behind its guard."""

    async def login(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 1000:
                break
        if not guard.accepts(body[:1000].decode(errors="replace").strip()):
            return JSONResponse({"error": "wrong token"}, 403)
        response = JSONResponse({})
        response.set_cookie(guard.cookie_name, guard.cookie_value(), httponly=True, samesite="strict")
        return response

    def handle_error(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400 if isinstance(error, SettingError) else 409)

    routes = [*dashboard.routes(), Route("/api/login", login, methods=["POST"])]
    guard = Guard(Starlette(routes=routes, exception_handlers={FewerError: handle_error}), token, names, port)
    return guard


def create_server(
    root: Path, listening: socket.socket, token: str | None = None, names: Sequence[str] = (), read_only: bool = False
) -> uvicorn.Server:
    """Creates a server for the runs under a directory, ready to run on a listening socket."""
    control = Control()
    dashboard = Dashboard(Catalog(root, control.start_time), control, read_only)
    app = create_app(dashboard, token, names, listening.getsockname()[1])
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(app, ws="none", timeout_graceful_shutdown=2, **quiet))
    dashboard.closing = lambda: server.should_exit
    return server


def serve(
    root: Path,
    host: str,
    port: int,
    *,
    token_file: Path | None = None,
    names: Sequence[str] = (),
    read_only: bool = False,
    browse: bool = False,
) -> None:
    """Serves the runs under a directory until interrupted."""
    token = choose_token(host, token_file)
    with listen(host, port) as listening:
        server = create_server(root, listening, token=token, names=[*names, host], read_only=read_only)
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listening.getsockname()[1]}/"
        print(f"Runs under {root}: {address}" + (f"#token={token}" if token and not token_file else ""))
        if token_file:
            print(f"The page asks for the token in {token_file}.")
        mode = "The dashboard is read-only." if read_only else "Runs continue when the dashboard stops."
        print(f"Press Ctrl-C to stop. {mode}", flush=True)
        if browse:
            webbrowser.open(address)  # without the token: other users can see the arguments of processes
        server.run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket; SettingError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)
        hint = "choose another with --port N, or --port 0 for any free one"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            hint = "--host must be an address of this machine"
        raise SettingError(f"cannot listen on {host}:{port}: {reason} ({hint})") from None
