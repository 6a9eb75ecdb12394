"""Clients as real processes on loopback, which tests kill and restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from fewer.runs.machines import FlowerServer, exchange_keys
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.programs import find_free_port
from tests.helpers import wait_for

CLIENT = Path(__file__).with_name("client.py")
TIMEOUT = 400.0
"""Time limit in seconds for any step on a busy machine."""


class Cluster:
    """Keys, a port, and clients that join and leave. Each run has its own server."""

    def __init__(self, folder: Path, clients: int) -> None:
        self.folder = folder
        self.keys = Credentials.create(folder / "keys", clients)
        exchange_keys([self.keys.client_folder(client) for client in range(clients)])
        self.port = find_free_port()
        self.clients: dict[int, subprocess.Popen[bytes]] = {}
        self.servers: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def server(self, timeout: float = TIMEOUT) -> FlowerServer:
        return FlowerServer(self.keys, port=self.port, timeout=timeout)

    def command(self, *args: str | Path) -> list[str]:
        """The command line of a server process."""
        options = ["--keys", self.keys.folder, "--port", self.port, "--timeout", TIMEOUT, "--no-report"]
        return [sys.executable, "-m", "fewer", "server", *map(str, [*args, *options])]

    def start_server(self, *args: str | Path) -> subprocess.Popen[bytes]:
        """Starts a server process that ends with the cluster."""
        self.servers.append(subprocess.Popen(self.command(*args)))
        return self.servers[-1]

    def store(self, client: int) -> Path:
        return self.folder / f"store-{client}"

    def join(self, client: int, mode: str = "", keys: Path | None = None) -> None:
        """Starts a real client, or one that misbehaves according to `mode`."""
        key, store = keys or self.keys.client_folder(client), self.store(client)
        args = ["-m", "fewer", "join", self.address, "--key", key, "--store", store]
        if mode:
            args = [CLIENT, self.address, key, store, mode, self.folder / f"mark-{client}"]
        with self.log(client).open("ab") as log:
            self.clients[client] = subprocess.Popen([sys.executable, *map(str, args)], stdout=log, stderr=log)

    def log(self, client: int) -> Path:
        return self.folder / f"client-{client}.log"

    def logged(self, client: int, text: str) -> bool:
        return text in self.log(client).read_text()

    def node(self, client: int) -> psutil.Process:
        """The SuperNode of a client that has joined."""
        wait_for(lambda: psutil.Process(self.clients[client].pid).children(), TIMEOUT)
        return psutil.Process(self.clients[client].pid).children()[0]

    def kill(self, client: int) -> None:
        process = self.clients.pop(client)
        process.kill()
        process.wait()

    def close(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()
        for client in list(self.clients):
            self.clients[client].send_signal(signal.SIGTERM)
            self.clients.pop(client).wait()

    def strays(self) -> list[int]:
        """Flower processes that still use these keys."""
        pids = []
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if str(self.folder) in command and process.pid != os.getpid():
                pids.append(process.pid)
        return pids
