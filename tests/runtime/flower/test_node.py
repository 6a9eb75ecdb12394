"""A client's loop against the real state and handlers of a SuperNode, without processes: dropped questions."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from flwr.app import Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.servicer.runtime import runtime_handlers as core
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.servicer.runtime import runtime_handlers as handlers
from flwr.supernode.start_client_internal import _pull_and_store_message

from fewer.runtime.flower import envelope
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program
from fewer.runtime.flower.superlink import APP
from fewer.runtime.handlers import Call, Reply

pytestmark = pytest.mark.timeout(60)
FAB = Fab("", build_fab_from_files({"pyproject.toml": APP})[0], {})


class SuperNode(Program):
    """A SuperNode's state and loop, driven by the test; a client's calls go straight to its handlers."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__("none:none", [], home)
        home.mkdir()
        (home / "secret").write_bytes(b"0" * 32)
        store = ObjectStoreFactory()
        self.store, self.state = store.store(), NodeStateFactory(store).state()
        self.state.set_node_id(1)
        self.up = True
        patch.setattr(RuntimeHttpClient, "_unary_unary", lambda *args, **kwargs: self.call(*args, **kwargs))

    @property
    def pid(self) -> int | None:
        return 1 if self.up else None

    def call(self, http: Any, *, rpc_method: str, request: Any, **_: Any) -> Any:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", rpc_method.rpartition("/")[2]).lower()
        if name == "acquire_task":
            return handlers.acquire_task(request, self.state)
        token = next(
            interceptor._token
            for interceptor in http._interceptors
            if isinstance(interceptor, RuntimeTokenHttpInterceptor)
        )
        task = self.state.get_task_by_token(token)
        if task is None:
            raise httpx.HTTPStatusError(
                "", request=httpx.Request("POST", "http://a"), response=httpx.Response(httpx.codes.UNAUTHORIZED)
            )
        module = handlers if hasattr(handlers, name) else core
        return getattr(module, name)(request, state=self.state, task=task)

    def fetch(self, run: int, content: Callable[[], None] = lambda: None) -> None:
        """Fetches a question of a run; `content` is called before each piece of its content."""
        message = make_question(run)
        pieces = {key: piece.deflate() for key, piece in get_all_nested_objects(message).items()}

        def pull(run: int, key: str) -> bytes:
            content()
            return pieces[key]

        _pull_and_store_message(
            self.state,
            self.store,
            {},
            receive=lambda: (remove_content_from_message(message), get_object_tree(message)),
            get_run=lambda run: Run(**{**vars(Run.create_empty(run)), "fab_hash": self.state.store_fab(FAB)}),
            get_fab=lambda fab, run: FAB,
            pull_object=pull,
            confirm_message_received=lambda run, key: None,
            trusted_entities=None,
        )


def make_question(run: int) -> Message:
    metadata = Metadata(
        run_id=run,
        message_id="",
        src_node_id=1,
        dst_node_id=1,
        reply_to_message_id="",
        group_id=str(run),
        created_at=0.0,
        ttl=1000.0,
        message_type=envelope.TYPE,
    )
    message = make_message(
        metadata=metadata, content=envelope.pack_question(Call(0, "local_train", run), b"the same model")
    )
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.fixture
def supernode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuperNode:
    return SuperNode(tmp_path / "home", monkeypatch)


def answer_one(supernode: SuperNode) -> list[int]:
    """Lets a client answer one question; returns the rounds of the answered questions."""
    rounds = []

    def answer(experiment: str, call: Call, blob: bytes) -> Reply:
        assert blob == b"the same model"
        rounds.append(call.round)
        supernode.up = False
        return Reply(b"fine")

    Node("", Path(), supernode.home)._answer_until_exit(supernode, 1, answer)
    return rounds


def replied_runs(supernode: SuperNode) -> list[int]:
    """The runs with a reply that is waiting to be sent."""
    return [message.metadata.run_id for message in supernode.state.get_messages_legacy(is_reply=True)]


def ended() -> None:
    raise RunNotRunningException


def failed() -> None:
    raise OSError("the line is cut")


