"""The parts of the runtime between machines, each by itself and without processes."""

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
from fewer.cli.machines import _begin
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.methods.frl_deploy import FRLDeploy
from fewer.report import write_report
from fewer.runs.engine import build_handler_server, resume, start
from fewer.runs.machines import ClientDaemon, FlowerServer, _told
from fewer.runtime import Faults, Rules
from fewer.runtime.flower import envelope, without_proxy
from fewer.runtime.flower.clients import Flower
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.link import Again, Asked, Link, LinkLost, RemoteClient
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program, secret_file
from fewer.runtime.handlers import GIVE, Call, Hop, Reply, on_client
from fewer.runtime.keys import PinnedKeys
from fewer.runtime.ring import Journal
from fewer.wire import Refused, decode, encode
from fewer.wire.message import MAX_REASON
from fewer.wire.sealing import public_of
from tests.machines.cluster import GROUPS, experiment
from tests.test_cli import call as command

# --- envelopes ------------------------------------------------------------------------------------------------


def sent(content: RecordDict | None = None, error: Error | None = None) -> Message:
    about = Metadata(
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
    return make_message(metadata=about, content=content, error=error)


def test_a_question_and_an_answer_come_as_they_were() -> None:
    blob = bytes(range(256)) * 50_000  # more than one chunk of Flower's
    for call in (Call(3, "train", 7), Call(3, GIVE, 7, hop=Hop(1, "train", 4, True))):
        assert envelope.read_question(envelope.question(call, blob)) == (call, blob)
    for reply in (Reply(blob, None, "", 1.5), Reply(b"", "unable", "no data", 0.25)):
        assert envelope.read_answer(sent(envelope.answer(reply))) == reply


RECORD = ArrayRecord({"blob": Array("uint8", (1,), "fewer", b"x")})
FINE: dict[str, Any] = {"failure": "", "detail": "", "seconds": 1.0}
ODD = [
    RecordDict({}),
    RecordDict({"about": ConfigRecord(FINE)}),
    RecordDict({"about": RECORD, "message": RECORD}),
    RecordDict({"about": ConfigRecord(FINE), "message": ArrayRecord({})}),
    RecordDict({"about": ConfigRecord({}), "message": RECORD}),
    *(
        RecordDict({"about": ConfigRecord(FINE | wrong), "message": RECORD})
        for wrong in ({"failure": "bored"}, {"failure": [1]}, {"detail": 5}, {"seconds": "long"}, {"seconds": [1.0]})
    ),
]


@pytest.mark.parametrize("content", ODD)
def test_what_is_no_answer_is_refused(content: RecordDict) -> None:
    assert envelope.read_answer(sent(content)).failure == "refused"


def test_a_reason_is_cut_and_without_signs_that_move_a_terminal() -> None:
    reply = envelope.read_answer(sent(envelope.answer(Reply(b"", "unable", "\x1b[2J" + "é" * (MAX_REASON + 1)))))
    assert reply.detail == "[2J" + "é" * (MAX_REASON - 4)


def test_an_error_of_flowers_is_a_lost_answer() -> None:
    assert envelope.read_answer(sent(error=Error(5, "…"))) == Reply(b"", "lost", "its node is gone")
    assert envelope.read_answer(sent(error=Error(4, "no more"))) == Reply(b"", "lost", "no more")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"client": -1, "handler": "x", "round": 1}', '{"client": "0", "handler": "x", "round": 1}'],
)
def test_what_is_no_question_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        envelope.read_question(RecordDict({"about": ConfigRecord({"call": text}), "message": RECORD}))


def test_nothing_is_passed_on_unsealed() -> None:
    with pytest.raises(Refused, match="sealed"):
        envelope.read_question(envelope.question(Call(0, GIVE, 1, hop=Hop(1, "train", 4, False)), b""))


# --- carrying -------------------------------------------------------------------------------------------------


class FakeLink(Link):
    """Says what it was told to say: who is online at each look, and which replies come at each pull."""

    def __init__(self, looks: Sequence[Any], pulls: Sequence[Mapping[str, Reply]]) -> None:
        self.looks, self.pulls, self.pushed = deque(looks), deque(pulls), []  # type: ignore[var-annotated]

    def there(self) -> dict[int, RemoteClient]:
        found = self.looks.popleft() if len(self.looks) > 1 else self.looks[0]
        if isinstance(found, Exception):
            raise found
        return dict(found)

    def push(self, questions: Sequence[tuple[Asked, bytes]], seconds: float | None) -> dict[str, Asked]:
        self.pushed.append(seconds)
        return {str(asked.call.client): asked for asked, _ in questions}

    def pull(self, waiting: Any) -> Mapping[str, Reply]:
        return self.pulls.popleft() if self.pulls else {}


