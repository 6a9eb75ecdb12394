"""Sealed messages: from one to one, over a carrier that can neither read, change, forge nor repeat them.

A message is encrypted with ChaCha20-Poly1305 under a key that is used once, derived (HKDF, SHA-256) from two X25519
agreements with the receiver's key: that of a fresh key of the sender's, and that of its lasting one. So only the
receiver can read it, and only the sender can have written it (the one-way pattern K of the Noise protocols). The head,
which says from whom, to whom, in which round and under which number, can be read by the carrier and is under the seal;
so is what both sides know anyway and nobody sends: the context, of which run the message is.

Layout: `FWS1`, length of the head (4 bytes), the head as JSON, the fresh public key (32 bytes), the ciphertext with
its tag (16 bytes). Who has which key is told by fingerprints, which must come another way than over the carrier.
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
KEY = 32
"""Bytes of a key, public or private."""
NONCE = bytes(12)
"""Always the same, since no key is used twice."""


@dataclass(frozen=True)
class Head:
    """What the carrier may know of a message."""

    sender: int
    receiver: int
    kind: str
    round: int
    number: int
    """Rises with every message of a round."""


@dataclass(frozen=True)
class Sealed:
    """A message as it came: its head, not to be believed before it is opened, and what is under the seal."""

    head: Head
    signed: bytes
    """Everything before the fresh key."""
    fresh: bytes
    ciphertext: bytes


def new_key() -> bytes:
    """A private key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The public key that belongs to a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def fingerprint(public: bytes) -> str:
    """What people compare to know a key again."""
    return hashlib.sha256(public).hexdigest()


def seal(message: bytes, head: Head, private: bytes, receiver: bytes, context: bytes = b"") -> bytes:
    """The message under a seal that only the owner of the public key `receiver` can open, in the same context."""
    text = json.dumps(asdict(head), separators=(",", ":")).encode()
    signed = MAGIC + len(text).to_bytes(4, "little") + text
    fresh = new_key()
    shared = _agreement(fresh, receiver) + _agreement(private, receiver)
    key = _key(shared, public_of(fresh), public_of(private), receiver)
    return signed + public_of(fresh) + ChaCha20Poly1305(key).encrypt(NONCE, message, signed + context)


def look(blob: bytes) -> Sealed:
    """The parts of a sealed message; Refused where it is none."""
    length = int.from_bytes(blob[4:8], "little")
    start = 8 + length
    if blob[:4] != MAGIC or length > MAX_HEADER or len(blob) < start + KEY + 16:
        raise Refused("not a sealed message")
    try:
        head = Head(**json.loads(blob[8:start]))
    except (ValueError, TypeError, RecursionError) as error:
        raise Refused("a sealed message without a head") from error
    if any(type(value) is not (str if name == "kind" else int) for name, value in vars(head).items()):
        raise Refused("a sealed message without a head")
    return Sealed(head, blob[:start], blob[start : start + KEY], blob[start + KEY :])


def unseal(sealed: Sealed, private: bytes, sender: bytes, context: bytes = b"") -> bytes:
    """What the owner of the public key `sender` wrote; Refused where anything was changed or anyone else wrote it."""
    try:
        shared = _agreement(private, sealed.fresh) + _agreement(private, sender)
        key = _key(shared, sealed.fresh, sender, public_of(private))
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed.ciphertext, sealed.signed + context)
    except (InvalidTag, ValueError) as error:
        raise Refused(
            "the seal is broken: it was changed on its way, or is from somebody else or another run"
        ) from error


def _agreement(private: bytes, public: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def _key(shared: bytes, fresh: bytes, sender: bytes, receiver: bytes) -> bytes:
    """The key of one message, from both agreements and all public keys."""
    return HKDF(SHA256(), KEY, None, MAGIC + fresh + sender + receiver).derive(shared)
