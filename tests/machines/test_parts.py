"""The parts of the Flower runtime, tested one by one and without processes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import typer

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
)

import fewer.runtime.flower.clients as module
from fewer.cli import printing
from fewer.cli.machines import _prepare_process
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.methods.frl_deploy import FRLDeploy
from fewer.report import write_report
from fewer.runs.engine import build_handler_runner, resume, run_experiment
from fewer.runs.machines import ClientDaemon, FlowerServer, _describe_session
from fewer.runtime import Faults, RoundRules
from fewer.runtime.flower import bypass_proxy, envelope
from fewer.runtime.flower.clients import Flower
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program, secret_file
from fewer.runtime.flower.superlink import NoResponse, Question, RemoteClient, SuperLink, SuperLinkLost
from fewer.runtime.handlers import FETCH_OUTGOING, Call, Hop, Reply, on_client
from fewer.runtime.keys import PinnedKeys
from fewer.runtime.ring import Journal
from fewer.wire import Refused, decode, encode
from fewer.wire.message import MAX_REASON
from fewer.wire.sealing import public_key
from tests.machines.cluster import FRL_SETTINGS, experiment
from tests.test_cli import call as command

# --- envelopes ------------------------------------------------------------------------------------------------


def make_reply(content: RecordDict | None = None, error: Error | None = None) -> Message:
    metadata = Metadata(
        run_id=1,
        message_id="",
        src_node_id=1,
        dst_node_id=1,
        reply_to_message_id="a",
        group_id="",
        created_at=0.0,
        ttl=1.0,
        message_type=envelope.TYPE,
    )
    return make_message(metadata=metadata, content=content, error=error)


def test_questions_and_answers_survive_a_round_trip() -> None:
    blob = bytes(range(256)) * 50_000  # more than one of Flower's chunks
    for call in (Call(3, "local_train", 7), Call(3, FETCH_OUTGOING, 7, hop=Hop(1, "train", 4, True))):
        assert envelope.read_question(envelope.pack_question(call, blob)) == (call, blob)
    for reply in (Reply(blob, None, "", 1.5), Reply(b"", "unable", "no data", 0.25)):
        assert envelope.read_answer(make_reply(envelope.pack_answer(reply))) == reply


RECORD = ArrayRecord({"blob": Array("uint8", (1,), "fewer", b"x")})
VALID_HEADER: dict[str, Any] = {"failure": "", "detail": "", "seconds": 1.0}
INVALID_ANSWERS = [
    RecordDict({}),
    RecordDict({"header": ConfigRecord(VALID_HEADER)}),
    RecordDict({"header": RECORD, "payload": RECORD}),
    RecordDict({"header": ConfigRecord(VALID_HEADER), "payload": ArrayRecord({})}),
    RecordDict({"header": ConfigRecord({}), "payload": RECORD}),
    *(
        RecordDict({"header": ConfigRecord(VALID_HEADER | wrong), "payload": RECORD})
        for wrong in ({"failure": "bored"}, {"failure": [1]}, {"detail": 5}, {"seconds": "long"}, {"seconds": [1.0]})
    ),
]


@pytest.mark.parametrize("content", INVALID_ANSWERS)
def test_an_invalid_answer_is_refused(content: RecordDict) -> None:
    assert envelope.read_answer(make_reply(content)).failure == "refused"


def test_a_reason_is_truncated_and_has_no_control_characters() -> None:
    reply = envelope.read_answer(
        make_reply(envelope.pack_answer(Reply(b"", "unable", "\x1b[2J" + "é" * (MAX_REASON + 1))))
    )
    assert reply.detail == "[2J" + "é" * (MAX_REASON - 4)


def test_a_flower_error_is_a_lost_answer() -> None:
    assert envelope.read_answer(make_reply(error=Error(5, "…"))) == Reply(b"", "lost", "its node is gone")
    assert envelope.read_answer(make_reply(error=Error(4, "no more"))) == Reply(b"", "lost", "no more")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"client": -1, "handler": "x", "round": 1}', '{"client": "0", "handler": "x", "round": 1}'],
)
def test_an_invalid_question_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        envelope.read_question(RecordDict({"header": ConfigRecord({"call": text}), "payload": RECORD}))


def test_messages_between_clients_must_be_sealed() -> None:
    with pytest.raises(Refused, match="sealed"):
        envelope.read_question(envelope.pack_question(Call(0, FETCH_OUTGOING, 1, hop=Hop(1, "train", 4, False)), b""))


# --- delivery -------------------------------------------------------------------------------------------------


class FakeSuperLink(SuperLink):
    """Returns scripted values: the clients online at each check, and the replies of each poll."""

    def __init__(self, checks: Sequence[Any], polls: Sequence[Mapping[str, Reply]]) -> None:
        self.checks, self.polls, self.ttls = deque(checks), deque(polls), []  # type: ignore[var-annotated]

    def online_clients(self) -> dict[int, RemoteClient]:
        online = self.checks.popleft() if len(self.checks) > 1 else self.checks[0]
        if isinstance(online, Exception):
            raise online
        return dict(online)

    def send_questions(self, questions: Sequence[tuple[Question, bytes]], ttl: float | None) -> dict[str, Question]:
        self.ttls.append(ttl)
        return {str(question.call.client): question for question, _ in questions}

    def receive_replies(self, pending: Any) -> Mapping[str, Reply]:
        return self.polls.popleft() if self.polls else {}


def deliver(link: SuperLink, clients: Sequence[int], rules: RoundRules | None = None) -> dict[int, Reply | None]:
    flower = Flower(4, 0, Faults(), rules or RoundRules(), handlers=None, superlink=link)  # type: ignore[arg-type]
    return {
        call.client: reply for call, reply in flower._deliver_calls([(Call(client, "f", 1), b"") for client in clients])
    }


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_INTERVAL", "ONLINE_CHECK_INTERVAL"):
        monkeypatch.setattr(module, name, 0.01)


def test_an_offline_client_is_lost_at_once_and_replies_match_their_questions() -> None:
    online = {0: RemoteClient(10, "a"), 2: RemoteClient(12, "a")}
    unrelated = Reply(b"of another question")
    link = FakeSuperLink([NoResponse(), online], [{}, {"99": unrelated}, {"2": Reply(b"two")}, {"0": Reply(b"nought")}])
    replies = deliver(link, [0, 1, 2])
    assert replies == {0: Reply(b"nought"), 1: Reply(b"", "lost", "not online", sent=False), 2: Reply(b"two")}
    assert link.ttls == [None]


def test_an_unsent_message_is_not_in_the_ledger() -> None:
    def score() -> None: ...

    link = FakeSuperLink([{0: RemoteClient(10, "a")}], [{"0": Reply(encode("score", {}))}])
    flower = Flower(2, 0, handlers=None, superlink=link)  # type: ignore[arg-type]
    answers = flower.ask([0, 1], score, returns={}, x=1)
    assert [absent.client for absent in answers.absent] == [1]
    assert [(entry.client, entry.direction) for entry in flower.ledger.drain()] == [(0, "down"), (0, "up")]


def test_an_unsent_message_of_a_ring_is_not_in_the_ledger_even_after_resuming(tmp_path: Path) -> None:
    def train() -> None: ...

    def ledger_entries(link: SuperLink) -> list[tuple[int, str]]:
        flower = Flower(3, 0, handlers=None, superlink=link, journal=Journal(tmp_path))  # type: ignore[arg-type]
        assert flower.relay([1, 2], train, holders=[0]) == [0, 2]
        return [(entry.client, entry.direction) for entry in flower.ledger.drain()]

    online, reply = {0: RemoteClient(10, "a"), 2: RemoteClient(12, "a")}, Reply(encode("train", {}))
    link = FakeSuperLink([online], [{"0": reply}, {"0": reply}, {"2": reply}])
    assert ledger_entries(link) == ledger_entries(FakeSuperLink([{}], [])) == [(0, "up"), (0, "up"), (2, "down")]


def test_an_evaluation_without_clients_loses_the_quorum() -> None:
    """The training of the round is over: the settings are valid, and the run can resume."""

    def score() -> None: ...

    flower = Flower(2, 0, handlers=None, superlink=FakeSuperLink([{}], []), round=4, evaluating=True)  # type: ignore[arg-type]
    with pytest.raises(QuorumLost, match=r"round 4: 0 of 2 .*, 1 needed \(evaluation\): 2 lost \(not online\)"):
        flower.ask([0, 1], score, returns={})
    assert flower.ask([], score, returns={}) == []


def test_a_superlink_that_does_not_respond_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESPONSE_TIMEOUT", 0.1)
    with pytest.raises(SuperLinkLost, match="does not answer"):
        deliver(FakeSuperLink([NoResponse()], []), [0])


def test_changed_settings_survive_a_lost_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quorums = []

    def resume(out: Path, **options: Any) -> None:
        quorums.append(options.get("quorum"))
        if len(quorums) == 1:
            raise SuperLinkLost("gone")

    monkeypatch.setattr("fewer.runs.machines.resume", resume)
    FlowerServer(Credentials(tmp_path)).resume(tmp_path / "run", quorum=0.5)
    assert quorums == [0.5, 0.5]


def test_a_run_resumes_only_with_the_keys_of_its_clients(tmp_path: Path) -> None:
    server = FlowerServer(Credentials.create(tmp_path / "keys", 2))
    with pytest.raises(SettingError, match=r"clients = 3, but .* has keys of clients \[0, 1\]"):
        server._connect_to(tmp_path)(experiment(3), tmp_path, 1)


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


def test_a_restarted_node_has_lost_its_question() -> None:
    before, gone, back = (
        {0: RemoteClient(10, "a"), 1: RemoteClient(11, "a")},
        {1: RemoteClient(11, "a")},
        {0: RemoteClient(10, "b")},
    )
    link = FakeSuperLink([before, gone, back], [{"1": Reply(b"one")}])
    assert deliver(link, [0, 1]) == {0: Reply(b"", "lost", "its node was restarted"), 1: Reply(b"one")}


def test_the_server_does_not_wait_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRANSIT", 0.1)
    link = FakeSuperLink([{0: RemoteClient(10, "a")}], [])
    reply = deliver(link, [0], RoundRules(deadline=0.1))[0]
    assert reply is not None and reply.failure == "late"
    assert link.ttls == [pytest.approx(0.3)]


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
        link._grid = SimpleNamespace(_runtime_client=self, node=None, run=SimpleNamespace(run_id=1))  # type: ignore[assignment]
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


# --- keys -----------------------------------------------------------------------------------------------------


def test_keys_are_private_and_the_authority_signs_the_certificate(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path / "keys", 2, ["fewer.example.org", "10.0.0.7"])
    for file in [*tmp_path.rglob("*.key")]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(file.name for file in credentials.client_folder(1).iterdir()) == ["ca.crt", "node.key", "node.pub"]
    assert list(credentials.public_keys) == [0, 1] and len(set(credentials.public_keys.values())) == 2
    server, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(credentials.folder / "server.crt", credentials.folder / "server.key")
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    client_side.load_verify_locations(credentials.client_folder(0) / "ca.crt")
    for name, valid in (("fewer.example.org", True), ("10.0.0.7", True), ("127.0.0.1", True), ("elsewhere", False)):
        assert handshake_succeeds(server, client_side, name) is valid
    credentials.issue_certificate((), days=-1)
    assert not handshake_succeeds(server, client_side, "elsewhere")
    with pytest.raises(RunError, match="expired on .* fewer keys renew"):
        Credentials.open(credentials.folder)


def handshake_succeeds(server: ssl.SSLContext, client_side: ssl.SSLContext, name: str) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client_side.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for end in ends * 3:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError:
        return False
    return True


def test_mistakes_with_keys_are_reported(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path / "keys", 1)
    with pytest.raises(RunError, match="already contains keys"):
        Credentials.create(tmp_path / "keys", 1)
    with pytest.raises(RunError, match="has no ca.crt .*fewer keys init"):
        Credentials.open(tmp_path)
    (credentials.client_folder(0) / "node.pub").write_text("nonsense")
    with pytest.raises(RunError, match="is not a public key"):
        credentials.public_keys  # noqa: B018


@pytest.mark.parametrize("host", ["bücher.example", "a.example:443", "https://a.example", "", "10.0.0.300", "-a"])
def test_an_invalid_host_is_reported_before_anything_is_written(host: str, tmp_path: Path) -> None:
    wrong = command("keys", "init", tmp_path / "keys", "--clients", "1", "--host", host, code=2).stderr
    assert f"'{host}' is not a host name or IP address" in wrong and not (tmp_path / "keys").exists()


def test_damaged_keys_are_reported(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "--days" in command("keys", "init", keys, "--clients", "1", "--days", "4000000", code=2).stderr
    credentials = Credentials.create(keys, 1)
    (credentials.client_folder(0) / "peers.json").write_text("{")
    assert (
        "peers.json is damaged"
        in command("keys", "trust", credentials.client_folder(0), f"1={'00' * 32}", code=2).stderr
    )
    with pytest.raises(Refused, match="pinned keys are damaged"):
        PinnedKeys(credentials.client_folder(0)).public(0, 1)
    command("keys", "trust", credentials.client_folder(0), "--", f"-5={'00' * 32}", code=2)
    (keys / "ca.key").write_text("nonsense")
    assert "ca.key is not a private key" in command("keys", "renew", keys, code=2).stderr
    (keys / "server.crt").write_text("nonsense")
    wrong = command("server", "fedavg", "--data", "digits", "--keys", keys, "--clients", "1", code=2).stderr
    assert "server.crt is not a certificate" in wrong


def test_an_address_missing_from_the_certificate_is_reported_at_once(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1, ["10.0.0.7", "a.example"])
    for name in ("10.0.0.7", "a.example", "127.0.0.1", "::1", "localhost"):
        keys.check_host(name)
    with pytest.raises(
        RunError, match=r"is not valid for 127.0.0.2 \(renew it with: fewer keys renew .* --host 127.0.0.2"
    ):
        SuperLink(keys, "127.0.0.2").__enter__()


def test_key_and_store_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink's database holds unencrypted messages; a store holds what a client derives from its data."""
    keys = Credentials.create(tmp_path / "keys", 1)
    secret = secret_file(keys.folder / "flower")
    Program("sys:exit", [], tmp_path / "home").start()
    monkeypatch.setattr(Node, "serve", lambda self, answer: None)
    ClientDaemon(tmp_path / "store").join("a:1", keys.client_folder(0))
    for folder in (keys.folder, secret.parent, tmp_path / "home", tmp_path / "store"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_flowers_programs_are_quiet_private_and_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda args, **options: started.update(options, arguments=args))
    keys = Credentials.create(tmp_path / "keys", 1)
    program, _ = Node("far.example:443", keys.client_folder(0), tmp_path / "store")._make_program()
    assert program.arguments[program.arguments.index("--host") + 1] == "127.0.0.1"
    program.start()
    assert started["env"]["FLWR_HOME"] == str(program.home)
    assert started["env"]["FLWR_TELEMETRY_ENABLED"] == "0" and started["env"]["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    monkeypatch.setattr(SuperLink, "_start_program", lambda self: None)
    monkeypatch.setattr(SuperLink, "_register_clients", lambda self: None)
    link = SuperLink(keys, "127.0.0.1", 1).__enter__()
    assert link._program and link._lock
    link._lock.close()
    args = list(link._program.arguments)
    assert args[args.index("--host") + 1] == "127.0.0.1" and "--enable-supernode-auth" in args


def test_a_superlink_on_all_addresses_is_reached_on_loopback(tmp_path: Path) -> None:
    assert SuperLink(Credentials(tmp_path), "0.0.0.0", 5).address == "127.0.0.1:5"


def test_packed_bytes_are_counted_per_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = SuperLink(Credentials(tmp_path))
    monkeypatch.setattr(SuperLink, "pid", 1)
    monkeypatch.setattr(SuperLink, "_submit_run", lambda self, experiment: None)
    link.packed["up"] = 5
    link.start_run("{}")
    assert not link.packed


def test_a_client_creates_its_sealing_key_and_pins_the_keys_of_others(tmp_path: Path) -> None:
    first, second = PinnedKeys(tmp_path / "one"), PinnedKeys(tmp_path / "two")
    for keys in (first, second):
        keys.folder.mkdir()
        with pytest.raises(Refused, match="fewer keys seal"):
            keys.private(0)
    printed = command("keys", "seal", second.folder).stdout.strip()
    assert command("keys", "seal", second.folder).stdout.strip() == printed == second.create().hex()
    assert stat.S_IMODE((second.folder / "seal.key").stat().st_mode) == 0o600
    first.create()
    with pytest.raises(Refused, match="no key of client 1 is pinned"):
        first.public(0, 1)
    command("keys", "trust", first.folder, f"1={printed}")
    command("keys", "trust", first.folder, f"2={'00' * 32}")
    assert first.public(0, 1) == public_key(second.private(1)) and first.public(0, 2) == bytes(32)
    for wrong in ("1", "x=00", "1=zz", "1=00"):
        command("keys", "trust", first.folder, wrong, code=2)
    other_pin = f"1={'11' * 32}"
    refused = command("keys", "trust", first.folder, other_pin, code=2).stderr
    assert "client 1: another key is pinned (pass --replace" in refused
    command("keys", "trust", first.folder, f"1={printed}")  # the same key again
    assert first.public(0, 1).hex() == printed
    command("keys", "trust", first.folder, other_pin, "--replace")
    assert first.public(0, 1).hex() == "11" * 32 and first.public(0, 2) == bytes(32)


# --- a client --------------------------------------------------------------------------------------------------


def session(out: Path, done: int = 0, **settings: Any) -> dict[str, Any]:
    """The session description of a server, as a client receives it."""
    out.mkdir(exist_ok=True)
    description: dict[str, Any] = json.loads(json.dumps(_describe_session(experiment(3, **settings), out, done)))
    return description


def write_client_data(folder: Path, classes: int = 4, height: int = 8) -> str:
    """Writes a client's own data, like digits: 50 samples."""
    x = np.random.default_rng(0).integers(0, 17, (50, height, 8), np.uint8)
    np.savez(folder / "mine.npz", x=x, y=np.arange(50) % classes)
    return f"npz:{folder / 'mine.npz'}"


def ask(daemon: ClientDaemon, description: Any, round: int = 1, client: int = 0) -> Reply:
    model = experiment(3).task.initial_weights(3)
    return daemon.answer(
        json.dumps(description), Call(client, "local_train", round), encode("local_train", {"model": model})
    )


def test_a_daemon_answers_like_a_handler_server_on_one_machine(tmp_path: Path) -> None:
    reply = ask(ClientDaemon(tmp_path / "store"), session(tmp_path), client=2)
    runner = build_handler_runner(experiment(3), tmp_path / "here")
    model = encode("local_train", {"model": experiment(3).task.initial_weights(3)})
    remote, local = decode(reply.blob)[1], decode(runner.answer(Call(2, "local_train", 1), model).blob)[1]
    assert reply.failure is None and remote["size"] == local["size"]
    assert all(torch.equal(remote["model"][name], tensor) for name, tensor in local["model"].items())


def test_a_clients_own_data_has_the_format_of_the_servers(tmp_path: Path) -> None:
    description, daemon = session(tmp_path), ClientDaemon(tmp_path / "store", write_client_data(tmp_path))
    data = daemon._build_experiment(description["settings"], description["data_info"]).data
    server_test = experiment(3).data.test
    client_data = data.client(1)
    assert (len(data), data.classes, len(client_data.train), len(client_data.test)) == (3, 10, 40, 10)
    assert (client_data.train.shift, client_data.train.scale) == (server_test.shift, server_test.scale)
    assert decode(ask(daemon, description, client=1).blob)[1]["size"] == 40
    reply = ask(ClientDaemon(tmp_path / "store", write_client_data(tmp_path, height=7)), description)
    assert reply.failure == "unable" and "the task needs torch.uint8 (1, 8, 8)" in reply.detail


def test_a_client_with_text_uses_the_servers_vocabulary(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} thing{n % 5}", "label": n % 2}) for n in range(60)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.jsonl").write_text("\n".join(lines[:20]).replace("good", "novel"))
    description = session(
        tmp_path, data=f"jsonl:{tmp_path / 'all.jsonl'}", model="text-bilstm", partition="iid", max_length=4
    )
    daemon = ClientDaemon(tmp_path / "store", f"jsonl:{tmp_path / 'mine.jsonl'}")
    data = daemon._build_experiment(description["settings"], description["data_info"]).data
    assert list(data.tokens) == description["data_info"]["tokens"] and "novel" not in data.tokens
    tokens, _ = data.client(0).train.slice(0, 16)
    assert tokens.shape[1] == 4 and int(tokens.max()) < len(data.tokens)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "/tmp/evil.py:Evil"},
        {"model": "/tmp/evil.py:Evil"},
        {"data": "npz:/etc/secret"},
        {"data": "qmnist", "data_options": {"images": "../../etc"}},
        {"method": "frl-deploy", "method_options": {"prepared": "secret"}},
        {"method": "frl-deploy", "method_options": {"prepared": "/etc/secret"}},
        {"model": "text-bilstm", "model_options": {"vectors": "secret.txt"}},
        {"method": "metafed", "method_options": {"inner_method": "evil.py:Evil"}},
        {"method": "metafed", "method_options": {"inner_options": {"deep": ["/etc/secret"]}}},
    ],
)
def test_a_client_accepts_no_file_from_a_server(changed: dict[str, Any], tmp_path: Path) -> None:
    description = session(tmp_path)
    description["settings"] |= changed
    reply = ask(ClientDaemon(tmp_path / "store"), description)
    assert reply.failure == "unable" and "names a file, which this client does not accept from a server" in reply.detail