@pytest.mark.parametrize("reason", [ended, failed])
def test_a_question_that_the_supernode_dropped_does_not_block_the_next_one(
    reason: Callable[[], None], supernode: SuperNode
) -> None:
    supernode.fetch(1, reason)
    supernode.fetch(2)
    assert answer_one(supernode) == [2]
    assert replied_runs(supernode) == [2]  # a reply to the first question would be sent instead
    assert all(task.status.status == "finished" for task in supernode.state.get_tasks())


@pytest.mark.parametrize("reason", [ended, failed])
def test_a_question_that_is_dropped_while_a_client_waits_for_it_is_abandoned(
    reason: Callable[[], None], supernode: SuperNode
) -> None:
    waits = threading.Event()
    original = handlers.pull_object

    def recording_pull(*args: Any, **kwargs: Any) -> Any:
        waits.set()  # the client asks for content that is missing
        return original(*args, **kwargs)

    def dropped() -> None:
        waits.wait(30)
        reason()

    def fetch() -> None:
        supernode.fetch(1, dropped)
        supernode.fetch(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handlers, "pull_object", recording_pull)
        thread = threading.Thread(target=fetch)
        thread.start()
        assert answer_one(supernode) == [2]
        thread.join()
    assert replied_runs(supernode) == [2]


def test_a_client_logs_when_the_server_is_unreachable_and_when_it_is_back(supernode: SuperNode) -> None:
    """Its SuperNode retries forever, and only the log shows it."""
    failed, back = "WARNING : Connection attempt failed, retrying in 1 s\n", "INFO : Connection successful after 2\n"
    messages: list[str] = []
    steps = [failed, failed, "INFO : SuperNode ID: 5\nINFO : Receiving: a\n", failed, "INFO : Receiving: b\n", back]
    supernode.log.write_text("")

    def acquire(http: Any) -> str:
        if not steps:
            supernode.up = False
            return ""
        with supernode.log.open("a") as log:
            log.write(steps.pop(0))
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewer.runtime.flower.node.acquire_question", acquire)
        patch.setattr("fewer.runtime.flower.node.POLL_INTERVAL", 0.0)
        Node("a:1", Path(), supernode.home, messages.append)._answer_until_exit(supernode, 1, lambda *_: Reply(b""))
    offline = "no server at a:1; still trying"
    assert messages == [offline, "joined a:1", offline, "joined a:1"]


def test_a_client_retries_with_growing_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 7:
            raise KeyboardInterrupt

    keys = Credentials.create(tmp_path / "keys", 1)
    monkeypatch.setattr("fewer.runtime.flower.node.time.sleep", sleep)
    monkeypatch.setattr(Program, "start", lambda self: None)
    monkeypatch.setattr(Node, "_answer_until_exit", lambda *_: "no")
    with pytest.raises(KeyboardInterrupt):
        Node("a:1", keys.client_folder(0), tmp_path / "store").serve(lambda *_: Reply(b""))
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_a_client_waits_until_a_question_is_complete(supernode: SuperNode) -> None:
    thread = threading.Thread(target=supernode.fetch, args=(1, lambda: time.sleep(0.1)))
    thread.start()
    assert answer_one(supernode) == [1]
    thread.join()
    assert replied_runs(supernode) == [1]


@pytest.mark.parametrize("action", ["send", "receive"])
def test_a_supernode_that_lost_a_message_is_restarted(
    action: str, supernode: SuperNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server waits for a lost message. A new question shows that it has stopped waiting."""
    monkeypatch.setattr("fewer.runtime.flower.node.RESTART_AFTER", 0.3)
    supernode.log.write_text(f"INFO :      Receiving: a\nERROR :     Failed to {action} message 1f: 413 too large\n")
    reason = Node("", Path(), supernode.home)._answer_until_exit(supernode, 1, lambda *_: Reply(b""))
    assert reason == "a message was lost (413 too large)"
    with supernode.log.open("a") as log:
        log.write("INFO :      Receiving: query.fewer message (ID: 2f)\n")
    threading.Timer(1.0, lambda: setattr(supernode, "up", False)).start()
    assert "lost" not in Node("", Path(), supernode.home)._answer_until_exit(supernode, 1, lambda *_: Reply(b""))
