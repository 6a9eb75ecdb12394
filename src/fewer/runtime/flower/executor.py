"""Taking work from a SuperLink or SuperNode in the place of Flower's own executor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from fewer.runtime.flower.programs import secret_file

logging.getLogger("flwr").setLevel(logging.ERROR)
SHORT, LONG = 0.05, 0.2
"""Seconds between two looks for what the SuperNode is just fetching: at first, and at most."""


def executor(address: str, home: Path, root: bytes | None) -> RuntimeHttpClient:
    """Who is given work by the program whose home this is; `root` is the authority it is known by, None without TLS."""
    secret = secret_file(home).read_bytes()
    signing = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"})
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    return RuntimeHttpClient.from_server_address(address, root is None, root, [version, signing])


def beats(http: RuntimeHttpClient) -> bool:
    """Tell a SuperLink or SuperNode that its task is in good hands; False where it did not hear."""
    try:
        return http.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
    except httpx.HTTPError:
        return False


# --- a client's questions --------------------------------------------------------------------------------------


def look(http: RuntimeHttpClient) -> str:
    """The token of a question that waits at the SuperNode; "" where none does."""
    try:
        return http.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token
    except httpx.HTTPError:  # it is not there yet, or not any more
        return ""


class GivenUp(Exception):
    """The SuperNode has dropped a question; `token` is of the one that came after it, or ""."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token


class Patient(RuntimeHttpClient):
    """Pulls a question, and waits while the SuperNode has not got all of it; GivenUp where it never will.

    A SuperNode makes a task of a message first and fetches its content then. If the run has ended meanwhile (its
    server was killed, and another is there), it drops the message without a word and leaves the task. It fetches
    one message at a time, so when there is another task, it has dropped this one.
    """

    another: Callable[[], str]
    """Looks for a newer task."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._newer, self._wait, self._lock = "", SHORT, Lock()  # pieces are pulled by several threads

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        """The message, without its content."""
        while not (found := super().PullMessages(request)).messages_list:
            self._pause()
        return found

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        """A piece of its content."""
        while True:
            try:
                found = super().PullObject(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.UNAUTHORIZED:  # it has ended the task itself
                    raise GivenUp("") from error
                raise
            if found.object_available:
                return found
            self._pause()

    def _pause(self) -> None:
        with self._lock:
            self._newer = self._newer or self.another()
            if self._newer:
                raise GivenUp(self._newer)
            self._wait = min(1.1 * self._wait, LONG)
        time.sleep(self._wait)
