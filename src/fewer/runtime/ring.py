"""Passing on: a message goes from client to client, and each makes the next one of it. Nobody is asked, nobody averages.

Two calls make a hop. `give`: the client that holds the message seals it for the next one. `take`: the next one opens it,
works, and keeps what it made to give on. The carrier in between moves bytes that it cannot read, and sees three things:
that a client does not take (it is dead or late: the message goes past it, to the one after), that a client refuses what
it was given or can make nothing of it (then the one who held a message before gives its own instead, and if it takes
that, the other one is passed over, else itself), and that a holder is gone or refuses to give (the same). Whoever was
passed over is part of the next pass again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fewer.runtime.handlers import GIVE, Call, Hop, Reply
from fewer.runtime.store import write_durably
from fewer.wire import encode, pack, unpack

if TYPE_CHECKING:
    from fewer.runtime.clients import AbsenceReason, Clients


DOUBTED = ("refused", "unable")
"""Where a client answers so, the fault can be its own or that of the message."""


@dataclass(frozen=True)
class Journal:
    """What the calls of a pass gave, each as it came, so that a pass that was broken off goes on at the same hop."""

    folder: Path

    def get(self, round: int, number: int) -> Reply | None:
        """The reply to this call of the round, if it came before the break."""
        path = self._path(round, number)
        if not path.exists():
            return None
        kept = unpack(path.read_bytes())
        blob = bytes(kept.pop("blob").numpy())
        return Reply(blob, kept["failure"], kept["detail"], kept["seconds"], kept.get("asked", True))

    def put(self, round: int, number: int, taker: int | None, reply: Reply) -> None:
        """Keep a reply, and who worked for it; whoever only gives changes nothing at home."""
        self.folder.mkdir(parents=True, exist_ok=True)
        blob = torch.frombuffer(bytearray(reply.blob), dtype=torch.uint8) if reply.blob else torch.empty(0).byte()
        kept = {"taker": taker, "failure": reply.failure, "detail": reply.detail, "seconds": reply.seconds}
        kept["asked"] = reply.asked
        write_durably(self._path(round, number), pack({**kept, "blob": blob}))

    def finished(self, round: int) -> set[int]:
        """Clients whose work of this round is over: what they remember belongs to it."""
        takers = (unpack(path.read_bytes())["taker"] for path in self.folder.glob(f"{round:08d}-*.safetensors"))
        return {taker for taker in takers if taker is not None}

    def clear(self) -> None:
        """Forget all: the round is over."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()

    def _path(self, round: int, number: int) -> Path:
        return self.folder / f"{round:08d}-{number:06d}.safetensors"


@dataclass
class Pass:
    """One way of a message along some clients, as the carrier sees it."""

    clients: Clients
    handler: str
    stream: str
    """The name of the handler's random stream, which draws injected faults."""
    sealed: bool
    holders: list[int]
    """Who holds a message that can be passed on, the last one last."""
    calls: int = 0
    """Calls of this round so far."""
    taken: int = 0
    absent: list[tuple[int, AbsenceReason, str]] = field(default_factory=list)

    def along(self, order: Sequence[int]) -> None:
        """From one to the next."""
        for done, client in enumerate(order, 1):
            fate = self.clients._fate(client, self.stream)
            if fate == "drop":
                self.absent.append((client, "dropped", ""))
            elif self._reach(client, late=fate == "slow"):
                self.holders = [*(one for one in self.holders if one != client), client]
                self.taken += 1
            self.clients.on_progress(done, len(order))

    def _reach(self, client: int, late: bool) -> bool:
        """Whether this client took the message, in time. If it takes from neither of two holders, the fault is its."""
        doubted: list[tuple[int, AbsenceReason, str]] = []
        reply = self._offer(client, again=True)
        if reply and reply.failure in DOUBTED and self.holders:
            doubted = [(self.holders.pop(), "refused", f"by client {client}: {reply.detail}")]
            reply = self._offer(client)
        if reply is None or reply.failure:
            self.holders += [holder for holder, _, _ in doubted]
            self.absent += [(client, reply.failure, reply.detail)] if reply and reply.failure else []
            return False
        self.absent += doubted
        limit = self.clients.rules.deadline
        if late or (limit is not None and reply.seconds > limit):
            self.absent.append((client, "late", "" if late else f"after {reply.seconds:.1f} s"))
            return False
        return True

    def _offer(self, client: int, again: bool = False) -> Reply | None:
        """What the client says to the message of the last holder; None where nobody may give to it.

        `again` says that it may yet be offered another.
        """
        blob = self._give(client)
        return None if blob is None else self._take(client, blob, again)

    def _give(self, to: int) -> bytes | None:
        """What the last holder has for this client, of nobody an empty message; None where nobody may give to it.

        If two holders refuse to give to it, the fault is its own; if one does, that one's.
        """
        unwilling: list[tuple[int, AbsenceReason, str]] = []
        blob = encode(self.handler, {})
        while self.holders:
            holder = self.holders[-1]
            reply = self._call(holder, GIVE, Hop(to, self.handler, self.calls, self.sealed))
            if not reply.failure:
                self.clients.ledger.add(self.clients.round, holder, "up", self.handler, len(reply.blob))
                blob = self.clients._deliver(holder, self.clients._fate(holder, self.stream), reply.blob)
                break
            self.holders.pop()
            if reply.failure != "refused":
                self.absent.append((holder, reply.failure, f"when it was to give: {reply.detail}"))
            elif unwilling:
                self.holders += [holder, unwilling[0][0]]
                self.absent.append((to, "refused", f"by clients {unwilling[0][0]} and {holder}: {reply.detail}"))
                return None
            else:
                unwilling = [(holder, "refused", f"to give to client {to}: {reply.detail}")]
        self.absent += unwilling
        return blob

    def _take(self, client: int, blob: bytes, again: bool) -> Reply:
        holder = self.holders[-1] if self.holders else -1
        hop = Hop(holder, self.handler, self.calls - 1, self.sealed)
        reply = self._call(client, self.handler, hop, blob, again and bool(self.holders))
        if self.holders and reply.asked:
            self.clients.ledger.add(self.clients.round, client, "down", self.handler, len(blob))
        return reply

    def _call(self, client: int, handler: str, hop: Hop, blob: bytes = b"", again: bool = False) -> Reply:
        """One call, or what it gave before the run was broken off."""
        round, journal, number = self.clients.round, self.clients.journal, self.calls
        self.calls += 1
        if journal and (kept := journal.get(round, number)) is not None:
            return kept
        ((_, reply),) = self.clients._carry([(Call(client, handler, round, hop=hop), blob)])
        reply = reply or Reply(b"", "lost", "its worker process died")
        if journal:
            over = handler != GIVE and not (again and reply.failure in DOUBTED)
            journal.put(round, number, client if over else None, reply)
        return reply