def test_a_server_does_not_start_with_a_file_that_clients_lack(tmp_path: Path) -> None:
    server = FlowerServer(Credentials.create(tmp_path / "keys", 3))
    inner = experiment(3, "metafed", method_options={"inner_method": "mine.py:Mine"})
    with pytest.raises(SettingError, match="inner_method = mine.py:Mine names a file, which clients on other machines"):
        server.check_experiment(inner)


def test_a_prepared_model_stays_on_the_server(tmp_path: Path) -> None:
    run_experiment(experiment(3, "frl-scratch", runtime="inline", **FRL_SETTINGS), tmp_path / "prepared")
    description = session(
        tmp_path, method="frl-deploy", rounds=1, method_options={"prepared": str(tmp_path / "prepared")}
    )
    assert description["settings"]["method_options"]["prepared"] == ""
    FlowerServer(Credentials.create(tmp_path / "keys", 3)).check_experiment(
        experiment(3, "frl-deploy", method_options={"prepared": str(tmp_path / "prepared")})
    )
    assert isinstance(ClientDaemon(tmp_path / "store")._build_handlers(description, 0).program, FRLDeploy)


def test_a_client_with_its_own_data_lacks_the_common_test_set(tmp_path: Path) -> None:
    """Otherwise it would evaluate its model on its own samples instead of the common ones."""
    description = session(tmp_path, method="local")
    totals = {}
    for data in (None, write_client_data(tmp_path)):
        for global_test in (False, True):
            daemon = ClientDaemon(tmp_path / "store", data)
            question = encode("score", {"model": {}, "use_global_test": global_test})
            reply = daemon.answer(json.dumps(description), Call(1, "score", 1), question)
            totals[data is None, global_test] = decode(reply.blob)[1]["total"]
    assert totals[False, True] == 0 and totals[False, False] == 10
    assert totals[True, True] == len(experiment(3).data.test) > totals[True, False] > 0


