"""Calls and replies as Flower messages: a few plain values in one record, the encoded bytes in another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, get_args

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fewer.privacy import NOISES
from fewer.runtime.flower import flwr_compat as compat
from fewer.runtime.handlers import Call, Failure, Hop, Reply
from fewer.wire import Refused
from fewer.wire.message import MAX_REASON

MAX_RELEASES, MAX_STEPS, MIN_RATE = 100, 10**9, 1e-9
"""Bounds of what one answer says about its releases."""
TYPE = "query.fewer"
"""The Flower type of all messages."""


def pack_question(call: Call, blob: bytes) -> RecordDict:
    """Packs a call and its message."""
    return _pack_content({"call": json.dumps(asdict(call))}, blob)


def read_question(content: RecordDict) -> tuple[Call, bytes]:
    """Reads a call and its message. Raises Refused if the content is not a Fewer question."""
    values, blob = _read_content(content)
    try:
        call = Call.from_dict(json.loads(str(values["call"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused("not a question") from error
    hop = call.hop or Hop(None, "", 0, True)
    peer = 0 if hop.peer is None else hop.peer
    numbers, names = (call.client, call.round, peer, hop.number, call.protect, call.repeat), (call.handler, hop.kind)
    if any(type(number) is not int for number in numbers) or any(type(name) is not str for name in names):
        raise Refused("not a question to a client")
    if call.on_server is not False or min(call.client, call.protect, call.repeat) < 0:
        raise Refused("not a question to a client")
    if hop.sealed is not True:
        raise Refused("messages from client to client must be sealed between machines")
    return call, blob


def pack_answer(reply: Reply) -> RecordDict:
    """Packs a reply."""
    values = {"failure": reply.failure or "", "detail": reply.detail, "seconds": reply.seconds}
    values |= (
        {"releases": [float(number) for release in reply.releases for number in release]} if reply.releases else {}
    )
    values |= {"remembers": True} if reply.remembers else {}
    return _pack_content(values, reply.blob)


def read_answer(message: Message) -> Reply:
    """Reads the reply in a Flower message. Anything that is not a valid answer becomes a refused reply."""
    if message.has_error():
        gone = message.error.code == compat.ErrorCode.NODE_UNAVAILABLE
        return Reply(b"", "lost", "its node is gone" if gone else message.error.reason or str(message.error.code))
    try:
        values, blob = _read_content(message.content)
        failure, detail, seconds = values["failure"], values["detail"], values["seconds"]
    except (Refused, KeyError):
        return Reply(b"", "refused", "not an answer")
    if not (isinstance(detail, str) and isinstance(seconds, float)):
        return Reply(b"", "refused", "not an answer")
    reason: Failure | None = next((known for known in get_args(Failure) if known == failure), None)
    if failure and not reason:
        return Reply(b"", "refused", "not an answer")
    try:
        releases = _read_releases(values.get("releases", []))
    except (TypeError, ValueError):
        return Reply(b"", "refused", "invalid releases")
    # The terminal shows the detail, so it must not contain control characters.
    printable = "".join(character for character in detail[:MAX_REASON] if character.isprintable())
    remembers = bool(values.get("remembers", False))
    return Reply(blob, reason, printable, seconds, releases=releases, remembers=remembers)


def _read_releases(numbers: Any) -> tuple[tuple[float, float, int], ...]:
    """What an answer released about records, from a flat list. Raises ValueError if it is impossible."""
    releases = [(float(rate), float(noise), int(count)) for rate, noise, count in batched(numbers, 3)]
    for rate, noise, count in releases:
        possible = MIN_RATE <= rate <= 1 and NOISES[0] <= noise <= NOISES[1] and 1 <= count <= MAX_STEPS
        if not possible or len(releases) > MAX_RELEASES:
            raise ValueError(f"a release with rate {rate}, noise {noise} and count {count}")
    return tuple(releases)


def batched(numbers: Any, size: int) -> Iterator[tuple[Any, ...]]:
    """Groups of `size` numbers; the last one may be shorter."""
    return (tuple(numbers[start : start + size]) for start in range(0, len(numbers), size))


def message_size(message: Message) -> int:
    """Bytes of a message as Flower packs it, including the payload."""
    return sum(len(part.deflate()) for part in compat.get_all_nested_objects(message).values())


def _pack_content(values: dict[str, Any], blob: bytes) -> RecordDict:
    # The bytes go into an array, because Flower splits only arrays into chunks.
    record = ArrayRecord({"blob": Array("uint8", (len(blob),), "fewer", blob)})
    return RecordDict({"header": ConfigRecord(values), "payload": record})


def _read_content(content: RecordDict) -> tuple[ConfigRecord, bytes]:
    values, record = content.get("header"), content.get("payload")
    if not isinstance(values, ConfigRecord) or not isinstance(record, ArrayRecord) or list(record) != ["blob"]:
        raise Refused("not a Fewer message")
    return values, record["blob"].data
