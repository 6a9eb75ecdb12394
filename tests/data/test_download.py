"""Downloads from a local server with and without ranges, with broken connections and wrong content."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from fewer.data import download
from fewer.data.download import DOWNLOADS, RemoteFile
from fewer.errors import DataError, SettingError

CONTENT = np.random.default_rng(0).bytes(1 << 20)
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` and records the requested ranges."""

    content = CONTENT
    ranges = True
    breaks_after: int | None = None
    sends_length = True
    status: int | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested_ranges: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        requested_range = self.headers["Range"]
        server.requested_ranges.append(requested_range)
        start = (
            int(requested_range.removeprefix("bytes=").removesuffix("-")) if requested_range and server.ranges else 0
        )
        if start >= len(server.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.content)}")
            self.end_headers()
            return
        if server.status is not None:
            self.send_error(server.status)
            return
        rest = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        if server.sends_length:
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest if server.breaks_after is None else rest[: server.breaks_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def register_file(monkeypatch: pytest.MonkeyPatch, url: str, name: str = "file.bin", checksum: str = MD5) -> None:
    monkeypatch.setitem(DOWNLOADS, "set", (RemoteFile(url, "folder", name, checksum),))


def test_a_file_arrives_complete_and_progress_is_reported(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_file(monkeypatch, server.url)
    calls: list[tuple[int, int | None]] = []
    folder = download.download("set", tmp_path / "new" / "directory", lambda *progress: calls.append(progress))
    assert [file.name for file in folder.iterdir()] == ["file.bin"]
    assert (folder / "file.bin").read_bytes() == CONTENT
    assert calls[-1] == (len(CONTENT), len(CONTENT)) and calls == sorted(calls) and len(calls) > 1
    download.download("set", tmp_path / "new" / "directory")
    assert server.requested_ranges == [None]  # an existing file is not downloaded again


@pytest.mark.parametrize("ranges", [True, False])
def test_a_partial_file_is_resumed_if_the_server_supports_ranges(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    server.ranges = ranges
    register_file(monkeypatch, server.url)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.bin.part").write_bytes(CONTENT[:1000])
    calls: list[int] = []
    download.download("set", tmp_path, lambda so_far, total: calls.append(so_far))
    assert (tmp_path / "folder" / "file.bin").read_bytes() == CONTENT
    assert server.requested_ranges == ["bytes=1000-"] and calls[-1] == len(CONTENT)
    assert (calls[0] % 1000 != 0) or not ranges


@pytest.mark.parametrize("extra", [b"", b"too much"])
def test_a_complete_partial_file_is_used_and_a_longer_one_is_not(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: bytes
) -> None:
    register_file(monkeypatch, server.url)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.bin.part").write_bytes(CONTENT + extra)
    download.download("set", tmp_path)
    assert (tmp_path / "folder" / "file.bin").read_bytes() == CONTENT
    assert len(server.requested_ranges) == (2 if extra else 1)


def test_a_broken_connection_is_resumed(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_file(monkeypatch, server.url)
    server.breaks_after = 400_000
    download.download("set", tmp_path)
    assert (tmp_path / "folder" / "file.bin").read_bytes() == CONTENT
    assert server.requested_ranges == [None, "bytes=400000-", "bytes=800000-"]


def test_a_connection_that_keeps_breaking_leaves_a_partial_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_file(monkeypatch, server.url)
    server.breaks_after = 1000
    with pytest.raises(DataError, match="broke; kept 3000 bytes"):
        download.download("set", tmp_path)
    server.breaks_after = None
    download.download("set", tmp_path)
    assert (tmp_path / "folder" / "file.bin").read_bytes() == CONTENT
    assert server.requested_ranges[-1] == "bytes=3000-"


@pytest.mark.parametrize("sends_length", [True, False])
def test_a_wrong_checksum_removes_the_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends_length: bool
) -> None:
    register_file(monkeypatch, server.url)
    server.content, server.sends_length = CONTENT[:-1], sends_length
    with pytest.raises(DataError, match="removed the corrupt download of .*: its md5 is .*, expected "):
        download.download("set", tmp_path)
    assert not list((tmp_path / "folder").iterdir())


def test_archives_without_a_checksum_are_read_completely(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("inside.txt", b"something " * 100)
    for name, content in (("file.zip", buffer.getvalue()), ("file.gz", gzip.compress(CONTENT))):
        register_file(monkeypatch, server.url, name, checksum="")
        server.content = content
        download.download("set", tmp_path)
        assert hashlib.sha256(content).hexdigest() in capsys.readouterr().err
        for number, bad in enumerate((content[:-5], content[:60] + b"!" + content[61:], b"<html>")):
            server.content = bad
            with pytest.raises(DataError, match="removed the corrupt download"):
                download.download("set", tmp_path / str(number))


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_file(monkeypatch, "http://127.0.0.1:9/file")
    with pytest.raises(DataError) as caught:
        download.download("set", tmp_path)
    line = str(caught.value)
    for part in ("http://127.0.0.1:9/file", str(tmp_path / "folder" / "file.bin"), "--data-dir", "FEWER_DATA"):
        assert part in line
    assert "\n" not in line


def test_an_http_error_is_reported(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_file(monkeypatch, server.url)
    server.status = 404
    with pytest.raises(DataError, match="returned HTTP 404"):
        download.download("set", tmp_path)
    assert len(server.requested_ranges) == 1


def test_an_unwritable_directory_is_an_error(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_file(monkeypatch, server.url)
    (tmp_path / "folder").write_text("a file where a directory should be")
    with pytest.raises(DataError, match="folder"):
        download.download("set", tmp_path)


def test_unknown_datasets_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="did you mean 'mnist'"):
        download.download("mnits", tmp_path)


def test_every_dataset_has_a_url_and_a_well_formed_checksum() -> None:
    lengths = {"md5": 32, "sha256": 64}
    for name, remotes in DOWNLOADS.items():
        for remote in remotes:
            algorithm, _, digest = remote.checksum.partition(":")
            assert remote.url.startswith("https://") and remote.folder and remote.name, name
            assert not remote.checksum or len(bytes.fromhex(digest)) * 2 == lengths[algorithm], name
    assert download.MAX_ATTEMPTS > 1
