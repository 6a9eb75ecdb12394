"""The connection to a SuperLink: pending, incomplete and invalid replies."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from flwr.app import ConfigRecord, Message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
)

from fewer.errors import RunError
from fewer.runtime.flower import bypass_proxy, envelope
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.programs import Program
from fewer.runtime.flower.superlink import NoResponse, SuperLink, SuperLinkLost
from fewer.runtime.handlers import Reply
from tests.runtime.flower.harness import make_reply


def test_requests_to_this_machine_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ["no_proxy"].endswith("localhost,127.0.0.1,::1")
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "elsewhere")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        port = server.getsockname()[1]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}")
        bypass_proxy("127.0.0.1")
        bypass_proxy("127.0.0.1")
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "elsewhere,127.0.0.1"
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"http://127.0.0.1:{port}", timeout=0.2)


def test_a_failed_receive_is_a_lost_superlink(tmp_path: Path) -> None:
    """The SuperLink announces a reply only once, and no client may be asked twice."""

    class Silent:
        def __getattr__(self, name: str) -> Any:
            raise httpx.ReadTimeout("")

    link = SuperLink(Credentials(tmp_path))
    link._grid = Silent()  # type: ignore[assignment]
    link._program = Program("none:none", [], tmp_path)
    link._program._process = SimpleNamespace(pid=1, poll=lambda: None)  # type: ignore[assignment]
    with pytest.raises(NoResponse):
        link.online_clients()
    with pytest.raises(SuperLinkLost, match="does not answer"):
        link.receive_replies(["a"])
    link._program._process = None
    with pytest.raises(SuperLinkLost, match="has ended"):
        link.online_clients()


class FakeUpload:
    """A SuperLink with an announced reply, whose pieces are available, pending or deleted.

    The client names another question than the one that the SuperLink has recorded.
    """

    def __init__(self, message: Message, damaged: bool = False) -> None:
        self.reply, self.tree = message_to_proto(message), get_object_tree(message)
        self.reply.metadata.message_id, self.reply.metadata.reply_to_message_id = message.object_id, "mine"
        self.pieces = {key: piece.deflate() for key, piece in get_all_nested_objects(message).items()}
        if damaged:
            for key, piece in get_all_nested_objects(message).items():
                if isinstance(piece, ConfigRecord):
                    self.pieces[key] = add_header_to_object_body(object_body=b"\xff" * 20, obj=piece)
        self.available = dict.fromkeys(self.pieces, True)
        self.confirmed, self.pulls = [], 0  # type: ignore[var-annotated]

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        if "mine" not in request.message_ids:
            return PullAppMessagesResponse()
        return PullAppMessagesResponse(messages_list=[self.reply], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.pulls += 1
        key = request.object_id
        if key not in self.available:
            return PullObjectResponse(object_found=False)
        is_available = self.available[key]
        content = self.pieces[key] if is_available else b""
        return PullObjectResponse(object_found=True, object_available=is_available, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def link(self, folder: Path) -> SuperLink:
        link = SuperLink(Credentials(folder))
        link._grid = SimpleNamespace(http=self, node=None, run=SimpleNamespace(run_id=1))  # type: ignore[assignment]
        return link


def test_a_pending_reply_does_not_block(tmp_path: Path) -> None:
    """No piece is fetched twice, and the reply goes to the question that the SuperLink has recorded."""
    reply = Reply(b"well", None, "", 1.5)
    uploaded = FakeUpload(make_reply(envelope.pack_answer(reply)))
    link = uploaded.link(tmp_path)
    pending = list(uploaded.available)[2]
    uploaded.available[pending] = False
    for _ in range(3):
        assert link.receive_replies(["other", "mine"]) == {} and not uploaded.confirmed
    uploaded.available[pending] = True
    assert link.receive_replies(["other", "mine"]) == {"mine": reply}
    assert uploaded.confirmed == [uploaded.reply.metadata.message_id] and uploaded.pulls == len(uploaded.pieces) + 3
    assert link.packed["up"] == sum(map(len, uploaded.pieces.values())) and link.receive_replies(["other"]) == {}


def test_an_incomplete_reply_is_lost(tmp_path: Path) -> None:
    uploaded = FakeUpload(make_reply(envelope.pack_answer(Reply(b"well"))))
    link = uploaded.link(tmp_path)
    del uploaded.available[list(uploaded.available)[1]]
    assert link.receive_replies(["mine"]) == {"mine": Reply(b"", "lost", "its answer is incomplete")}


def test_a_reply_that_is_not_a_message_is_refused(tmp_path: Path) -> None:
    link = FakeUpload(make_reply(envelope.pack_answer(Reply(b"well"))), damaged=True).link(tmp_path)
    assert link.receive_replies(["mine"]) == {"mine": Reply(b"", "refused", "not a message")}


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            SuperLink(keys, port=port),
        ):
            pass
