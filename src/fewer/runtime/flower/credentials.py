"""Who is who between machines: an authority of our own, the server's certificate, a key for each client.

    DIR/ca.crt, ca.key            the authority that signs the certificate
    DIR/server.crt, server.key    the server's certificate, for the names by which clients reach it
    DIR/client-N/node.key          client N's private key (ECDSA, P-384), node.pub the public one
    DIR/client-N/ca.crt            what it knows the server by

The folder of a client goes to its machine; the server needs of it node.pub alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fewer.errors import RunError

LOCAL = ("localhost", "127.0.0.1", "::1")
CA_DAYS = 3650
_PART = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(\*\.)?{_PART}(\.{_PART})*")


@dataclass(frozen=True)
class Credentials:
    """The server's directory of keys."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, clients: int, hosts: Sequence[str] = (), days: int = 825) -> Credentials:
        """New keys for a server that is reached by these names, and for its clients."""
        if (folder / "ca.key").exists():
            raise RunError(f"{folder} holds keys already (choose another directory; keys are never written over)")
        for host in hosts:
            _host(host)  # what is wrong with it is told before anything is written
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fewer authority")])
        authority = _certificate(name, name, key, key.public_key(), CA_DAYS, ())
        _write_private(folder / "ca.key", key)
        _write(folder / "ca.crt", authority.public_bytes(serialization.Encoding.PEM))
        made = cls(folder)
        made.certify(hosts, days)
        for client in range(clients):
            made.add_client(client)
        return made

    @classmethod
    def open(cls, folder: Path) -> Credentials:
        """Those that are there; RunError where something is missing."""
        for name in ("ca.crt", "server.crt", "server.key"):
            if not (folder / name).is_file():
                raise RunError(f"{folder} has no {name} (make keys with: fewer keys init {folder} --clients N)")
        end = _read(folder / "server.crt").not_valid_after_utc
        if end < datetime.datetime.now(datetime.UTC):
            raise RunError(
                f"{folder / 'server.crt'} expired on {end:%Y-%m-%d} (a new one: fewer keys renew {folder} --host NAME)"
            )
        return cls(folder)

    def certify(self, hosts: Sequence[str], days: float) -> None:
        """A new certificate for the server, under the same authority: clients need nothing new."""
        names = [_host(name) for name in dict.fromkeys([*hosts, *LOCAL])]
        authority, path = _read(self.folder / "ca.crt"), self.folder / "ca.key"
        try:
            signer = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise RunError(f"{path} is not a private key: {_first(error)}") from error
        if not isinstance(signer, ec.EllipticCurvePrivateKey):
            raise RunError(f"{path} is not a key of the kind that an authority has here (ECDSA)")
        key = ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fewer server")])
        signed = _certificate(name, authority.subject, signer, key.public_key(), days, names)
        _write_private(self.folder / "server.key", key)
        _write(self.folder / "server.crt", signed.public_bytes(serialization.Encoding.PEM))

    def check_host(self, host: str) -> None:
        """RunError where the certificate is not for this name of the server."""
        named = _read(self.folder / "server.crt").extensions.get_extension_for_class(x509.SubjectAlternativeName)
        if _host(host) not in list(named.value):
            raise RunError(
                f"the certificate in {self.folder} is not for {host} "
                f"(fewer keys renew {self.folder} --host {host}, and --host for each other name that clients use)"
            )

    def add_client(self, client: int) -> Path:
        """The folder of one more client."""
        folder = self.client(client)
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(folder / "node.key", key)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _write(folder / "node.pub", public + b"\n")
        _write(folder / "ca.crt", (self.folder / "ca.crt").read_bytes())
        return folder

    def client(self, number: int) -> Path:
        """What belongs to a client."""
        return self.folder / f"client-{number}"

    @property
    def public_keys(self) -> dict[int, bytes]:
        """The clients' public keys by number, in the form in which Flower names them."""
        found: dict[int, bytes] = {}
        for path in self.folder.glob("client-*/node.pub"):
            if not (number := re.fullmatch(r"client-(\d+)", path.parent.name)):
                continue
            try:
                key = serialization.load_ssh_public_key(path.read_bytes())
            except ValueError as error:
                raise RunError(f"{path} is not a public key: {error}") from error
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise RunError(f"{path} is not a key of the kind that clients have (ECDSA, P-384)")
            found[int(number[1])] = key.public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        return dict(sorted(found.items()))


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    public: ec.EllipticCurvePublicKey,
    days: float,
    names: Sequence[x509.GeneralName],
) -> x509.Certificate:
    """Signed; for names it is a server's, for none an authority's."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - datetime.timedelta(hours=1))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(authority=not names), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    """A name or address, as a certificate has it; RunError where it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _NAME.fullmatch(name) or name.rpartition(".")[2].isdecimal():
        raise RunError(f"'{name}' is no name or address of a machine (allowed: server.example.org, 10.0.0.7, …)")
    return x509.DNSName(name)


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is not a certificate: {_first(error)}") from error


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form = serialization.PrivateFormat.OpenSSH if path.name == "node.key" else serialization.PrivateFormat.PKCS8
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()), 0o600)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Never readable by others for a moment if it is not to be so at all."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
