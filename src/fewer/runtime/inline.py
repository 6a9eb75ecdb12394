"""All clients in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fewer.runtime.clients import Clients
from fewer.runtime.handlers import Call, HandlerServer, Reply
from fewer.runtime.streams import kept_streams


@dataclass
class Inline(Clients):
    """The plainest runtime: a call is a function call, with the same encoding as everywhere."""

    handlers: HandlerServer = field(kw_only=True)

    def _carry(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        with kept_streams():
            for call, message in calls:
                yield call, self.handlers.answer(call, message)
