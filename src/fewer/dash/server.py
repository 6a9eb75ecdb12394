"""The answers: the page, and what it asks for as JSON; what changes is told by server-sent events."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import fewer
from fewer.dash.catalog import STATES, Catalog, RunEntry
from fewer.dash.control import LOG, Control, hindrance
from fewer.dash.guard import Guard, token_for
from fewer.dash.records import newest, read_line
from fewer.errors import FewerError, RunError, SettingError
from fewer.report.style import looks
from fewer.runs.files import EVENTS, LEDGER
from fewer.runs.settings import OUTSIDE

REPORT = "report/report.html"
"""In a run's directory: the page that `fewer run` and `fewer resume` write."""
LARGEST = 200
"""Rows of one answer."""
ANY = 1 << 60
TICK = 0.5
"""Seconds between two looks of somebody who follows."""
QUIET = 15.0
"""Seconds after which a word is sent to see whether somebody is still there."""
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST = 24
"""Runs that are compared at once."""
HIDDEN = ("method", "method_options", *OUTSIDE)
"""Settings that need not be told: what makes the numbers is told otherwise, or they do not depend on it."""
ORDERS: Mapping[str, Callable[[RunEntry], Any]] = {
    "changed": lambda run: run.row["changed"],
    "accuracy": lambda run: run.row.get("accuracy") or 0.0,
    "bytes": lambda run: run.row.get("up", 0) + run.row.get("down", 0),
    "seconds": lambda run: run.row.get("seconds", 0.0),
    "name": lambda run: run.name,
    "method": lambda run: (run.row["method"], run.name),
}
_REPORT = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
"""A report needs nothing but itself, and is kept from asking us for anything."""


