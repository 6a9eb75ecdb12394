"""Replies for tests of the Flower runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message

from fewer.runs.engine import Connect, build_handler_runner, runtime_options
from fewer.runs.experiment import Experiment
from fewer.runs.machines import ClientDaemon, _describe_session
from fewer.runtime import Inline
from fewer.runtime.flower import envelope
from fewer.runtime.handlers import Call, Reply
from tests.helpers import experiment


def make_reply(content: RecordDict | None = None, error: Error | None = None) -> Message:
    metadata = Metadata(
        run_id=1,
        message_id="",
        src_node_id=1,
        dst_node_id=1,
        reply_to_message_id="a",
        group_id="",
        created_at=0.0,
        ttl=1.0,
        message_type=envelope.TYPE,
    )
    return make_message(metadata=metadata, content=content, error=error)


@dataclass
class DaemonClients(Inline):
    """Clients that answer through their daemons, as on their own machines, but in this process."""

    daemons: Sequence[ClientDaemon] = ()
    description: str = ""

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        for call, blob in calls:
            if call.on_server:
                yield from super()._deliver_calls([(call, blob)])
            else:
                yield call, self.daemons[call.client].answer(self.description, call, blob)


def connect_daemons(out: Path, data: Sequence[str | None]) -> Connect:
    """Connects a run to one daemon per data, which is a client's own or None; their stores are in the run directory."""

    def connect(experiment: Experiment, folder: Path, done: int, **options: Any) -> DaemonClients:
        daemons = [ClientDaemon(out / f"client-{client}", name) for client, name in enumerate(data)]
        out.mkdir(exist_ok=True)
        options |= {**runtime_options(experiment), "handlers": build_handler_runner(experiment, folder)}
        description = json.dumps(_describe_session(experiment, out, done))
        return DaemonClients(**options, daemons=daemons, description=description)

    return connect


def session(out: Path, done: int = 0, **settings: Any) -> dict[str, Any]:
    """The session description of a server, as a client receives it."""
    out.mkdir(exist_ok=True)
    description: dict[str, Any] = json.loads(json.dumps(_describe_session(experiment(3, **settings), out, done)))
    return description
