"""Flower's programs are quiet, private and on loopback."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from fewer.runs.machines import ClientDaemon
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program, secret_file
from fewer.runtime.flower.superlink import SuperLink


def test_key_and_store_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink's database holds unencrypted messages; a store holds what a client derives from its data."""
    keys = Credentials.create(tmp_path / "keys", 1)
    secret = secret_file(keys.folder / "flower")
    Program("sys:exit", [], tmp_path / "home").start()
    monkeypatch.setattr(Node, "serve", lambda self, answer: None)
    ClientDaemon(tmp_path / "store").join("a:1", keys.client_folder(0))
    for folder in (keys.folder, secret.parent, tmp_path / "home", tmp_path / "store"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_flowers_programs_are_quiet_private_and_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda args, **options: started.update(options, arguments=args))
    keys = Credentials.create(tmp_path / "keys", 1)
    program, _ = Node("far.example:443", keys.client_folder(0), tmp_path / "store")._make_program()
    assert program.arguments[program.arguments.index("--host") + 1] == "127.0.0.1"
    program.start()
    assert started["env"]["FLWR_HOME"] == str(program.home)
    assert started["env"]["FLWR_TELEMETRY_ENABLED"] == "0" and started["env"]["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    monkeypatch.setattr(SuperLink, "_start_program", lambda self: None)
    monkeypatch.setattr(SuperLink, "_register_clients", lambda self: None)
    link = SuperLink(keys, "127.0.0.1", 1).__enter__()
    assert link._program and link._lock
    link._lock.close()
    args = list(link._program.arguments)
    assert args[args.index("--host") + 1] == "127.0.0.1" and "--enable-supernode-auth" in args


def test_a_superlink_on_all_addresses_is_reached_on_loopback(tmp_path: Path) -> None:
    assert SuperLink(Credentials(tmp_path), "0.0.0.0", 5).address == "127.0.0.1:5"


def test_packed_bytes_are_counted_per_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = SuperLink(Credentials(tmp_path))
    monkeypatch.setattr(SuperLink, "pid", 1)
    monkeypatch.setattr(SuperLink, "_submit_run", lambda self, experiment: None)
    link.packed["up"] = 5
    link.start_run("{}")
    assert not link.packed
