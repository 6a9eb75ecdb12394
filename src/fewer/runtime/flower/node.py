"""A client's side: a SuperNode that fetches questions, and the loop that answers them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flwr.app import Message

from fewer.errors import RunError
from fewer.runtime.flower import envelope
from fewer.runtime.flower import flwr_compat as compat
from fewer.runtime.flower.executor import (
    PollingClient,
    QuestionDropped,
    acquire_question,
    connect_executor,
    send_heartbeat,
)
from fewer.runtime.flower.programs import Program, find_free_port, secret_file
from fewer.runtime.handlers import Call, Reply
from fewer.wire import Refused

POLL_INTERVAL = 0.2
"""Seconds between two polls for a question."""
RESTART_AFTER = 60.0
"""Seconds without a new question after which a SuperNode that lost a message is restarted."""
MAX_WAIT = 30.0
"""Maximum number of seconds between two attempts to join."""
_LOST_MESSAGE = re.compile(r"Failed to (?:send|receive) message \w+: (.*)")

AnswerCallback = Callable[[str, Call, bytes], Reply]
"""Answers a call with its message. The first argument is the experiment, as text."""


@dataclass
class Node:
    """Joins the server at `address` with the keys in a folder, and answers until it is stopped."""

    address: str
    keys: Path
    home: Path
    log: Callable[[str], None] = lambda text: None
    """Called with each log line."""

    def serve(self, answer: AnswerCallback) -> None:
        """Answers questions forever. Restarts a SuperNode that ends (no server yet, key in use)."""
        for name in ("node.key", "ca.crt"):
            if not (self.keys / name).is_file():
                source = "`fewer keys init`, add or make-client" if name == "node.key" else "the server's operator"
                raise RunError(f"{self.keys} has no {name} (it comes from {source})")
        if compat.parse_address(self.address) is None:
            raise RunError(f"'{self.address}' is not the address of a server (expected: HOST:PORT)")
        wait = 1.0
        while True:
            program, port = self._make_program()
            program.start()
            start = time.monotonic()
            try:
                reason = self._answer_until_exit(program, port, answer)
            finally:
                program.stop()
            if time.monotonic() - start > MAX_WAIT:
                wait = 1.0
            self.log(f"not joined: {reason}; trying again in {wait:.0f} s")
            time.sleep(wait)
            wait = min(2 * wait, MAX_WAIT)

    def _make_program(self) -> tuple[Program, int]:
        home, port = self.home.resolve() / "flower", find_free_port()
        arguments = ["--superlink", self.address, "--root-certificates", self.keys.resolve() / "ca.crt"]
        arguments += ["--auth-supernode-private-key", self.keys.resolve() / "node.key"]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", secret_file(home)]
        arguments += ["--host", "127.0.0.1", "--port", port]
        setup = compat.DETECT_SOON[compat.SUPERNODE]
        return Program(compat.SUPERNODE, list(map(str, arguments)), home, setup), port

    def _answer_until_exit(self, program: Program, port: int, answer: AnswerCallback) -> str:
        """Answers questions until the SuperNode ends or an answer is lost. Returns the reason."""
        connected: bool | None = None
        loss, loss_time = "", 0.0
        with closing(connect_executor(f"127.0.0.1:{port}", program.home, None)) as http:
            while program.pid is not None:
                lines = program.log_lines()
                if (now_connected := _find_connection(lines)) not in (None, connected):
                    connected = now_connected
                    self.log(f"joined {self.address}" if connected else f"no server at {self.address}; still trying")
                if loss != (loss := _find_loss(lines)):
                    loss_time = time.monotonic()
                # After a restart, the server sees a new SuperNode and stops waiting for the lost message.
                if loss and time.monotonic() > loss_time + RESTART_AFTER:
                    return f"a message was lost ({loss})"
                token = acquire_question(http)
                if not token:
                    time.sleep(POLL_INTERVAL)
                while token:
                    try:
                        token = self._answer_question(port, token, answer, partial(acquire_question, http))
                    except Exception as error:  # the SuperNode would wait for this answer forever
                        return f"an answer was lost ({type(error).__name__})"
            return _explain_exit(program.exit_reason())

    def _answer_question(self, port: int, token: str, answer: AnswerCallback, newer_task: Callable[[], str]) -> str:
        """Answers the question with this token. Returns the token of a newer question if this one was dropped."""
        version = compat.RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        signing = compat.RuntimeTokenHttpInterceptor(token)
        http = PollingClient.from_server_address(f"127.0.0.1:{port}", True, None, [version, signing])
        http.find_newer_task = newer_task
        heartbeat = compat.HeartbeatSender(lambda: send_heartbeat(http))
        heartbeat.start()
        try:
            try:
                message, context, _, _ = compat.pull_task_input(http)
            except QuestionDropped as dropped:
                if dropped.newer_token:  # otherwise the SuperNode has ended the task itself
                    compat.push_task_output(http, None, compat.SubStatus.FAILED, "")
                return dropped.newer_token
            try:
                call, blob = envelope.read_question(message.content)
                reply = answer(str(context.run_config.get("experiment", "")), call, blob)
            except Refused as refused:
                reply = Reply(b"", "refused", refused.reason)
            except Exception as error:  # for example, a full disk: report it, and the next question may succeed
                self.log(f"{type(error).__name__}: {error}")
                reply = Reply(b"", "failed", type(error).__name__)
            compat.push_message(http, Message(envelope.pack_answer(reply), reply_to=message), context)
            compat.push_task_output(http, context, compat.SubStatus.COMPLETED, "")
            return ""
        finally:
            if heartbeat.is_running:
                heartbeat.stop()
            http.close()


def _find_connection(lines: Sequence[str]) -> bool | None:
    """True if the SuperNode is connected, None if unknown. It retries forever, so only its log shows this."""
    for line in reversed(lines):
        if "Connection attempt failed" in line:
            return False
        if "SuperNode ID" in line or "Connection successful" in line:
            return True
    return None


def _find_loss(lines: Sequence[str]) -> str:
    """The reason why the SuperNode lost a message, or "". A message that it received later makes the loss harmless."""
    for line in reversed(lines):
        if "Receiving: " in line:
            break
        if match := _LOST_MESSAGE.search(line):
            return match[1]
    return ""


def _explain_exit(reason: str) -> str:
    """Translates Flower's reason why the SuperNode could not join."""
    if "[code: 2004]" in reason:
        return "the server does not accept this key (it is not registered, or is in use right now)"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        detail = reason.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return f"the server's certificate cannot be trusted ({detail})"
    return reason
