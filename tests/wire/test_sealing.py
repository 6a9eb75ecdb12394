"""Sealed messages are encrypted, authenticated, and refused if they are anything else."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from fewer.wire import Refused
from fewer.wire.sealing import Header, fingerprint, new_key, parse_sealed, public_key, seal, unseal


def test_the_seal_uses_x25519_hkdf_and_chacha20poly1305() -> None:
    sender, receiver = new_key(), new_key()
    blob = seal(b"weights", Header(1, 2, "accumulate", 3, 4), sender, public_key(receiver), b"run")
    header_end = 8 + int.from_bytes(blob[4:8], "little")
    header, fresh, ciphertext = blob[:header_end], blob[header_end : header_end + 32], blob[header_end + 32 :]
    private = X25519PrivateKey.from_private_bytes(receiver)
    shared = b"".join(private.exchange(X25519PublicKey.from_public_bytes(key)) for key in (fresh, public_key(sender)))
    key = HKDF(SHA256(), 32, None, b"FWS1" + fresh + public_key(sender) + public_key(receiver)).derive(shared)
    assert ChaCha20Poly1305(key).decrypt(bytes(12), ciphertext, header + b"run") == b"weights"
    with pytest.raises(Refused, match="the seal is broken"):
        unseal(parse_sealed(blob.replace(b'"round":3', b'"round":4')), receiver, public_key(sender), b"run")


def test_sealed_messages_are_authenticated_and_encrypted() -> None:
    sender, receiver, stranger = new_key(), new_key(), new_key()
    header = Header(1, 2, "accumulate", 1, 0)
    blob = seal(b"weights", header, sender, public_key(receiver))
    assert unseal(parse_sealed(blob), receiver, public_key(sender)) == b"weights" and b"weights" not in blob
    assert blob != seal(b"weights", header, sender, public_key(receiver))
    for private, sender_public in ((stranger, public_key(sender)), (receiver, public_key(stranger))):
        with pytest.raises(Refused, match="the seal is broken"):
            unseal(parse_sealed(blob), private, sender_public)
    forged = seal(b"weights", header, stranger, public_key(receiver))  # the stranger claims to be federation 1
    with pytest.raises(Refused, match="the seal is broken"):
        unseal(parse_sealed(forged), receiver, public_key(sender))
    assert len(fingerprint(public_key(sender))) == 64 and fingerprint(public_key(sender)) != fingerprint(
        public_key(receiver)
    )


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    for blob in (junk, b"FWS1" + junk, b"FWS1\x02\0\0\0{}" + junk, b"FWS1\x04\0\0\0null" + junk):
        with pytest.raises(Refused):
            parse_sealed(blob)
            raise AssertionError("parse_sealed accepted invalid bytes")