def carried(link: Link, clients: Sequence[int], rules: Rules | None = None) -> dict[int, Reply | None]:
    flower = Flower(4, 0, Faults(), rules or Rules(), handlers=None, link=link)  # type: ignore[arg-type]
    return {call.client: reply for call, reply in flower._carry([(Call(client, "f", 1), b"") for client in clients])}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE", "LOOK"):
        monkeypatch.setattr(module, name, 0.01)


def test_who_is_not_online_is_lost_at_once_and_replies_go_to_their_questions() -> None:
    here = {0: RemoteClient(10, "a"), 2: RemoteClient(12, "a")}
    late = Reply(b"of another question")
    link = FakeLink([Again(), here], [{}, {"99": late}, {"2": Reply(b"two")}, {"0": Reply(b"nought")}])
    got = carried(link, [0, 1, 2])
    assert got == {0: Reply(b"nought"), 1: Reply(b"", "lost", "not online", asked=False), 2: Reply(b"two")}
    assert link.pushed == [None]


def test_what_was_never_sent_is_not_counted() -> None:
    def score() -> None: ...

    link = FakeLink([{0: RemoteClient(10, "a")}], [{"0": Reply(encode("score", {}))}])
    flower = Flower(2, 0, handlers=None, link=link)  # type: ignore[arg-type]
    answers = flower.ask([0, 1], score, returns={}, x=1)
    assert [absent.client for absent in answers.absent] == [1]
    assert [(one.client, one.direction) for one in flower.ledger.take()] == [(0, "down"), (0, "up")]


def test_what_a_ring_never_sent_is_not_counted_either_nor_after_a_break(tmp_path: Path) -> None:
    def train() -> None: ...

    def lines(link: Link) -> list[tuple[int, str]]:
        flower = Flower(3, 0, handlers=None, link=link, journal=Journal(tmp_path))  # type: ignore[arg-type]
        assert flower.relay([1, 2], train, holders=[0]) == [0, 2]
        return [(one.client, one.direction) for one in flower.ledger.take()]

    here, fine = {0: RemoteClient(10, "a"), 2: RemoteClient(12, "a")}, Reply(encode("train", {}))
    link = FakeLink([here], [{"0": fine}, {"0": fine}, {"2": fine}])
    assert lines(link) == lines(FakeLink([{}], [])) == [(0, "up"), (0, "up"), (2, "down")]


def test_nobody_to_be_measured_is_a_quorum_lost() -> None:
    """After all the training of a round: no mistake in settings, and the run can go on."""

    def score() -> None: ...

    flower = Flower(2, 0, handlers=None, link=FakeLink([{}], []), round=4, evaluating=True)  # type: ignore[arg-type]
    with pytest.raises(QuorumLost, match=r"round 4: 0 of 2 .*, 1 needed \(measuring\): 2 lost \(not online\)"):
        flower.ask([0, 1], score, returns={})
    assert flower.ask([], score, returns={}) == []


def test_a_superlink_that_lives_and_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.1)
    with pytest.raises(LinkLost, match="does not answer"):
        carried(FakeLink([Again()], []), [0])


def test_what_was_changed_holds_after_a_lost_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def resume(out: Path, **named: Any) -> None:
        given.append(named.get("quorum"))
        if len(given) == 1:
            raise LinkLost("gone")

    monkeypatch.setattr("fewer.runs.machines.resume", resume)
    FlowerServer(Credentials(tmp_path)).resume(tmp_path / "run", quorum=0.5)
    assert given == [0.5, 0.5]


def test_a_run_goes_on_with_the_keys_of_its_clients_alone(tmp_path: Path) -> None:
    there = FlowerServer(Credentials.create(tmp_path / "keys", 2))
    with pytest.raises(SettingError, match="clients = 3, but .* has keys of 2"):
        there._opening(tmp_path)(experiment(3), tmp_path, 1)


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
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
        without_proxy("127.0.0.1")
        without_proxy("127.0.0.1")
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "elsewhere,127.0.0.1"
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"http://127.0.0.1:{port}", timeout=0.2)


