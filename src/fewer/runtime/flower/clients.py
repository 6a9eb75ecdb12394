"""The runtime: asks each client through its SuperNode, and does the server's own work in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fewer.runtime.flower.superlink import NoResponse, Question, SuperLink, SuperLinkLost
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.inline import Inline

T = TypeVar("T")

TRANSIT = 20.0
"""Seconds added to a deadline for transit to a client and back. A SuperNode polls for messages every 3 seconds."""
DEFAULT_DEADLINE = 600.0
"""Seconds that a client may take if there is no deadline, and in evaluations. A client that hangs ends no run."""
POLL_INTERVAL = 0.1
"""Seconds between two polls for replies."""
RESPONSE_TIMEOUT = 120.0
"""Seconds after which a SuperLink that does not answer counts as lost."""
ONLINE_CHECK_INTERVAL = 2.0
"""Seconds between two checks of which clients are online."""


@dataclass
class Flower(Inline):
    """Clients behind a SuperLink. The results and the ledger are those of `Inline`, bit for bit."""

    superlink: SuperLink = field(kw_only=True)

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        yield from super()._deliver_calls([(call, blob) for call, blob in calls if call.on_server])
        online = retry_until_answered(self.superlink.online_clients)
        questions = []
        for call, blob in calls:
            if call.on_server:
                continue
            if call.client in online:
                questions.append((Question(call, online[call.client]), blob))
            else:
                yield call, Reply(b"", "lost", "not online", sent=False)
        deadlines = [self._call_deadline(question.call) or DEFAULT_DEADLINE for question, _ in questions]
        timeout = max(deadlines, default=DEFAULT_DEADLINE) + TRANSIT
        pending = self.superlink.send_questions(questions, timeout + TRANSIT)
        start = last_check = time.monotonic()
        while pending:
            for message_id, reply in self.superlink.receive_replies(pending).items():
                if message_id in pending:
                    yield pending.pop(message_id).call, reply
            now = time.monotonic()
            if now > start + timeout:
                for question in pending.values():
                    yield question.call, Reply(b"", "late", f"no answer after {now - start:.0f} s")
                return
            if now > last_check + ONLINE_CHECK_INTERVAL:
                online, last_check = retry_until_answered(self.superlink.online_clients), now
                for message_id, question in list(pending.items()):
                    current = online.get(question.call.client)
                    if current is not None and current != question.client:
                        yield pending.pop(message_id).call, Reply(b"", "lost", "its node was restarted")
            time.sleep(POLL_INTERVAL)

    def transport_bytes(self) -> dict[str, int]:
        """Bytes of the messages as Flower packs them."""
        return {f"transport_{direction}": size for direction, size in self.superlink.packed.items()}

    def close(self) -> None:
        """Ends the run on the SuperLink, which keeps running for the next one."""
        self.superlink.end_run()


def retry_until_answered(request: Callable[[], T]) -> T:
    """Repeats a request until the SuperLink answers. Raises SuperLinkLost if it stays silent."""
    end = time.monotonic() + RESPONSE_TIMEOUT
    while True:
        try:
            return request()
        except NoResponse as error:
            if time.monotonic() > end:
                raise SuperLinkLost("Flower's SuperLink does not answer") from error
            time.sleep(POLL_INTERVAL)
