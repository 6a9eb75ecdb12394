"""Clients in worker processes on this machine, one torch thread each.

Workers are started once, by fork where that is safe, so data, model and imports are shipped once and for nothing.
Each worker has one pipe and holds one call at a time; the server hands out the most expensive call first and
the next one to whoever is free, which balances the work. A message that goes to many clients crosses a pipe once
per worker. A worker that dies loses the call it had and is replaced; one that overruns the deadline is killed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from fewer.runtime.clients import Clients
from fewer.runtime.handlers import Call, HandlerServer, Reply

_LIBC = ctypes.CDLL(None)
GRACE = 0.5
"""Seconds past the deadline before a worker that does not answer is killed."""


@dataclass(eq=False)
class Worker:
    """One process, the server's end of its pipe, and the call it is at."""

    process: Any
    pipe: Connection
    message: bytes | None = None
    call: Call | None = None
    since: float = 0.0

    def hand(self, call: Call, message: bytes) -> bool:
        """Give it a call, and the message unless it has that one already; False where it is dead."""
        fresh = message is not self.message
        try:
            self.pipe.send_bytes(json.dumps({**asdict(call), "fresh": fresh}).encode())
            if fresh:
                self.pipe.send_bytes(message)
        except OSError:
            return False
        self.call, self.message, self.since = call, message, time.monotonic()
        return True

    def take(self) -> Reply | None:
        """Its reply; None where it died."""
        self.call = None
        try:
            reply = json.loads(self.pipe.recv_bytes())
            return Reply(self.pipe.recv_bytes(), **reply)
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Pool(Clients):
    """`workers` processes. The numbers are those of `Inline`, bit for bit."""

    handlers: HandlerServer = field(kw_only=True)
    workers: int = 2
    cost: Callable[[int], float] = lambda client: 0.0
    """What a client's work is expected to cost, in any unit."""
    _crew: list[Worker] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._context = cast(Any, multiprocessing.get_context(self._way()))
        if self._way() == "fork":
            if hasattr(_LIBC, "malloc_trim"):
                _LIBC.malloc_trim(0)  # what is freed but not given back would count once for each worker
            gc.freeze()  # keeps the collector from touching, and so copying, the pages that the workers share
        for _ in range(self.workers):
            self._crew.append(self._hire())

    def close(self) -> None:
        """End the workers at once; none of them outlives this."""
        for worker in self._crew:
            worker.end()
        self._crew = []
        gc.unfreeze()

    def _carry(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        queue = deque(sorted(calls, key=lambda call: -self._expected(call[0])))
        replies: list[tuple[Call, Reply | None]] = []
        try:
            while queue or replies or any(worker.call for worker in self._crew):
                for worker in [worker for worker in self._crew if worker.call is None]:
                    if queue:
                        call, message = queue.popleft()
                        if not worker.hand(call, message):
                            self._replace(worker)
                            replies.append((call, None))
                yield from replies  # while the workers are at their next calls
                replies = list(self._collect())
        finally:  # whoever asked gave up in the middle: what is under way must not answer a later question
            for worker in [worker for worker in self._crew if worker.call is not None]:
                self._replace(worker)

    def _expected(self, call: Call) -> float:
        return self.cost(call.client) if call.client >= 0 else 0.0

    def _collect(self) -> Iterator[tuple[Call, Reply | None]]:
        """Wait until a worker answers, dies or overruns the deadline; yield what that gives."""
        busy = [worker for worker in self._crew if worker.call is not None]
        ends = [worker.since + limit + GRACE for worker in busy if (limit := self._limit(worker)) is not None]
        patience = max(0.0, min(ends) - time.monotonic()) if ends else None
        ready = wait([worker.pipe for worker in busy], patience) if busy else []
        for worker in busy:
            call = worker.call
            assert call is not None
            if worker.pipe in ready:
                reply = worker.take()
                if reply is None:
                    self._replace(worker)
                yield call, reply
            elif (limit := self._limit(worker)) is not None and time.monotonic() > worker.since + limit + GRACE:
                self._replace(worker)
                yield call, Reply(b"", "late", f"stopped after {limit:g} s")

    def _limit(self, worker: Worker) -> float | None:
        return None if worker.call is None else self._deadline(worker.call)

    def _way(self) -> str:
        """Forking is safe on Linux as long as no accelerator is in use."""
        return "fork" if sys.platform == "linux" and self.handlers.device.type == "cpu" else "spawn"

    def _hire(self) -> Worker:
        ours, theirs = self._context.Pipe()
        foreign = [*(worker.pipe for worker in self._crew), ours] if self._way() == "fork" else []
        process = self._context.Process(target=_work, args=(self.handlers, theirs, foreign, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _replace(self, worker: Worker) -> None:
        self._crew.remove(worker)
        worker.end()
        self._crew.append(self._hire())


def _work(handlers: HandlerServer, pipe: Connection, foreign: Sequence[Connection], server: int) -> None:
    """A worker's life: take a call, answer it, until the server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the server
        if os.getppid() != server:
            os._exit(0)
    for other in foreign:
        other.close()
    torch.set_num_threads(1)
    message = b""
    while True:
        try:
            header = json.loads(pipe.recv_bytes())
            if header.pop("fresh"):
                message = pipe.recv_bytes()
            reply = asdict(handlers.answer(Call.of(header), message))
            blob = reply.pop("blob")
            pipe.send_bytes(json.dumps(reply).encode())
            pipe.send_bytes(blob)
        except (EOFError, OSError):
            os._exit(0)