def test_a_client_with_more_classes_than_the_task_is_reported(tmp_path: Path) -> None:
    reply = ask(ClientDaemon(tmp_path / "store", write_client_data(tmp_path, classes=25)), session(tmp_path))
    assert reply.failure == "unable" and "has 25 classes, but the task has 10" in reply.detail


def test_a_resumed_run_names_the_clients_that_finished_their_hops(tmp_path: Path) -> None:
    Journal(tmp_path / "hops").put(3, 0, 2, Reply(b"x"))
    assert (
        _describe_session(experiment(3), tmp_path, 2)["finished_clients"] == [2]
        and _describe_session(experiment(3), tmp_path, 3)["finished_clients"] == []
    )


def test_a_client_can_be_limited_to_one_method(tmp_path: Path) -> None:
    description = session(tmp_path)
    reply = ask(ClientDaemon(tmp_path / "store", method="metafed"), description)
    assert reply.failure == "unable" and "method = fedavg, but this client takes part in metafed only" in reply.detail
    assert ask(ClientDaemon(tmp_path / "store", method="fedavg"), description).failure is None
    wrong = command("join", "localhost:1", "--key", tmp_path, "--method", "metafedd", code=2)
    assert "unknown method 'metafedd', did you mean 'metafed'?" in wrong.stderr


