"""The server's side: a SuperLink of our own, and one run on it."""

from __future__ import annotations

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, NamedTuple, Self, cast

import httpx
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fewer.errors import RunError
from fewer.runtime.flower import envelope, without_proxy
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.executor import beats, executor
from fewer.runtime.flower.programs import Program, secret_file
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.store import hold
from fewer.wire import Direction

START = 120.0
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
serverapp = "fewer.runtime.flower.link:Link"
clientapp = "fewer.runtime.flower.node:Node"

[tool.flwr.app.config]
job = ""
"""


class LinkLost(RunError):
    """The SuperLink is gone, or has given up our run: it must be begun anew, and goes on from our checkpoint."""


class RemoteClient(NamedTuple):
    """A client's SuperNode that is online."""

    node: int
    since: str
    """When it came: another time means that it has lost what it was at."""


class Asked(NamedTuple):
    """A question under way."""

    call: Call
    there: RemoteClient


class Coming(NamedTuple):
    """A reply of which perhaps not all has come."""

    message: str
    missing: list[str]
    pieces: dict[str, bytes]


@dataclass
class Link:
    """Starts the SuperLink, submits the run, and carries its messages. Its ports are open on `host` alone."""

    credentials: Credentials
    host: str = "127.0.0.1"
    port: int = 8443
    packed: Counter[Direction] = field(default_factory=Counter)
    """Bytes of the run's messages as Flower packs them."""
    _lock: IO[str] | None = field(default=None, repr=False)
    _program: Program | None = field(default=None, repr=False)
    _grid: HttpGrid | None = field(default=None, repr=False)
    _heart: HeartbeatSender | None = field(default=None, repr=False)
    _coming: dict[str, Coming] = field(default_factory=dict, repr=False)

    @property
    def address(self) -> str:
        """Where it is reached from this machine."""
        return f"127.0.0.1:{self.port}" if self.host == "0.0.0.0" else f"{self.host}:{self.port}"

    # --- the program ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        reached, _, _ = self.address.rpartition(":")
        self.credentials.check_host(reached)
        without_proxy(reached)
        keys, home = self.credentials.folder.resolve(), self.credentials.folder.resolve() / "flower"
        arguments = ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"]
        arguments += ["--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"]
        arguments += ["--host", self.host, "--port", self.port, "--database", home / "superlink.db"]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", secret_file(home)]
        arguments += ["--disable-runtime-dependency-installation"]
        self._program = Program("flwr.superlink.cli:flower_superlink", list(map(str, arguments)), home)
        self._lock = hold(home / "lock")
        if self._lock is None:
            raise RunError(f"another server is at work with the keys in {self.credentials.folder}")
        try:
            self._start()
            self._register()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end_run()
        self._stop()

    def _stop(self) -> None:
        assert self._program and self._lock
        self._program.stop()
        self._lock.close()

    def _start(self) -> None:
        """Start the program and wait until it answers."""
        assert self._program
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise RunError(f"{self.host}:{self.port} cannot be listened on: {error.strerror}") from error
        self._program.start()
        end = time.monotonic() + START
        while True:
            with suppress(httpx.TransportError), self._control() as control:
                control.ListNodes(ListNodesRequest())
                return
            if self._program.pid is None or time.monotonic() > end:
                reason = self._program.last_words()
                self._program.stop()
                raise RunError(f"Flower's SuperLink does not start on {self.host}:{self.port}: {reason}")
            time.sleep(0.2)

    @property
    def pid(self) -> int | None:
        """The SuperLink's process, if it runs."""
        return self._program.pid if self._program else None

    def _register(self) -> None:
        """Let in the clients whose keys are in the directory, and nobody else."""
        with self._control() as control:
            nodes = control.ListNodes(ListNodesRequest()).nodes_info
            known = {node.public_key: node for node in nodes if not node.unregistered_at}
            keys = {key: client for client, key in self.credentials.public_keys.items()}
            for key in keys.keys() - known.keys():
                try:
                    control.RegisterNode(RegisterNodeRequest(public_key=key, name=f"client-{keys[key]}"))
                except httpx.HTTPStatusError as error:
                    folder = self.credentials.folder
                    raise RunError(
                        f"client {keys[key]}: Flower does not take a key again whose node.pub was taken away before "
                        f"(make a new key; or delete {folder / 'flower'}, to begin anew with all that are in {folder})"
                    ) from error
            for key in known.keys() - keys.keys():
                control.UnregisterNode(UnregisterNodeRequest(node_id=known[key].node_id))

    @contextmanager
    def _control(self) -> Iterator[ControlHttpClient]:
        http = ControlHttpClient.from_server_address(
            self.address, False, self._root, [RuntimeVersionHttpInterceptor(component_name="flwr-cli")]
        )
        try:
            yield http
        finally:
            http.close()

    @property
    def _root(self) -> bytes:
        return (self.credentials.folder / "ca.crt").read_bytes()

    # --- the run --------------------------------------------------------------------------------------------

    def begin_run(self, experiment: str) -> None:
        """Submit a run; every client gets `job` with the first question."""
        self.end_run()  # of an attempt that did not get as far as to a runtime
        if self.pid is None:
            self._start()
        self.packed.clear()
        self._coming.clear()
        try:
            self._submit(experiment)
        except httpx.HTTPError as error:
            raise LinkLost(f"Flower's SuperLink does not take the run ({error})") from error

    def _submit(self, experiment: str) -> None:
        fab, _ = build_fab_from_files({"pyproject.toml": APP})
        with self._control() as control:
            started = control.StartRun(
                StartRunRequest(
                    fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {})),
                    override_config=user_config_to_proto({"job": experiment}),
                )
            )
        if not started.HasField("run_id"):
            raise RunError("Flower's SuperLink does not take the run")
        self._grid = HttpGrid(self.address, False, self._root, token=self._claim(started.run_id))
        self._grid._retry_invoker = None  # type: ignore[assignment]  # ours: Flower's would interrupt this process
        task = self._grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            task.task_id,
            task.run.run_id,
            task.context.node_id,
        )
        self._grid.set_run(run_from_proto(task.run))
        self._heart = HeartbeatSender(partial(beats, self._grid._runtime_client))
        self._heart.start()

    def _claim(self, run: int) -> str:
        """The token with which this process is the run's server."""
        http = executor(self.address, self.credentials.folder / "flower", self._root)
        try:
            while True:
                found = http.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if not found.token:
                    raise RunError("Flower's SuperLink has lost the run that it took")
                if found.task.run_id == run:
                    return found.token
                # of a run that was submitted and never begun: it ends by itself
        finally:
            http.close()

    def end_run(self) -> None:
        """Let the SuperLink forget the run."""
        if self._grid is None:
            return
        done = PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details="")
        with suppress(httpx.HTTPError):
            self._grid._runtime_client.PushTaskOutput(done)
        if self._heart and self._heart.is_running:
            self._heart.stop()
        self._grid.close()
        self._grid = None

    # --- its messages ---------------------------------------------------------------------------------------

    def there(self) -> dict[int, RemoteClient]:
        """The clients that are online."""
        numbers = {key: client for client, key in self.credentials.public_keys.items()}
        with self._answering() as grid:
            nodes = list(grid.get_nodes())
        return {
            numbers[node.public_key]: RemoteClient(node.node_id, node.last_activated_at)
            for node in nodes
            if node.public_key in numbers
        }

    def push(self, questions: Sequence[tuple[Asked, bytes]], seconds: float | None) -> dict[str, Asked]:
        """Send questions, to be taken within so many seconds; by the number of the message, what was asked of whom."""
        if not questions:
            return {}
        messages = [
            Message(
                envelope.question(asked.call, blob),
                asked.there.node,
                envelope.TYPE,
                ttl=seconds,
                group_id=str(asked.call.round),
            )
            for asked, blob in questions
        ]
        with self._once() as grid:  # nobody may be asked twice: a client would take what it made for what was before
            numbers = list(grid.push_messages(messages))
        self.packed["down"] += sum(map(envelope.size, messages))
        return {number: asked for number, (asked, _) in zip(numbers, questions, strict=True)}

    def pull(self, waiting: Iterable[str]) -> Mapping[str, Reply]:
        """The replies that have come.

        A SuperLink hands a reply out when it is announced, before it is there. Whoever sends it may be slow or gone, so
        nothing is waited for here: what has not come whole is looked at again with the next pull.
        """
        numbers = list(waiting)
        with self._once() as grid:  # a reply is handed out once
            new = [number for number in numbers if number not in self._coming]
            found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=new))
            for about, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                told = about.metadata  # what the SuperLink has checked; a client could write anything into the message
                pieces = dict.fromkeys(piece.object_id for piece in iterate_object_tree(tree))
                self._coming[told.reply_to_message_id] = Coming(told.message_id, list(pieces), {})
            self._coming = {number: self._coming[number] for number in numbers if number in self._coming}
            replies = {number: reply for number, one in self._coming.items() if (reply := self._whole(grid, one))}
        for number in replies:
            del self._coming[number]
        return replies

    def _whole(self, grid: HttpGrid, coming: Coming) -> Reply | None:
        """A reply, if all of its pieces are there."""
        http = grid._runtime_client
        about: dict[str, Any] = {"node": grid.node, "run_id": grid.run.run_id}
        while coming.missing:
            got = http.PullObject(PullObjectRequest(object_id=coming.missing[0], **about))
            if not got.object_found:
                return Reply(b"", "lost", "its answer did not come whole")
            if not got.object_available:
                return None
            coming.pieces[coming.missing.pop(0)] = got.object_content
        http.ConfirmMessageReceived(ConfirmMessageReceivedRequest(message_object_id=coming.message, **about))
        size = sum(map(len, coming.pieces.values()))
        try:
            message = cast(Message, inflate_object_from_contents(coming.message, coming.pieces))
            reply = envelope.read_answer(message)
        except Exception:  # a SuperLink looks at the heads of pieces alone, and a client can put anything into the rest
            return Reply(b"", "refused", "not a message")
        self.packed["up"] += size if message.has_content() else 0
        return reply

    @contextmanager
    def _once(self) -> Iterator[HttpGrid]:
        """The grid, for what cannot be asked again."""
        try:
            with self._answering() as grid:
                yield grid
        except Again as error:
            raise LinkLost("Flower's SuperLink does not answer") from error

    @contextmanager
    def _answering(self) -> Iterator[HttpGrid]:
        """The grid; Again where it can be asked once more, LinkLost where the SuperLink is gone or has given us up."""
        assert self._grid
        try:
            yield self._grid
        except httpx.TransportError as error:
            if self.pid is None:
                raise LinkLost("Flower's SuperLink has ended") from error
            raise Again from error
        except httpx.HTTPStatusError as error:
            raise LinkLost(f"Flower's SuperLink has given up the run ({error.response.status_code})") from error
        except ObjectPushError as error:  # its disk is full, say
            raise LinkLost(f"Flower's SuperLink does not keep what it is given: {error}") from error


class Again(Exception):
    """The SuperLink did not answer; it is to be asked again."""
