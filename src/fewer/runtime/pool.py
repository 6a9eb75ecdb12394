"""The pool runtime: clients in worker processes on this machine, with one torch thread each.

Workers start once, by fork if that is safe, so they share data, model and imports with the server at no cost. Each
worker has one pipe and holds one call at a time. The server sends the most expensive call first, and the next one to
any free worker, which balances the load. A message that goes to many clients crosses the pipe once per worker. If a
worker dies, its call is lost and a new worker replaces it. A worker that overruns the deadline is killed.
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
from fewer.runtime.handlers import Call, HandlerRunner, Reply
from fewer.runtime.memory import return_freed_memory

GRACE = 0.5
"""Seconds past the deadline before a worker that does not answer is killed."""


@dataclass(eq=False)
class Worker:
    """One worker process, the server's end of its pipe, and its current call."""

    process: Any
    pipe: Connection
    message: bytes | None = None
    call: Call | None = None
    started: float = 0.0
    """When the current call was sent."""

    def send(self, call: Call, message: bytes) -> bool:
        """Sends a call, and its message unless the worker already has it. Returns False if the worker is dead."""
        new_message = message is not self.message
        try:
            self.pipe.send_bytes(json.dumps({**asdict(call), "new_message": new_message}).encode())
            if new_message:
                self.pipe.send_bytes(message)
        except OSError:
            return False
        self.call, self.message, self.started = call, message, time.monotonic()
        return True

    def receive(self) -> Reply | None:
        """Receives the worker's reply. Returns None if the worker died."""
        self.call = None
        try:
            reply = json.loads(self.pipe.recv_bytes())
            reply["releases"] = tuple(map(tuple, reply["releases"]))
            return Reply(self.pipe.recv_bytes(), **reply, unsent=self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        """Kills the process and waits until it is gone."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Pool(Clients):
    """Runs clients in `workers` processes. The results are those of `Inline`, bit for bit."""

    handlers: HandlerRunner = field(kw_only=True)
    workers: int = 2
    cost: Callable[[int], float] = lambda client: 0.0
    """The expected cost of a client's work, in any unit."""
    _running: list[Worker] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._context = cast(Any, multiprocessing.get_context(self._start_method()))
        if self._start_method() == "fork":
            return_freed_memory()  # otherwise every worker would inherit it
            gc.freeze()  # keeps the collector from touching, and thereby copying, pages that the workers share
        for _ in range(self.workers):
            self._running.append(self._start_worker())

    def close(self) -> None:
        """Kills all workers."""
        for worker in self._running:
            worker.kill()
        self._running = []
        gc.unfreeze()

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        queue = deque(sorted(calls, key=lambda call: -self._expected_cost(call[0])))
        replies: list[tuple[Call, Reply | None]] = []
        try:
            while queue or replies or any(worker.call for worker in self._running):
                for worker in [worker for worker in self._running if worker.call is None]:
                    if queue:
                        call, message = queue.popleft()
                        if not worker.send(call, message):
                            self._replace_worker(worker)
                            replies.append((call, None))
                yield from replies  # while the workers run their next calls
                replies = list(self._collect_replies())
        finally:  # the caller may stop early: a reply to a running call must not reach a later question
            for worker in [worker for worker in self._running if worker.call is not None]:
                self._replace_worker(worker)

    def _expected_cost(self, call: Call) -> float:
        return 0.0 if call.on_server else self.cost(call.client)

    def _collect_replies(self) -> Iterator[tuple[Call, Reply | None]]:
        """Waits until a worker answers, dies or overruns the deadline, and yields the outcomes."""
        busy = [worker for worker in self._running if worker.call is not None]
        ends = [
            worker.started + deadline + GRACE
            for worker in busy
            if (deadline := self._worker_deadline(worker)) is not None
        ]
        timeout = max(0.0, min(ends) - time.monotonic()) if ends else None
        ready = wait([worker.pipe for worker in busy], timeout) if busy else []
        for worker in busy:
            call = worker.call
            assert call is not None
            deadline = self._worker_deadline(worker)
            if worker.pipe in ready:
                reply = worker.receive()
                if reply is None:
                    self._replace_worker(worker)
                yield call, reply
            elif deadline is not None and time.monotonic() > worker.started + deadline + GRACE:
                self._replace_worker(worker)
                yield call, Reply(b"", "late", f"stopped after {deadline:g} s")

    def _worker_deadline(self, worker: Worker) -> float | None:
        return None if worker.call is None else self._call_deadline(worker.call)

    def _start_method(self) -> str:
        """`fork` is safe on Linux as long as no accelerator is in use."""
        return "fork" if sys.platform == "linux" and self.handlers.device.type == "cpu" else "spawn"

    def _start_worker(self) -> Worker:
        server_end, worker_end = self._context.Pipe()
        inherited = [*(worker.pipe for worker in self._running), server_end] if self._start_method() == "fork" else []
        arguments = (self.handlers, worker_end, inherited, os.getpid())
        process = self._context.Process(target=_run_worker, args=arguments, daemon=True)
        process.start()
        worker_end.close()
        return Worker(process, server_end)

    def _replace_worker(self, worker: Worker) -> None:
        self._running.remove(worker)
        worker.kill()
        self._running.append(self._start_worker())


def _run_worker(handlers: HandlerRunner, pipe: Connection, inherited: Sequence[Connection], server: int) -> None:
    """The main loop of a worker: answers calls until the server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the server
        if os.getppid() != server:
            os._exit(0)
    for connection in inherited:
        connection.close()
    torch.set_num_threads(1)
    message = b""
    while True:
        try:
            header = json.loads(pipe.recv_bytes())
            if header.pop("new_message"):
                message = pipe.recv_bytes()
            reply = asdict(handlers.answer(Call.from_dict(header), message))
            parts = reply.pop("blob"), reply.pop("unsent")
            for part in (json.dumps(reply).encode(), *parts):
                pipe.send_bytes(part)
        except (EOFError, OSError):
            os._exit(0)
