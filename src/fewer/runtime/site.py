"""The party's side: turns an encoded question into an encoded answer. The same in every runtime."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

import torch

from fewer.runtime.keys import Keys
from fewer.runtime.store import Store
from fewer.runtime.streams import seed_globals
from fewer.wire import Refused, decode, encode
from fewer.wire.sealing import Head, look, seal, unseal

P = ParamSpec("P")
S = TypeVar("S")
M = TypeVar("M")
R = TypeVar("R")


class Unable(Exception):
    """Raised in a handler when this party cannot do what it was asked, for a reason worth telling."""


def on_party(handler: Callable[Concatenate[S, M, P], R]) -> Callable[Concatenate[S, M, P], R]:
    """Marks a method that runs at a party: `handler(self, me, **fields)` returns a dict of fields.

    Only marked methods can be asked for, so a message can name nothing else.
    """
    handler.__fewer__ = "party"  # type: ignore[attr-defined]
    return handler


def on_ring(handler: Callable[Concatenate[S, M, P], R]) -> Callable[Concatenate[S, M, P], R]:
    """Marks a method that is reached only by a message passed from party to party: what it returns is for the next."""
    handler.__fewer__ = "ring"  # type: ignore[attr-defined]
    return handler


def on_coordinator(handler: Callable[Concatenate[S, M, P], R]) -> Callable[Concatenate[S, M, P], R]:
    """Marks a method whose calls the coordinator may spread over its own workers: `handler(self, here, **fields)`."""
    handler.__fewer__ = "coordinator"  # type: ignore[attr-defined]
    return handler


SEEN, LETTER = "ring_seen", "ring_letter"
"""Under these names a party's store has the number of the last sealed message that it opened, and what it passes on."""

Failure = Literal["refused", "failed", "unable", "late", "lost"]

LAST = 99_999_999
"""No round is later."""

GIVE = "pass on"
"""Asks a party for the message it has made for whoever comes next: the one call that names no handler."""


@dataclass(frozen=True)
class Hop:
    """A call that is part of a message's way from party to party."""

    other: int
    """Whom to give to, or whom it came from; -1 where it came from nobody."""
    kind: str
    """The handler that the message is for."""
    number: int
    """Of the message, rising within a round."""
    sealed: bool


@dataclass(frozen=True)
class Call:
    """Who is asked what, in which round; its message travels beside it."""

    party: int
    """The party's number; for work of the coordinator's own, below zero."""
    handler: str
    round: int
    item: Mapping[str, int] = field(default_factory=dict)
    """Which piece of the coordinator's own work."""
    hop: Hop | None = None
    """Set where a message is passed from party to party."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Call:
        """A call from what `asdict` made of it."""
        hop = told.get("hop")
        return cls(**{**told, "hop": hop and Hop(**hop)})


@dataclass(frozen=True)
class Reply:
    """An encoded answer, or why there is none; and how long it took."""

    blob: bytes
    failure: Failure | None = None
    detail: str = ""
    seconds: float = 0.0
    asked: bool = True
    """Whether the question was sent at all."""


class Place(Protocol):
    """Makes the object that a handler gets as `me` (a party) or `here` (the coordinator, party below 0)."""

    @property
    def keys(self) -> Keys:
        """Keys for sealed messages."""

    def store(self, party: int, round: int) -> Store:
        """What a party remembers."""

    def __call__(self, party: int, round: int) -> Any:
        """The party's data, store and streams for this round."""

    def keep(self, party: int, error: str) -> None:
        """Write down, where the party is, what went wrong there: it may hold private data, so it is never sent."""


