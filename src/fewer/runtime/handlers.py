"""The client's side of a question: decode it, run its handler, encode the answer. Every runtime uses this code."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import torch

from fewer.privacy import NotCovered
from fewer.runtime.flops import FlopCounter
from fewer.runtime.keys import Keys
from fewer.runtime.lies import Lies
from fewer.runtime.noise import hash_fields
from fewer.runtime.secure_sum import STEPS, WITHHELD, SumMember, has_tensors, withhold
from fewer.runtime.store import Store, is_disk_full
from fewer.runtime.streams import seed_globals, server_key, stream
from fewer.wire import Refused, decode, encode, pack, unpack
from fewer.wire.sealing import Header, parse_sealed, seal, unseal

P = ParamSpec("P")
S = TypeVar("S")
C = TypeVar("C")
R = TypeVar("R")


class Unable(Exception):
    """Raise this in a handler if the client cannot do the work. The server sees the reason."""


# --- decorators -----------------------------------------------------------------------------------------------

Handler = Callable[Concatenate[S, C, P], R]
"""A handler: `handler(self, context, **fields)`."""
Side = Literal["client", "ring", "server"]


class HandlerDecorator:
    """Marks a function of a method as a handler. Messages can only call marked functions.

    Before a handler runs, the global random generators are seeded by (seed, round, client, `stream`). By default,
    `stream` is the handler's name. Pass the old name to rename a handler without changing results.

    Messages encode floating-point tensors with the method's `codec`. Fields in `exact`, of the question or the answer,
    are sent as they are.

    With `measures`, the answer holds nothing but metrics. In runs with secure sums, all other answers with tensors stay
    with the client.
    """

    def __init__(self, side: Side) -> None:
        self.side = side

    @overload
    def __call__(self, handler: Handler[S, C, P, R]) -> Handler[S, C, P, R]: ...
    @overload
    def __call__(
        self, *, stream: str | None = None, exact: tuple[str, ...] = (), measures: bool = False
    ) -> Callable[[Handler[S, C, P, R]], Handler[S, C, P, R]]: ...
    def __call__(
        self, handler: Any = None, *, stream: str | None = None, exact: tuple[str, ...] = (), measures: bool = False
    ) -> Any:
        """Marks the handler: `@on_client` or `@on_client(stream="train", exact=("model",))`."""

        def decorate(handler: Any) -> Any:
            handler.__side__ = self.side
            handler.__stream__ = stream or handler.__name__
            handler.__exact__ = exact
            handler.__measures__ = measures
            return handler

        return decorate if handler is None else decorate(handler)


on_client = HandlerDecorator("client")
"""Marks a handler that runs on a client: `handler(self, client, **fields)` returns a dict of fields."""

on_ring = HandlerDecorator("ring")
"""Marks a client handler that only `clients.relay` can call. The next client receives what it returns."""

on_server = HandlerDecorator("server")
"""Marks a handler that runs on the server's own workers. `clients.map_on_server` calls it."""


def stream_name(handler: Callable[..., Any]) -> str:
    """The name of a handler's random stream."""
    return getattr(handler, "__stream__", handler.__name__)


def encode_message(handler: Callable[..., Any], kind: str, fields: Mapping[str, Any]) -> bytes:
    """Encodes a question to a handler, or its answer, with the codec of the program that has the handler."""
    codec = getattr(getattr(handler, "__self__", None), "codec", None)
    return encode(kind, fields, codec, getattr(handler, "__exact__", ()))


# --- calls and replies ----------------------------------------------------------------------------------------

Failure = Literal["refused", "failed", "unable", "late", "lost"]

FETCH_OUTGOING = "fetch outgoing"
"""A call with this handler name asks a client for its outgoing message, sealed for the next client."""

LAST_OPENED, OUTGOING = "ring_last_opened", "ring_outgoing"
"""Names in a client's store: the number of the last sealed message it opened, and its outgoing message."""

LAST_ROUND = 99_999_999
"""An upper bound on the rounds of a run."""


