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

from fewer.runtime.streams import seed_globals
from fewer.wire import Refused, decode, encode

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


def on_coordinator(handler: Callable[Concatenate[S, M, P], R]) -> Callable[Concatenate[S, M, P], R]:
    """Marks a method whose calls the coordinator may spread over its own workers: `handler(self, here, **fields)`."""
    handler.__fewer__ = "coordinator"  # type: ignore[attr-defined]
    return handler


Failure = Literal["refused", "failed", "unable", "late", "lost"]


@dataclass(frozen=True)
class Call:
    """Who is asked what, in which round; its message travels beside it."""

    party: int
    """The party's number; for work of the coordinator's own, below zero."""
    handler: str
    round: int
    item: Mapping[str, int] = field(default_factory=dict)
    """Which piece of the coordinator's own work."""


@dataclass(frozen=True)
class Reply:
    """An encoded answer, or why there is none; and how long it took."""

    blob: bytes
    failure: Failure | None = None
    detail: str = ""
    seconds: float = 0.0


class Place(Protocol):
    """Makes the object that a handler gets as `me` (a party) or `here` (the coordinator, party below 0)."""

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
    _last: dict[str, Any] = field(default_factory=dict, repr=False)
    """The message that came last, and what it says."""

    def answer(self, call: Call, blob: bytes) -> Reply:
        """Run one handler on one message. Whatever goes wrong in there is a reply too."""
        begun = time.perf_counter()

        def reply(blob: bytes = b"", **what: Any) -> Reply:
            return Reply(blob, **what, seconds=time.perf_counter() - begun)

        try:
            handler = self._handler(call)
            fields = self._fields(blob)
            fields |= call.item
            _check_names(handler, fields)
            seed_globals(self.seed, call.round, call.party, call.handler)
            answer = handler(self.place(call.party, call.round), **fields)
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
        wanted = "coordinator" if call.party < 0 else "party"
        if getattr(handler, "__fewer__", None) != wanted:
            raise Refused(f"'{call.handler}' is not something that can be asked of a {wanted}")
        return cast(Callable[..., Mapping[str, Any]], handler)

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