@dataclass(frozen=True)
class Site:
    """Answers calls: `program` holds the handlers, `place` gives each call its party."""

    program: object
    place: Place
    seed: int
    device: torch.device
    limit: int
    context: bytes = b""
    """Which run this is, where parties have the same keys in several: what was sealed in one is refused in another."""
    _last: dict[str, Any] = field(default_factory=dict, repr=False)
    """The message that came last, and what it says."""

    def answer(self, call: Call, blob: bytes) -> Reply:
        """Run one handler on one message. Whatever goes wrong in there is a reply too."""
        begun = time.perf_counter()

        def reply(blob: bytes = b"", **what: Any) -> Reply:
            return Reply(blob, **what, seconds=time.perf_counter() - begun)

        try:
            if call.handler == GIVE and call.hop:
                return reply(self._give(call))
            handler = self._handler(call)
            fields = self._fields(self._open(call, blob) if call.hop and call.hop.other >= 0 else blob)
            if call.hop and call.hop.other < 0 and fields:
                raise Refused("a message from nobody")
            if call.party < 0:
                fields |= call.item
            _check_names(handler, fields)
            seed_globals(self.seed, call.round, call.party, call.handler)
            answer = handler(self.place(call.party, call.round), **fields)
            if call.hop:
                self._put_out(call, answer)
                return reply()
            return reply(encode(call.handler, answer))
        except Refused as refused:
            return reply(failure="refused", detail=refused.reason)
        except Unable as unable:
            return reply(failure="unable", detail=str(unable))
        except (Exception, SystemExit) as error:  # a party that breaks is a missing answer, not the end of the run
            self.place.keep(call.party, f"round {call.round}, {call.handler}\n{traceback.format_exc()}\n")
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{PurePath(last.filename).name}:{last.lineno}"
            return reply(failure="failed", detail=f"{type(error).__name__} at {where}")

    def _handler(self, call: Call) -> Callable[..., Mapping[str, Any]]:
        handler = getattr(self.program, call.handler, None)
        wanted = "coordinator" if call.party < 0 else "ring" if call.hop else "party"
        if getattr(handler, "__fewer__", None) != wanted:
            raise Refused(f"'{call.handler}' is not something that can be asked of a {wanted}")
        return cast(Callable[..., Mapping[str, Any]], handler)

    # --- passing on -----------------------------------------------------------------------------------------

    def _open(self, call: Call, blob: bytes) -> bytes:
        """The message that another party made for this one; Refused where it is another, or came before."""
        assert call.hop
        if not call.hop.sealed:
            return blob
        sealed = look(blob)
        head = sealed.head
        if head != Head(call.hop.other, call.party, call.handler, call.round, call.hop.number):
            raise Refused(f"a sealed message of another kind: {head}")
        store = self.place.store(call.party, call.round)
        seen = self.place.store(call.party, LAST).get(SEEN)  # of whatever round: the carrier says which one it is
        if seen is not None and (head.round, head.number) <= tuple(seen):
            raise Refused(f"a sealed message that was there already (round {head.round}, number {head.number})")
        keys = self.place.keys
        private, sender = keys.private(call.party), keys.public(call.party, head.sender)
        message = unseal(sealed, private, sender, self.context)
        store.put(SEEN, (head.round, head.number))
        return message

    def _put_out(self, call: Call, answer: Mapping[str, Any]) -> None:
        """Keep an answer where whoever comes next can be given it."""
        try:
            blob = encode(call.handler, answer)
        except Refused as refused:  # its own answer: nothing is wrong with the message that it got
            raise ValueError(refused.reason) from refused
        letter = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        self.place.store(call.party, call.round).put(LETTER, letter)

    def _give(self, call: Call) -> bytes:
        """The answer that this party made last, for another one; sealed, if so asked."""
        assert call.hop
        letter = self.place.store(call.party, call.round).get(LETTER)
        if letter is None:
            raise Unable("nothing to pass on")
        if not call.hop.sealed:
            return bytes(letter.numpy())
        keys, to = self.place.keys, call.hop.other
        head = Head(call.party, to, call.hop.kind, call.round, call.hop.number)
        private, receiver = keys.private(call.party), keys.public(call.party, to)
        return seal(bytes(letter.numpy()), head, private, receiver, self.context)

    def _fields(self, blob: bytes) -> dict[str, Any]:
        """What the message says, a copy for each call; a message that many get is decoded once."""
        if self._last.get("blob") is not blob:
            self._last["fields"] = decode(blob, limit=self.limit)[1]
            self._last["blob"] = blob
        return {name: self._copy(value) for name, value in self._last["fields"].items()}

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, copy=True)
        if isinstance(value, dict):
            return {name: tensor.to(self.device, copy=True) for name, tensor in value.items()}
        return value


_signature = lru_cache(inspect.signature)


def _check_names(handler: Callable[..., Any], fields: Mapping[str, Any]) -> None:
    try:
        _signature(handler.__func__).bind(None, None, **fields)  # type: ignore[attr-defined]
    except TypeError as error:
        raise Refused(f"fields {sorted(fields)} do not fit '{handler.__name__}': {error}") from error
