"""Passing on: a message goes from party to party, and each makes the next one of it. Nobody is asked, nobody averages.

Two calls make a hop. `give`: the party that holds the message seals it for the next one. `take`: the next one opens it,
works, and keeps what it made to give on. The carrier in between moves bytes that it cannot read, and sees three things:
that a party does not take (it is dead or late: the message goes past it, to the one after), that a party refuses what
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

from fewer.runtime.site import GIVE, Call, Hop, Reply
from fewer.runtime.store import write_durably
from fewer.wire import encode, pack, unpack

if TYPE_CHECKING:
    from fewer.runtime.parties import Parties, Why


DOUBTED = ("refused", "unable")
"""Where a party answers so, the fault can be its own or that of the message."""


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
        """Whether this party took the message, in time. If it takes from neither of two holders, the fault is its."""
        doubted: list[tuple[int, Why, str]] = []
        reply = self._offer(party, again=True)
        if reply and reply.failure in DOUBTED and self.trail:
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

    def _offer(self, party: int, again: bool = False) -> Reply | None:
        """What the party says to the message of the last holder; None where nobody may give to it.

        `again` says that it may yet be offered another.
        """
        blob = self._give(party)
        return None if blob is None else self._take(party, blob, again)

    def _give(self, to: int) -> bytes | None:
        """What the last holder has for this party, of nobody an empty message; None where nobody may give to it.

        If two holders refuse to give to it, the fault is its own; if one does, that one's.
        """
        unwilling: list[tuple[int, Why, str]] = []
        blob = encode(self.handler, {})
        while self.trail:
            holder = self.trail[-1]
            reply = self._call(holder, GIVE, Hop(to, self.handler, self.calls, self.sealed))
            if not reply.failure:
                self.parties.ledger.add(self.parties.round, holder, "up", self.handler, len(reply.blob))
                blob = self.parties._on_its_way(holder, self.handler, reply.blob)
                break
            self.trail.pop()
            if reply.failure != "refused":
                self.absent.append((holder, reply.failure, f"when it was to give: {reply.detail}"))
            elif unwilling:
                self.trail += [holder, unwilling[0][0]]
                self.absent.append((to, "refused", f"by parties {unwilling[0][0]} and {holder}: {reply.detail}"))
                return None
            else:
                unwilling = [(holder, "refused", f"to give to party {to}: {reply.detail}")]
        self.absent += unwilling
        return blob

    def _take(self, party: int, blob: bytes, again: bool) -> Reply:
        holder = self.trail[-1] if self.trail else -1
        hop = Hop(holder, self.handler, self.calls - 1, self.sealed)
        reply = self._call(party, self.handler, hop, blob, again and bool(self.trail))
        if self.trail and reply.asked:
            self.parties.ledger.add(self.parties.round, party, "down", self.handler, len(blob))
        return reply

    def _call(self, party: int, handler: str, hop: Hop, blob: bytes = b"", again: bool = False) -> Reply:
        """One call, or what it gave before the run was broken off."""
        round, journal, number = self.parties.round, self.parties.journal, self.calls
        self.calls += 1
        if journal and (kept := journal.get(round, number)) is not None:
            return kept
        ((_, reply),) = self.parties._carry([(Call(party, handler, round, hop=hop), blob)])
        reply = reply or Reply(b"", "lost", "its worker process died")
        if journal:
            over = handler != GIVE and not (again and reply.failure in DOUBTED)
            journal.put(round, number, party if over else None, reply)
        return reply