def test_a_node_that_was_started_anew_has_lost_its_question() -> None:
    before, gone, back = (
        {0: RemoteClient(10, "a"), 1: RemoteClient(11, "a")},
        {1: RemoteClient(11, "a")},
        {0: RemoteClient(10, "b")},
    )
    link = FakeLink([before, gone, back], [{"1": Reply(b"one")}])
    assert carried(link, [0, 1]) == {0: Reply(b"", "lost", "its node was started anew"), 1: Reply(b"one")}


def test_after_the_deadline_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRANSIT", 0.1)
    link = FakeLink([{0: RemoteClient(10, "a")}], [])
    reply = carried(link, [0], Rules(deadline=0.1))[0]
    assert reply is not None and reply.failure == "late"
    assert link.pushed == [pytest.approx(0.3)]


def test_what_cannot_be_asked_again_is_a_link_lost(tmp_path: Path) -> None:
    """A reply is handed out once, and nobody may be asked twice: who did not hear does not know which it was."""

    class Silent:
        def __getattr__(self, name: str) -> Any:
            raise httpx.ReadTimeout("")

    link = Link(Credentials(tmp_path))
    link._grid = Silent()  # type: ignore[assignment]
    link._program = Program("none:none", [], tmp_path)
    link._program._process = SimpleNamespace(pid=1, poll=lambda: None)  # type: ignore[assignment]
    with pytest.raises(Again):
        link.there()
    with pytest.raises(LinkLost, match="does not answer"):
        link.pull(["a"])
    link._program._process = None
    with pytest.raises(LinkLost, match="has ended"):
        link.there()


