"""Questions and answers in Flower's messages."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict

from fewer.runtime.flower import envelope
from fewer.runtime.handlers import FETCH_OUTGOING, Call, Hop, Reply
from fewer.wire import Refused
from fewer.wire.message import MAX_REASON
from tests.runtime.flower.harness import make_reply


def test_questions_and_answers_survive_a_round_trip() -> None:
    blob = bytes(range(256)) * 50_000  # more than one of Flower's chunks
    for call in (Call(3, "local_train", 7), Call(3, FETCH_OUTGOING, 7, hop=Hop(1, "train", 4, True))):
        assert envelope.read_question(envelope.pack_question(call, blob)) == (call, blob)
    for reply in (Reply(blob, None, "", 1.5), Reply(b"", "unable", "no data", 0.25)):
        assert envelope.read_answer(make_reply(envelope.pack_answer(reply))) == reply


def test_unsent_fields_stay_on_the_machine() -> None:
    packed = envelope.pack_answer(Reply(b"blob", unsent=b"label counts"))
    assert packed == envelope.pack_answer(Reply(b"blob"))
    assert envelope.read_answer(make_reply(packed)).unsent == b""


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
    [
        "",
        "[]",
        "{}",
        '{"client": -1, "handler": "x", "round": 1}',
        '{"client": 0, "handler": "x", "round": 1, "on_server": true}',
        '{"client": "0", "handler": "x", "round": 1}',
    ],
)
def test_an_invalid_question_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        envelope.read_question(RecordDict({"header": ConfigRecord({"call": text}), "payload": RECORD}))


def test_messages_between_clients_must_be_sealed() -> None:
    with pytest.raises(Refused, match="sealed"):
        envelope.read_question(envelope.pack_question(Call(0, FETCH_OUTGOING, 1, hop=Hop(1, "train", 4, False)), b""))


def test_an_answer_says_whether_it_depends_on_stored_state() -> None:
    for remembers in (False, True):
        packed = envelope.pack_answer(Reply(b"", remembers=remembers))
        assert envelope.read_answer(make_reply(packed)).remembers is remembers


def test_impossible_releases_are_refused() -> None:
    for releases in (
        [(1.5, 1.0, 1)],
        [(0.5, 0.0, 1)],
        [(0.5, 1e-200, 1)],
        [(0.5, 1.0, 0)],
        [(0.5, 1.0)],
        [(0.5, float("nan"), 1)],
    ):
        packed = envelope.pack_answer(Reply(b"", releases=tuple(releases)))  # type: ignore[arg-type]
        assert envelope.read_answer(make_reply(packed)).detail == "invalid releases"
