"""All parties in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fewer.runtime.parties import Parties
from fewer.runtime.site import Call, Reply, Site
from fewer.runtime.streams import kept_streams


@dataclass
class Inline(Parties):
    """The plainest runtime: a call is a function call, with the same encoding as everywhere."""

    site: Site = field(kw_only=True)

    def _carry(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        with kept_streams():
            for call, message in calls:
                yield call, self.site.answer(call, message)
