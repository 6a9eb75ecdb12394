"""The server's side: `Clients`, the only way for a method to reach clients."""

from __future__ import annotations

import errno
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch

from fewer.choices import Aggregate, LieKind
from fewer.errors import QuorumLost, RunError, RunInterrupted, SettingError
from fewer.ledger import EVALUATION
from fewer.privacy import NotCovered, PrivacyLedger
from fewer.runtime.handlers import Call, Reply, Unsent, encode_message, stream_name
from fewer.runtime.lies import COLLUDING, Lies
from fewer.runtime.noise import NoiseSource, NoiseStream, hash_fields
from fewer.runtime.ring import Journal, RelayRun
from fewer.runtime.secure_sum import STEPS, WITHHELD, SecureSum, threshold
from fewer.runtime.streams import SERVER, global_streams, seed_of, stream
from fewer.wire import Field, Ledger, Refused, Schema, decode, encode

MAX_EVAL_COHORT = 100
"""The largest number of clients that an evaluation asks."""

MAX_ATTEMPTS = 3
"""Maximum attempts at the server's own work if its worker processes die."""

AbsenceReason = Literal["dropped", "late", "refused", "failed", "unable", "lost"]


@dataclass(frozen=True)
class Answer:
    """The answer of one client: `answer["model"]`, `answer.client`."""

    client: int
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True)
class Absent:
    """A client that was asked but gave no usable answer, and the reason."""

    client: int
    reason: AbsenceReason
    detail: str = ""


class PrivateSum(NamedTuple):
    """What a noisy sum of answers needs."""

    ledger: PrivacyLedger
    asked: int
    drawn_from: int
    """The number of clients that the cohort was drawn from; `asked` if it was not drawn in this round."""
    round: int
    stream: Callable[[str, str], NoiseStream]
    shares: int = 0
    """The number of shares of distributed noise that make up noise z."""

    def noise_stream(self, updates: Sequence[Mapping[str, Any]]) -> NoiseStream:
        """The stream of the noise of the next release, which sums up `updates`. No two releases share noise."""
        content = hash_fields({str(index): update for index, update in enumerate(updates)})
        return self.stream(f"privacy {self.ledger.count_sums()}", content)


@dataclass(frozen=True)
class Aggregation:
    """How the server combines answers."""

    rule: Aggregate = "mean"
    liars: float = 0.2
    """The share of clients that may lie, which some rules assume."""