def test_sealed_messages_belong_to_one_run(tmp_path: Path) -> None:
    handlers = [
        ClientDaemon(tmp_path / "store")._build_handlers(session(tmp_path / run), 0) for run in ("one", "two", "one")
    ]
    assert handlers[0].run_id == handlers[2].run_id != handlers[1].run_id and handlers[0].run_id


def test_other_data_under_the_same_name_is_reported(tmp_path: Path) -> None:
    description = session(tmp_path)
    description["data_info"]["fingerprint"] = "00000000"
    assert "differs from the server's" in ask(ClientDaemon(tmp_path / "store"), description).detail


@pytest.mark.parametrize(
    "description", [[], {}, 5, {"run": "../x", "session": 1, "done": 0}, {"run": "a", "session": {}}]
)
def test_an_invalid_session_description_is_refused(description: Any, tmp_path: Path) -> None:
    assert ask(ClientDaemon(tmp_path / "store"), description).failure == "refused"
    assert not (tmp_path / "store").exists()


def test_a_new_session_drops_later_rounds_and_ends_the_old_session(tmp_path: Path) -> None:
    first = session(tmp_path, method="fedbn", norm="batch")
    daemon = ClientDaemon(tmp_path / "store")

    def stored_rounds() -> list[str]:
        return sorted(file.name.split(".")[-2] for file in (tmp_path / "store").rglob("*.safetensors"))

    blob = encode("train", {"model": {}})
    handlers = daemon._build_handlers(first, 0)
    for round in (1, 2, 3):
        handlers.contexts(0, round).store.put("model", {"a": torch.ones(1)})
    assert stored_rounds() == ["00000002", "00000003"]
    second = session(tmp_path, 2, method="fedbn", norm="batch")
    assert second["session"] == first["session"] + 1 and second["run"] == first["run"]
    # a client that finished its hop in a resumed ring keeps its state
    daemon._build_handlers({**second, "finished_clients": [0]}, 0)
    assert stored_rounds() == ["00000002", "00000003"]
    second = session(tmp_path, 2, method="fedbn", norm="batch")
    daemon._build_handlers(second, 0)
    assert stored_rounds() == ["00000002"]
    daemon._build_handlers(second, 0)  # the same session after a client restart: nothing changes
    reply = daemon.answer(json.dumps(first), Call(0, "local_train", 3), blob)
    assert reply.failure == "unable" and "session 1 of this run is over; session 3 has started" in reply.detail


