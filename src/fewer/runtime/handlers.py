"""The client's side: turns an encoded question into an encoded answer. The same in every runtime."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

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
    """Raised in a handler when this client cannot do what it was asked, for a reason worth telling."""


Handler = Callable[Concatenate[S, M, P], R]
Where = Literal["client", "ring", "server"]


def _mark(where: Where, stream: str | None) -> Callable[[Handler[S, M, P, R]], Handler[S, M, P, R]]:
    def decorate(handler: Handler[S, M, P, R]) -> Handler[S, M, P, R]:
        handler.__fewer__ = where  # type: ignore[attr-defined]
        handler.__stream__ = stream or handler.__name__  # type: ignore[attr-defined]
        return handler

    return decorate


@overload
def on_client(handler: Handler[S, M, P, R]) -> Handler[S, M, P, R]: ...
@overload
def on_client(*, stream: str) -> Callable[[Handler[S, M, P, R]], Handler[S, M, P, R]]: ...
def on_client(handler: Any = None, *, stream: str | None = None) -> Any:
    """Marks a handler that runs on a client: `handler(self, client, **fields)` returns a dict of fields.

    Only marked handlers can be asked for, so a message can name nothing else. `stream` names the handler's random
    stream, by default its own name. Give it when you rename a handler and its numbers must stay the same.
    """
    mark = _mark("client", stream)
    return mark if handler is None else mark(handler)


@overload
def on_ring(handler: Handler[S, M, P, R]) -> Handler[S, M, P, R]: ...
@overload
def on_ring(*, stream: str) -> Callable[[Handler[S, M, P, R]], Handler[S, M, P, R]]: ...
def on_ring(handler: Any = None, *, stream: str | None = None) -> Any:
    """Marks a client handler that only `clients.relay` can reach; what it returns goes to the next client."""
    mark = _mark("ring", stream)
    return mark if handler is None else mark(handler)


@overload
def on_server(handler: Handler[S, M, P, R]) -> Handler[S, M, P, R]: ...
@overload
def on_server(*, stream: str) -> Callable[[Handler[S, M, P, R]], Handler[S, M, P, R]]: ...
def on_server(handler: Any = None, *, stream: str | None = None) -> Any:
    """Marks a handler that runs on the server's own workers, called by `clients.map_on_server`."""
    mark = _mark("server", stream)
    return mark if handler is None else mark(handler)


def stream_of(handler: Callable[..., Any]) -> str:
    """The name of a handler's random stream."""
    return getattr(handler, "__stream__", handler.__name__)


SEEN, LETTER = "ring_seen", "ring_letter"
"""Under these names a client's store has the number of the last sealed message that it opened, and what it passes on."""

Failure = Literal["refused", "failed", "unable", "late", "lost"]

LAST = 99_999_999
"""No round is later."""

GIVE = "pass on"
"""Asks a client for the message it has made for whoever comes next: the one call that names no handler."""


@dataclass(frozen=True)
class Hop:
    """A call that is part of a message's way from client to client."""

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

    client: int
    """The client's number; for work of the server's own, below zero."""
    handler: str
    round: int
    item: Mapping[str, int] = field(default_factory=dict)
    """Which piece of the server's own work."""
    hop: Hop | None = None
    """Set where a message is passed from client to client."""

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


class ContextProvider(Protocol):
    """Makes the object that a handler gets as `me` (a client) or `here` (the server, client below 0)."""

    @property
    def keys(self) -> Keys:
        """Keys for sealed messages."""

    def store(self, client: int, round: int) -> Store:
        """What a client remembers."""

    def __call__(self, client: int, round: int) -> Any:
        """The client's data, store and streams for this round."""

    def keep(self, client: int, error: str) -> None:
        """Write down, where the client is, what went wrong there: it may hold private data, so it is never sent."""


@dataclass(frozen=True)
class HandlerServer:
    """Answers calls: `program` holds the handlers, `place` gives each call its client."""

    program: object
    contexts: ContextProvider
    seed: int
    device: torch.device
    limit: int
    context: bytes = b""
    """Which run this is, where clients have the same keys in several: what was sealed in one is refused in another."""
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
            if call.client < 0:
                fields |= call.item
            _check_names(handler, fields)
            seed_globals(self.seed, call.round, call.client, stream_of(handler))
            answer = handler(self.contexts(call.client, call.round), **fields)
            if call.hop:
                self._put_out(call, answer)
                return reply()
            return reply(encode(call.handler, answer))
        except Refused as refused:
            return reply(failure="refused", detail=refused.reason)
        except Unable as unable:
            return reply(failure="unable", detail=str(unable))
        except (Exception, SystemExit) as error:  # a client that breaks is a missing answer, not the end of the run
            self.contexts.keep(call.client, f"round {call.round}, {call.handler}\n{traceback.format_exc()}\n")
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{PurePath(last.filename).name}:{last.lineno}"
            return reply(failure="failed", detail=f"{type(error).__name__} at {where}")

    def _handler(self, call: Call) -> Callable[..., Mapping[str, Any]]:
        handler = getattr(self.program, call.handler, None)
        wanted = "server" if call.client < 0 else "ring" if call.hop else "client"
        if getattr(handler, "__fewer__", None) != wanted:
            raise Refused(f"'{call.handler}' is not something that can be asked of a {wanted}")
        return cast(Callable[..., Mapping[str, Any]], handler)

    # --- passing on -----------------------------------------------------------------------------------------

    def _open(self, call: Call, blob: bytes) -> bytes:
        """The message that another client made for this one; Refused where it is another, or came before."""
        assert call.hop
        if not call.hop.sealed:
            return blob
        sealed = look(blob)
        head = sealed.head
        if head != Head(call.hop.other, call.client, call.handler, call.round, call.hop.number):
            raise Refused(f"a sealed message of another kind: {head}")
        store = self.contexts.store(call.client, call.round)
        seen = self.contexts.store(call.client, LAST).get(SEEN)  # of whatever round: the carrier says which one it is
        if seen is not None and (head.round, head.number) <= tuple(seen):
            raise Refused(f"a sealed message that was there already (round {head.round}, number {head.number})")
        keys = self.contexts.keys
        private, sender = keys.private(call.client), keys.public(call.client, head.sender)
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
        self.contexts.store(call.client, call.round).put(LETTER, letter)

    def _give(self, call: Call) -> bytes:
        """The answer that this client made last, for another one; sealed, if so asked."""
        assert call.hop
        letter = self.contexts.store(call.client, call.round).get(LETTER)
        if letter is None:
            raise Unable("nothing to pass on")
        if not call.hop.sealed:
            return bytes(letter.numpy())
        keys, to = self.contexts.keys, call.hop.other
        head = Head(call.client, to, call.hop.kind, call.round, call.hop.number)
        private, receiver = keys.private(call.client), keys.public(call.client, to)
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
