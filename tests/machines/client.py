"""A client that misbehaves: python client.py ADDRESS KEYS STORE MODE MARK."""

import os
import sys
import time
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

from fewer.runs.machines import ClientDaemon
from fewer.runtime.flower import envelope
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.keys import PinnedKeys

address, keys, store, mode, mark = sys.argv[1], *map(Path, sys.argv[2:4]), sys.argv[4], Path(sys.argv[5])
daemon = ClientDaemon(store, keys=PinnedKeys(keys))


def answer(experiment: str, call: Call, blob: bytes) -> Reply:
    if mode == "hangs" and not mark.exists():  # once: the first question gets no answer
        mark.touch()
        time.sleep(3600)
    if mode == "garbage":
        return Reply(b"\xff" * 1000)
    if mode == "huge":
        return Reply(b"\0" * 200_000_000)
    if mode == "echo":
        return Reply(blob)
    return daemon.answer(experiment, call, blob)


class Broken(ConfigRecord):
    """A record with a valid header and an invalid body: a SuperLink accepts it."""

    def deflate(self) -> bytes:
        return add_header_to_object_body(object_body=b"\xff" * 20, obj=self)


Broken.__qualname__ = "ConfigRecord"
pack_answer = envelope.pack_answer


def pack_broken_answer(reply: Reply) -> RecordDict:
    content = pack_answer(reply)
    content["header"] = Broken({"failure": ""})
    return content


class Dying(Node):
    """A node whose SuperNode dies while it sends an answer."""

    def _make_program(self) -> tuple[Program, int]:
        program, port = super()._make_program()
        program.entry = "dying:flower_supernode"
        return program, port


if __name__ == "__main__":
    if mode == "broken":
        envelope.pack_answer = pack_broken_answer
    if mode == "dies":
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    node_class = Dying if mode == "dies" else Node
    node_class(address, keys, store, lambda text: print(text, flush=True)).serve(answer)