@dataclass(frozen=True)
class Hop:
    """One step of a message from client to client."""

    peer: int | None
    """The client to seal for, or the client that the message comes from; None for the first message of a ring."""
    kind: str
    """The handler that receives the message."""
    number: int
    """The number of the message; increases within a round."""
    sealed: bool


@dataclass(frozen=True)
class Call:
    """A call of one handler on one client. The encoded message is sent with it."""

    client: int
    """The client's number; for work on the server, the number of the item."""
    handler: str
    round: int
    on_server: bool = False
    """True for work on the server (`clients.map_on_server`)."""
    item: Mapping[str, int] = field(default_factory=dict)
    """The item of `clients.map_on_server`."""
    hop: Hop | None = None
    """Set if the call is part of `clients.relay`."""
    protect: int = 0
    """If the client must protect its answer by differential privacy: the shares of the noise of a sum; otherwise 0."""
    repeat: int = 0
    """How often the handler was asked before in this round, if the answer is protected."""

    @property
    def stream_key(self) -> int:
        """The key of the caller in random streams."""
        return server_key(self.client) if self.on_server else self.client

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Call:
        """Restores a call from the result of `asdict`."""
        hop = values.get("hop")
        return cls(**{**values, "hop": hop and Hop(**hop)})


@dataclass(frozen=True)
class Unsent:
    """A field of an answer that only a simulation and the server's own workers pass on. No message contains it.

    Between machines, the field is missing from the answer.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """An encoded answer, or the reason why it is missing."""

    blob: bytes
    failure: Failure | None = None
    detail: str = ""
    seconds: float = 0.0
    sent: bool = True
    """False if the question was never sent."""
    flops: int = 0
    """Floating-point operations of the handler, if they are counted."""
    disk_full: bool = False
    """True if the client failed because its disk is full. A simulation then stops: all clients share one disk."""
    not_covered: bool = False
    """True if differential privacy does not cover what the handler does. The run then stops."""
    releases: tuple[tuple[float, float, int], ...] = ()
    """What the answer released about records: sampling rate, noise multiplier, and number of releases."""
    remembers: bool = False
    """True if the handler read what its client stored, so that the answer may depend on earlier rounds."""
    unsent: bytes = b""
    """The `Unsent` fields of the answer. They stay on this machine: runtimes between machines leave them out."""

    def unsent_fields(self) -> dict[str, Unsent]:
        """Returns the fields of the answer that no message contains."""
        return {name: Unsent(tensors) for name, tensors in unpack(self.unsent).items()} if self.unsent else {}


# --- running handlers -----------------------------------------------------------------------------------------


class ContextProvider(Protocol):
    """Makes the object that a handler gets as its first argument: a `Client` or the `Server`."""

    @property
    def keys(self) -> Keys:
        """Keys for sealed messages."""

    def store(self, client: int, round: int) -> Store:
        """The client's private state."""

    def __call__(self, client: int, round: int) -> Any:
        """The client's data, store and streams for this round."""

    def server(self, item: int, round: int) -> Any:
        """The server's streams for one item of its work."""

    def log_error(self, client: int | None, error: str) -> None:
        """Logs a traceback on the client's own disk. It may contain private data, so it is never sent."""


