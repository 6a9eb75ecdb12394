"""Credentials for runs between machines: a certificate authority, the server's certificate, and a key per client.

    DIR/ca.crt, ca.key             the authority that signs the certificate
    DIR/server.crt, server.key     the server's certificate, for the host names that clients use
    DIR/client-N/node.key          the private key of client N (ECDSA, P-384); node.pub is the public key
    DIR/client-N/ca.crt            the authority, so that the client can verify the server
    DIR/NAME/number                the number of a client that has a name

Move each client's folder to its machine. The server needs only its node.pub. A client can also create its key itself,
and the server gets only the public one.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fewer.errors import RunError
from fewer.runtime.store import write_durably, write_private

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
CA_DAYS = 3650
_DEFAULT_NAME = re.compile(r"client-(\d+)")
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_RESERVED = ("flower",)
"""Folders of the server that are not a client's."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class Credentials:
    """The server's folder of keys."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, clients: int, hosts: Sequence[str] = (), days: int = 825) -> Credentials:
        """Creates keys for a server with these host names, and for this number of clients."""
        if (folder / "ca.key").exists():
            raise RunError(f"{folder} already contains keys (choose another directory; keys are never overwritten)")
        for host in hosts:
            _parse_host(host)  # reports an invalid name before anything is written
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_certificate(folder / "ca", "Fewer authority", CA_DAYS)
        credentials = cls(folder)
        credentials.issue_certificate(hosts, days)
        for client in range(clients):
            credentials.add_client(f"client-{client}")
        return credentials

    @classmethod
    def open(cls, folder: Path) -> Credentials:
        """Opens the credentials in an existing folder. Raises RunError if a file is missing or has expired."""
        for name in ("ca.crt", "server.crt", "server.key"):
            if not (folder / name).is_file():
                raise RunError(
                    f"{folder} has no {name} (create keys with: fewer keys init {_quote(folder)} --clients N)"
                )
        end = _read_certificate(folder / "server.crt").not_valid_after_utc
        if end < datetime.datetime.now(datetime.UTC):
            raise RunError(
                f"{folder / 'server.crt'} expired on {end:%Y-%m-%d} "
                f"(renew it with: fewer keys renew {_quote(folder)} --host NAME)"
            )
        return cls(folder)

    def issue_certificate(self, hosts: Sequence[str], days: float) -> None:
        """Issues a new certificate for the server. The authority stays the same, so clients need nothing new."""
        names = [_parse_host(host) for host in dict.fromkeys([*hosts, *LOCAL_HOSTS])]
        authority, path = _read_certificate(self.folder / "ca.crt"), self.folder / "ca.key"
        try:
            signer = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise RunError(f"{path} is not a private key: {_first_line(error)}") from error
        if not isinstance(signer, ec.EllipticCurvePrivateKey):
            raise RunError(f"{path} is not an ECDSA key")
        _write_certificate(self.folder / "server", "Fewer server", days, names, (authority, signer))

    def check_host(self, host: str) -> None:
        """Raises RunError if the certificate does not cover this name of the server."""
        certificate = _read_certificate(self.folder / "server.crt")
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        if _parse_host(host) not in list(names.value):
            raise RunError(
                f"the certificate in {self.folder} is not valid for {host} (renew it with: fewer keys renew "
                f"{_quote(self.folder)} --host {host}, and --host for each other name that clients use)"
            )

    def add_client(self, name: str, public: Path | None = None) -> int:
        """Adds one client, with a new key or with the public key that it made. Returns its number.

        Its folder has this name. Raises RunError if the name is taken or is a path, or if the key is in use.
        """
        if not (self.folder / "ca.crt").is_file():
            raise RunError(f"{self.folder} has no ca.crt (create keys with: fewer keys init {_quote(self.folder)})")
        if not _CLIENT_NAME.fullmatch(name) or name in _RESERVED:
            allowed = "letters, digits, - and _, and none of the server's own folders"
            raise RunError(f"'{name}' is not a name for a client (allowed: {allowed})")
        folders = self._client_folders()
        folder, number = self.folder / name, next(n for n in range(len(folders) + 1) if n not in folders)
        if folder.exists():
            raise RunError(f"{folder} exists already: choose another name, or remove it to replace that client's key")
        is_numbered = bool(_DEFAULT_NAME.fullmatch(name))
        if is_numbered and name != f"client-{number}":
            raise RunError(f"{name} is not the next client (allowed: client-{number}, or a name without a number)")
        key = None if public is None else _read_public(public)
        for other, known in self.public_keys.items():
            if key and known == _to_pem(key):
                raise RunError(f"{public} is the key of client {other} already")
        try:
            folder.mkdir()
            if key is None:
                create_node_key(folder)
            else:
                _write_public(folder, key)
            write_durably(folder / "ca.crt", (self.folder / "ca.crt").read_bytes())
            if not is_numbered:
                write_durably(folder / "number", f"{number}\n".encode())
        except OSError as error:
            raise RunError(f"{folder} cannot be written: {error.strerror}") from error
        return number

    def client_folder(self, client: int) -> Path:
        """The folder with a client's keys."""
        return self._client_folders().get(client, self.folder / f"client-{client}")

    def _client_folders(self) -> dict[int, Path]:
        """The folders with a public key, by the client's number."""
        folders: dict[int, Path] = {}
        for path in sorted(self.folder.glob("*/node.pub")):
            folder = path.parent
            file, default = folder / "number", _DEFAULT_NAME.fullmatch(folder.name)
            text = default[1] if default else file.read_text().strip() if file.is_file() else ""
            if not text.isdecimal():
                continue
            if (number := int(text)) in folders:
                raise RunError(f"{folders[number]} and {folder} are both client {number}: remove one of them")
            folders[number] = folder
        return dict(sorted(folders.items()))

    @property
    def public_keys(self) -> dict[int, bytes]:
        """The clients' public keys by number, in Flower's format."""
        return {client: _to_pem(_read_public(path / "node.pub")) for client, path in self._client_folders().items()}