# --- commands -------------------------------------------------------------------------------------------------


def test_keys_and_mistakes_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    assert "client 1: " in command("keys", "init", keys, "--clients", "2", "--host", "a.example").stdout
    assert "already contains keys" in command("keys", "init", keys, "--clients", "2", code=2).stderr
    before = (keys / "server.crt").read_bytes()
    command("keys", "renew", keys, "--host", "b.example")
    assert (keys / "server.crt").read_bytes() != before
    digits: list[str | Path] = ["--data", "digits", "--keys", keys, "--clients"]
    wrong = command("server", "fedavg", *digits, "3", code=2).stderr
    assert f"clients = 3, but {keys} has keys of clients [0, 1]" in wrong
    method_file = Path(__file__).parents[2] / "docs/examples/fedmedian.py"
    assert "names a file" in command("server", f"{method_file}:FedMedian", *digits, "2", code=2).stderr
    assert "has no node.key" in command("join", "127.0.0.1:1", "--key", tmp_path, code=2).stderr
    join: list[str | Path] = ["join", "127.0.0.1:1", "--key", keys / "client-0"]
    assert "device = 'gpu' is not available" in command(*join, "--device", "gpu", code=2).stderr
    assert "'none.npz' does not exist" in command(*join, "--data", "npz:none.npz", code=2).stderr
    for address in ("server", "https://server:443", "server:http"):
        wrong = command("join", address, *join[2:], code=2).stderr
        assert f"'{address}' is not the address of a server (expected: HOST:PORT)" in wrong
    assert "is not a run directory" in command("server", "--resume", tmp_path, "--keys", keys, code=2).stderr
    assert "--resume RUN" in command("server", "fedavg", "--resume", tmp_path, *digits, "2", code=2).stderr
    assert "runtime = flower" in command("run", "fedavg", "--data", "digits", "--runtime", "flower", code=2).stderr
    monkeypatch.setattr("fewer.runtime.flower.find_spec", lambda name: None)
    for args in (["join", "a:1", "--key", "x"], ["local-cluster", "2"], ["keys", "init", "x", "--clients", "1"]):
        assert "pip install 'fewer[flower]'" in command(*args, code=2).stderr


