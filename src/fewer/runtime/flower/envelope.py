"""Our calls and replies as Flower's messages: a few plain values in one record, the encoded bytes in another."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, get_args

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fewer.runtime.handlers import Call, Failure, Hop, Reply
from fewer.wire import Refused
from fewer.wire.message import MAX_REASON

TYPE = "query.fewer"
"""Flower's name for the kind of message."""


def question(call: Call, blob: bytes) -> RecordDict:
    """A call with its message."""
    return _content({"call": json.dumps(asdict(call))}, blob)


def read_question(content: RecordDict) -> tuple[Call, bytes]:
    """What was asked; Refused where it is no question of ours."""
    values, blob = _open(content)
    try:
        call = Call.of(json.loads(str(values["call"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused("not a question") from error
    hop = call.hop or Hop(0, "", 0, True)
    numbers, names = (call.client, call.round, hop.other, hop.number), (call.handler, hop.kind)
    if any(type(one) is not int for one in numbers) or any(type(one) is not str for one in names) or call.client < 0:
        raise Refused("not a question to a client")
    if hop.sealed is not True:
        raise Refused("between machines, what is passed on is sealed")
    return call, blob


def answer(reply: Reply) -> RecordDict:
    """A reply."""
    values = {"failure": reply.failure or "", "detail": reply.detail, "seconds": reply.seconds}
    return _content(values, reply.blob)


def read_answer(message: Message) -> Reply:
    """What came back; whatever a node sends that is no answer of ours is a refused one."""
    if message.has_error():
        gone = message.error.code == ErrorCode.NODE_UNAVAILABLE
        return Reply(b"", "lost", "its node is gone" if gone else message.error.reason or str(message.error.code))
    try:
        values, blob = _open(message.content)
        failure, detail, seconds = values["failure"], values["detail"], values["seconds"]
    except (Refused, KeyError):
        return Reply(b"", "refused", "not an answer")
    if not (isinstance(detail, str) and isinstance(seconds, float)):
        return Reply(b"", "refused", "not an answer")
    reason: Failure | None = next((known for known in get_args(Failure) if known == failure), None)
    if failure and not reason:
        return Reply(b"", "refused", "not an answer")
    told = "".join(sign for sign in detail[:MAX_REASON] if sign.isprintable())  # it is shown on a terminal
    return Reply(blob, reason, told, seconds)


def size(message: Message) -> int:
    """Bytes of a message as Flower packs it, ours among them."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def _content(values: dict[str, Any], blob: bytes) -> RecordDict:
    # In an array, since Flower cuts those into chunks and anything else into none.
    record = ArrayRecord({"blob": Array("uint8", (len(blob),), "fewer", blob)})
    return RecordDict({"about": ConfigRecord(values), "message": record})


def _open(content: RecordDict) -> tuple[ConfigRecord, bytes]:
    values, record = content.get("about"), content.get("message")
    if not isinstance(values, ConfigRecord) or not isinstance(record, ArrayRecord) or list(record) != ["blob"]:
        raise Refused("not a message of ours")
    return values, record["blob"].data