class Uploaded:
    """A SuperLink to which a client has announced a reply: pieces of it are there, others are not yet, or not any more.

    The client says that it replies to another question than the SuperLink knows.
    """

    def __init__(self, message: Message, damaged: bool = False) -> None:
        self.about, self.tree = message_to_proto(message), get_object_tree(message)
        self.about.metadata.message_id, self.about.metadata.reply_to_message_id = message.object_id, "mine"
        self.pieces = {key: piece.deflate() for key, piece in get_all_nested_objects(message).items()}
        if damaged:
            for key, piece in get_all_nested_objects(message).items():
                if isinstance(piece, ConfigRecord):
                    self.pieces[key] = add_header_to_object_body(object_body=b"\xff" * 20, obj=piece)
        self.there = dict.fromkeys(self.pieces, True)
        self.confirmed, self.asked = [], 0  # type: ignore[var-annotated]

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        if "mine" not in request.message_ids:
            return PullAppMessagesResponse()
        return PullAppMessagesResponse(messages_list=[self.about], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.asked += 1
        key = request.object_id
        if key not in self.there:
            return PullObjectResponse(object_found=False)
        there = self.there[key]
        content = self.pieces[key] if there else b""
        return PullObjectResponse(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def link(self, folder: Path) -> Link:
        link = Link(Credentials(folder))
        link._grid = SimpleNamespace(_runtime_client=self, node=None, run=SimpleNamespace(run_id=1))  # type: ignore[assignment]
        return link


def test_a_reply_that_is_on_its_way_is_not_waited_for(tmp_path: Path) -> None:
    """Nor is any piece of it fetched twice; and it goes to the question that the SuperLink knows."""
    reply = Reply(b"well", None, "", 1.5)
    uploaded = Uploaded(sent(envelope.answer(reply)))
    link = uploaded.link(tmp_path)
    slow = list(uploaded.there)[2]
    uploaded.there[slow] = False
    for _ in range(3):
        assert link.pull(["other", "mine"]) == {} and not uploaded.confirmed
    uploaded.there[slow] = True
    assert link.pull(["other", "mine"]) == {"mine": reply}
    assert uploaded.confirmed == [uploaded.about.metadata.message_id] and uploaded.asked == len(uploaded.pieces) + 3
    assert link.packed["up"] == sum(map(len, uploaded.pieces.values())) and link.pull(["other"]) == {}


def test_a_reply_that_does_not_come_whole_is_lost(tmp_path: Path) -> None:
    uploaded = Uploaded(sent(envelope.answer(Reply(b"well"))))
    link = uploaded.link(tmp_path)
    del uploaded.there[list(uploaded.there)[1]]
    assert link.pull(["mine"]) == {"mine": Reply(b"", "lost", "its answer did not come whole")}


def test_a_reply_that_is_no_message_at_all_is_refused(tmp_path: Path) -> None:
    link = Uploaded(sent(envelope.answer(Reply(b"well"))), damaged=True).link(tmp_path)
    assert link.pull(["mine"]) == {"mine": Reply(b"", "refused", "not a message")}


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(RunError, match=f"127.0.0.1:{port} cannot be listened on: Address already in use"),
            Link(keys, port=port),
        ):
            pass


# --- keys -----------------------------------------------------------------------------------------------------


def test_keys_are_private_and_the_certificate_is_of_the_authority(tmp_path: Path) -> None:
    made = Credentials.create(tmp_path / "keys", 2, ["fewer.example.org", "10.0.0.7"])
    for file in [*tmp_path.rglob("*.key")]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(file.name for file in made.client(1).iterdir()) == ["ca.crt", "node.key", "node.pub"]
    assert list(made.public_keys) == [0, 1] and len(set(made.public_keys.values())) == 2
    server, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(made.folder / "server.crt", made.folder / "server.key")
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    client_side.load_verify_locations(made.client(0) / "ca.crt")
    for name, fine in (("fewer.example.org", True), ("10.0.0.7", True), ("127.0.0.1", True), ("elsewhere", False)):
        assert shakes_hands(server, client_side, name) is fine
    made.certify((), days=-1)
    assert not shakes_hands(server, client_side, "elsewhere")
    with pytest.raises(RunError, match="expired on .* fewer keys renew"):
        Credentials.open(made.folder)


def shakes_hands(server: ssl.SSLContext, client_side: ssl.SSLContext, name: str) -> bool:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client_side.wrap_bio(back, there, server_hostname=name),
        server.wrap_bio(there, back, server_side=True),
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


def test_mistakes_with_keys_are_told_in_one_line(tmp_path: Path) -> None:
    made = Credentials.create(tmp_path / "keys", 1)
    with pytest.raises(RunError, match="holds keys already"):
        Credentials.create(tmp_path / "keys", 1)
    with pytest.raises(RunError, match="has no ca.crt .*fewer keys init"):
        Credentials.open(tmp_path)
    (made.client(0) / "node.pub").write_text("nonsense")
    with pytest.raises(RunError, match="is not a public key"):
        made.public_keys  # noqa: B018


@pytest.mark.parametrize("host", ["bücher.example", "a.example:443", "https://a.example", "", "10.0.0.300", "-a"])
def test_what_is_no_host_is_told_before_anything_is_written(host: str, tmp_path: Path) -> None:
    wrong = command("keys", "init", tmp_path / "keys", "--clients", "1", "--host", host, code=2).stderr
    assert f"'{host}' is no name or address" in wrong and not (tmp_path / "keys").exists()


def test_damaged_keys_are_told(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "--days" in command("keys", "init", keys, "--clients", "1", "--days", "4000000", code=2).stderr
    made = Credentials.create(keys, 1)
    (made.client(0) / "peers.json").write_text("{")
    assert "peers.json is damaged" in command("keys", "trust", made.client(0), f"1={'00' * 32}", code=2).stderr
    with pytest.raises(Refused, match="pinned keys are damaged"):
        PinnedKeys(made.client(0)).public(0, 1)
    command("keys", "trust", made.client(0), "--", f"-5={'00' * 32}", code=2)
    (keys / "ca.key").write_text("nonsense")
    assert "ca.key is not a private key" in command("keys", "renew", keys, code=2).stderr
    (keys / "server.crt").write_text("nonsense")
    wrong = command("server", "fedavg", "--data", "digits", "--keys", keys, "--clients", "1", code=2).stderr
    assert "server.crt is not a certificate" in wrong


def test_an_address_that_the_certificate_does_not_name_is_told_at_once(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1, ["10.0.0.7", "a.example"])
    for name in ("10.0.0.7", "a.example", "127.0.0.1", "::1", "localhost"):
        keys.check_host(name)
    with pytest.raises(RunError, match=r"is not for 127.0.0.2 \(fewer keys renew .* --host 127.0.0.2"):
        Link(keys, "127.0.0.2").__enter__()


def test_what_lies_beside_keys_and_in_a_store_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink's database holds messages in the clear, a store what a client made of its data."""
    keys = Credentials.create(tmp_path / "keys", 1)
    secret = secret_file(keys.folder / "flower")
    Program("sys:exit", [], tmp_path / "home").start()
    monkeypatch.setattr(Node, "serve", lambda self, answering: None)
    ClientDaemon(tmp_path / "store").join("a:1", keys.client(0))
    for folder in (keys.folder, secret.parent, tmp_path / "home", tmp_path / "store"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_flowers_programs_are_quiet_private_and_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda words, **named: started.update(named, vocab_size=words))
    keys = Credentials.create(tmp_path / "keys", 1)
    program, _ = Node("far.example:443", keys.client(0), tmp_path / "store")._program()
    assert program.arguments[program.arguments.index("--host") + 1] == "127.0.0.1"
    program.start()
    assert started["env"]["FLWR_HOME"] == str(program.home)
    assert started["env"]["FLWR_TELEMETRY_ENABLED"] == "0" and started["env"]["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    monkeypatch.setattr(Link, "_start", lambda self: None)
    monkeypatch.setattr(Link, "_register", lambda self: None)
    link = Link(keys, "127.0.0.1", 1).__enter__()
    assert link._program and link._lock
    link._lock.close()
    words = list(link._program.arguments)
    assert words[words.index("--host") + 1] == "127.0.0.1" and "--enable-supernode-auth" in words


def test_a_link_on_all_addresses_is_reached_on_loopback(tmp_path: Path) -> None:
    assert Link(Credentials(tmp_path), "0.0.0.0", 5).address == "127.0.0.1:5"


def test_packed_bytes_are_of_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(Credentials(tmp_path))
    monkeypatch.setattr(Link, "pid", 1)
    monkeypatch.setattr(Link, "_submit", lambda self, experiment: None)
    link.packed["up"] = 5
    link.begin_run("{}")
    assert not link.packed


def test_a_client_makes_its_own_key_for_sealing_and_pins_those_of_others(tmp_path: Path) -> None:
    one, two = PinnedKeys(tmp_path / "one"), PinnedKeys(tmp_path / "two")
    for keys in (one, two):
        keys.folder.mkdir()
        with pytest.raises(Refused, match="fewer keys seal"):
            keys.private(0)
    printed = command("keys", "seal", two.folder).stdout.strip()
    assert command("keys", "seal", two.folder).stdout.strip() == printed == two.create().hex()
    assert stat.S_IMODE((two.folder / "seal.key").stat().st_mode) == 0o600
    one.create()
    with pytest.raises(Refused, match="no key of client 1 is pinned"):
        one.public(0, 1)
    command("keys", "trust", one.folder, f"1={printed}")
    command("keys", "trust", one.folder, f"2={'00' * 32}")
    assert one.public(0, 1) == public_of(two.private(1)) and one.public(0, 2) == bytes(32)
    for wrong in ("1", "x=00", "1=zz", "1=00"):
        command("keys", "trust", one.folder, wrong, code=2)
    other = f"1={'11' * 32}"
    refused = command("keys", "trust", one.folder, other, code=2).stderr
    assert "client 1: another key is pinned here (--replace" in refused
    command("keys", "trust", one.folder, f"1={printed}")  # the same again
    assert one.public(0, 1).hex() == printed
    command("keys", "trust", one.folder, other, "--replace")
    assert one.public(0, 1).hex() == "11" * 32 and one.public(0, 2) == bytes(32)


# --- a client --------------------------------------------------------------------------------------------------


def told(out: Path, done: int = 0, **settings: Any) -> dict[str, Any]:
    """What a server tells, as it arrives."""
    out.mkdir(exist_ok=True)
    found: dict[str, Any] = json.loads(json.dumps(_told(experiment(3, **settings), out, done)))
    return found


def mine(folder: Path, classes: int = 4, height: int = 8) -> str:
    """A client's own data, like digits: 50 samples."""
    x = np.random.default_rng(0).integers(0, 17, (50, height, 8), np.uint8)
    np.savez(folder / "mine.npz", x=x, y=np.arange(50) % classes)
    return f"npz:{folder / 'mine.npz'}"


def ask(station: ClientDaemon, said: Any, round: int = 1, client: int = 0) -> Reply:
    model = experiment(3).task.initial(3)
    return station.answer(json.dumps(said), Call(client, "train", round), encode("train", {"model": model}))


def test_a_station_answers_as_a_site_on_one_machine(tmp_path: Path) -> None:
    reply = ask(ClientDaemon(tmp_path / "store"), told(tmp_path), client=2)
    here = build_handler_server(experiment(3), tmp_path / "here")
    model = encode("train", {"model": experiment(3).task.initial(3)})
    mine, theirs = decode(reply.blob)[1], decode(here.answer(Call(2, "train", 1), model).blob)[1]
    assert reply.failure is None and mine["size"] == theirs["size"]
    assert all(torch.equal(mine["model"][name], tensor) for name, tensor in theirs["model"].items())


def test_a_client_has_its_own_data_in_the_form_of_the_servers(tmp_path: Path) -> None:
    said, station = told(tmp_path), ClientDaemon(tmp_path / "store", mine(tmp_path))
    data = station._build_experiment(said["settings"], said["facts"]).data
    common = experiment(3).data.test
    held = data.client(1)
    assert (len(data), data.classes, len(held.train), len(held.test)) == (3, 10, 40, 10)
    assert (held.train.shift, held.train.scale) == (common.shift, common.scale)
    assert decode(ask(station, said, client=1).blob)[1]["size"] == 40
    reply = ask(ClientDaemon(tmp_path / "store", mine(tmp_path, height=7)), said)
    assert reply.failure == "unable" and "the task takes torch.uint8 (1, 8, 8)" in reply.detail


def test_a_client_of_texts_uses_the_servers_words(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} thing{n % 5}", "label": n % 2}) for n in range(60)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.jsonl").write_text("\n".join(lines[:20]).replace("good", "novel"))
    said = told(tmp_path, data=f"jsonl:{tmp_path / 'all.jsonl'}", model="text-bilstm", partition="iid", max_length=4)
    station = ClientDaemon(tmp_path / "store", f"jsonl:{tmp_path / 'mine.jsonl'}")
    data = station._build_experiment(said["settings"], said["facts"]).data
    assert list(data.tokens) == said["facts"]["tokens"] and "novel" not in data.tokens
    words, _ = data.client(0).train.slice(0, 16)
    assert words.shape[1] == 4 and int(words.max()) < len(data.tokens)


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
        {"method": "metafed", "method_options": {"inside": "evil.py:Evil"}},
        {"method": "metafed", "method_options": {"inside_set": {"deep": ["/etc/secret"]}}},
    ],
)
def test_no_file_is_taken_from_a_server(changed: dict[str, Any], tmp_path: Path) -> None:
    said = told(tmp_path)
    said["settings"] |= changed
    reply = ask(ClientDaemon(tmp_path / "store"), said)
    assert reply.failure == "unable" and "lies in a file, which is not taken from a server" in reply.detail


