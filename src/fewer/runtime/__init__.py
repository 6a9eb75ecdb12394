"""Carries questions to parties and answers back: in this process, or in worker processes."""

from fewer.runtime.inline import Inline
from fewer.runtime.parties import Absent, Answer, Answers, Each, Faults, Parties, Rules
from fewer.runtime.pool import Pool
from fewer.runtime.site import Site, Unable, on_coordinator, on_party, on_ring
from fewer.runtime.store import Store
from fewer.runtime.streams import seed_of, stream

__all__ = [
    "Absent",
    "Answer",
    "Answers",
    "Each",
    "Faults",
    "Inline",
    "Parties",
    "Pool",
    "Rules",
    "Site",
    "Store",
    "Unable",
    "on_coordinator",
    "on_party",
    "on_ring",
    "seed_of",
    "stream",
]
