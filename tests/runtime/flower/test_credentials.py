"""Keys and certificates."""

from __future__ import annotations

import shutil
import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fewer.errors import RunError
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.superlink import SuperLink
from fewer.runtime.keys import PinnedKeys
from fewer.wire import Refused
from tests.helpers import call as command


def test_keys_are_private_and_the_authority_signs_the_certificate(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path / "keys", 2, ["fewer.example.org", "10.0.0.7"])
    for file in [*tmp_path.rglob("*.key")]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(file.name for file in credentials.client_folder(1).iterdir()) == ["ca.crt", "node.key", "node.pub"]
    assert list(credentials.public_keys) == [0, 1] and len(set(credentials.public_keys.values())) == 2
    server, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(credentials.folder / "server.crt", credentials.folder / "server.key")
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    client_side.load_verify_locations(credentials.client_folder(0) / "ca.crt")
    for name, valid in (("fewer.example.org", True), ("10.0.0.7", True), ("127.0.0.1", True), ("elsewhere", False)):
        assert handshake_succeeds(server, client_side, name) is valid
    credentials.issue_certificate((), days=-1)
    assert not handshake_succeeds(server, client_side, "elsewhere")
    with pytest.raises(RunError, match="expired on .* fewer keys renew"):
        Credentials.open(credentials.folder)


def handshake_succeeds(server: ssl.SSLContext, client_side: ssl.SSLContext, name: str) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client_side.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for end in ends * 3:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError:
        return False
    return True


def test_mistakes_with_keys_are_reported(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path / "keys", 1)
    with pytest.raises(RunError, match="already contains keys"):
        Credentials.create(tmp_path / "keys", 1)
    with pytest.raises(RunError, match="has no ca.crt .*fewer keys init"):
        Credentials.open(tmp_path)
    (credentials.client_folder(0) / "node.pub").write_text("nonsense")
    with pytest.raises(RunError, match="is not a public key"):
        credentials.public_keys  # noqa: B018


@pytest.mark.parametrize("host", ["bücher.example", "a.example:443", "https://a.example", "", "10.0.0.300", "-a"])
def test_an_invalid_host_is_reported_before_anything_is_written(host: str, tmp_path: Path) -> None:
    wrong = command("keys", "init", tmp_path / "keys", "--clients", "1", "--host", host, code=2).stderr
    assert f"'{host}' is not a host name or IP address" in wrong and not (tmp_path / "keys").exists()