def test_a_server_does_not_begin_with_a_file_that_clients_have_not(tmp_path: Path) -> None:
    there = FlowerServer(Credentials.create(tmp_path / "keys", 3))
    inside = experiment(3, "metafed", method_options={"inside": "mine.py:Mine"})
    with pytest.raises(SettingError, match="inside = mine.py:Mine lies in a file: clients on other machines"):
        there.check(inside)


def test_a_prepared_model_is_the_servers_alone(tmp_path: Path) -> None:
    start(experiment(3, "frl-scratch", runtime="inline", **GROUPS), tmp_path / "prepared")
    said = told(tmp_path, method="frl-deploy", rounds=1, method_options={"prepared": str(tmp_path / "prepared")})
    assert said["settings"]["method_options"]["prepared"] == ""
    FlowerServer(Credentials.create(tmp_path / "keys", 3)).check(
        experiment(3, "frl-deploy", method_options={"prepared": str(tmp_path / "prepared")})
    )
    assert isinstance(ClientDaemon(tmp_path / "store")._build(said, 0).program, FRLDeploy)


def test_whoever_has_its_own_data_does_not_know_everyones(tmp_path: Path) -> None:
    """It would judge its model on its own samples for those of all clients."""
    said = told(tmp_path, method="local")
    totals = {}
    for data in (None, mine(tmp_path)):
        for everywhere in (False, True):
            station = ClientDaemon(tmp_path / "store", data)
            question = encode("score", {"model": {}, "global_accuracy": everywhere})
            reply = station.answer(json.dumps(said), Call(1, "score", 1), question)
            totals[data is None, everywhere] = decode(reply.blob)[1]["total"]
    assert totals[False, True] == 0 and totals[False, False] == 10
    assert totals[True, True] == len(experiment(3).data.test) > totals[True, False] > 0