def create_node_key(folder: Path) -> None:
    """Creates a client's key in its folder: node.key is private, node.pub is public. Raises RunError if it has one."""
    if (folder / "node.key").exists():
        raise RunError(f"{folder} has a node.key already (choose another directory; keys are never overwritten)")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(folder / "node.key", key)
    _write_public(folder, key.public_key())


def _write_public(folder: Path, key: ec.EllipticCurvePublicKey) -> None:
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_durably(folder / "node.pub", text + b"\n")


def _read_public(path: Path) -> ec.EllipticCurvePublicKey:
    """Reads a client's public key. Raises RunError if it is no public key, with a warning if it is a private key."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    if b"PRIVATE KEY" in content:
        raise RunError(f"{path} is a private key, which must stay with its client: ask for its node.pub")
    try:
        key = serialization.load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RunError(f"{path} is not a public key: {_first_line(error)}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise RunError(f"{path} is not an ECDSA key (P-384)")
    return key


def _to_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in Flower's format."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _write_certificate(
    path: Path,
    name: str,
    days: float,
    hosts: Sequence[x509.GeneralName] = (),
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
) -> None:
    """Writes a new key and its certificate: for a server if there are hosts, otherwise for an authority."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject, public = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key()
    issuer, signer = (authority[0].subject, authority[1]) if authority else (subject, key)
    unused = ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    unused += ["encipher_only", "decipher_only"]
    usage = {"digital_signature": bool(hosts), "key_cert_sign": not hosts, "crl_sign": not hosts}
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
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.KeyUsage(**usage, **dict.fromkeys(unused, False)), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    _write_private(path.with_suffix(".key"), key)
    write_durably(path.with_suffix(".crt"), builder.sign(signer, SHA256()).public_bytes(serialization.Encoding.PEM))


def _parse_host(name: str) -> x509.GeneralName:
    """Parses a host name or IP address for a certificate. Raises RunError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(name) or name.rpartition(".")[2].isdecimal():
        raise RunError(f"'{name}' is not a host name or IP address (allowed: server.example.org, 10.0.0.7, …)")
    return x509.DNSName(name)


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is not a certificate: {_first_line(error)}") from error


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    file_format = serialization.PrivateFormat.OpenSSH if path.name == "node.key" else serialization.PrivateFormat.PKCS8
    write_private(path, key.private_bytes(serialization.Encoding.PEM, file_format, serialization.NoEncryption()))