def test_damaged_keys_are_reported(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "--days" in command("keys", "init", keys, "--clients", "1", "--days", "4000000", code=2).stderr
    credentials = Credentials.create(keys, 1)
    (credentials.client_folder(0) / "peers.json").write_text("{")
    assert (
        "peers.json is damaged"
        in command("keys", "trust", credentials.client_folder(0), f"1={'00' * 32}", code=2).stderr
    )
    with pytest.raises(Refused, match="pinned keys are damaged"):
        PinnedKeys(credentials.client_folder(0)).public(0, 1)
    command("keys", "trust", credentials.client_folder(0), "--", f"-5={'00' * 32}", code=2)
    (keys / "ca.key").write_text("nonsense")
    assert "ca.key is not a private key" in command("keys", "renew", keys, code=2).stderr
    (keys / "server.crt").write_text("nonsense")
    wrong = command("server", "fedavg", "--data", "digits", "--keys", keys, "--clients", "1", code=2).stderr
    assert "server.crt is not a certificate" in wrong


def test_an_address_missing_from_the_certificate_is_reported_at_once(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1, ["10.0.0.7", "a.example"])
    for name in ("10.0.0.7", "a.example", "127.0.0.1", "::1", "localhost"):
        keys.check_host(name)
    with pytest.raises(
        RunError, match=r"is not valid for 127.0.0.2 \(renew it with: fewer keys renew .* --host 127.0.0.2"
    ):
        SuperLink(keys, "127.0.0.2").__enter__()


def test_one_more_client_gets_the_next_number(tmp_path: Path) -> None:
    keys = tmp_path / "my keys"
    text = command("keys", "init", keys, "--clients", "2").stdout
    assert f"To add a client: fewer keys add NAME --keys '{keys}'" in text
    text = command("keys", "add", "clinic-b", "--keys", keys).stdout
    assert "clinic-b is client 2." in text and f"Send {keys / 'clinic-b'} to the client" in text
    assert f"Then delete {keys / 'clinic-b/node.key'} here." in text and "after its next start, in new runs" in text
    assert "client-3 is client 3." in command("keys", "add", "client-3", "--keys", keys).stdout
    credentials = Credentials.open(keys)
    assert list(credentials.public_keys) == [0, 1, 2, 3] and len({*credentials.public_keys.values()}) == 4
    assert credentials.client_folder(2) == keys / "clinic-b"
    assert sorted(file.name for file in (keys / "clinic-b").iterdir()) == ["ca.crt", "node.key", "node.pub", "number"]
    assert stat.S_IMODE((keys / "clinic-b/node.key").stat().st_mode) == 0o600
    (keys / "client-1/node.pub").unlink()  # locked out; its number is free
    assert "other is client 1." in command("keys", "add", "other", "--keys", keys).stdout


def test_a_client_keeps_its_own_private_key(tmp_path: Path) -> None:
    keys, own = tmp_path / "keys", tmp_path / "clinic b"
    assert "To add a client" in command("keys", "init", keys, "--clients", "0").stdout
    text = command("keys", "make-client", own).stdout
    assert f"Send {own / 'node.pub'} to the server's operator" in text and f"--key '{own}'" in text
    assert stat.S_IMODE((own / "node.key").stat().st_mode) == 0o600
    assert "has a node.key already" in command("keys", "make-client", own, code=2).stderr
    text = command("keys", "add", "clinic", "--keys", keys, "--public", own / "node.pub").stdout
    assert "clinic is client 0." in text and f"Send {keys / 'clinic/ca.crt'} to the client" in text
    assert sorted(file.name for file in (keys / "clinic").iterdir()) == ["ca.crt", "node.pub", "number"]
    assert (keys / "clinic/node.pub").read_bytes() == (own / "node.pub").read_bytes()
    assert list(Credentials.open(keys).public_keys) == [0]
    missing = command("join", "127.0.0.1:1", "--key", own, code=2).stderr
    assert "has no ca.crt (it comes from the server's operator)" in missing
    again = command("keys", "add", "twin", "--keys", keys, "--public", own / "node.pub", code=2).stderr
    assert "node.pub is the key of client 0 already" in again
    private = command("keys", "add", "twin", "--keys", keys, "--public", own / "node.key", code=2).stderr
    assert "node.key is a private key, which must stay with its client: ask for its node.pub" in private
    assert not (keys / "twin").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("client-0", "exists already: choose another name"),
        ("client-5", "client-5 is not the next client (allowed: client-1, or a name without a number)"),
        ("client-01", "is not the next client"),
        ("../x", "'../x' is not a name for a client (allowed: letters, digits, - and _"),
        ("a/b", "is not a name for a client"),
        ("/x", "is not a name for a client"),
        (".", "is not a name for a client"),
        ("", "is not a name for a client"),
        ("flower", "is not a name for a client"),
        ("a" * 65, "is not a name for a client"),
    ],
)
def test_a_clients_name_is_new_and_no_path(name: str, problem: str, tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1).folder
    before = sorted(tmp_path.rglob("*"))
    assert problem in command("keys", "add", "--keys", keys, "--", name, code=2).stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_mistakes_when_a_client_is_added(tmp_path: Path) -> None:
    assert "has no ca.crt (create keys with: fewer keys init" in command("keys", "add", "a", code=2).stderr
    keys = Credentials.create(tmp_path / "keys", 1).folder
    (tmp_path / "text").write_text("nonsense")
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    public = other.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "p256").write_bytes(public)
    for file, problem in (("none", "cannot be read"), ("text", "not a public key"), ("p256", "ECDSA key (P-384)")):
        assert problem in command("keys", "add", "a", "--keys", keys, "--public", tmp_path / file, code=2).stderr
    shutil.copytree(keys / "client-0", keys / "copy")
    (keys / "copy/number").write_text("0")
    with pytest.raises(RunError, match="client-0 and .*copy are both client 0: remove one of them"):
        _ = Credentials.open(keys).public_keys
