"""Keys of clients that hand sealed messages to each other, and whose keys they take for whose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fewer.errors import SettingError
from fewer.runtime.store import folder_of, write_durably
from fewer.wire import Refused
from fewer.wire.sealing import fingerprint, new_key, public_of


class Keys(Protocol):
    """What a client knows of keys. Where clients are on machines of their own, each has only its own."""

    def private(self, client: int) -> bytes:
        """The client's own private key."""

    def public(self, client: int, other: int) -> bytes:
        """The public key of another one, the one that this client has pinned; Refused where it is offered another."""


@dataclass(frozen=True)
class KeyFiles:
    """Keys of simulated clients, each in its own folder: `key` (private), `key.pub`, and `pins.json`.

    A client pins the fingerprint of a key when it first needs it. In simulation the public key comes straight from
    the folder of its owner; a pin that is there already, from whatever source, is never changed.
    """

    root: Path

    def private(self, client: int) -> bytes:
        """The client's own private key, made when it is first needed."""
        path = folder_of(self.root, client) / "key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path.with_name("key.pub"), public_of(key := new_key()))
            _keep(path, key)
        return path.read_bytes()

    def public(self, client: int, other: int) -> bytes:
        """The public key that is offered for another one, if it is the pinned one."""
        self.private(other)
        offered = (folder_of(self.root, other) / "key.pub").read_bytes()
        path = folder_of(self.root, client) / "pins.json"
        pins = json.loads(path.read_text()) if path.exists() else {}
        pinned = pins.setdefault(str(other), fingerprint(offered))
        if pinned != fingerprint(offered):
            raise Refused(
                f"the key offered for client {other} has the fingerprint {fingerprint(offered)[:16]}…, not the pinned "
                f"{pinned[:16]}…"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(pins).encode())
        return offered


@dataclass(frozen=True)
class PinnedKeys:
    """The keys that a client on a machine of its own has: `seal.key`, which it made itself, and `peers.json`.

    The latter holds the public keys of the others by number. They come from them, over any way but the carrier, and
    nothing that is carried changes them.
    """

    folder: Path

    def create(self) -> bytes:
        """The public key; the private one is made if there is none yet."""
        path = self.folder / "seal.key"
        if not path.exists():
            _keep(path, new_key())
        return public_of(path.read_bytes())

    def trust(self, others: Mapping[int, bytes], replace: bool = False) -> None:
        """Pin the public keys of others; SettingError where another one is pinned already, unless it is to go."""
        pins = self._pins()
        for client, key in others.items():
            if pins.setdefault(str(client), key.hex()) != key.hex() and not replace:
                raise SettingError(f"client {client}: another key is pinned here (--replace, if its people say so)")
            pins[str(client)] = key.hex()
        write_durably(self.folder / "peers.json", json.dumps(pins, indent=2).encode())

    def private(self, client: int) -> bytes:
        """Its own private key."""
        path = self.folder / "seal.key"
        if not path.exists():
            raise Refused("no key to open what is sealed (fewer keys seal)")
        return path.read_bytes()

    def public(self, client: int, other: int) -> bytes:
        """The pinned key of another one."""
        try:
            return bytes.fromhex(self._pins()[str(other)])
        except (SettingError, ValueError):
            raise Refused("the pinned keys are damaged here (fewer keys trust)") from None
        except KeyError:
            raise Refused(f"no key of client {other} is pinned here (fewer keys trust)") from None

    def _pins(self) -> dict[str, str]:
        path = self.folder / "peers.json"
        try:
            return {client: str(key) for client, key in json.loads(path.read_text()).items()} if path.exists() else {}
        except (ValueError, AttributeError) as error:
            raise SettingError(f"{path} is damaged: pin the keys anew (delete it, fewer keys trust): {error}") from None


def _keep(path: Path, key: bytes) -> None:
    """Write a private key so that nobody else can ever read it, and a crash leaves none or the whole of it."""
    path.with_name(path.name + ".part").touch(0o600)  # what `write_durably` writes to
    write_durably(path, key)
