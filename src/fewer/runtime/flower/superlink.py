"""The server's side: a SuperLink, and one run on it."""

from __future__ import annotations

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, NamedTuple, Self, cast

import httpx
from flwr.app import Message

from fewer.errors import RunError, RunInterrupted
from fewer.runtime.flower import bypass_proxy, envelope
from fewer.runtime.flower import flwr_compat as compat
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.executor import connect_executor, send_heartbeat
from fewer.runtime.flower.programs import Program, secret_file
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.store import lock_file
from fewer.wire import Direction

START_TIMEOUT = 120.0
"""Seconds that a SuperLink gets to answer after its start."""
APP = b"""
[project]
name = "fewer"
version = "1.0.0"
description = "No code: both sides run the package that they have installed."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fewer"

[tool.flwr.app.components]
serverapp = "fewer.runtime.flower.superlink:SuperLink"
clientapp = "fewer.runtime.flower.node:Node"

[tool.flwr.app.config]
experiment = ""
"""


class SuperLinkLost(RunInterrupted):
    """The SuperLink ended or dropped the run. A new attempt resumes from the last checkpoint."""


class NoResponse(Exception):
    """The SuperLink did not answer; repeat the request."""


class RemoteClient(NamedTuple):
    """A client whose SuperNode is online."""

    node: int
    since: str
    """When the SuperNode connected. A different time means that it has restarted and lost its question."""


class Question(NamedTuple):
    """A call that waits for its reply."""

    call: Call
    client: RemoteClient


class PartialReply(NamedTuple):
    """A reply of which some objects may still be missing."""

    message: str
    missing: list[str]
    objects: dict[str, bytes]