def test_a_client_with_more_classes_than_the_task_is_told(tmp_path: Path) -> None:
    reply = ask(ClientDaemon(tmp_path / "store", mine(tmp_path, classes=25)), told(tmp_path))
    assert reply.failure == "unable" and "has 25 classes; the task has 10" in reply.detail


def test_a_run_that_goes_on_tells_who_has_done_its_hops(tmp_path: Path) -> None:
    Journal(tmp_path / "hops").put(3, 0, 2, Reply(b"x"))
    assert _told(experiment(3), tmp_path, 2)["spared"] == [2] and _told(experiment(3), tmp_path, 3)["spared"] == []


def test_a_client_can_keep_to_one_method(tmp_path: Path) -> None:
    said = told(tmp_path)
    reply = ask(ClientDaemon(tmp_path / "store", method="metafed"), said)
    assert reply.failure == "unable" and "method = fedavg: this client takes part in metafed alone" in reply.detail
    assert ask(ClientDaemon(tmp_path / "store", method="fedavg"), said).failure is None
    wrong = command("join", "localhost:1", "--key", tmp_path, "--method", "metafedd", code=2)
    assert "unknown method 'metafedd', did you mean 'metafed'?" in wrong.stderr


def test_what_is_sealed_belongs_to_its_run(tmp_path: Path) -> None:
    sites = [ClientDaemon(tmp_path / "store")._build(told(tmp_path / run), 0) for run in ("one", "two", "one")]
    assert sites[0].context == sites[2].context != sites[1].context and sites[0].context