class HiddenFields(Mapping[str, Any]):
    """The fields of an answer that the server may use only in sums: under differential privacy, or in secure sums."""

    def __init__(self, fields: Mapping[str, Any], handler: str, setting: str = "dp") -> None:
        self._fields, self._handler, self._setting = fields, handler, setting

    def __getitem__(self, name: str) -> Any:
        raise NotCovered(
            f"{self._setting} does not cover this method: its server reads '{name}' of single clients "
            f"('{self._handler}'), and only averages of what clients change are protected"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def reveal(self, name: str) -> Any:
        """The field, for a function that protects it."""
        return self._fields[name]


def reveal(answer: Answer, name: str) -> Any:
    """A field of an answer, also if it is hidden. For functions that protect it."""
    return answer.fields.reveal(name) if isinstance(answer.fields, HiddenFields) else answer.fields[name]


class Answers(list[Answer]):
    """The answers, in the order in which the clients were asked. `absent` lists the missing ones."""

    def __init__(
        self,
        answers: Iterable[Answer],
        absent: Sequence[Absent],
        sent: Mapping[str, Any] | None = None,
        aggregation: Aggregation = Aggregation(),  # noqa: B008
        private: PrivateSum | None = None,
        secure: SecureSum | None = None,
    ) -> None:
        super().__init__(answers)
        self.absent = absent
        self.sent = sent or {}
        """The fields of the question."""
        self.aggregation = aggregation
        self.private = private
        """How to protect sums of these answers, under differential privacy."""
        self.secure = secure
        """How to sum up these answers, if clients keep them."""


@dataclass(frozen=True)
class Each:
    """A field that differs by client: `clients.ask(who, handler, seeds=Each({3: …, 7: …}))`."""

    by_client: Mapping[int, Field]


@dataclass(frozen=True)
class Faults:
    """Injected faults. Each value is the probability that the fault hits a client in a round."""

    drop: float = 0.0
    """The question arrives, but no answer comes back."""
    slow: float = 0.0
    """The client does its work, but its answer misses the deadline."""
    corrupt: float = 0.0
    """The answer is damaged in transit."""


@dataclass(frozen=True)
class RoundRules:
    """The conditions under which a round counts."""

    quorum: float = 0.0
    """The fraction of the cohort that must answer. At least one answer is always required."""
    deadline: float | None = None
    """Seconds that a client may take for one question; a later answer counts as late."""

    def min_answers(self, asked: int) -> int:
        """The number of answers required from `asked` clients."""
        return max(1, math.ceil(self.quorum * asked - 1e-9))


@dataclass
class Clients(ABC):
    """All clients of a run. A subclass only delivers calls; everything else is the same in every runtime."""

    population: int
    seed: int
    faults: Faults = Faults()
    rules: RoundRules = RoundRules()
    aggregation: Aggregation = Aggregation()
    privacy: PrivacyLedger | None = None
    """The ledger of differential privacy, if the run has it."""
    noise: NoiseSource | None = None
    """Where the server's noise comes from, under differential privacy."""
    lies: Lies | None = None
    """Injected lies, if some clients tell them."""
    secure_sum: bool = False
    """Clients keep their answers, and the server learns sums of them only."""
    ledger: Ledger = field(default_factory=Ledger)
    on_absent: Callable[[Absent, str], None] = lambda absent, handler: None
    """Called for each absent client, with the handler's name."""
    on_answer: Callable[[int, int], None] = lambda answered, asked: None
    """Called after each answer, with the number of answers so far and the number of clients asked."""
    journal: Journal | None = None
    """Records the hops of a ring until its round is over."""
    round: int = 0
    """The current round; `training_round` sets it."""
    evaluating: bool = False
    will_evaluate: bool = True
    """True if the current round ends with an evaluation."""
    is_last: bool = False
    """True if no round follows the current one."""
    joining: Sequence[int] = ()
    """New clients, while they join: they alone are asked."""
    flops: int = 0
    """Floating-point operations of all clients so far, without evaluations, if they are counted."""
    _drawn: tuple[int, frozenset[int], int] = field(default=(0, frozenset(), 0), repr=False)
    _questions: tuple[int, Counter[str]] = field(default_factory=lambda: (0, Counter()), repr=False)
    """A round, the cohort drawn in it, and the number of clients that it was drawn from."""
    _relay_calls: tuple[int, int] = field(default=(0, 0), repr=False)
    """A round, and the number of relay calls in it so far."""
    _sums: tuple[int, int] = field(default=(0, 0), repr=False)
    """A round, and the number of secure sums in it so far."""

    # --- rounds ---------------------------------------------------------------------------------------------

    def enter_round(self, number: int, will_evaluate: bool, is_last: bool) -> None:
        """Makes `number` the current round, to train or to evaluate in it."""
        self.round, self.will_evaluate, self.is_last = number, will_evaluate, is_last

    @contextmanager
    def training_round(self, number: int, will_evaluate: bool = True, is_last: bool = False) -> Iterator[None]:
        """Trains in round `number`: all random streams and faults are those of this round."""
        self.enter_round(number, will_evaluate, is_last)
        with global_streams(self.seed, number, SERVER):
            yield

    @contextmanager
    def evaluation(self, is_last: bool) -> Iterator[None]:
        """Evaluates the current round: without faults and deadlines, and with bytes that no total includes."""
        self.evaluating, self.is_last = True, is_last
        try:
            with global_streams(self.seed, self.round, "evaluate"):
                yield
        finally:
            self.evaluating = False

    @contextmanager
    def join(self, count: int) -> Iterator[None]:
        """Evaluates with `count` new clients in place of all others. Their ids follow those of the population."""
        before = self.round, self.journal
        self.joining, self.journal = range(self.population, self.population + count), None
        try:
            with self.evaluation(is_last=True):
                yield
        finally:
            self.joining, (self.round, self.journal) = (), before

    # --- differential privacy ---------------------------------------------------------------------------------

    @property
    def protected(self) -> bool:
        """True if clients protect what they send now. Evaluations are not protected."""
        return self.privacy is not None and self.privacy.protection is not None and not self.evaluating

    @property
    def protects_records(self) -> bool:
        """True if clients protect each record now."""
        return self.protected and self.privacy is not None and self.privacy.settings.level == "record"

    @property
    def _shares_noise(self) -> bool:
        """True if clients add shares of the noise of a sum."""
        return self.protected and self.privacy is not None and self.privacy.settings.distributed

    def _count_shares(self, asked: int) -> int:
        """The number of shares that make up the noise of a sum.

        In a simulation the server adds the shares of absent clients. A server must not know noise that protects from
        it. So in a secure sum, the shares of the fewest clients that may be in it have all of the noise.
        """
        return max(self.rules.min_answers(asked), threshold(asked)) if self.secure_sum else asked

    # --- sampling -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.population

    def sample(self, count: int, purpose: str = "sample", among: Sequence[int] | None = None) -> list[int]:
        """Draws `count` distinct clients from all clients, or from `among`, with the round's random stream.

        The cost does not grow with the population. While new clients join, draws all of them. If ε counts on the draw,
        it follows from the secret of the noise: no one can tell from the seed who was drawn.
        """
        if self.joining:
            return list(self.joining)
        candidates = range(self.population) if among is None else among
        check_cohort(count, len(candidates))
        rng = np.random.default_rng(self._draw_seed(purpose))
        drawn = [candidates[index] for index in rng.choice(len(candidates), count, replace=False)]
        self._drawn = self.round, frozenset(drawn), len(candidates)
        return drawn

    def _draw_seed(self, purpose: str) -> int:
        if self.noise and self.noise.secret and not self.protects_records:
            return int.from_bytes(self.noise.derive(self.round, "cohort", purpose), "little")
        return seed_of(self.seed, self.round, purpose)

    def forget_draw(self) -> None:
        """The cohort answers in several rounds, or depends on earlier draws: its sampling does not make ε smaller."""
        self._drawn = 0, frozenset(), 0

    def eval_cohort(self, among: Sequence[int] | None = None) -> list[int]:
        """The clients to evaluate on: all of them, or all `among`. If there are more than 100, always the same 100."""
        candidates = self.joining or (range(self.population) if among is None else among)
        if len(candidates) <= MAX_EVAL_COHORT:
            return list(candidates)
        rng = np.random.default_rng(seed_of(self.seed, "panel"))
        return sorted(candidates[index] for index in rng.choice(len(candidates), MAX_EVAL_COHORT, replace=False))

    def stream(self, purpose: str) -> torch.Generator:
        """The server's random stream for this round and purpose."""
        return stream(self.seed, self.round, SERVER, purpose)

    def noise_stream(self, purpose: str, content: str) -> NoiseStream:
        """The server's noise for this round and purpose, under differential privacy.

        `content` is a hash of what it protects. Clients may have seen the sum of an interrupted round. If others answer
        after the run resumes, the sum has other noise, and ε counts both.
        """
        assert self.noise and self.privacy
        repeats = self.noise.count_repeats(f"{self.round} {purpose}", content)
        self.privacy.check_repeats(max(repeats, self.privacy.repeats))
        return self.noise.stream(self.round, SERVER, purpose, question=content)

    # --- asking ---------------------------------------------------------------------------------------------

    def ask(
        self, who: Sequence[int], handler: Callable[..., Any], *, returns: Schema, **fields: Field | Each
    ) -> Answers:
        """Sends `fields` to the clients in `who`, runs `handler` on each, and returns their answers.

        `returns` is the schema of an answer: an example tensor or model, `int`, `Number(int, 0)`, or
        `Shaped((None, 28, 28))`. An answer that does not match is refused. `answers.absent` lists the clients that are
        missing, late or refused. Raises QuorumLost if too few clients answer.

        Floating-point tensors are encoded with the method's `codec`, in both directions.
        """
        if unknown := {*getattr(handler, "__exact__", ())} - {*fields, *returns}:
            raise ValueError(f"exact = {min(unknown)!r} of '{handler.__name__}' is neither sent nor returned")
        kind = self.kind(handler.__name__)
        messages = self._encode_messages(handler, kind, who, fields)
        faults = {client: self._draw_fault(client, stream_name(handler)) for client in who}
        asked = [client for client in who if faults[client] != "drop"]
        answers: dict[int, Answer] = {}
        absent = {client: Absent(client, "dropped") for client in who if faults[client] == "drop"}
        protected = self.protected and handler.__name__ not in STEPS
        protect = self._count_shares(len(who)) if protected else 0
        repeat = self._count_question(handler.__name__) if protected else 0
        calls = [
            (Call(client, handler.__name__, self.round, protect=protect, repeat=repeat), messages[client])
            for client in asked
        ]
        sizes: dict[int, int] = {}
        unsent = set()
        spent: dict[int, tuple[tuple[float, float, int], ...]] = {}
        remembers = False
        for done, (call, reply) in enumerate(self._gather_replies(calls), 1):
            if reply and not reply.sent:
                unsent.add(call.client)
            if reply and not self.evaluating:
                self.flops += reply.flops
            if reply and self.privacy:
                spent[call.client] = reply.releases
                remembers |= reply.remembers
            outcome, sizes[call.client] = self._read_reply(call, reply, faults[call.client], returns)
            if isinstance(outcome, Answer):
                answers[call.client] = outcome
            else:
                absent[call.client] = outcome
            self.on_answer(done, len(asked))
        if self.lies and not self.evaluating:
            for client, refused in self._tell_lies(answers, fields, kind, returns).items():
                absent[client] = refused
        for client in who:  # in the order of `who`, so that the ledger is the same in every runtime
            if client not in unsent:
                self.ledger.add(self.round, client, "down", kind, len(messages[client]))
        for client in who:
            if sizes.get(client):
                self.ledger.add(self.round, client, "up", kind, sizes[client])
        if self.privacy and protected:
            for client in asked:
                self.privacy.record_client(client, spent.get(client, ()), self.round)
            self.privacy.check_target()
        missing = [absent[client] for client in who if client in absent]
        self._check_quorum(missing, handler.__name__, len(answers), len(who))
        answered = [answers[client] for client in who if client in answers]
        kept = [answer.client for answer in answered if isinstance(answer.fields, HiddenFields)]
        secure = SecureSum(self, kept, len(who), returns, protect if self._shares_noise else 0) if kept else None
        in_the_clear = self.protects_records and not self._shares_noise
        if self.privacy is None or self.evaluating or in_the_clear or handler.__name__ in STEPS:
            return Answers(answered, missing, fields, self.aggregation, secure=secure)
        hidden = (Answer(answer.client, HiddenFields(answer.fields, handler.__name__)) for answer in answered)
        # Shares of noise protect from the server, which knows whom it draws: a draw hides nothing from it.
        # State that a client keeps depends on earlier draws, for which the discount is not proven.
        hides = self._drawn[:2] == (self.round, frozenset(who)) and not secure and not remembers
        drawn_from = self._drawn[2] if hides else len(who)
        private = PrivateSum(self.privacy, len(who), drawn_from, self.round, self.noise_stream, protect)
        return Answers(hidden, missing, fields, self.aggregation, private, secure)

    def _tell_lies(
        self, answers: dict[int, Answer], fields: Mapping[str, Any], kind: str, returns: Schema
    ) -> dict[int, Absent]:
        """Replaces the answers of the liars. Returns the liars whose answers are refused, without their answers."""
        assert self.lies
        liars, refused = self.lies.liars(self.population, self.seed), {}
        honest = [answers[client].fields for client in sorted(answers) if client not in liars]
        asked = len(answers)
        for client in sorted(answers.keys() & liars):
            sent = {name: part.by_client[client] if isinstance(part, Each) else part for name, part in fields.items()}
            generator = stream(self.seed, self.round, client, f"lie {kind}")
            false = self.lies.falsify(answers[client].fields, sent, generator, honest, asked)
            unsent = {name: false.pop(name) for name in list(false) if isinstance(false[name], Unsent)}
            try:  # the server checks lies as it checks everything
                answers[client] = Answer(client, decode(encode(kind, false), returns)[1] | unsent)
            except Refused as error:
                del answers[client]
                refused[client] = Absent(client, "refused", error.reason)
        return refused

    def relay(
        self, order: Sequence[int], handler: Callable[..., Any], holders: Sequence[int] = (), sealed: bool = True
    ) -> list[int]:
        """Passes a message from client to client: each receives what the one before returned. Returns the new holders.

        `holders` are the clients that have a message at the start, the latest last. Without holders, the handler of the
        first client gets no fields. Each message is sealed for its receiver unless `sealed` is False. The relay skips a
        client that does not take the message. Raises QuorumLost if too few clients take it.
        """
        if self.privacy:
            raise NotCovered(
                f"dp does not cover this method: clients pass models on to each other ('{handler.__name__}'), and no "
                "server adds noise"
            )
        if self.secure_sum:
            raise SettingError(
                f"secure_sum does not cover this method: clients pass models on to each other ('{handler.__name__}')"
            )
        if self.lies and self.lies.kind in COLLUDING:
            allowed = ", ".join(kind for kind in get_args(LieKind) if kind not in COLLUDING)
            raise SettingError(
                f"lie = {self.lies.kind} needs the answers of honest clients, and in a ring no liar sees them "
                f"(allowed: {allowed})"
            )
        calls = self._relay_calls[1] if self._relay_calls[0] == self.round else 0
        relay = RelayRun(self, handler.__name__, stream_name(handler), sealed, list(holders), calls)
        relay.run(order)
        self._relay_calls = self.round, relay.calls
        try:
            absent = [Absent(client, reason, detail) for client, reason, detail in relay.absent]
            self._check_quorum(absent, handler.__name__, relay.taken, len(order))
        except QuorumLost:
            if self.journal:
                self.journal.clear()  # the next attempt must ask every client again
            raise
        return relay.holders

    def count_sum(self) -> int:
        """Returns the number of the next secure sum of this round."""
        self._sums = self.round, (self._sums[1] if self._sums[0] == self.round else 0) + 1
        return self._sums[1]

    def _count_question(self, handler: str) -> int:
        """Returns how often this handler has been asked in this round, under differential privacy."""
        if self._questions[0] != self.round:
            self._questions = self.round, Counter()
        self._questions[1][handler] += 1
        return self._questions[1][handler] - 1

    def kind(self, handler: str) -> str:
        """The kind of a message in the ledger: the handler, and whether it evaluates."""
        return (EVALUATION if self.evaluating else "") + handler

    def _check_quorum(self, absent: Sequence[Absent], handler: str, answered: int, asked: int) -> None:
        """Reports absent clients. Raises QuorumLost if too few clients answered; an evaluation needs one answer."""
        for client in absent:
            self.on_absent(client, handler)
        unable = all(client.reason == "unable" for client in absent)
        needed, rule = self.rules.min_answers(asked), f"quorum {self.rules.quorum:g}"
        if self.evaluating:  # if all clients are unable, the method raises a better error
            needed, rule = 0 if unable else 1, "evaluation"
        if answered < needed:
            reasons = Counter(client.reason + (f" ({client.detail})" if client.detail else "") for client in absent)
            common = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
            text = f"round {self.round}: {answered} of {asked} clients answered, {needed} needed ({rule}): {common}"
            if any(map(self._has_diverged, absent)):
                text += "; training diverged: lower lr, or standardize inputs and targets"
            resumable = answered + sum(map(self._may_answer, absent)) >= needed
            raise QuorumLost(text, unable, resumable)

    def _may_answer(self, absent: Absent) -> bool:
        """True if an absent client may answer when asked again. A client that is unable, or diverged, does not."""
        return absent.reason != "unable" and not self._has_diverged(absent)

    def _has_diverged(self, absent: Absent) -> bool:
        return absent.reason == "refused" and absent.detail.endswith("not finite") and not self.faults.corrupt

    def map_on_server(
        self, handler: Callable[..., Any], items: Sequence[Mapping[str, int]], **fields: Field
    ) -> list[dict[str, Any]]:
        """Runs `handler` once per item on the server's own workers. Results are in the order of the items.

        Nothing leaves the server, so the ledger counts no bytes.
        """
        message = encode(handler.__name__, fields)
        results: dict[int, dict[str, Any]] = {}
        for _ in range(MAX_ATTEMPTS):
            missing = [index for index in range(len(items)) if index not in results]
            calls = [(Call(index, handler.__name__, self.round, True, items[index]), message) for index in missing]
            for call, reply in self._gather_replies(calls):
                if reply is None:
                    continue
                if reply.failure:
                    raise RunError(f"server handler '{handler.__name__}' failed: {reply.detail}")
                try:
                    results[call.client] = decode(reply.blob)[1] | reply.unsent_fields()
                except Refused as refused:
                    raise RunError(
                        f"server handler '{handler.__name__}' returned invalid values: {refused.reason}"
                    ) from refused
            if len(results) == len(items):
                return [results[index] for index in range(len(items))]
        raise RunInterrupted(f"the worker processes died {MAX_ATTEMPTS} times in '{handler.__name__}' (out of memory?)")

    # --- delivery -------------------------------------------------------------------------------------------

    @abstractmethod
    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        """Delivers each call and yields its reply, in any order; None if the reply is lost."""

    def _gather_replies(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        """Delivers each call and yields its reply. Raises OSError if a simulated client found the disk full.

        Such a client must not count as absent: the run would continue with other numbers than on a larger disk. Raises
        NotCovered if differential privacy does not cover what a client does.
        """
        for call, reply in self._deliver_calls(calls):
            if reply and reply.disk_full:
                raise OSError(errno.ENOSPC, reply.detail)
            if reply and reply.not_covered:
                raise NotCovered(reply.detail)
            yield call, reply

    def transport_bytes(self) -> dict[str, int]:
        """Bytes of all messages as the transport packs them, if it adds its own packaging."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Releases all resources. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call_deadline(self, call: Call) -> float | None:
        """Seconds that this call may take. Evaluation and the server's own work have no deadline."""
        return None if self.evaluating or call.on_server else self.rules.deadline

    def _encode_messages(
        self, handler: Callable[..., Any], kind: str, who: Sequence[int], fields: Mapping[str, Field | Each]
    ) -> dict[int, bytes]:
        differing = {name: value.by_client for name, value in fields.items() if isinstance(value, Each)}
        if not differing:
            return dict.fromkeys(who, encode_message(handler, kind, fields))
        messages = {}
        for client in who:
            own_fields = {name: by_client[client] for name, by_client in differing.items()}
            messages[client] = encode_message(handler, kind, {**fields, **own_fields})
        return messages

    def _draw_fault(self, client: int, stream: str) -> str | None:
        """Draws the injected fault that hits this client now, if any."""
        if self.evaluating or self.faults == Faults():
            return None
        draws = np.random.default_rng(seed_of(self.seed, self.round, client, "fault", stream)).random(3)
        for fault, draw in zip(("drop", "slow", "corrupt"), draws, strict=True):
            if draw < getattr(self.faults, fault):
                return fault
        return None

    def _inject_damage(self, client: int, fault: str | None, blob: bytes) -> bytes:
        """The client's message as it arrives: truncated or with changed bytes if the injected fault is `corrupt`."""
        if fault != "corrupt":
            return blob
        rng = np.random.default_rng(seed_of(self.seed, self.round, client, "damage"))
        if rng.random() < 0.5:
            return blob[: int(rng.integers(len(blob)))]
        data = bytearray(blob)
        for position in rng.integers(len(data), size=8):
            data[position] ^= int(rng.integers(1, 256))
        return bytes(data)

    def _read_reply(
        self, call: Call, reply: Reply | None, fault: str | None, returns: Schema
    ) -> tuple[Answer | Absent, int]:
        """Returns the outcome of one call, and the number of bytes that came back."""
        client, deadline = call.client, self._call_deadline(call)
        if reply is None:
            return Absent(client, "lost", "its worker process died"), 0
        if reply.failure:
            return Absent(client, reply.failure, reply.detail), 0
        blob = self._inject_damage(client, fault, reply.blob)
        if fault == "slow" or (deadline is not None and reply.seconds > deadline):
            return Absent(client, "late", f"after {reply.seconds:.1f} s" if fault is None else ""), len(blob)
        try:
            if self.secure_sum and decode(blob)[0] == WITHHELD:
                return Answer(client, HiddenFields({}, call.handler, "secure_sum")), len(blob)
            return Answer(client, decode(blob, returns)[1] | reply.unsent_fields()), len(blob)
        except Refused as refused:
            return Absent(client, "refused", refused.reason), len(blob)


def check_cohort(count: int, available: int) -> None:
    """Raises SettingError unless a cohort of this size can be drawn from the available clients."""
    if not 1 <= count <= available:
        raise SettingError(f"cohort = {count}, but there are only {available} clients (allowed: 1 … {available})")
