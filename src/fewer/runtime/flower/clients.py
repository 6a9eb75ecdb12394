"""The runtime: asks each client over its SuperNode, and does the server's own work here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fewer.runtime.flower.link import Again, Asked, Link, LinkLost
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.inline import Inline

T = TypeVar("T")

TRANSIT = 20.0
"""Seconds beyond a deadline for a message to get to a client and back: a SuperNode looks for one every 3 seconds."""
PAUSE = 0.1
"""Seconds between two looks for replies."""
SILENCE = 120.0
"""Seconds after which a SuperLink that does not answer is taken to be lost."""
LOOK = 2.0
"""Seconds between two looks for clients that are gone."""


@dataclass
class Flower(Inline):
    """Clients behind a SuperLink. The numbers and the ledger are those of `Inline`, bit for bit."""

    link: Link = field(kw_only=True)

    def _carry(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        yield from super()._carry([one for one in calls if one[0].client < 0])
        there = surely(self.link.there)
        questions = []
        for call, blob in calls:
            if call.client in there:
                questions.append((Asked(call, there[call.client]), blob))
            elif call.client >= 0:
                yield call, Reply(b"", "lost", "not online", asked=False)
        limits = [limit for asked, _ in questions if (limit := self._deadline(asked.call)) is not None]
        seconds = max(limits) + TRANSIT if limits else None
        waiting = self.link.push(questions, None if seconds is None else seconds + TRANSIT)
        begun = looked = time.monotonic()
        while waiting:
            for number, reply in self.link.pull(waiting).items():
                if number in waiting:
                    yield waiting.pop(number).call, reply
            now = time.monotonic()
            if seconds is not None and now > begun + seconds:
                for asked in waiting.values():
                    yield asked.call, Reply(b"", "late", f"no answer after {now - begun:.0f} s")
                return
            if now > looked + LOOK:
                there, looked = surely(self.link.there), now
                for number, asked in list(waiting.items()):
                    found = there.get(asked.call.client)
                    if found is not None and found != asked.there:
                        yield waiting.pop(number).call, Reply(b"", "lost", "its node was started anew")
            time.sleep(PAUSE)

    def transport_bytes(self) -> dict[str, int]:
        """Bytes of the messages as Flower packs them."""
        return {f"packed_{way}": size for way, size in self.link.packed.items()}

    def close(self) -> None:
        """End the run on the SuperLink, which goes on for the next one."""
        self.link.end_run()


def surely(ask: Callable[[], T]) -> T:
    """What the SuperLink says, however often it must be asked; LinkLost where it lives and says nothing."""
    end = time.monotonic() + SILENCE
    while True:
        try:
            return ask()
        except Again as error:
            if time.monotonic() > end:
                raise LinkLost("Flower's SuperLink does not answer") from error
            time.sleep(PAUSE)
