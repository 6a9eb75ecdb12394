"""The server's side: `Clients`, through which alone a method reaches anybody."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch

from fewer.errors import QuorumLost, RunError, SettingError
from fewer.runtime.handlers import Call, Reply, stream_of
from fewer.runtime.ring import Journal, Pass
from fewer.runtime.streams import seed_of, stream
from fewer.wire import Field, Ledger, Refused, Schema, decode, encode
from fewer.wire.ledger import EVALUATION

PANEL = 100
"""At most so many clients are asked when all of them are to be measured."""

TRIES = 3
"""How often the server's own work is begun anew when a worker dies at it."""

AbsenceReason = Literal["dropped", "late", "refused", "failed", "unable", "lost"]


@dataclass(frozen=True)
class Answer:
    """What one client sent: `answer["model"]`, `answer.client`."""

    client: int
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True)
class Absent:
    """A client that was asked and whose answer cannot be used, and why."""

    client: int
    reason: AbsenceReason
    detail: str = ""


class Answers(list[Answer]):
    """The answers that came, in the order in which the clients were asked; `absent` has the others."""

    def __init__(self, answers: Iterable[Answer], absent: Sequence[Absent]) -> None:
        super().__init__(answers)
        self.absent = absent


@dataclass(frozen=True)
class Each:
    """A field that differs by client: `clients.ask(who, handler, seeds=Each({3: …, 7: …}))`."""

    by_client: Mapping[int, Field]


@dataclass(frozen=True)
class Faults:
    """Faults put in on purpose: each is the chance that it hits a client that is asked in a round."""

    drop: float = 0.0
    """The question arrives, no answer comes."""
    slow: float = 0.0
    """The client does its work, but its answer comes after the deadline."""
    corrupt: float = 0.0
    """The answer is damaged on its way."""


@dataclass(frozen=True)
class Rules:
    """When a round counts."""

    quorum: float = 0.0
    """The share of the asked clients that must answer; one answer is needed in any case."""
    deadline: float | None = None
    """Seconds that a client may take for one question; what comes later is late."""
    limit: int = 1 << 30
    """Bytes that one message may have."""

    def needed(self, asked: int) -> int:
        """How many of so many clients must answer."""
        return max(1, math.ceil(self.quorum * asked - 1e-9))