def test_other_data_under_the_same_name_is_told(tmp_path: Path) -> None:
    said = told(tmp_path)
    said["facts"]["fingerprint"] = "00000000"
    assert "is another here" in ask(ClientDaemon(tmp_path / "store"), said).detail


@pytest.mark.parametrize("said", [[], {}, 5, {"run": "../x", "session": 1, "done": 0}, {"run": "a", "session": {}}])
def test_what_is_no_job_is_refused(said: Any, tmp_path: Path) -> None:
    assert ask(ClientDaemon(tmp_path / "store"), said).failure == "refused"
    assert not (tmp_path / "store").exists()


def test_a_new_session_forgets_what_does_not_count_and_an_old_one_is_over(tmp_path: Path) -> None:
    first = told(tmp_path, method="fedbn", norm="batch")
    station = ClientDaemon(tmp_path / "store")

    def remembered() -> list[str]:
        return sorted(file.name.split(".")[-2] for file in (tmp_path / "store").rglob("*.safetensors"))

    blob = encode("train", {"model": {}})
    handlers = station._build(first, 0)
    for round in (1, 2, 3):
        handlers.contexts(0, round).store.put("model", {"a": torch.ones(1)})
    assert remembered() == ["00000002", "00000003"]
    second = told(tmp_path, 2, method="fedbn", norm="batch")
    assert second["session"] == first["session"] + 1 and second["run"] == first["run"]
    station._build({**second, "spared": [0]}, 0)  # what it did in a ring that goes on where it was counts
    assert remembered() == ["00000002", "00000003"]
    second = told(tmp_path, 2, method="fedbn", norm="batch")
    station._build(second, 0)
    assert remembered() == ["00000002"]
    station._build(second, 0)  # the same session again, after a restart of the client: all stays
    reply = station.answer(json.dumps(first), Call(0, "train", 3), blob)
    assert reply.failure == "unable" and "session 1 of a run whose session 3 has begun" in reply.detail


# --- commands -------------------------------------------------------------------------------------------------


def test_keys_and_mistakes_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    assert "client 1: " in command("keys", "init", keys, "--clients", "2", "--host", "a.example").stdout
    assert "holds keys already" in command("keys", "init", keys, "--clients", "2", code=2).stderr
    before = (keys / "server.crt").read_bytes()
    command("keys", "renew", keys, "--host", "b.example")
    assert (keys / "server.crt").read_bytes() != before
    digits: list[str | Path] = ["--data", "digits", "--keys", keys, "--clients"]
    wrong = command("server", "fedavg", *digits, "3", code=2).stderr
    assert f"clients = 3, but {keys} has keys of 2: [0, 1]" in wrong
    own = Path(__file__).parents[2] / "docs/examples/fedmedian.py"
    assert "lies in a file" in command("server", f"{own}:FedMedian", *digits, "2", code=2).stderr
    assert "has no node.key" in command("join", "127.0.0.1:1", "--key", tmp_path, code=2).stderr
    join: list[str | Path] = ["join", "127.0.0.1:1", "--key", keys / "client-0"]
    assert "device = 'gpu' cannot be used" in command(*join, "--device", "gpu", code=2).stderr
    assert "no 'none.npz' here" in command(*join, "--data", "npz:none.npz", code=2).stderr
    for address in ("server", "https://server:443", "server:http"):
        wrong = command("join", address, *join[2:], code=2).stderr
        assert f"{address} is no address of a server (expected: HOST:PORT)" in wrong
    assert "is not a run of Fewer" in command("server", "--resume", tmp_path, "--keys", keys, code=2).stderr
    assert "--resume RUN" in command("server", "fedavg", "--resume", tmp_path, *digits, "2", code=2).stderr
    assert "runtime = flower" in command("run", "fedavg", "--data", "digits", "--runtime", "flower", code=2).stderr
    monkeypatch.setattr("fewer.runtime.flower.find_spec", lambda name: None)
    for words in (["join", "a:1", "--key", "x"], ["local-cluster", "2"], ["keys", "init", "x", "--clients", "1"]):
        assert "pip install 'fewer[flower]'" in command(*words, code=2).stderr


