"""Runtimes deliver calls to clients and return answers: in this process, in worker processes, or through Flower."""

from fewer.runtime.clients import Absent, Aggregation, Answer, Answers, Clients, Each, Faults, RoundRules
from fewer.runtime.handlers import HandlerRunner, Unable, on_client, on_ring, on_server
from fewer.runtime.inline import Inline, open_members
from fewer.runtime.lies import Lies
from fewer.runtime.memory import keep_freed_memory
from fewer.runtime.pool import Pool
from fewer.runtime.store import Store
from fewer.runtime.streams import seed_of, stream

__all__ = [
    "Absent",
    "Aggregation",
    "Answer",
    "Answers",
    "Clients",
    "Each",
    "Faults",
    "HandlerRunner",
    "Inline",
    "Lies",
    "Pool",
    "RoundRules",
    "Store",
    "Unable",
    "on_client",
    "on_ring",
    "on_server",
    "open_members",
    "seed_of",
    "stream",
]

keep_freed_memory()
