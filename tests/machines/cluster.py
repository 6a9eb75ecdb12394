"""Parties as real processes on loopback, to be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fewer.runs.job import Job, check, job_from
from fewer.runs.machines import Coordinator, acquaint
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.programs import free_port

PARTY = Path(__file__).with_name("party.py")
PATIENCE = 400.0
"""Seconds that anything here may take on a busy machine."""

GROUPS: dict[str, Any] = {"rounds": 4, "set": {"way": 2, "members": 2, "groups": 1, "samples": 20}}
"""Settings with which FRL is quick."""


def until(what: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def job(parties: int, method: str = "fedavg", **settings: Any) -> Job:
    """A small one."""
    plain: dict[str, Any] = {"data": "digits", "alpha": 1.0, "rounds": 2, "seed": 3, "runtime": "flower"}
    return job_from(check({**plain, "method": method, "parties": parties, **settings}))


class Cluster:
    """Keys, a port, and parties that join and leave; a coordinator comes and goes with each run."""

    def __init__(self, folder: Path, parties: int) -> None:
        self.folder = folder
        self.keys = Credentials.create(folder / "keys", parties)
        acquaint([self.keys.party(party) for party in range(parties)])
        self.port = free_port()
        self.parties: dict[int, subprocess.Popen[bytes]] = {}
        self.coordinators: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def coordinator(self, patience: float = PATIENCE) -> Coordinator:
        return Coordinator(self.keys, port=self.port, patience=patience)

    def command(self, *words: str | Path) -> list[str]:
        """A coordinator in a process of its own."""
        plain = ["--keys", self.keys.folder, "--port", self.port, "--patience", PATIENCE, "--no-report"]
        return [sys.executable, "-m", "fewer", "coordinator", *map(str, [*words, *plain])]

    def coordinate(self, *words: str | Path) -> subprocess.Popen[bytes]:
        """Start it; it is gone when the cluster is."""
        self.coordinators.append(subprocess.Popen(self.command(*words)))
        return self.coordinators[-1]

    def store(self, party: int) -> Path:
        return self.folder / f"store-{party}"

    def join(self, party: int, mode: str = "", keys: Path | None = None) -> None:
        """Start a party: the real one, or one that misbehaves in its own way."""
        key, store = keys or self.keys.party(party), self.store(party)
        words = ["-m", "fewer", "join", self.address, "--key", key, "--store", store]
        if mode:
            words = [PARTY, self.address, key, store, mode, self.folder / f"mark-{party}"]
        with self.log(party).open("ab") as log:
            self.parties[party] = subprocess.Popen([sys.executable, *map(str, words)], stdout=log, stderr=log)

    def log(self, party: int) -> Path:
        return self.folder / f"party-{party}.log"

    def said(self, party: int, text: str) -> bool:
        return text in self.log(party).read_text()

    def node(self, party: int) -> psutil.Process:
        """The SuperNode of a party that has joined."""
        until(lambda: psutil.Process(self.parties[party].pid).children())
        return psutil.Process(self.parties[party].pid).children()[0]

    def kill(self, party: int) -> None:
        process = self.parties.pop(party)
        process.kill()
        process.wait()

    def close(self) -> None:
        for coordinator in self.coordinators:
            coordinator.kill()
            coordinator.wait()
        for party in list(self.parties):
            self.parties[party].send_signal(signal.SIGTERM)
            self.parties.pop(party).wait()

    def strays(self) -> list[int]:
        """Processes of Flower's that still use this port or these keys."""
        mine = []
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or [])
            if str(self.folder) in words and process.pid != os.getpid():
                mine.append(process.pid)
        return mine
