"""A client's side: a SuperNode that fetches questions, and the loop that answers them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flwr.app import Message
from flwr.common.constant import SubStatus
from flwr.supercore.address import parse_address
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fewer.errors import RunError
from fewer.runtime.flower import envelope
from fewer.runtime.flower.executor import GivenUp, Patient, beats, executor, look
from fewer.runtime.flower.programs import Program, free_port, secret_file
from fewer.runtime.handlers import Call, Reply
from fewer.wire import Refused

PAUSE = 0.2
"""Seconds between two looks for a question."""
LOST = 60.0
"""Seconds without a question after which a message that the SuperNode lost is taken to be waited for in vain."""
_FAILED = re.compile(r"Failed to (?:send|receive) message \w+: (.*)")
LONGEST = 30.0
"""Seconds between two attempts to join, at most."""

Answering = Callable[[str, Call, bytes], Reply]
"""Answers a call with its message, of a job (as text)."""


@dataclass
class Node:
    """Joins a server at `address` with the keys in a folder, and answers until it is stopped."""

    address: str
    keys: Path
    home: Path
    say: Callable[[str], None] = lambda text: None
    """Told what happens."""

    def serve(self, answering: Answering) -> None:
        """Answer questions for ever. A SuperNode that ends (no server yet, a key in use) is started again."""
        for name in ("node.key", "ca.crt"):
            if not (self.keys / name).is_file():
                raise RunError(f"{self.keys} has no {name} (expected: the folder client-N that `fewer keys init` made)")
        if parse_address(self.address) is None:
            raise RunError(f"{self.address} is no address of a server (expected: HOST:PORT)")
        wait = 1.0
        while True:
            program, port = self._program()
            program.start()
            begun = time.monotonic()
            try:
                reason = self._answer_all(program, port, answering)
            finally:
                program.stop()
            if time.monotonic() - begun > LONGEST:
                wait = 1.0
            self.say(f"not joined: {reason}; again in {wait:.0f} s")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST)

    def _program(self) -> tuple[Program, int]:
        home, port = self.home.resolve() / "flower", free_port()
        arguments = ["--superlink", self.address, "--root-certificates", self.keys.resolve() / "ca.crt"]
        arguments += ["--auth-supernode-private-key", self.keys.resolve() / "node.key"]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", secret_file(home)]
        arguments += ["--host", "127.0.0.1", "--port", port]
        return Program("flwr.supernode.cli:flower_supernode", list(map(str, arguments)), home), port

    def _answer_all(self, program: Program, port: int, answering: Answering) -> str:
        """Answer what comes until the SuperNode ends, or an answer cannot be given to it; why."""
        http = executor(f"127.0.0.1:{port}", program.home, None)
        joined: bool | None = None
        lost, since = "", 0.0
        try:
            while program.pid is not None:
                said = program.said()
                if (now := _joined(said)) not in (None, joined):
                    joined = now
                    where = self.address
                    self.say(f"joined {where}" if joined else f"no server at {where}: trying again and again")
                if lost != (lost := _lost(said)):
                    since = time.monotonic()
                if lost and time.monotonic() > since + LOST:  # who asked sees that it came anew, and waits no more
                    return f"a message was lost on its way ({lost})"
                token = look(http)
                if not token:
                    time.sleep(PAUSE)
                while token:
                    try:
                        token = self._answer(port, token, answering, partial(look, http))
                    except Exception as error:  # a SuperNode without its answer would wait for it for ever
                        return f"an answer was lost ({type(error).__name__})"
            return _reason(program.last_words())
        finally:
            http.close()

    def _answer(self, port: int, token: str, answering: Answering, another: Callable[[], str]) -> str:
        """One question, from its token to its reply; the token of another that came where this one was given up."""
        signing = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), RuntimeTokenHttpInterceptor(token)
        http = Patient.from_server_address(f"127.0.0.1:{port}", True, None, signing)
        http.another = another
        heart = HeartbeatSender(lambda: beats(http))
        heart.start()
        try:
            try:
                message, context, _, _ = pull_task_input(http)
            except GivenUp as given_up:
                if given_up.token:  # otherwise the SuperNode has ended the task itself
                    push_task_output(http, None, SubStatus.FAILED, "")
                return given_up.token
            try:
                call, blob = envelope.read_question(message.content)
                reply = answering(str(context.run_config.get("job", "")), call, blob)
            except Refused as refused:
                reply = Reply(b"", "refused", refused.reason)
            except Exception as error:  # a full disk, say: it is told, and the next question may go well
                self.say(f"{type(error).__name__}: {error}")
                reply = Reply(b"", "failed", type(error).__name__)
            push_message(http, Message(envelope.answer(reply), reply_to=message), context)
            push_task_output(http, context, SubStatus.COMPLETED, "")
            return ""
        finally:
            if heart.is_running:
                heart.stop()
            http.close()


def _joined(said: Sequence[str]) -> bool | None:
    """Whether the SuperNode reaches a server, by what it said last: by itself it tries for ever, in its log."""
    for line in reversed(said):
        if "Connection attempt failed" in line:
            return False
        if "SuperNode ID" in line or "Connection successful" in line:
            return True
    return None


def _lost(said: Sequence[str]) -> str:
    """Why the SuperNode lost a message, unless it has been given another since: then nobody waits for that one."""
    for line in reversed(said):
        if "Receiving: " in line:
            break
        if found := _FAILED.search(line):
            return found[1]
    return ""


def _reason(told: str) -> str:
    """Why the SuperNode could not join, in our words."""
    if "[code: 2004]" in told:
        return "the server does not take this key (it is not registered, or in use at this moment)"
    if "CERTIFICATE_VERIFY_FAILED" in told:
        reason = told.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return f"the server's certificate is not to be trusted ({reason})"
    return told
