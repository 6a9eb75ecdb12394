"""Passing on: a message goes from party to party, and each makes the next one of it. Nobody is asked, nobody averages.

Two calls make a hop. `give`: the party that holds the message seals it for the next one. `take`: the next one opens it,
works, and keeps what it made to give on. The carrier in between moves bytes that it cannot read, and sees three things:
that a party does not take (it is dead, late, or cannot: the message goes past it, to the one after), that a party
refuses what it was given (then the one who held a message before gives its own instead), and that a holder is gone (the
same). Whoever was passed over is part of the next pass again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fewer.runtime.site import GIVE, Call, Hop, Reply
from fewer.runtime.store import write_durably
from fewer.wire import encode, pack, unpack

if TYPE_CHECKING:
    from fewer.runtime.parties import Parties, Why


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
        return Reply(bytes(kept.pop("blob").numpy()), kept["failure"], kept["detail"], kept["seconds"])

    def put(self, round: int, number: int, taker: int | None, reply: Reply) -> None:
        """Keep a reply, and who worked for it; whoever only gives changes nothing at home."""
        self.folder.mkdir(parents=True, exist_ok=True)
        blob = torch.frombuffer(bytearray(reply.blob), dtype=torch.uint8) if reply.blob else torch.empty(0).byte()
        kept = {"taker": taker, "failure": reply.failure, "detail": reply.detail, "seconds": reply.seconds}
        write_durably(self._path(round, number), pack({**kept, "blob": blob}))

    def finished(self, round: int) -> set[int]:
        """Parties whose work of this round is over: what they remember belongs to it."""
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
    """One way of a message along some parties, as the carrier sees it."""

    parties: Parties
    handler: str
    sealed: bool
    trail: list[int]
    """Who holds a message that can be passed on, the last one last."""
    calls: int = 0
    """Calls of this round so far."""
    taken: int = 0
    absent: list[tuple[int, Why, str]] = field(default_factory=list)

    def along(self, order: Sequence[int]) -> None:
        """From one to the next."""
        for done, party in enumerate(order, 1):
            fate = self.parties._fate(party, self.handler)
            if fate == "drop":
                self.absent.append((party, "dropped", ""))
            elif self._reach(party, late=fate == "slow"):
                self.trail = [*(one for one in self.trail if one != party), party]
                self.taken += 1
            self.parties.on_progress(done, len(order))

    def _reach(self, party: int, late: bool) -> bool:
        """Whether this party took the message, in time. If it refuses those of two holders, the fault is its own."""
        doubted: list[tuple[int, Why, str]] = []
        reply = self._offer(party)
        if reply and reply.failure == "refused" and self.trail:
            doubted = [(self.trail.pop(), "refused", f"by party {party}: {reply.detail}")]
            reply = self._offer(party)
        if reply is None or reply.failure:
            self.trail += [holder for holder, _, _ in doubted]
            self.absent += [(party, reply.failure, reply.detail)] if reply and reply.failure else []
            return False
        self.absent += doubted
        limit = self.parties.rules.deadline
        if late or (limit is not None and reply.seconds > limit):
            self.absent.append((party, "late", "" if late else f"after {reply.seconds:.1f} s"))
            return False
        return True

    def _offer(self, party: int) -> Reply | None:
        """What the party says to the message of the last holder; None where nobody may give to it."""
        blob = self._give(party)
        return None if blob is None else self._take(party, blob)

    def _give(self, to: int) -> bytes | None:
        """What the last holder has for this party, of nobody an empty message; None where nobody may give to it."""
        while self.trail:
            holder = self.trail[-1]
            reply = self._call(holder, GIVE, Hop(to, self.handler, self.calls, self.sealed))
            if reply.failure == "refused":
                self.absent.append((to, "refused", f"by party {holder}: {reply.detail}"))
                return None
            if not reply.failure:
                self.parties.ledger.add(self.parties.round, holder, "up", self.handler, len(reply.blob))
                return self.parties._on_its_way(holder, self.handler, reply.blob)
            self.absent.append((self.trail.pop(), reply.failure, f"when it was to give: {reply.detail}"))
        return encode(self.handler, {})

    def _take(self, party: int, blob: bytes) -> Reply:
        holder = self.trail[-1] if self.trail else -1
        if self.trail:
            self.parties.ledger.add(self.parties.round, party, "down", self.handler, len(blob))
        return self._call(party, self.handler, Hop(holder, self.handler, self.calls - 1, self.sealed), blob)

    def _call(self, party: int, handler: str, hop: Hop, blob: bytes = b"") -> Reply:
        """One call, or what it gave before the run was broken off."""
        round, journal, number = self.parties.round, self.parties.journal, self.calls
        self.calls += 1
        if journal and (kept := journal.get(round, number)) is not None:
            return kept
        ((_, reply),) = self.parties._carry([(Call(party, handler, round, hop=hop), blob)])
        reply = reply or Reply(b"", "lost", "its worker process died")
        if journal:
            journal.put(round, number, None if handler == GIVE else party, reply)
        return reply