@dataclass
class Dashboard:
    """What the page asks for."""

    catalog: Catalog
    control: Control
    read_only: bool = False
    closing: Callable[[], bool] = lambda: False
    resuming: threading.Lock = field(default_factory=threading.Lock)
    """Held so that nobody starts a run twice."""

    def routes(self) -> list[Route]:
        """All addresses. Runs are asked for by what the catalog calls them, never by a path."""
        one = "/api/runs/{id}"
        found = [
            Route("/", partial(self.file, name="index.html")),
            Route("/static/{name}", self.file),
            Route("/api/runs", self.listing),
            Route("/api/follow", self.follow),
            Route("/api/compare", self.compare),
            Route(one, self.show),
            Route(f"{one}/curve", self.curve),
            Route(f"{one}/tally", self.tally),
            Route(f"{one}/events", self.events),
            Route(f"{one}/ledger", self.ledger),
            Route(f"{one}/log", self.log),
            Route(f"{one}/report", self.report),
        ]
        if not self.read_only:
            found += [
                Route(f"{one}/stop", self.stop, methods=["POST"]),
                Route(f"{one}/resume", self.resume, methods=["POST"]),
            ]
        return found

    def _run(self, request: Request) -> RunEntry:
        id = request.path_params["id"]
        if id not in self.catalog.runs:
            self.catalog.refresh(now=True)
        try:
            return self.catalog.runs[id]
        except KeyError:
            raise RunError("there is no such run here") from None

    # --- looking ------------------------------------------------------------------------------------------------

    def file(self, request: Request, name: str = "") -> Response:
        """The page and what belongs to it."""
        found = _STATIC.get(name or request.path_params["name"])
        if found is None:
            return JSONResponse({"error": "there is no such file"}, 404)
        return Response(found[0], media_type=found[1], headers={"cache-control": "no-cache"})

    def listing(self, request: Request) -> Response:
        """A page of the list, sorted and sifted."""
        asked = request.query_params
        self.catalog.refresh()
        words, state, order = (
            asked.get("find", "").lower().split(),
            asked.get("state", ""),
            asked.get("sort", "changed"),
        )
        if order not in ORDERS or (state and state not in STATES):
            raise SettingError(f"sort is one of {', '.join(ORDERS)}; state is one of {', '.join(STATES)}")
        runs = [run for run in self.catalog.rows() if run.row]
        found = [run for run in runs if (not state or run.state == state) and _has(run, words)]
        found.sort(key=ORDERS[order], reverse=asked.get("down", "1") == "1")
        first = _number(asked.get("from"), 0, ANY)
        page = found[first : first + _number(asked.get("limit"), 50)]
        return answer(
            {
                "rows": [run.row for run in page],
                "found": len(found),
                **self._totals(),
                "root": str(self.catalog.root),
                "read_only": self.read_only,
                "version": fewer.__version__,
            }
        )

    def _totals(self) -> dict[str, Any]:
        counts = self.catalog.counts()
        return {
            "total": counts.total(),
            "came": self.catalog.came,
            "counts": {state: counts[state] for state in STATES},
        }

    def show(self, request: Request) -> Response:
        """All about a run but what is long."""
        run = self._run(request)
        self.catalog.look_at(run)
        about = run.description
        return answer(
            {
                "row": run.row,
                "path": str(run.path),
                "settings": about.get("settings", {}),
                "method": about.get("method", {}),
                "environment": {
                    "hash": about.get("hash"),
                    **about.get("environment", {}),
                    "data": about.get("data"),
                    "command": " ".join(map(str, about.get("command", []))),
                },
                "hindrance": hindrance(run.path, about) if run.state != "damaged" else "it is damaged",
                "report": (run.path / REPORT).is_file(),
                "log": (run.path / LOG).is_file(),
                "read_only": self.read_only,
            }
        )

    def compare(self, request: Request) -> Response:
        """Some runs, with looks by which to tell them apart, and the settings that they have differently."""
        runs = [self.catalog.runs[id] for id in _ids(request) if id in self.catalog.runs]
        runs = [run for run in runs if run.row["state"] != "damaged"][:MOST]
        found = looks({run.id: run.row["method"] for run in runs})
        told = [{**run.description["settings"], **run.description["method"]} for run in runs]
        keys = [key for key in dict.fromkeys(key for each in told for key in each) if _differ(key, told)]
        beside = len(runs) > 1 and len({run.path.parent for run in runs}) == 1
        return answer(
            {
                "runs": [{**run.row, **found[run.id]._asdict()} for run in runs],
                "most": MOST,
                "report": beside and self._together(runs[0]).is_file(),
                "differing": [{"name": key, "values": [each.get(key) for each in told]} for key in keys],
            }
        )

    def _together(self, run: RunEntry) -> Path:
        """Where `fewer compare` writes its page on this and the runs beside it; what is above our root is not ours."""
        inside = run.path.parent.is_relative_to(self.catalog.root)
        return (run.path.parent if inside else run.path) / REPORT

    def curve(self, request: Request) -> Response:
        """Figures by round."""
        return answer({"points": self.catalog.curve(self._run(request))})

    def tally(self, request: Request) -> Response:
        """Faults and messages, added up as far as read by now."""
        return answer(self.catalog.tally(self._run(request)))

    def events(self, request: Request) -> Response:
        """What happened, the newest first."""
        lines, before = self._page(request, EVENTS)
        return answer({"events": [event for line in lines if (event := read_line(line))], "before": before})

    def ledger(self, request: Request) -> Response:
        """Messages, the newest first."""
        lines, before = self._page(request, LEDGER)
        rows = [line.decode(errors="replace").split(",") for line in lines]
        return answer({"rows": [row for row in rows if row[0].isdecimal()], "before": before})

    def log(self, request: Request) -> Response:
        """The last words of `fewer resume` that was started from here."""
        lines, _ = self._page(request, LOG)
        return answer({"lines": [line.decode(errors="replace") for line in reversed(lines)]})

    def _page(self, request: Request, name: str) -> tuple[Sequence[bytes], int]:
        before = request.query_params.get("before")
        limit = _number(request.query_params.get("limit"), 50)
        return newest(self._run(request).path / name, limit, None if before is None else _number(before, 0, ANY))

    def report(self, request: Request) -> Response:
        """The page that was written on the run, or on all runs of its comparison together."""
        run = self._run(request)
        path = self._together(run) if request.query_params.get("together") else run.path / REPORT
        try:
            page = path.read_bytes()
        except OSError:
            raise RunError("there is no report of this run") from None
        return Response(page, media_type="text/html", headers={"content-security-policy": _REPORT})

    async def follow(self, request: Request) -> Response:
        """Rows that change, of the runs that are named, as they change."""
        ids = _ids(request)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._changes(ids), media_type="text/event-stream", headers=headers)

    async def _changes(self, ids: Sequence[str]) -> AsyncIterator[str]:
        told: dict[str, int] = {}
        totals: dict[str, Any] = {}
        quiet = 0.0
        while not self.closing():
            await run_in_threadpool(self.catalog.refresh)
            runs = [run for id in ids if (run := self.catalog.runs.get(id)) and run.revision != told.get(id)]
            now = self._totals()
            if runs or now != totals:
                told |= {run.id: run.revision for run in runs}
                totals, quiet = now, 0.0
                yield f"data: {_text({'rows': [run.row for run in runs], **now})}\n\n"
            elif (quiet := quiet + TICK) >= QUIET:
                quiet = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(TICK)

    # --- acting -------------------------------------------------------------------------------------------------

    def stop(self, request: Request) -> Response:
        """Interrupt a run."""
        return answer({"process": self.control.stop(self._run(request).path)})

    def resume(self, request: Request) -> Response:
        """Go on with a run."""
        run = self._run(request)
        with self.resuming:
            self.catalog.look_at(run)
            if run.state not in ("stopped", "broken"):
                raise RunError(f"{run.path} is {run.state}")
            process = self.control.resume(run.path, run.description)
            self.catalog.look_at(run)
        return answer({"process": process})