def test_whoever_is_ended_in_the_midst_of_an_answer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in there would be a reply."""
    before = signal.getsignal(signal.SIGTERM)
    said = told(tmp_path)
    station = ClientDaemon(tmp_path / "store")
    monkeypatch.setattr("fewer.methods.fedavg.FedAvg.train", on_client(lambda *_, **__: signal.raise_signal(15)))
    try:
        _begin()
        with pytest.raises(KeyboardInterrupt):
            station.answer(json.dumps(said), Call(0, "train", 1), encode("train", {"model": {}}))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_lost_quorum_is_told_with_a_way_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    @printing.told
    def lost() -> None:
        printing.GO_ON.append("Go on so.")
        raise QuorumLost("too few")

    with pytest.raises(typer.Exit):
        lost()
    printing.GO_ON.remove("Go on so.")
    assert capsys.readouterr().err == "fewer: too few\nGo on so.\n"


def test_a_stopped_local_cluster_says_how_to_go_on_and_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    joined: list[Sequence[str]] = []
    went_on: list[tuple[Path, dict[str, Any]]] = []

    def begin(self: FlowerServer, job_: Any, out: Path, progress: Any) -> None:
        start(experiment(2, rounds=1, runtime="inline"), out)
        raise KeyboardInterrupt

    def go_on(self: FlowerServer, out: Path, progress: Any, **changed: Any) -> None:
        went_on.append((out, changed))
        raise QuorumLost("too few")

    monkeypatch.setattr(Program, "start", lambda self: joined.append(self.arguments))
    monkeypatch.setattr(Link, "__enter__", lambda self: self)
    monkeypatch.setattr(Link, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(FlowerServer, "start", begin)
    monkeypatch.setattr(FlowerServer, "resume", go_on)
    words: list[str | Path] = ["local-cluster", "2", "fedavg", "--data", "digits", "--out", run]
    hint = f"Go on with: fewer local-cluster --resume {run}"
    try:
        assert hint in command(*words, code=130).stderr and len(joined) == 2
        assert "is there already" in command(*words, code=2).stderr and len(joined) == 2
        assert hint in command("local-cluster", "--resume", run, "--quorum", "0.5", code=2).stderr
    finally:
        printing.GO_ON.clear()
    assert went_on == [(run, {"quorum": 0.5})] and len(joined) == 4
    assert "N is missing" in command("local-cluster", code=2).stderr
    assert "--resume RUN goes on" in command("local-cluster", "2", "--resume", run, code=2).stderr
    nowhere = tmp_path / "nowhere"
    assert "is not a run of Fewer" in command("local-cluster", "--resume", nowhere, code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-cluster"]


def test_a_server_that_is_stopped_before_its_run_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: Link) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Link, "__enter__", stopped)
    keys = Credentials.create(tmp_path / "keys", 2).folder
    words = ["fedavg", "--data", "digits", "--keys", str(keys), "--clients", "2", "--out", str(tmp_path / "run")]
    assert command("server", *words, code=130).stderr == "\nStopped.\n"


def test_one_server_at_a_time_has_the_keys(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1)
    secret_file(keys.folder / "flower")
    with (keys.folder / "flower/lock").open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another server is at work with the keys in"), Link(keys, port=1):
            pass


def test_a_clients_model_is_where_the_client_is(tmp_path: Path) -> None:
    result = start(experiment(3, rounds=1, runtime="inline"), tmp_path / "run")
    with pytest.raises(SettingError, match="cannot move between this machine and others"):
        resume(tmp_path / "run", runtime="flower")
    result.personal_model(0)
    result.settings = result.settings.model_copy(update={"runtime": "flower"})
    with pytest.raises(RunError, match="where that client is"):
        result.personal_model(0)


def test_the_report_tells_what_flower_made_of_the_messages(tmp_path: Path) -> None:
    start(experiment(3, rounds=1, runtime="inline"), tmp_path / "run")
    with (tmp_path / "run/events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "finish", "packed_up": 2_500_000, "packed_down": 1_000_000}) + "\n")
    page = write_report([tmp_path / "run"], tmp_path / "report")[0]
    assert "Flower made 2.5 MB up and 1 MB down" in page.read_text()