def test_sigterm_ends_a_client_in_the_middle_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other exception in a handler becomes a reply."""
    before = signal.getsignal(signal.SIGTERM)
    description = session(tmp_path)
    daemon = ClientDaemon(tmp_path / "store")
    monkeypatch.setattr("fewer.methods.fedavg.FedAvg.local_train", on_client(lambda *_, **__: signal.raise_signal(15)))
    try:
        _prepare_process()
        with pytest.raises(KeyboardInterrupt):
            daemon.answer(json.dumps(description), Call(0, "local_train", 1), encode("train", {"model": {}}))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_lost_quorum_prints_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    @printing.report_errors
    def lose_quorum() -> None:
        printing.RESUME_HINTS.append("Resume so.")
        raise QuorumLost("too few")

    with pytest.raises(typer.Exit):
        lose_quorum()
    printing.RESUME_HINTS.remove("Resume so.")
    assert capsys.readouterr().err == "fewer: too few\nResume so.\n"


def test_a_stopped_local_cluster_prints_how_to_resume_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    joined: list[Sequence[str]] = []
    resumed: list[tuple[Path, dict[str, Any]]] = []

    def start_and_stop(self: FlowerServer, unused: Any, out: Path, progress: Any) -> None:
        run_experiment(experiment(2, rounds=1, runtime="inline"), out)
        raise KeyboardInterrupt

    def resume_run(self: FlowerServer, out: Path, progress: Any, **changed: Any) -> None:
        resumed.append((out, changed))
        raise QuorumLost("too few")

    monkeypatch.setattr(Program, "start", lambda self: joined.append(self.arguments))
    monkeypatch.setattr(SuperLink, "__enter__", lambda self: self)
    monkeypatch.setattr(SuperLink, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(FlowerServer, "start", start_and_stop)
    monkeypatch.setattr(FlowerServer, "resume", resume_run)
    args: list[str | Path] = ["local-cluster", "2", "fedavg", "--data", "digits", "--out", run]
    hint = f"Resume with: fewer local-cluster --resume {run}"
    try:
        assert hint in command(*args, code=130).stderr and len(joined) == 2
        assert "exists already" in command(*args, code=2).stderr and len(joined) == 2
        assert hint in command("local-cluster", "--resume", run, "--quorum", "0.5", code=2).stderr
    finally:
        printing.RESUME_HINTS.clear()
    assert resumed == [(run, {"quorum": 0.5})] and len(joined) == 4
    assert "N is missing" in command("local-cluster", code=2).stderr
    assert "--resume RUN cannot be combined" in command("local-cluster", "2", "--resume", run, code=2).stderr
    missing = tmp_path / "nowhere"
    assert "is not a run directory" in command("local-cluster", "--resume", missing, code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-cluster"]


def test_a_server_stopped_before_its_run_prints_no_resume_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: SuperLink) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SuperLink, "__enter__", stopped)
    keys = Credentials.create(tmp_path / "keys", 2).folder
    args = ["fedavg", "--data", "digits", "--keys", str(keys), "--clients", "2", "--out", str(tmp_path / "run")]
    assert command("server", *args, code=130).stderr == "\nStopped.\n"


def test_only_one_server_at_a_time_uses_the_keys(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1)
    secret_file(keys.folder / "flower")
    with (keys.folder / "flower/lock").open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another server uses the keys in"), SuperLink(keys, port=1):
            pass


def test_a_personal_model_exists_only_on_its_client(tmp_path: Path) -> None:
    result = run_experiment(experiment(3, rounds=1, runtime="inline"), tmp_path / "run")
    with pytest.raises(SettingError, match="cannot switch between simulated and remote clients"):
        resume(tmp_path / "run", runtime="flower")
    result.personal_model(0)
    result.settings = result.settings.model_copy(update={"runtime": "flower"})
    with pytest.raises(RunError, match="exists only on that client's machine"):
        result.personal_model(0)


def test_the_report_shows_the_bytes_that_flower_sent(tmp_path: Path) -> None:
    run_experiment(experiment(3, rounds=1, runtime="inline"), tmp_path / "run")
    with (tmp_path / "run/events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "finish", "transport_up": 2_500_000, "transport_down": 1_000_000}) + "\n")
    page = write_report([tmp_path / "run"], tmp_path / "report")[0]
    assert "Flower sent 2.5 MB up and 1 MB down" in page.read_text()
