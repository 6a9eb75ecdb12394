"""Keys and certificates."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
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