@dataclass
class SuperLink:
    """Starts the SuperLink, submits the run, and transports its messages. It listens on `host` only."""

    credentials: Credentials
    host: str = "127.0.0.1"
    port: int = 8443
    packed: Counter[Direction] = field(default_factory=Counter)
    """Bytes of the run's messages as Flower packs them."""
    _lock: IO[str] | None = field(default=None, repr=False)
    _program: Program | None = field(default=None, repr=False)
    _grid: compat.RunGrid | None = field(default=None, repr=False)
    _heartbeat: compat.HeartbeatSender | None = field(default=None, repr=False)
    _partial_replies: dict[str, PartialReply] = field(default_factory=dict, repr=False)

    @property
    def address(self) -> str:
        """The address of the SuperLink for programs on this machine."""
        return f"127.0.0.1:{self.port}" if self.host == "0.0.0.0" else f"{self.host}:{self.port}"

    # --- the program ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        host, _, _ = self.address.rpartition(":")
        self.credentials.check_host(host)
        bypass_proxy(host)
        keys, home = self.credentials.folder.resolve(), self.credentials.folder.resolve() / "flower"
        arguments = ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"]
        arguments += ["--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"]
        arguments += ["--host", self.host, "--port", self.port, "--database", home / "superlink.db"]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", secret_file(home)]
        arguments += ["--disable-runtime-dependency-installation"]
        self._program = Program(compat.SUPERLINK, list(map(str, arguments)), home, compat.DETECT_SOON[compat.SUPERLINK])
        self._lock = lock_file(home / "lock")
        if self._lock is None:
            raise RunError(f"another server uses the keys in {self.credentials.folder}")
        try:
            self._start_program()
            self._register_clients()
        except BaseException:
            self._stop_program()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end_run()
        self._stop_program()

    def _stop_program(self) -> None:
        assert self._program and self._lock
        self._program.stop()
        self._lock.close()

    def _start_program(self) -> None:
        """Starts the program and waits until it answers."""
        assert self._program
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise RunError(f"cannot listen on {self.host}:{self.port}: {error.strerror}") from error
        self._program.start()
        end = time.monotonic() + START_TIMEOUT
        while True:
            with suppress(httpx.TransportError), self._open_control() as control:
                control.ListNodes(compat.ListNodesRequest())
                return
            if self._program.pid is None or time.monotonic() > end:
                reason = self._program.exit_reason()
                self._program.stop()
                raise RunError(f"Flower's SuperLink does not start on {self.host}:{self.port}: {reason}")
            time.sleep(0.2)

    @property
    def pid(self) -> int | None:
        """The process id of the SuperLink; None if it is not running."""
        return self._program.pid if self._program else None

    def _register_clients(self) -> None:
        """Admits exactly the clients whose public keys are in the credentials folder."""
        with self._open_control() as control:
            nodes = control.ListNodes(compat.ListNodesRequest()).nodes_info
            registered = {node.public_key: node for node in nodes if not node.unregistered_at}
            keys = self._clients_by_key()
            for key in keys.keys() - registered.keys():
                try:
                    control.RegisterNode(compat.RegisterNodeRequest(public_key=key, name=f"client-{keys[key]}"))
                except httpx.HTTPStatusError as error:
                    folder = self.credentials.folder
                    raise RunError(
                        f"client {keys[key]}: Flower does not accept a key again after its node.pub was removed "
                        f"(create a new key; or delete {folder / 'flower'} to register all keys in {folder} again)"
                    ) from error
            for key in registered.keys() - keys.keys():
                control.UnregisterNode(compat.UnregisterNodeRequest(node_id=registered[key].node_id))

    def _clients_by_key(self) -> dict[bytes, int]:
        return {key: client for client, key in self.credentials.public_keys.items()}

    def _open_control(self) -> closing[compat.ControlHttpClient]:
        version = compat.RuntimeVersionHttpInterceptor(component_name="flwr-cli")
        server = self.address, False, self._root_certificate
        return closing(compat.ControlHttpClient.from_server_address(*server, [version]))

    @property
    def _root_certificate(self) -> bytes:
        return (self.credentials.folder / "ca.crt").read_bytes()

    # --- the run --------------------------------------------------------------------------------------------

    def start_run(self, experiment: str) -> None:
        """Submits a run. Every client receives `experiment` with its first question."""
        self.end_run()  # a previous attempt may have failed before it had a runtime
        if self.pid is None:
            self._start_program()
        self.packed.clear()
        self._partial_replies.clear()
        try:
            self._submit_run(experiment)
        except httpx.HTTPError as error:
            raise SuperLinkLost(f"Flower's SuperLink does not accept the run ({error})") from error

    def _submit_run(self, experiment: str) -> None:
        fab, _ = compat.build_fab_from_files({"pyproject.toml": APP})
        with self._open_control() as control:
            app = compat.fab_to_proto(compat.Fab(hashlib.sha256(fab).hexdigest(), fab, {}))
            config = compat.user_config_to_proto({"experiment": experiment})
            response = control.StartRun(compat.StartRunRequest(fab=app, override_config=config))
        if not response.HasField("run_id"):
            raise RunError("Flower's SuperLink does not accept the run")
        self._grid = compat.RunGrid(self.address, self._root_certificate, self._claim_task(response.run_id))
        self._grid.enter_run()
        self._heartbeat = compat.HeartbeatSender(partial(send_heartbeat, self._grid.http))
        self._heartbeat.start()

    def _claim_task(self, run: int) -> str:
        """Claims the run's task. Returns the token that makes this process the server of the run."""
        home = self.credentials.folder / "flower"
        request = compat.AcquireTaskRequest(supported_task_types=[compat.TaskType.SERVER_APP])
        with closing(connect_executor(self.address, home, self._root_certificate)) as http:
            while (response := http.AcquireTask(request)).token:
                if response.task.run_id == run:
                    return response.token
                # This task belongs to a run that was submitted but never started. It expires on its own.
        raise RunError("Flower's SuperLink has lost the run that it accepted")

    def end_run(self) -> None:
        """Ends the run on the SuperLink."""
        if self._grid is None:
            return
        output = compat.PushTaskOutputRequest(sub_status=compat.SubStatus.COMPLETED, details="")
        with suppress(httpx.HTTPError):
            self._grid.http.PushTaskOutput(output)
        if self._heartbeat and self._heartbeat.is_running:
            self._heartbeat.stop()
        self._grid.close()
        self._grid = None

    # --- its messages ---------------------------------------------------------------------------------------

    def online_clients(self) -> dict[int, RemoteClient]:
        """The clients that are online, by number."""
        numbers = self._clients_by_key()
        with self._open_grid(may_repeat=True) as grid:
            nodes = list(grid.get_nodes())
        known = [node for node in nodes if node.public_key in numbers]
        return {numbers[node.public_key]: RemoteClient(node.node_id, node.last_activated_at) for node in known}

    def send_questions(self, questions: Sequence[tuple[Question, bytes]], ttl: float | None) -> dict[str, Question]:
        """Sends questions that expire after `ttl` seconds. Returns them by message id."""
        if not questions:
            return {}
        messages = []
        for (call, client), blob in questions:
            content = envelope.pack_question(call, blob)
            messages.append(Message(content, client.node, envelope.TYPE, ttl=ttl, group_id=str(call.round)))
        # Never ask twice: the client would continue from the state that it stored the first time.
        with self._open_grid() as grid:
            message_ids = list(grid.push_messages(messages))
        self.packed["down"] += sum(map(envelope.message_size, messages))
        return {message_id: question for message_id, (question, _) in zip(message_ids, questions, strict=True)}

    def receive_replies(self, pending: Iterable[str]) -> Mapping[str, Reply]:
        """Returns the replies that are complete, by the id of the question.

        A SuperLink announces a reply before all of it has arrived, and its sender may be slow or gone. So this method
        never waits: it looks at an incomplete reply again in the next call.
        """
        question_ids = list(pending)
        with self._open_grid() as grid:  # the SuperLink announces a reply only once
            unannounced = [question_id for question_id in question_ids if question_id not in self._partial_replies]
            response = grid.http.PullMessages(compat.PullAppMessagesRequest(message_ids=unannounced))
            for announced, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                # The SuperLink has checked the metadata. A client could write anything into the message.
                metadata = announced.metadata
                object_ids = dict.fromkeys(node.object_id for node in compat.iterate_object_tree(tree))
                partial_reply = PartialReply(metadata.message_id, list(object_ids), {})
                self._partial_replies[metadata.reply_to_message_id] = partial_reply
            known = self._partial_replies
            self._partial_replies = {key: known[key] for key in question_ids if key in known}
            outcomes = {key: self._complete_reply(grid, reply) for key, reply in self._partial_replies.items()}
        replies = {question_id: reply for question_id, reply in outcomes.items() if reply}
        for question_id in replies:
            del self._partial_replies[question_id]
        return replies

    def _complete_reply(self, grid: compat.RunGrid, partial_reply: PartialReply) -> Reply | None:
        """Pulls the missing objects of a reply. Returns None if some have not arrived yet."""
        http = grid.http
        sender: dict[str, Any] = {"node": grid.node, "run_id": grid.run.run_id}
        while partial_reply.missing:
            response = http.PullObject(compat.PullObjectRequest(object_id=partial_reply.missing[0], **sender))
            if not response.object_found:
                return Reply(b"", "lost", "its answer is incomplete")
            if not response.object_available:
                return None
            partial_reply.objects[partial_reply.missing.pop(0)] = response.object_content
        message_id = partial_reply.message
        http.ConfirmMessageReceived(compat.ConfirmMessageReceivedRequest(message_object_id=message_id, **sender))
        size = sum(map(len, partial_reply.objects.values()))
        try:
            message = cast(Message, compat.inflate_object_from_contents(message_id, partial_reply.objects))
            reply = envelope.read_answer(message)
        except Exception:  # a SuperLink checks only the headers of objects; a client can put anything into the rest
            return Reply(b"", "refused", "not a message")
        self.packed["up"] += size if message.has_content() else 0
        return reply

    @contextmanager
    def _open_grid(self, may_repeat: bool = False) -> Iterator[compat.RunGrid]:
        """Yields the grid. Raises SuperLinkLost if the run is gone, NoResponse if the request may be repeated."""
        assert self._grid
        try:
            yield self._grid
        except httpx.TransportError as error:
            if self.pid is None:
                raise SuperLinkLost("Flower's SuperLink has ended") from error
            raise NoResponse if may_repeat else SuperLinkLost("Flower's SuperLink does not answer") from error
        except httpx.HTTPStatusError as error:
            raise SuperLinkLost(f"Flower's SuperLink has dropped the run ({error.response.status_code})") from error
        except compat.ObjectPushError as error:  # for example, its disk is full
            raise SuperLinkLost(f"Flower's SuperLink cannot store a message: {error}") from error
