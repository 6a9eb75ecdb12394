"""A party that misbehaves: python party.py ADDRESS KEYS STORE MODE MARK."""

import sys
import time
from pathlib import Path

from fewer.runs.machines import Station
from fewer.runtime.flower.node import Node
from fewer.runtime.keys import PinnedKeys
from fewer.runtime.site import Call, Reply

address, keys, store, mode, mark = sys.argv[1], *map(Path, sys.argv[2:4]), sys.argv[4], Path(sys.argv[5])
station = Station(store, keys=PinnedKeys(keys))


def answer(job: str, call: Call, blob: bytes) -> Reply:
    if mode == "hangs" and not mark.exists():  # once: it never answers the first question
        mark.touch()
        time.sleep(3600)
    if mode == "garbage":
        return Reply(b"\xff" * 1000)
    if mode == "huge":
        return Reply(b"\0" * 200_000_000)
    if mode == "echo":
        return Reply(blob)
    return station.answer(job, call, blob)


if __name__ == "__main__":
    Node(address, keys, store, lambda text: print(text, flush=True)).serve(answer)