def _statics() -> dict[str, tuple[bytes, str]]:
    folder = files("fewer.dash") / "static"
    return {
        entry.name: (entry.read_bytes(), KINDS[Path(entry.name).suffix])
        for entry in folder.iterdir()
        if Path(entry.name).suffix in KINDS
    }


_STATIC = _statics()


def _ids(request: Request) -> list[str]:
    return list(dict.fromkeys(filter(None, request.query_params.get("ids", "").split(","))))[:LARGEST]


def _differ(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    known = [each[key] for each in settings if key in each]
    return key not in HIDDEN and any(value != known[0] for value in known)


def _has(run: RunEntry, words: Sequence[str]) -> bool:
    text = f"{run.name} {run.row['method']} {run.row['data']} {run.state}".lower()
    return all(word in text for word in words)


def _number(text: str | None, default: int, most: int = LARGEST) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise SettingError(f"'{text[:20]}' is not a number")
    return min(int(text[:20]), most)


def answer(value: Any) -> Response:
    """JSON that a browser can read, and does not keep."""
    return Response(_text(value), media_type="application/json", headers={"cache-control": "no-store"})


def _text(value: Any) -> str:
    return json.dumps(_plain(value), separators=(",", ":"), default=str)


def _plain(value: Any) -> Any:
    """Without numbers that are none, for which JSON has no word."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


# --- serving ----------------------------------------------------------------------------------------------------


def application(dashboard: Dashboard, token: str | None, names: Sequence[str], port: int) -> Guard:
    """All of it, with the guard before it."""

    async def enter(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 1000:
                break
        if not guard.accepts(body[:1000].decode(errors="replace").strip()):
            return JSONResponse({"error": "this is not the token"}, 403)
        response = JSONResponse({})
        response.set_cookie(guard.cookie, guard.proof(), httponly=True, samesite="strict")
        return response

    def refused(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400 if isinstance(error, SettingError) else 409)

    app = Starlette(
        routes=[*dashboard.routes(), Route("/api/enter", enter, methods=["POST"])],
        exception_handlers={FewerError: refused},
    )
    guard = Guard(app, token, names, port)
    return guard


def opened(
    root: Path,
    listening: socket.socket,
    *,
    token: str | None = None,
    names: Sequence[str] = (),
    read_only: bool = False,
) -> uvicorn.Server:
    """A server of the runs under a directory, ready to run on a socket that listens."""
    control = Control()
    dashboard = Dashboard(Catalog(root, control.started), control, read_only)
    app = application(dashboard, token, names, listening.getsockname()[1])
    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
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
    """Serve the runs under a directory until interrupted."""
    token = token_for(host, token_file)
    with listen(host, port) as listening:
        server = opened(root, listening, token=token, names=[*names, host], read_only=read_only)
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listening.getsockname()[1]}/"
        print(f"Runs under {root}: {address}" + (f"#token={token}" if token and not token_file else ""))
        if token_file:
            print(f"The page asks for the token in {token_file}.")
        end = "nothing can be stopped or resumed from it" if read_only else "runs go on"
        print(f"Ctrl-C ends the dashboard; {end}.", flush=True)
        if browse:
            webbrowser.open(address)  # without the token: others can see what programs are started with
        server.run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; SettingError where it cannot."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)
        other = "--port N takes another, 0 any free one"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            other = "--host takes an address of this machine"
        raise SettingError(f"{host}:{port} cannot be listened on: {reason} ({other})") from None