@dataclass
class Clients(ABC):
    """Everyone who can be asked. Subclasses only carry calls; everything that must agree between them is here."""

    population: int
    seed: int
    faults: Faults = Faults()
    rules: Rules = Rules()
    ledger: Ledger = field(default_factory=Ledger)
    round: int = 0
    evaluating: bool = False
    judged: bool = True
    """Whether the round under way is evaluated after it."""
    on_absent: Callable[[Absent, str], None] = lambda absent, handler: None
    """Called for each absent answer, with the handler's name."""
    on_progress: Callable[[int, int], None] = lambda done, asked: None
    journal: Journal | None = None
    """Where the hops of a pass are kept until its round is over."""
    _passed: tuple[int, int] = field(default=(0, 0), repr=False)
    """A round, and how many calls its passes have made so far."""

    # --- choosing -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.population

    def sample(self, count: int, purpose: str = "sample", among: Sequence[int] | None = None) -> list[int]:
        """`count` different clients, of all or `among` these, drawn from the round's stream.

        The cost does not grow with the population.
        """
        some = range(self.population) if among is None else among
        if not 1 <= count <= len(some):
            raise SettingError(f"active = {count} clients a round, but there are {len(some)} (allowed: 1 … all)")
        draw = np.random.default_rng(seed_of(self.seed, self.round, purpose))
        return [some[place] for place in draw.choice(len(some), count, replace=False)]

    def eval_cohort(self, among: Sequence[int] | None = None) -> list[int]:
        """The clients to measure on, of all or `among` these: each of them, or of many always the same hundred."""
        some = range(self.population) if among is None else among
        if len(some) <= PANEL:
            return list(some)
        draw = np.random.default_rng(seed_of(self.seed, "panel"))
        return sorted(some[place] for place in draw.choice(len(some), PANEL, replace=False))

    def stream(self, purpose: str) -> torch.Generator:
        """The server's own random stream of this round."""
        return stream(self.seed, self.round, "coordinator", purpose)

    # --- asking ---------------------------------------------------------------------------------------------

    def ask(
        self, who: Sequence[int], handler: Callable[..., Any], *, returns: Schema, **fields: Field | Each
    ) -> Answers:
        """Send `fields` to each client, run `handler` there, and give back what came.

        `returns` says what an answer must look like (a tensor or model like this one, `int`, `Number(int, 0)`,
        `Shaped((None, 28, 28))`); another one is refused. An answer that is missing, late or refused is in
        `answers.absent`; QuorumLost where too few are left.
        """
        kind = (EVALUATION if self.evaluating else "") + handler.__name__
        messages = self._messages(kind, who, fields)
        fates = {client: self._fate(client, stream_of(handler)) for client in who}
        asked = [client for client in who if fates[client] != "drop"]
        good: dict[int, Answer] = {}
        absent = {client: Absent(client, "dropped") for client in who if fates[client] == "drop"}
        calls = [(Call(client, handler.__name__, self.round), messages[client]) for client in asked]
        sizes: dict[int, int] = {}
        unsent = set()
        for done, (call, reply) in enumerate(self._carry(calls), 1):
            if reply and not reply.asked:
                unsent.add(call.client)
            got, sizes[call.client] = self._receive(call, reply, fates[call.client], returns)
            if isinstance(got, Answer):
                good[call.client] = got
            else:
                absent[call.client] = got
            self.on_progress(done, len(asked))
        for client in who:  # in the order asked, so that the ledger is the same wherever the clients ran
            if client not in unsent:
                self.ledger.add(self.round, client, "down", kind, len(messages[client]))
        for client in who:
            if sizes.get(client):
                self.ledger.add(self.round, client, "up", kind, sizes[client])
        missing = [absent[client] for client in who if client in absent]
        self._tell(missing, handler.__name__, len(good), len(who))
        return Answers((good[client] for client in who if client in good), missing)

    def relay(
        self, order: Sequence[int], handler: Callable[..., Any], holders: Sequence[int] = (), sealed: bool = True
    ) -> list[int]:
        """Bring a message from client to client: each gets what the one before made, and makes the next of it.

        `trail` says who holds a message to begin with, the last one last; without any the first client's handler gets
        no fields. Comes back with who holds one now. Each message is sealed for the one who gets it, unless that is
        not wanted. A client that does not take is passed over; QuorumLost where too few took.
        """
        begun = self._passed[1] if self._passed[0] == self.round else 0
        way = Pass(self, handler.__name__, stream_of(handler), sealed, list(holders), begun)
        way.along(order)
        self._passed = self.round, way.calls
        try:
            self._tell([Absent(*one) for one in way.absent], handler.__name__, way.taken, len(order))
        except QuorumLost:
            if self.journal:
                self.journal.clear()  # the next attempt is to find out anew who is there
            raise
        return way.holders

    def _tell(self, absent: Sequence[Absent], handler: str, good: int, asked: int) -> None:
        """Say who is absent; QuorumLost where too few are left, or in measuring nobody."""
        for one in absent:
            self.on_absent(one, handler)
        unable = all(one.reason == "unable" for one in absent)
        needed, rule = self.rules.needed(asked), f"quorum {self.rules.quorum:g}"
        if self.evaluating:  # where all say that they cannot, the method knows better what to say of it
            needed, rule = 0 if unable else 1, "measuring"
        if good < needed:
            raise QuorumLost(_quorum_text(self.round, good, asked, needed, rule, absent), unable)

    def map_on_server(
        self, handler: Callable[..., Any], items: Sequence[Mapping[str, int]], **fields: Field
    ) -> list[dict[str, Any]]:
        """The server's own work, one call of `handler` for each item, over the workers there are.

        Nothing is counted, since nothing leaves the server. Results come in the order of the items.
        """
        message = encode(handler.__name__, fields)
        results: dict[int, dict[str, Any]] = {}
        for _ in range(TRIES):
            left = [number for number in range(len(items)) if number not in results]
            calls = [(Call(-1 - number, handler.__name__, self.round, items[number]), message) for number in left]
            for call, reply in self._carry(calls):
                if reply is None:
                    continue
                if reply.failure:
                    raise RuntimeError(f"'{handler.__name__}' of the server failed: {reply.detail}")
                try:
                    results[-1 - call.client] = decode(reply.blob)[1]
                except Refused as refused:
                    raise RunError(
                        f"'{handler.__name__}' gave figures that cannot be used: {refused.reason}"
                    ) from refused
            if len(results) == len(items):
                return [results[number] for number in range(len(items))]
        raise RunError(f"the worker processes died {TRIES} times at '{handler.__name__}' (out of memory?)")

    # --- carrying -------------------------------------------------------------------------------------------

    @abstractmethod
    def _carry(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        """Deliver each call and yield its reply, in any order; None where the carrier lost it."""

    def transport_bytes(self) -> dict[str, int]:
        """Bytes that the carrier has made of all messages, where it packs them its own way."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back what the runtime holds. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self, call: Call) -> float | None:
        """Seconds that this call may take: measuring, and the server's own work, take as long as they take."""
        return None if self.evaluating or call.client < 0 else self.rules.deadline

    def _messages(self, kind: str, who: Sequence[int], fields: Mapping[str, Field | Each]) -> dict[int, bytes]:
        if not any(isinstance(value, Each) for value in fields.values()):
            return dict.fromkeys(who, encode(kind, fields))  # type: ignore[arg-type]
        return {
            client: encode(
                kind,
                {name: value.by_client[client] if isinstance(value, Each) else value for name, value in fields.items()},
            )
            for client in who
        }

    def _fate(self, client: int, stream: str) -> str | None:
        """Which of the injected faults hits this client now, if any."""
        if self.evaluating or self.faults == Faults():
            return None
        draws = np.random.default_rng(seed_of(self.seed, self.round, client, "fault", stream)).random(3)
        for fault, draw in zip(("drop", "slow", "corrupt"), draws, strict=True):
            if draw < getattr(self.faults, fault):
                return fault
        return None

    def _deliver(self, client: int, fate: str | None, blob: bytes) -> bytes:
        """The client's message as it arrives: damaged if the injected fault says so."""
        if fate != "corrupt":
            return blob
        return _damage(blob, np.random.default_rng(seed_of(self.seed, self.round, client, "damage")))

    def _receive(
        self, call: Call, reply: Reply | None, fate: str | None, returns: Schema
    ) -> tuple[Answer | Absent, int]:
        """What became of one call, and how many bytes came back."""
        client, deadline = call.client, self._deadline(call)
        if reply is None:
            return Absent(client, "lost", "its worker process died"), 0
        if reply.failure:
            return Absent(client, reply.failure, reply.detail), 0
        blob = self._deliver(client, fate, reply.blob)
        if fate == "slow" or (deadline is not None and reply.seconds > deadline):
            return Absent(client, "late", f"after {reply.seconds:.1f} s" if fate is None else ""), len(blob)
        try:
            return Answer(client, decode(blob, returns, self.rules.limit)[1]), len(blob)
        except Refused as refused:
            return Absent(client, "refused", refused.reason), len(blob)


def _damage(blob: bytes, draw: np.random.Generator) -> bytes:
    """A message as a bad line delivers it: cut short, or with some of its bytes changed."""
    if draw.random() < 0.5:
        return blob[: int(draw.integers(len(blob)))]
    data = bytearray(blob)
    for place in draw.integers(len(data), size=8):
        data[place] ^= int(draw.integers(1, 256))
    return bytes(data)


def _quorum_text(round: int, came: int, asked: int, needed: int, rule: str, absent: Sequence[Absent]) -> str:
    """One line: how many answered, how many were needed, and the commonest reasons."""
    reasons = Counter(one.reason + (f" ({one.detail})" if one.detail else "") for one in absent)
    told = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
    return f"round {round}: {came} of {asked} clients answered, {needed} needed ({rule}): {told}"
