"""Sealed messages: end-to-end encryption from one client to another through an untrusted relay.

The relay can neither read, change, forge nor replay a sealed message. Each message is encrypted with ChaCha20-Poly1305
under a key that is used once. HKDF (SHA-256) derives that key from two X25519 exchanges with the receiver's key: one
with an ephemeral key of the sender, one with the sender's static key. So only the receiver can read the message, and
only the sender can have written it (the one-way pattern K of the Noise protocols).

The header names sender, receiver, kind, round and number. The relay can read it, but the seal authenticates it. The
seal also covers the context, which identifies the run. Both sides know the context, so it is never sent.

Layout: `FWS1`, header length (4 bytes), header as JSON, ephemeral public key (32 bytes), ciphertext with its tag
(16 bytes). Clients verify each other's keys by fingerprints, which must not come from the relay.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fewer.wire.message import MAX_HEADER, Refused

MAGIC = b"FWS1"
KEY_BYTES = 32
"""Length of a key, public or private."""
NONCE = bytes(12)
"""Constant, because no key is used twice."""


@dataclass(frozen=True)
class Header:
    """The part of a sealed message that the relay can read."""

    sender: int
    receiver: int
    kind: str
    round: int
    number: int
    """Increases with every message of a round."""


@dataclass(frozen=True)
class Sealed:
    """A sealed message in parts. Do not trust its header before `unseal` succeeds."""

    header: Header
    prefix: bytes
    """All bytes before the ephemeral key; the seal authenticates them."""
    ephemeral: bytes
    ciphertext: bytes


def new_key() -> bytes:
    """Generates a private key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key that belongs to a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def fingerprint(public: bytes) -> str:
    """A digest of a public key, for people to compare."""
    return hashlib.sha256(public).hexdigest()


def seal(message: bytes, header: Header, private: bytes, receiver: bytes, context: bytes = b"") -> bytes:
    """Seals a message. Only the owner of the public key `receiver` can open it, in the same context."""
    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    prefix = MAGIC + len(text).to_bytes(4, "little") + text
    ephemeral = new_key()
    shared = shared_secret(ephemeral, receiver) + shared_secret(private, receiver)
    key = _derive_key(shared, public_key(ephemeral), public_key(private), receiver)
    return prefix + public_key(ephemeral) + ChaCha20Poly1305(key).encrypt(NONCE, message, prefix + context)


def parse_sealed(blob: bytes) -> Sealed:
    """Splits a sealed message into its parts. Raises Refused if it is malformed."""
    length = int.from_bytes(blob[4:8], "little")
    start = 8 + length
    if blob[:4] != MAGIC or length > MAX_HEADER or len(blob) < start + KEY_BYTES + 16:
        raise Refused("not a sealed message")
    try:
        header = Header(**json.loads(blob[8:start]))
    except (ValueError, TypeError, RecursionError) as error:
        raise Refused("a sealed message without a valid header") from error
    if any(type(value) is not (str if name == "kind" else int) for name, value in vars(header).items()):
        raise Refused("a sealed message without a valid header")
    return Sealed(header, blob[:start], blob[start : start + KEY_BYTES], blob[start + KEY_BYTES :])


def unseal(sealed: Sealed, private: bytes, sender: bytes, context: bytes = b"") -> bytes:
    """Opens a message from the owner of the public key `sender`. Raises Refused if it was changed or forged."""
    try:
        shared = shared_secret(private, sealed.ephemeral) + shared_secret(private, sender)
        key = _derive_key(shared, sealed.ephemeral, sender, public_key(private))
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed.ciphertext, sealed.prefix + context)
    except (InvalidTag, ValueError) as error:
        raise Refused(
            "the seal is broken: the message was changed in transit, or comes from another sender or another run"
        ) from error


def shared_secret(private: bytes, public: bytes) -> bytes:
    """The secret that two owners of keys share (X25519)."""
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def _derive_key(shared: bytes, ephemeral: bytes, sender: bytes, receiver: bytes) -> bytes:
    """The key of one message, from both shared secrets and all public keys."""
    return HKDF(SHA256(), KEY_BYTES, None, MAGIC + ephemeral + sender + receiver).derive(shared)
