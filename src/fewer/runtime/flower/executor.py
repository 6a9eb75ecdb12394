"""Takes work from a SuperLink or SuperNode, as Flower's own executor would."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import httpx

from fewer.runtime.flower import flwr_compat as compat
from fewer.runtime.flower.programs import secret_file

logging.getLogger("flwr").setLevel(logging.ERROR)
MIN_PAUSE, MAX_PAUSE = 0.05, 0.2
"""Seconds between two polls for content that the SuperNode is still fetching."""


def connect_executor(address: str, home: Path, root_certificate: bytes | None) -> compat.RuntimeHttpClient:
    """Returns an HTTP client that may take work from the program with this home. No certificate means no TLS."""
    secret = secret_file(home).read_bytes()
    signing = compat.SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={compat.ACQUIRE_TASK})
    version = compat.RuntimeVersionHttpInterceptor(component_name="SuperExec")
    server = address, root_certificate is None, root_certificate
    return compat.RuntimeHttpClient.from_server_address(*server, [version, signing])


def send_heartbeat(http: compat.RuntimeHttpClient) -> bool:
    """Tells a SuperLink or SuperNode that its task is still running. Returns False if the message did not arrive."""
    try:
        return http.SendTaskHeartbeat(compat.SendTaskHeartbeatRequest()).success
    except httpx.HTTPError:
        return False


# --- a client's questions --------------------------------------------------------------------------------------


def acquire_question(http: compat.RuntimeHttpClient) -> str:
    """Claims a question that waits at the SuperNode. Returns its token, or "" if none waits."""
    try:
        return http.AcquireTask(compat.AcquireTaskRequest(supported_task_types=[compat.TaskType.CLIENT_APP])).token
    except httpx.HTTPError:  # the SuperNode has not started yet, or has ended
        return ""


class QuestionDropped(Exception):
    """The SuperNode dropped a question. `newer_token` belongs to the question after it, or is ""."""

    def __init__(self, newer_token: str) -> None:
        super().__init__()
        self.newer_token = newer_token


class PollingClient(compat.RuntimeHttpClient):
    """Pulls a question, and waits until the SuperNode has all of it. Raises QuestionDropped if it never will.

    A SuperNode first makes a task for a message, then fetches its content. If the run ends in between (its server was
    killed and a new one started), the SuperNode silently drops the message but leaves the task. It fetches one message
    at a time, so a newer task means that it has dropped this one.
    """

    find_newer_task: Callable[[], str]
    """Returns the token of a newer task, or ""."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._newer_token, self._wait, self._lock = "", MIN_PAUSE, Lock()  # several threads pull objects

    def PullMessages(self, request: compat.PullAppMessagesRequest) -> compat.PullAppMessagesResponse:  # noqa: N802
        """Pulls the message without its content."""
        while not (response := super().PullMessages(request)).messages_list:
            self._pause()
        return response

    def PullObject(self, request: compat.PullObjectRequest) -> compat.PullObjectResponse:  # noqa: N802
        """Pulls one object of the message's content."""
        while True:
            try:
                response = super().PullObject(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.UNAUTHORIZED:  # the SuperNode has ended the task itself
                    raise QuestionDropped("") from error
                raise
            if response.object_available:
                return response
            self._pause()

    def _pause(self) -> None:
        with self._lock:
            self._newer_token = self._newer_token or self.find_newer_task()
            if self._newer_token:
                raise QuestionDropped(self._newer_token)
            self._wait = min(1.1 * self._wait, MAX_PAUSE)
        time.sleep(self._wait)
