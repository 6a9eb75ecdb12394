"""Keys for sealed messages between clients, and pins: the keys that a client trusts for its peers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fewer.errors import SettingError
from fewer.runtime.store import client_folder, write_durably, write_private
from fewer.wire import Refused
from fewer.wire.sealing import fingerprint, new_key, public_key


class Keys(Protocol):
    """The keys that clients know. A client on its own machine knows only its own private key."""

    def private(self, client: int) -> bytes:
        """The client's private key."""

    def public(self, client: int, peer: int) -> bytes:
        """The public key that this client has pinned for a peer. Raises Refused if the peer offers another key."""


@dataclass(frozen=True)
class KeyFiles:
    """Keys of simulated clients, each in its own folder: `key` (private), `key.pub`, and `pins.json`.

    A client pins the fingerprint of a peer's key on first use, and an existing pin never changes. In simulation, the
    public key comes straight from the peer's folder.
    """

    root: Path

    def private(self, client: int) -> bytes:
        """The client's private key, created on first use."""
        path = client_folder(self.root, client) / "key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path.with_name("key.pub"), public_key(key := new_key()))
            write_private(path, key)
        return path.read_bytes()

    def public(self, client: int, peer: int) -> bytes:
        """The public key that the peer offers, if it matches the pin."""
        self.private(peer)
        offered = (client_folder(self.root, peer) / "key.pub").read_bytes()
        path = client_folder(self.root, client) / "pins.json"
        pins = json.loads(path.read_text()) if path.exists() else {}
        digest = fingerprint(offered)
        if (pinned := pins.setdefault(str(peer), digest)) != digest:
            digests = f"{digest[:16]}…, not the pinned {pinned[:16]}…"
            raise Refused(f"the key offered for client {peer} has the fingerprint {digests}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(pins).encode())
        return offered


@dataclass(frozen=True)
class PinnedKeys:
    """The keys of a client on its own machine: `seal.key`, which it created itself, and `peers.json`.

    `peers.json` holds the public keys of the other clients by number. They come from those clients, through any channel
    except the relay. No message changes them.
    """

    folder: Path

    def create(self) -> bytes:
        """Returns the public key. Creates the private key if it does not exist yet."""
        path = self.folder / "seal.key"
        if not path.exists():
            write_private(path, new_key())
        return public_key(path.read_bytes())

    def trust(self, peers: Mapping[int, bytes], replace: bool = False) -> None:
        """Pins the public keys of peers. Raises SettingError if another key is pinned, unless `replace` is set."""
        pins = self._read_pins()
        for client, key in peers.items():
            if pins.setdefault(str(client), key.hex()) != key.hex() and not replace:
                advice = "pass --replace if that client confirms the new key"
                raise SettingError(f"client {client}: another key is pinned ({advice})")
            pins[str(client)] = key.hex()
        write_durably(self.folder / "peers.json", json.dumps(pins, indent=2).encode())

    def private(self, client: int) -> bytes:
        """The client's own private key."""
        path = self.folder / "seal.key"
        if not path.exists():
            raise Refused("no key to open sealed messages (create one with: fewer keys seal)")
        return path.read_bytes()

    def public(self, client: int, peer: int) -> bytes:
        """The pinned key of a peer."""
        try:
            return bytes.fromhex(self._read_pins()[str(peer)])
        except (SettingError, ValueError):
            raise Refused("the pinned keys are damaged (pin them again with: fewer keys trust)") from None
        except KeyError:
            raise Refused(f"no key of client {peer} is pinned (pin it with: fewer keys trust)") from None

    def _read_pins(self) -> dict[str, str]:
        path = self.folder / "peers.json"
        try:
            return {client: str(key) for client, key in json.loads(path.read_text()).items()} if path.exists() else {}
        except (ValueError, AttributeError) as error:
            advice = "delete it, then pin the keys again with: fewer keys trust"
            raise SettingError(f"{path} is damaged ({advice}): {error}") from None
