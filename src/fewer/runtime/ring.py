"""The relay: it forwards a message from client to client, and each client turns it into the next message.

One hop takes two calls. `FETCH_OUTGOING` asks the holder of the message to seal it for the next client. The handler
call hands the sealed message to that client, which opens it, trains, and stores its own outgoing message. The relay
forwards bytes that it cannot read. It reacts to three events:

- The next client crashes or is late. The relay skips it and offers the message to the client after it.
- The next client refuses the message, or is unable to use it. The relay offers it the message of the previous holder.
  If the client accepts that one, the last holder is at fault and is skipped; otherwise the client itself is.
- The holder is gone or refuses to seal. The relay falls back to the previous holder, as above.

A skipped client takes part again in the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fewer.runtime.handlers import FETCH_OUTGOING, Call, Hop, Reply
from fewer.runtime.store import write_durably
from fewer.wire import encode, pack, unpack

if TYPE_CHECKING:
    from fewer.runtime.clients import AbsenceReason, Clients


DISPUTED = ("refused", "unable")
"""After such a failure, either the client or the message it received may be at fault."""


@dataclass(frozen=True)
class Journal:
    """The replies of a relay run, stored as they arrive, so that an interrupted run resumes at the same hop."""

    folder: Path

    def get(self, round: int, number: int) -> Reply | None:
        """The reply to this call of the round, if it arrived before the interruption."""
        path = self._path(round, number)
        if not path.exists():
            return None
        record = unpack(path.read_bytes())
        blob = bytes(record["blob"].numpy())
        return Reply(
            blob, record["failure"], record["detail"], record["seconds"], record["sent"], record.get("flops", 0)
        )

    def put(self, round: int, number: int, finished: int | None, reply: Reply) -> None:
        """Stores a reply. `finished` is the client whose work in this round the reply completes, if any."""
        self.folder.mkdir(parents=True, exist_ok=True)
        blob = torch.frombuffer(bytearray(reply.blob), dtype=torch.uint8) if reply.blob else torch.empty(0).byte()
        record = {"failure": reply.failure, "detail": reply.detail, "seconds": reply.seconds, "sent": reply.sent}
        record |= {"flops": reply.flops} if reply.flops else {}
        write_durably(self._path(round, number), pack({"finished": finished, **record, "blob": blob}))

    def finished_clients(self, round: int) -> set[int]:
        """Clients that have finished this round: their stored state belongs to it."""
        paths = self.folder.glob(f"{round:08d}-*.safetensors")
        clients = (unpack(path.read_bytes())["finished"] for path in paths)
        return {client for client in clients if client is not None}

    def clear(self) -> None:
        """Deletes all records when the round is over."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()

    def _path(self, round: int, number: int) -> Path:
        return self.folder / f"{round:08d}-{number:06d}.safetensors"


@dataclass
class RelayRun:
    """One pass of a message along a sequence of clients, as the relay sees it."""

    clients: Clients
    handler: str
    stream: str
    """The name of the handler's random stream, from which injected faults are drawn."""
    sealed: bool
    holders: list[int]
    """Clients with an outgoing message, the latest last."""
    calls: int = 0
    """Calls in this round so far."""
    taken: int = 0
    """Clients that took the message in time."""
    absent: list[tuple[int, AbsenceReason, str]] = field(default_factory=list)

    def run(self, order: Sequence[int]) -> None:
        """Forwards the message along all clients in this order."""
        for done, client in enumerate(order, 1):
            fault = self.clients._draw_fault(client, self.stream)
            if fault == "drop":
                self.absent.append((client, "dropped", ""))
            elif self._deliver_to(client, late=fault == "slow"):
                self.holders = [*(holder for holder in self.holders if holder != client), client]
                self.taken += 1
            self.clients.on_answer(done, len(order))

    def _deliver_to(self, client: int, late: bool) -> bool:
        """Returns True if this client takes the message in time. A client that refuses two holders is at fault."""
        disputed: list[tuple[int, AbsenceReason, str]] = []
        reply = self._offer_message(client, may_retry=True)
        if reply and reply.failure in DISPUTED and self.holders:
            disputed = [(self.holders.pop(), "refused", f"by client {client}: {reply.detail}")]
            reply = self._offer_message(client)
        if reply is None or reply.failure:
            self.holders += [holder for holder, _, _ in disputed]
            self.absent += [(client, reply.failure, reply.detail)] if reply and reply.failure else []
            return False
        self.absent += disputed
        deadline = self.clients.rules.deadline
        if late or (deadline is not None and reply.seconds > deadline):
            self.absent.append((client, "late", "" if late else f"after {reply.seconds:.1f} s"))
            return False
        return True

    def _offer_message(self, client: int, may_retry: bool = False) -> Reply | None:
        """Offers the latest holder's message to the client. Returns None if two holders refuse to seal for it.

        `may_retry` is True if the client may get another holder's message after this one.
        """
        blob = self._fetch_outgoing(client)
        if blob is None:
            return None
        holder = self.holders[-1] if self.holders else None
        hop = Hop(holder, self.handler, self.calls - 1, self.sealed)
        reply = self._make_call(client, self.handler, hop, blob, may_retry and bool(self.holders))
        if self.holders and reply.sent:
            self.clients.ledger.add(self.clients.round, client, "down", self.clients.kind(self.handler), len(blob))
        return reply

    def _fetch_outgoing(self, receiver: int) -> bytes | None:
        """Fetches the latest holder's message for the receiver, or an empty message if there is no holder.

        If one holder refuses to seal for the receiver, that holder is at fault. If two refuse, the receiver is, and the
        result is None.
        """
        refusing: list[tuple[int, AbsenceReason, str]] = []
        blob = encode(self.handler, {})
        while self.holders:
            holder = self.holders[-1]
            reply = self._make_call(holder, FETCH_OUTGOING, Hop(receiver, self.handler, self.calls, self.sealed))
            if not reply.failure:
                self.clients.ledger.add(
                    self.clients.round, holder, "up", self.clients.kind(self.handler), len(reply.blob)
                )
                blob = self.clients._inject_damage(holder, self.clients._draw_fault(holder, self.stream), reply.blob)
                break
            self.holders.pop()
            if reply.failure != "refused":
                self.absent.append((holder, reply.failure, f"while sending its message: {reply.detail}"))
            elif refusing:
                self.holders += [holder, refusing[0][0]]
                self.absent.append((receiver, "refused", f"by clients {refusing[0][0]} and {holder}: {reply.detail}"))
                return None
            else:
                refusing = [(holder, "refused", f"to send to client {receiver}: {reply.detail}")]
        self.absent += refusing
        return blob

    def _make_call(self, client: int, handler: str, hop: Hop, blob: bytes = b"", may_retry: bool = False) -> Reply:
        """Makes one call, or returns its reply from the journal if it was made before an interruption."""
        round, journal, number = self.clients.round, self.clients.journal, self.calls
        self.calls += 1
        if journal and (recorded := journal.get(round, number)) is not None:
            self.clients.flops += recorded.flops
            return recorded
        ((_, reply),) = self.clients._gather_replies([(Call(client, handler, round, hop=hop), blob)])
        reply = reply or Reply(b"", "lost", "its worker process died")
        self.clients.flops += 0 if self.clients.evaluating else reply.flops
        if journal:
            final = handler != FETCH_OUTGOING and not (may_retry and reply.failure in DISPUTED)
            journal.put(round, number, client if final else None, reply)
        return reply
