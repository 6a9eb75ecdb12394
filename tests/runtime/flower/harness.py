"""Replies for tests of the Flower runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message

from fewer.runs.machines import _describe_session
from fewer.runtime.flower import envelope
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


def session(out: Path, done: int = 0, **settings: Any) -> dict[str, Any]:
    """The session description of a server, as a client receives it."""
    out.mkdir(exist_ok=True)
    description: dict[str, Any] = json.loads(json.dumps(_describe_session(experiment(3, **settings), out, done)))
    return description
