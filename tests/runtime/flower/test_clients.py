"""Delivery over a scripted SuperLink: lost, late and unsent messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
import fewer.runtime.flower.clients as module
from fewer.errors import QuorumLost
from fewer.runtime import Faults, RoundRules
from fewer.runtime.flower.clients import Flower
from fewer.runtime.flower.superlink import NoResponse, Question, RemoteClient, SuperLink, SuperLinkLost
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.ring import Journal
from fewer.wire import encode


class FakeSuperLink(SuperLink):
    """Returns scripted values: the clients online at each check, and the replies of each poll."""

    def __init__(self, checks: Sequence[Any], polls: Sequence[Mapping[str, Reply]]) -> None:
        self.checks, self.polls, self.ttls = deque(checks), deque(polls), []  # type: ignore[var-annotated]

    def online_clients(self) -> dict[int, RemoteClient]:
        online = self.checks.popleft() if len(self.checks) > 1 else self.checks[0]
        if isinstance(online, Exception):
            raise online
        return dict(online)

    def send_questions(self, questions: Sequence[tuple[Question, bytes]], ttl: float | None) -> dict[str, Question]:
        self.ttls.append(ttl)
        return {str(question.call.client): question for question, _ in questions}

    def receive_replies(self, pending: Any) -> Mapping[str, Reply]:
        return self.polls.popleft() if self.polls else {}


def deliver(
    link: SuperLink, clients: Sequence[int], rules: RoundRules | None = None, evaluating: bool = False
) -> dict[int, Reply | None]:
    flower = Flower(4, 0, Faults(), rules or RoundRules(), handlers=None, superlink=link)  # type: ignore[arg-type]
    flower.evaluating = evaluating
    return {
        call.client: reply for call, reply in flower._deliver_calls([(Call(client, "f", 1), b"") for client in clients])
    }


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_INTERVAL", "ONLINE_CHECK_INTERVAL"):
        monkeypatch.setattr(module, name, 0.01)


def test_an_offline_client_is_lost_at_once_and_replies_match_their_questions() -> None:
    online = {0: RemoteClient(10, "a"), 2: RemoteClient(12, "a")}
    unrelated = Reply(b"of another question")
    link = FakeSuperLink([NoResponse(), online], [{}, {"99": unrelated}, {"2": Reply(b"two")}, {"0": Reply(b"nought")}])
    replies = deliver(link, [0, 1, 2])
    assert replies == {0: Reply(b"nought"), 1: Reply(b"", "lost", "not online", sent=False), 2: Reply(b"two")}
    assert link.ttls == [module.DEFAULT_DEADLINE + 2 * module.TRANSIT]


def test_an_unsent_message_is_not_in_the_ledger() -> None:
    def score() -> None: ...

    link = FakeSuperLink([{0: RemoteClient(10, "a")}], [{"0": Reply(encode("score", {}))}])
    flower = Flower(2, 0, handlers=None, superlink=link)  # type: ignore[arg-type]
    answers = flower.ask([0, 1], score, returns={}, x=1)
    assert [absent.client for absent in answers.absent] == [1]
    assert [(entry.client, entry.direction) for entry in flower.ledger.drain()] == [(0, "down"), (0, "up")]


def test_an_unsent_message_of_a_ring_is_not_in_the_ledger_even_after_resuming(tmp_path: Path) -> None:
    def train() -> None: ...

    def ledger_entries(link: SuperLink) -> list[tuple[int, str]]:
        flower = Flower(3, 0, handlers=None, superlink=link, journal=Journal(tmp_path))  # type: ignore[arg-type]
        assert flower.relay([1, 2], train, holders=[0]) == [0, 2]
        return [(entry.client, entry.direction) for entry in flower.ledger.drain()]

    online, reply = {0: RemoteClient(10, "a"), 2: RemoteClient(12, "a")}, Reply(encode("train", {}))
    link = FakeSuperLink([online], [{"0": reply}, {"0": reply}, {"2": reply}])
    assert ledger_entries(link) == ledger_entries(FakeSuperLink([{}], [])) == [(0, "up"), (0, "up"), (2, "down")]


def test_an_evaluation_without_clients_loses_the_quorum() -> None:
    """The training of the round is over: the settings are valid, and the run can resume."""

    def score() -> None: ...

    flower = Flower(2, 0, handlers=None, superlink=FakeSuperLink([{}], []), round=4, evaluating=True)  # type: ignore[arg-type]
    with pytest.raises(QuorumLost, match=r"round 4: 0 of 2 .*, 1 needed \(evaluation\): 2 lost \(not online\)"):
        flower.ask([0, 1], score, returns={})
    assert flower.ask([], score, returns={}) == []


def test_a_superlink_that_does_not_respond_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESPONSE_TIMEOUT", 0.1)
    with pytest.raises(SuperLinkLost, match="does not answer"):
        deliver(FakeSuperLink([NoResponse()], []), [0])


def test_a_restarted_node_has_lost_its_question() -> None:
    before, gone, back = (
        {0: RemoteClient(10, "a"), 1: RemoteClient(11, "a")},
        {1: RemoteClient(11, "a")},
        {0: RemoteClient(10, "b")},
    )
    link = FakeSuperLink([before, gone, back], [{"1": Reply(b"one")}])
    assert deliver(link, [0, 1]) == {0: Reply(b"", "lost", "its node was restarted"), 1: Reply(b"one")}


def test_the_server_does_not_wait_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRANSIT", 0.1)
    link = FakeSuperLink([{0: RemoteClient(10, "a")}], [])
    reply = deliver(link, [0], RoundRules(deadline=0.1))[0]
    assert reply is not None and reply.failure == "late"
    assert link.ttls == [pytest.approx(0.3)]


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_client_that_hangs_is_late_without_a_deadline_and_in_evaluations(
    evaluating: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRANSIT", 0.1)
    monkeypatch.setattr(module, "DEFAULT_DEADLINE", 0.2)
    rules = RoundRules(deadline=1e6 if evaluating else None)
    reply = deliver(FakeSuperLink([{0: RemoteClient(10, "a")}], []), [0], rules, evaluating)[0]
    assert reply is not None and reply.failure == "late"
