"""The inline runtime: all clients in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fewer.runtime.clients import Clients
from fewer.runtime.handlers import Call, ContextProvider, HandlerRunner, Reply
from fewer.runtime.streams import preserve_global_rng


@dataclass
class Inline(Clients):
    """The simplest runtime: a call is a function call. Messages are encoded as in every other runtime."""

    handlers: HandlerRunner = field(kw_only=True)

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        with preserve_global_rng():
            for call, message in calls:
                yield call, self.handlers.answer(call, message)


def open_members(
    program: object, contexts: ContextProvider, population: int, seed: int, device: torch.device
) -> Clients:
    """Opens the clients inside a client. They run in the process of that client, in every runtime."""
    return Inline(population, seed, handlers=HandlerRunner(program, contexts, seed, device))