@dataclass(frozen=True)
class HandlerRunner:
    """Runs handlers on messages. `program` has the handlers, `contexts` makes their first argument."""

    program: object
    contexts: ContextProvider
    seed: int
    device: torch.device
    run_id: bytes = b""
    """Part of every sealed message, so that a client refuses messages from other runs with the same key."""
    debug: bool = False
    """Raises a handler's exception instead of turning it into a missing answer."""
    count_flops: bool = False
    """Counts the floating-point operations of each handler of a client."""
    lies: Lies | None = None
    """Injected lies: what the `liars` pass on in a ring is false."""
    liars: frozenset[int] = frozenset()
    secure_sum: bool = False
    """Clients store their answers. The server learns sums of them only."""
    always_protect: bool = False
    """Refuses questions whose answers differential privacy would not protect, other than for metrics."""
    _last: dict[str, Any] = field(default_factory=dict, repr=False)
    """The last message and its decoded fields."""

    def answer(self, call: Call, blob: bytes) -> Reply:
        """Runs one handler on one message. Every error becomes a reply too, unless `debug` is True."""
        try:
            return self._run_handler(call, blob)
        except OSError as error:
            if self.debug or not is_disk_full(error):
                raise
            return Reply(b"", "failed", str(error.strerror), disk_full=True)

    def _run_handler(self, call: Call, blob: bytes) -> Reply:
        start, counter = time.perf_counter(), FlopCounter()
        details: dict[str, Any] = {}

        def make_reply(blob: bytes = b"", **more: Any) -> Reply:
            return Reply(blob, **details, **more, seconds=time.perf_counter() - start, flops=counter.flops)

        try:
            if call.handler == FETCH_OUTGOING and call.hop:
                return make_reply(self._read_outgoing(call))
            if self.secure_sum and call.handler in STEPS and not call.on_server:
                store, keys = self.contexts.store(call.client, call.round), self.contexts.keys
                member = SumMember(call.client, store, keys, self.run_id)
                return make_reply(encode(call.handler, member.answer(call.handler, decode(blob)[1])))
            handler = self._find_handler(call)
            has_sender = call.hop is not None and call.hop.peer is not None
            fields = self._decode_fields(self._open_message(call, blob) if has_sender else blob)
            if call.hop and not has_sender and fields:
                raise Refused("a message without a sender")
            if call.on_server:
                fields |= call.item
            _check_signature(handler, fields)
            if self.always_protect and not (call.protect or call.on_server or handler.__measures__):
                # also not to run it: what the client stores may be part of a later answer
                raise Refused(f"dp protects every answer, and '{call.handler}' asks for one without noise")
            seed_globals(self.seed, call.round, call.stream_key, stream_name(handler))
            make_context = self.contexts.server if call.on_server else self.contexts
            context = make_context(call.client, call.round)
            if call.protect:
                context.protect(call.handler, call.protect, call.repeat, hash_fields(fields))
            if not call.on_server:
                context.store.read.clear()
            with counter if self.count_flops and not call.on_server else nullcontext():
                answer = handler(context, **fields)
            if not call.on_server:
                details["remembers"] = bool(context.store.read)
            if call.protect:
                answer = context.protect_answer(answer, fields)
                details["releases"] = context.releases
            unsent = {name: value.tensors for name, value in answer.items() if isinstance(value, Unsent)}
            answer = {name: value for name, value in answer.items() if name not in unsent}
            if call.hop and call.client in self.liars and self.lies:
                generator = stream(self.seed, call.round, call.client, f"lie {call.handler}")
                answer = self.lies.falsify(answer, fields, generator)
            if call.hop:
                self._store_outgoing(call, handler, answer)
                return make_reply()
            if self.secure_sum and not call.on_server and not handler.__measures__ and has_tensors(answer):
                shares = context.shares_of_noise if call.protect else 0
                withhold(self.contexts.store(call.client, call.round), answer, shares)
                return make_reply(encode(WITHHELD, {}))
            message = encode(call.handler, answer) if call.on_server else encode_message(handler, call.handler, answer)
            return make_reply(message, unsent=pack(unsent) if any(unsent.values()) else b"")
        except Refused as refused:
            return make_reply(failure="refused", detail=refused.reason)
        except Unable as unable:
            return make_reply(failure="unable", detail=str(unable))
        except NotCovered as problem:
            return make_reply(failure="unable", detail=str(problem), not_covered=True)
        except (Exception, SystemExit) as error:  # a client that crashes is a missing answer, not the end of the run
            if is_disk_full(error) and not self.debug:
                raise
            if self.debug:
                who = "server" if call.on_server else f"client {call.client}"
                error.add_note(f"{who}, round {call.round}, handler {call.handler}")
                raise
            client = None if call.on_server else call.client
            self.contexts.log_error(client, f"round {call.round}, {call.handler}\n{traceback.format_exc()}\n")
            last = traceback.extract_tb(error.__traceback__)[-1]
            location = f"{PurePath(last.filename).name}:{last.lineno}"
            return make_reply(failure="failed", detail=f"{type(error).__name__} at {location}")

    def _find_handler(self, call: Call) -> Any:
        handler = getattr(self.program, call.handler, None)
        side: Side = "server" if call.on_server else "ring" if call.hop else "client"
        if getattr(handler, "__side__", None) != side:
            raise Refused(f"'{call.handler}' is not an @on_{side} handler")
        return handler

    # Messages from client to client.

    def _open_message(self, call: Call, blob: bytes) -> bytes:
        """Opens the message from another client. Raises Refused if its header is wrong or it is a replay."""
        assert call.hop and call.hop.peer is not None
        if not call.hop.sealed:
            return blob
        sealed = parse_sealed(blob)
        header = sealed.header
        if header != Header(call.hop.peer, call.client, call.handler, call.round, call.hop.number):
            raise Refused(f"a sealed message with an unexpected header: {header}")
        store = self.contexts.store(call.client, call.round)
        # The relay chooses the round of the call, so check the messages of all rounds.
        last_opened = self.contexts.store(call.client, LAST_ROUND).get(LAST_OPENED)
        if last_opened is not None and (header.round, header.number) <= tuple(last_opened):
            raise Refused(f"a replayed sealed message (round {header.round}, number {header.number})")
        keys = self.contexts.keys
        private, sender = keys.private(call.client), keys.public(call.client, header.sender)
        message = unseal(sealed, private, sender, self.run_id)
        store.put(LAST_OPENED, (header.round, header.number))
        return message

    def _store_outgoing(self, call: Call, handler: Callable[..., Any], answer: Mapping[str, Any]) -> None:
        """Stores the answer until the relay fetches it for the next client."""
        try:
            blob = encode_message(handler, call.handler, answer)
        except Refused as refused:  # the client's own answer is at fault, not the message it received
            raise ValueError(refused.reason) from refused
        outgoing = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        self.contexts.store(call.client, call.round).put(OUTGOING, outgoing)

    def _read_outgoing(self, call: Call) -> bytes:
        """Returns the client's last answer, sealed for the peer if the call says so."""
        assert call.hop
        outgoing = self.contexts.store(call.client, call.round).get(OUTGOING)
        if outgoing is None:
            raise Unable("no outgoing message")
        if not call.hop.sealed:
            return bytes(outgoing.numpy())
        keys, peer = self.contexts.keys, call.hop.peer
        if peer is None:
            raise Refused("an outgoing message without a receiver")
        header = Header(call.client, peer, call.hop.kind, call.round, call.hop.number)
        private, receiver = keys.private(call.client), keys.public(call.client, peer)
        return seal(bytes(outgoing.numpy()), header, private, receiver, self.run_id)

    def _decode_fields(self, blob: bytes) -> dict[str, Any]:
        """Returns a copy of the message's fields. A message that goes to many clients is decoded once."""
        if self._last.get("blob") is not blob:
            self._last["fields"] = decode(blob)[1]
            self._last["blob"] = blob
        return {name: self._copy_to_device(value) for name, value in self._last["fields"].items()}

    def _copy_to_device(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._copy_to_device(tensor) for name, tensor in value.items()}
        return value.to(self.device, copy=True) if isinstance(value, torch.Tensor) else value


_signature = lru_cache(inspect.signature)


def _check_signature(handler: Callable[..., Any], fields: Mapping[str, Any]) -> None:
    try:
        _signature(handler.__func__).bind(None, None, **fields)  # type: ignore[attr-defined]
    except TypeError as error:
        names = sorted(fields)
        raise Refused(f"fields {names} do not match the parameters of '{handler.__name__}': {error}") from error
