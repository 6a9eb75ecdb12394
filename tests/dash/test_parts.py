"""The dashboard: records, catalog, access control, stopping and resuming."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from fewer.dash import catalog as catalog_module
from fewer.dash import control, records, server
from fewer.dash.catalog import Catalog
from fewer.dash.control import LOG, Control
from fewer.dash.guard import choose_token
from fewer.dash.records import Curve, EventTally, GrowingFile, read_last_lines
from fewer.dash.server import REPORT
from fewer.errors import RunError, SettingError
from fewer.report.page import PAGE
from fewer.report.style import assign_styles
from fewer.runs.directory import RunDirectory
from fewer.runs.files import in_use, writer_pid
from tests.dash.harness import (
    FINISHED,
    RESTORE_CTRL_C,
    STOPPED,
    describe_run,
    metrics,
    running,
    serving,
    wait_for,
    write_run,
)
from tests.test_cli import call

# --- records --------------------------------------------------------------------------------------------------


def test_pages_of_lines_from_the_end(tmp_path: Path) -> None:
    file = tmp_path / "file"
    lines = [f"line {number} {'x' * (number % 50)}".encode() for number in range(5000)]
    file.write_bytes(b"".join(line + b"\n" for line in lines) + b"half a li")
    read_lines, before, pages = [], None, 0
    while before != 0:
        page, before = read_last_lines(file, 70, before)
        read_lines += page
        pages += 1
    assert read_lines == lines[::-1] and pages == -(-5000 // 70)
    assert read_last_lines(tmp_path / "none", 5) == ([], 0)
    file.write_bytes(b"")
    assert read_last_lines(file, 5) == ([], 0)
    file.write_bytes(b"one\n")
    assert read_last_lines(file, 5) == ([b"one"], 0)


def test_a_growing_file_is_read_once_and_only_in_complete_lines(tmp_path: Path) -> None:
    file = tmp_path / "file"
    growing = GrowingFile(file)
    assert growing.read_new_lines() == ([], False)
    file.write_bytes(b"one\ntw")
    assert growing.read_new_lines() == ([b"one"], False)
    with file.open("ab") as more:
        more.write(b"o\n")
    assert growing.read_new_lines() == ([b"two"], False) and growing.read_new_lines() == ([], False)


def test_a_truncated_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo\n")
    growing = GrowingFile(file)
    growing.read_new_lines()
    file.write_bytes(b"one\n")  # shorter
    assert growing.read_new_lines() == ([b"one"], True)
    file.write_bytes(b"eno\ntwo\nthree\n")  # longer, with other content
    assert growing.read_new_lines() == ([b"eno", b"two", b"three"], True)


def test_one_request_reads_a_slice_but_a_long_line_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SLICE", 10)
    file = tmp_path / "file"
    file.write_bytes(b"1234\n" * 4 + b"x" * 55 + b"\n")
    growing = GrowingFile(file)
    assert growing.read_new_lines()[0] == growing.read_new_lines()[0] == [b"1234"] * 2
    assert growing.read_new_lines()[0] == [b"x" * 55]


def test_a_curve_is_thinned_out_and_keeps_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=0)
    with (run / "metrics.jsonl").open("w") as file:
        for number in range(1, 1203):
            file.write(json.dumps({**metrics(number), "clients": {"0": 1.0}}) + "\n")
    curve = Curve.open(run)
    points = curve.points()
    assert len(points) == 401 and points[-1]["round"] == 1202 and "clients" not in points[0]
    assert {b["round"] - a["round"] for a, b in pairwise(points)} == {3}
    (run / "metrics.jsonl").write_text(json.dumps(metrics(1)) + "\n")  # a resumed run removes later rounds
    assert [point["round"] for point in curve.points()] == [1]


def test_the_tally_counts_repeated_rounds_once(tmp_path: Path) -> None:
    absent = [
        {"event": "absent", "round": number, "client": 1, "reason": "late", "handler": "train"} for number in (1, 2, 3)
    ]
    resumed = {"event": "resume", "round": 2}
    run = write_run(tmp_path / "run", events=[*absent, STOPPED, resumed, {**absent[2], "reason": "dropped"}])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "abs\n{"event": "absent"}\n')  # one truncated by a kill, and an incomplete one
    totals = EventTally.open(run).update()
    assert totals["absent"] == {"late": 2, "dropped": 1, "?": 1} and totals["complete"] and totals["fraction_read"] == 1
    train, score = totals["traffic"]
    assert train == {"direction": "up", "kind": "train", "messages": 3, "bytes": 3000}
    assert score == {"direction": "down", "kind": "evaluate/score", "messages": 3, "bytes": 27}


# --- catalog -------------------------------------------------------------------------------------


def states(catalog: Catalog) -> dict[str, str]:
    catalog.refresh(now=True)
    return {run.name: run.state for run in catalog.entries()}


@contextmanager
def hold_lock(run: Path) -> Iterator[None]:
    with (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_runs_are_found_with_their_states(tmp_path: Path) -> None:
    write_run(tmp_path / "done", events=[FINISHED])
    write_run(tmp_path / "more/stopped", events=[STOPPED])
    write_run(tmp_path / "more/deep/killed")
    write_run(tmp_path / "again", done=10, events=[FINISHED, {"time": 3, "event": "resume", "round": 10}])
    (tmp_path / "none").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/settings.json").write_text("{")
    write_run(tmp_path / ".hidden/run")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "more")
    catalog = Catalog(tmp_path)
    expected = {"done": "finished", "more/stopped": "stopped", "more/deep/killed": "crashed", "again": "finished"}
    assert states(catalog) == {**expected, "bad": "damaged"}
    with hold_lock(tmp_path / "more/stopped"):
        assert states(catalog)["more/stopped"] == "stopped"  # nothing has been written yet
        with (tmp_path / "more/stopped/events.jsonl").open("a") as file:
            file.write('{"time": 4, "event": "resume", "round": 3}\n')
        assert states(catalog)["more/stopped"] == "running"
    assert states(catalog)["more/stopped"] == "crashed"
    row = next(run.row for run in catalog.entries() if run.name == "done")
    assert (row["round"], row["rounds"], row["accuracy"], row["up"]) == (3, 10, pytest.approx(0.3), 3000)
    assert states(Catalog(tmp_path / "done")) == {"done": "finished"}


def test_new_and_removed_runs_are_detected(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    assert states(catalog) == {}
    write_run(tmp_path / "a/one", events=[FINISHED])
    assert list(states(catalog)) == ["a/one"]
    before = catalog.revision
    catalog.refresh(now=True)
    assert catalog.revision == before
    (tmp_path / "a/one").rename(tmp_path / "a/two")
    assert list(states(catalog)) == ["a/two"] and catalog.discovered == 2


def test_the_list_shows_the_last_evaluated_accuracy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", events=[FINISHED])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(4, None)) + "\n" + json.dumps(metrics(5, None)) + "\n")
    catalog = Catalog(tmp_path)
    catalog.refresh()
    (entry,) = catalog.entries()
    assert (entry.row["round"], entry.row["accuracy"]) == (5, pytest.approx(0.3))


def test_runs_are_found_six_directories_deep(tmp_path: Path) -> None:
    write_run(tmp_path / "1/2/3/4/5/6", events=[FINISHED])
    write_run(tmp_path / "a/2/3/4/5/6/7", events=[FINISHED])
    assert list(states(Catalog(tmp_path))) == ["1/2/3/4/5/6"]


def test_a_slow_disk_is_not_scanned_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, scans = [100.0], []
    catalog = Catalog(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def fake_find() -> None:
        scans.append(clock[0])
        clock[0] += 2.0

    monkeypatch.setattr(catalog, "_find_runs", fake_find)
    for _ in range(60):
        catalog.refresh()
        clock[0] += 1.0
    assert len(scans) == 2 and scans[1] - scans[0] >= 40


def test_a_recreated_run_is_counted_again(tmp_path: Path) -> None:
    absent = {"time": 1.5, "event": "absent", "round": 1, "client": 3, "reason": "late", "handler": "train"}
    run = write_run(tmp_path / "run", events=[absent, FINISHED])
    catalog = Catalog(tmp_path)
    catalog.refresh(now=True)
    assert catalog.tally(catalog.entries()[0])["absent"] == {"late": 1}
    shutil.rmtree(run)
    write_run(run, rounds=7, events=[absent, absent, FINISHED])
    catalog.refresh(now=True)
    totals = catalog.tally(catalog.entries()[0])
    assert totals["absent"] == {"late": 2} and totals["traffic"][0]["messages"] == 3


def test_a_user_method_has_the_name_and_style_that_reports_give_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "/home/me/mine.py:FedMedian", events=[FINISHED])
    text = (run / "events.jsonl").read_text().replace("/home/me/mine.py:FedMedian", "fedmedian")
    (run / "events.jsonl").write_text(text)
    catalog = Catalog(tmp_path)
    catalog.refresh(now=True)
    row = catalog.entries()[0].row
    assert row["method"] == "fedmedian"
    assert (row["color"], row["marker"], row["dash"]) == assign_styles(["fedmedian"])["fedmedian"]


def bytes_read(action: object) -> int:
    """The number of bytes that this process reads during an action."""

    def total_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = total_read()
    action()  # type: ignore[operator]
    return total_read() - before


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io, which only Linux has")
def test_only_changes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "CLOCK_TICK", 0.0)
    monkeypatch.setattr(records, "SLICE", 1 << 20)
    for number in range(200):
        write_run(tmp_path / f"run-{number}", events=[FINISHED])
    long = tmp_path / "run-7"
    event = (
        json.dumps({"time": 1.0, "event": "absent", "round": 1, "client": 3, "reason": "late", "handler": "train"})
        + "\n"
    )
    (long / "events.jsonl").write_text(event * 50_000)
    size = (long / "events.jsonl").stat().st_size
    assert size > 4 * records.SLICE
    catalog = Catalog(tmp_path)
    first_read = bytes_read(lambda: catalog.refresh(now=True))
    assert 100_000 < first_read < 1_000_000  # settings and last lines, not 5 MB of events
    opened: list[object] = []
    monkeypatch.setattr(os, "scandir", opened.append)
    assert bytes_read(lambda: catalog.refresh(now=True)) < 10_000 and opened == []
    monkeypatch.undo()
    monkeypatch.setattr(records, "SLICE", 1 << 20)
    assert bytes_read(lambda: read_last_lines(long / "events.jsonl", 50)) < 2 * records.BLOCK
    assert bytes_read(lambda: read_last_lines(long / "events.jsonl", 50, size // 2)) < 2 * records.BLOCK
    (run,) = [run for run in catalog.entries() if run.path == long]
    answers = 0
    while True:
        totals: dict[str, object] = {}
        assert bytes_read(lambda: totals.update(catalog.tally(run))) < records.SLICE + records.BLOCK  # noqa: B023
        answers += 1
        if totals["complete"]:
            break
    assert totals["absent"] == {"late": 50_000} and answers == -(-size // records.SLICE)
    with (long / "events.jsonl").open("a") as file:
        file.write(event)
    assert bytes_read(lambda: catalog.refresh(now=True)) < 4 * records.BLOCK
    assert bytes_read(lambda: catalog.tally(run)) < records.BLOCK and catalog.tally(run)["absent"] == {"late": 50_001}


# --- access control ----------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs/one", events=[FINISHED])
    write_run(tmp_path / "runs/two", "fedprox", events=[STOPPED])
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "runs"


def test_the_list_is_filtered_sorted_and_paged(runs: Path) -> None:
    with serving(runs) as site:
        page = site.get("runs")
        assert page["matches"] == page["total"] == 2 and page["counts"]["finished"] == page["counts"]["stopped"] == 1
        assert [row["name"] for row in site.get("runs?sort=name&down=0")["rows"]] == ["one", "two"]
        assert [row["name"] for row in site.get("runs?sort=name&limit=1&from=1")["rows"]] == ["one"]
        assert [row["name"] for row in site.get("runs?find=PROX+digits")["rows"]] == ["two"]
        assert [row["name"] for row in site.get("runs?state=finished")["rows"]] == ["one"]
        for query in ("sort=path", "state=odd", "from=-1", "limit=x"):
            assert site.ask(f"/api/runs?{query}")[0] == 400


def test_the_api_of_a_run(runs: Path) -> None:
    (runs / "one/report").mkdir()
    (runs / "one/report/report.html").write_text("<h1>report</h1>")
    with serving(runs) as site:
        endpoint = f"runs/{site.row('one')['id']}"
        info = site.get(endpoint)
        assert info["method"]["lr"] == 0.1 and info["report"] and not info["log"] and info["why_not_resumable"] == ""
        assert [point["round"] for point in site.get(f"{endpoint}/curve")["points"]] == [1, 2, 3]
        assert [event["event"] for event in site.get(f"{endpoint}/events")["events"]] == ["finish", "start"]
        page = site.get(f"{endpoint}/ledger?limit=2")
        assert page["rows"] == [["3", "0", "down", "evaluate/score", "9"], ["3", "0", "up", "train", "1000"]]
        older = site.get(f"{endpoint}/ledger?before={page['before']}")
        assert len(older["rows"]) == 4 and older["before"] == 0
        status, text, headers = site.ask(f"/api/{endpoint}/report")
        assert (status, text) == (200, b"<h1>report</h1>") and headers["content-security-policy"].startswith("sandbox")
        ids = ",".join(row["id"] for row in site.get("runs?sort=name&down=0")["rows"])
        compared = site.get(f"compare?ids={ids},nobody")
        assert [run["color"] for run in compared["runs"]] == [site.row(name)["color"] for name in ("one", "two")]
        assert len({run["color"] for run in compared["runs"]}) == 2 and compared["differing"] == []


def test_the_report_of_a_comparison(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / f"table/{name}", events=[FINISHED])
    write_run(tmp_path / "other", events=[FINISHED])
    (tmp_path / "table/report").mkdir()
    (tmp_path / "table/report/report.html").write_text("both")
    with serving(tmp_path) as site:
        ids = {name: site.row(name)["id"] for name in ("table/one", "table/two", "other")}
        assert site.get(f"compare?ids={ids['table/one']},{ids['table/two']}")["report"]
        assert not site.get(f"compare?ids={','.join(ids.values())}")["report"]
        status, text, headers = site.ask(f"/api/runs/{ids['table/two']}/report?together=1")
        assert (status, text) == (200, b"both") and headers["content-security-policy"].startswith("sandbox")
        assert site.ask(f"/api/runs/{ids['other']}/report?together=1")[0] == 409
    with serving(tmp_path / "table/one") as site:  # files above the root are not served
        run_id = site.row("one")["id"]
        assert not site.get(f"compare?ids={run_id}")["report"]
        assert site.ask(f"/api/runs/{run_id}/report?together=1")[0] == 409


def test_nan_and_infinity_become_null(runs: Path) -> None:
    with (runs / "one/metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accuracy": NaN, "loss": Infinity, "up": 1, "down": 1, "seconds": 1}\n')
    with serving(runs) as site:
        assert site.row("one")["accuracy"] is None


@pytest.mark.parametrize(
    "path",
    ["../secret", "..%2fsecret", "%2e%2e/secret", "/etc/passwd", "runs/one", "one", "000000000000", "..", "a%00b"],
)
def test_no_path_leads_out(runs: Path, path: str) -> None:
    with serving(runs) as site:
        for address in (f"/api/runs/{path}", f"/api/runs/{path}/log", f"/static/{path}", f"/{path}"):
            status, text, _ = site.ask(address)
            assert status in (400, 404, 409) and "secret" not in str(text), address


def test_other_sites_are_refused(runs: Path) -> None:
    with serving(runs, names=["dash.example.org"]) as site:
        endpoint, port = f"/api/runs/{site.row('two')['id']}/resume", site.port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::1", "localhost.evil"):
            assert site.ask("/api/runs", headers={"Host": host})[0] in (400, 421), host
        for host in ("localhost", f"localhost:{port}", "[::1]:1", "DASH.example.org", f"127.0.0.1:{port}"):
            assert site.ask("/api/runs", headers={"Host": host})[0] == 200, host
        for origin in (
            "",
            "null",
            "http://evil.example",
            f"http://127.0.0.1:{port + 1}",
            "http://127.0.0.1",
            "http://[",
        ):
            assert site.ask(endpoint, "POST", {"Origin": origin} if origin else {})[0] == 403, origin
        assert site.ask(endpoint, "GET")[0] == 405
        headers = site.ask("/")[2]
        assert (
            "script-src 'self'" in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"
        )
        assert "access-control-allow-origin" not in headers
        assert not (runs / "two" / LOG).exists()


def test_with_a_token_nothing_about_runs_is_public(runs: Path) -> None:
    token = "0123456789abcdef"
    with serving(runs, token=token) as site:
        assert site.ask("/")[0] == site.ask("/static/app.js")[0] == 200
        for path in ("runs", "follow", "compare?ids=a", "runs/abc", "runs/abc/report", "nothing"):
            assert site.ask(f"/api/{path}")[0] == 401, path
        assert site.ask("/api/runs", headers={"Authorization": f"Bearer {token}"})[0] == 200
        for wrong in (token[:-1], token + "0", "", "é"):
            assert (
                site.ask("/api/runs", headers={"Authorization": f"Bearer {wrong}".encode().decode("latin1")})[0] == 401
            )
            assert site.ask("/api/login", "POST", {"Origin": site.address}, wrong or " ")[0] == 403
        assert site.ask("/api/login", "POST", {"Origin": "http://evil.example"}, token)[0] == 403
        status, _, headers = site.ask("/api/login", "POST", {"Origin": site.address}, token)
        cookie = headers["set-cookie"]
        assert status == 200 and "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and token not in cookie
        session = cookie.partition(";")[0]
        assert site.ask("/api/runs", headers={"Cookie": session})[0] == 200
        for wrong in (session[:-1], f"{session.partition('=')[0]}={token}", "odd=1", 'a="'):
            assert site.ask("/api/runs", headers={"Cookie": wrong})[0] == 401, wrong
        run_id = site.ask("/api/runs", headers={"Cookie": session})[1]["rows"][0]["id"]
        assert site.ask(f"/api/runs/{run_id}/stop", "POST", {"Origin": site.address})[0] == 401


def test_a_read_only_dashboard_has_no_actions(runs: Path) -> None:
    with serving(runs, read_only=True) as site:
        assert site.get("runs")["read_only"]
        for action in ("stop", "resume"):
            assert site.post(f"runs/{site.row('two')['id']}/{action}")[0] == 404
        assert not (runs / "two" / LOG).exists()


def test_every_response_keeps_other_sites_out(runs: Path) -> None:
    (runs / "one/report").mkdir()
    (runs / "one/report/report.html").write_text("<h1>report</h1>")
    with serving(runs) as site:
        for path in ("/", "/api/runs", "/static/app.js", "/nothing"):
            headers = site.ask(path)[2]
            assert "frame-ancestors 'none'" in headers["content-security-policy"], path
            assert headers["cross-origin-resource-policy"] == headers["cross-origin-opener-policy"] == "same-origin"
            assert headers["referrer-policy"] == "no-referrer"
        policy = site.ask(f"/api/runs/{site.row('one')['id']}/report")[2]["content-security-policy"]
    parts = {name: rest for name, _, rest in (part.strip().partition(" ") for part in policy.split(";"))}
    assert parts["sandbox"].split() == ["allow-scripts", "allow-downloads"] and parts["default-src"] == "'none'"
    assert not parts.keys() & {"connect-src", "form-action", "frame-src"}


def test_two_dashboards_do_not_share_a_cookie(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    with serving(tmp_path, token=token) as first, serving(tmp_path, token=token) as second:
        responses = [site.ask("/api/login", "POST", {"Origin": site.address}, token)[2] for site in (first, second)]
    assert len({headers["set-cookie"].partition("=")[0] for headers in responses}) == 2


def test_responses_are_limited(tmp_path: Path) -> None:
    for number in range(server.MAX_ROWS + 5):
        write_run(tmp_path / f"run-{number}", events=[FINISHED])
    with serving(tmp_path) as site:
        rows = site.get("runs?limit=9999")["rows"]
        assert len(rows) == server.MAX_ROWS
        ids = ",".join(row["id"] for row in rows)
        compared = site.get(f"compare?ids={ids}")
        assert len(compared["runs"]) == compared["max_runs"] == server.MAX_COMPARED


@pytest.mark.parametrize("text", ["0123456789abcde\x07f", "0123456789 abcdef", "é" * 20])
def test_a_token_that_no_header_can_carry_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(SettingError, match="16 or more letters"):
        choose_token("127.0.0.1", tmp_path / "token")


def test_the_token_is_not_in_the_command_of_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    server.serve(tmp_path, "0.0.0.0", 0, browse=True)
    (address,) = opened
    assert "token" not in address and address.endswith("/")


def test_followers_receive_changes(runs: Path) -> None:
    with serving(runs) as site:
        run_id = site.row("two")["id"]
        with urllib.request.urlopen(f"{site.address}/api/follow?ids={run_id}", timeout=10) as stream:

            def next_change() -> dict[str, object]:
                line = stream.readline().decode()
                assert stream.readline() == b"\n"
                change: dict[str, object] = json.loads(line.removeprefix("data: "))
                return change

            first = next_change()
            assert [row["round"] for row in first["rows"]] == [3]  # type: ignore[attr-defined]
            with (runs / "two/metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics(4)) + "\n")
            start = time.monotonic()
            assert [row["round"] for row in next_change()["rows"]] == [4]  # type: ignore[attr-defined]
            assert time.monotonic() - start < 5
            write_run(runs / "three")
            assert next_change()["total"] == 3


# --- stopping and resuming ------------------------------------------------------------------------------------


def test_only_the_process_that_holds_a_run_is_its_writer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    other = write_run(tmp_path / "other")
    with pytest.raises(RunError, match="is not running"):
        writer_pid(run)
    with RunDirectory.open(run), RunDirectory.open(other):
        assert in_use(run) and writer_pid(run) == os.getpid()
        for text, message in (
            ("", "not on this machine"),
            ("x", "not on this machine"),
            ("99999999", "not on this machine"),
        ):
            (run / "lock").write_text(text)
            with pytest.raises(RunError, match=message):
                writer_pid(run)
        with subprocess.Popen(["sleep", "60"]) as unrelated:  # as if another process had got the number
            (run / "lock").write_text(str(unrelated.pid))
            with pytest.raises(RunError, match=f"a process other than {unrelated.pid}"):
                Control().stop(run)
            assert unrelated.poll() is None
            unrelated.kill()
    assert not in_use(run)


def test_a_full_disk_is_reported_when_the_lock_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")

    def full() -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "getpid", full)
    with pytest.raises(RunError, match="No space left on device.*fewer resume"), RunDirectory.open(run):
        pass
    assert not in_use(run)


HOLDER = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == "ignores" else signal.default_int_handler)
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(str(os.getpid())), lock.flush()
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["ignores", "heeds"])
def test_a_process_that_ignores_ctrl_c_is_not_reported_as_stopped(tmp_path: Path, how: str) -> None:
    run = write_run(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run / "lock"), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        if how == "ignores":
            with pytest.raises(RunError, match=f"process {holder.pid} ignores Ctrl-C.*use kill {holder.pid}"):
                Control().stop(run)
            holder.kill()
        else:
            assert Control().stop(run) == holder.pid
        assert holder.wait(10) == (-signal.SIGKILL if how == "ignores" else -signal.SIGINT)


def test_runs_that_cannot_be_resumed_are_refused_with_a_reason(runs: Path) -> None:
    write_run(runs / "flower", runtime="flower", events=[STOPPED])
    write_run(runs / "own", objects=["data"], events=[STOPPED])
    (runs / "bad").mkdir()
    (runs / "bad/settings.json").write_text(describe_run("fedavg").replace("settings", "x"))
    reasons = {
        "flower": f"use fewer server --resume {runs / 'flower'} --keys",
        "own": "your own data: use fewer.resume(",
        "one": "is finished",
        "bad": "is damaged",
    }
    with serving(runs) as site:
        for name, reason in reasons.items():
            status, response = site.post(f"runs/{site.row(name)['id']}/resume")
            assert status == 409 and reason in response["error"], response
        with hold_lock(runs / "two"):
            (runs / "two/events.jsonl").touch()
            assert "is running" in site.post(f"runs/{site.row('two')['id']}/resume")[1]["error"]
        assert "is not running" in site.post(f"runs/{site.row('two')['id']}/stop")[1]["error"]


def test_the_output_of_a_resumed_run_is_kept(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RESUME_CODE", "import sys, time; print(*sys.argv[1:], flush=True); time.sleep(1)")
    with serving(runs) as site:
        endpoint = f"runs/{site.row('two')['id']}"
        status, _ = site.post(f"{endpoint}/resume")
        assert status == 200 and site.row("two")["state"] == "starting"
        assert "is starting" in site.post(f"{endpoint}/resume")[1]["error"]
        wait_for(lambda: site.row("two")["state"] == "stopped")
        assert site.get(f"{endpoint}/log")["lines"] == [f"resume {runs / 'two'}"] and site.get(endpoint)["log"]


def test_a_run_that_passes_to_another_process_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    with subprocess.Popen(["sleep", "60"]) as process:
        pids = iter([process.pid, process.pid + 1])
        monkeypatch.setattr(control, "writer_pid", lambda path: next(pids))
        with pytest.raises(RunError, match="has just passed to another process"):
            Control().stop(run)
        assert process.poll() is None
        process.kill()


def test_a_resumed_run_is_independent_of_the_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the dashboard does not reach it, and modules in this directory are not imported."""
    run = write_run(tmp_path / "run", events=[STOPPED])
    monkeypatch.setattr(
        control, "_RESUME_CODE", "import os, sys; print(os.getsid(0) == os.getpid(), sys.flags.safe_path)"
    )
    controller = Control()
    controller.resume(run, {"settings": {"runtime": "inline"}, "objects": []})
    controller._started[run][1].wait(40)
    assert (run / LOG).read_text() == "True True\n"


def test_a_run_is_not_started_twice(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RESUME_CODE", "import time; time.sleep(60)")
    barrier = threading.Barrier(2, timeout=0.5)
    resume = Control.resume

    def resume_together(self: Control, run: Path, metadata: dict[str, object]) -> int:
        with suppress(threading.BrokenBarrierError):  # if there is no second request
            barrier.wait()
        return resume(self, run, metadata)

    monkeypatch.setattr(Control, "resume", resume_together)
    responses: list[tuple[int, dict[str, int]]] = []
    with serving(runs) as site:
        endpoint = f"runs/{site.row('two')['id']}/resume"
        threads = [threading.Thread(target=lambda: responses.append(site.post(endpoint))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for _, answer in responses:
        if "process" in answer:
            os.kill(answer["process"], signal.SIGKILL)
    assert sorted(status for status, _ in responses) == [200, 409]


# --- the command ----------------------------------------------------------------------------------------------


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no directory" in call("dash", tmp_path / "none", code=2).stderr
    (tmp_path / "token").write_text("short")
    for file, message in (("token", "16 or more letters"), ("nofile", "cannot read --token-file")):
        assert message in call("dash", tmp_path, "--token-file", tmp_path / file, code=2).stderr
    with serving(tmp_path) as site:
        error = call("dash", tmp_path, "--port", str(site.port), code=2).stderr
    assert error.count("\n") == 1 and "Address already in use (choose another with --port N" in error
    for host in ("192.0.2.1", "300.1.1.1"):
        error = call("dash", tmp_path, "--host", host, code=2).stderr
        assert "cannot listen on" in error and "(--host must be an address of this machine)" in error
    monkeypatch.setattr("fewer.dash.find_spec", lambda name: None)
    assert "pip install 'fewer[dash]'" in call("dash", tmp_path, code=2).stderr


def test_the_dashboard_does_not_import_torch() -> None:
    code = "import sys, fewer.dash.server; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert f"report/{PAGE}" == REPORT


def test_from_launch_to_ctrl_c(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    process = subprocess.Popen(
        [sys.executable, "-m", "fewer", "dash", str(tmp_path), "--host", "0.0.0.0", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=RESTORE_CTRL_C,
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        port, token = line.strip().rpartition(":")[2].split("/#token=")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/follow", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=20) as stream:
            assert b'"total":1' in stream.readline()
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
    finally:
        process.kill()  # it listens on all addresses
    assert time.monotonic() - start < 5
    assert process.returncode == 130 and errors == "\nStopped.\n"


def test_a_real_run_is_watched_and_stopped(tmp_path: Path) -> None:
    with running(tmp_path / "run") as process, serving(tmp_path) as site:
        wait_for(lambda: site.get("runs")["total"] and site.row("run")["round"] > 1)
        row = site.row("run")
        assert row["state"] == "running"
        assert site.post(f"runs/{row['id']}/stop") == (200, {"process": process.pid})
        process.join(20)
        assert process.exitcode == 0
        wait_for(lambda: site.row("run")["state"] == "stopped")
        assert str(site.row("run")["reason"]).startswith("KeyboardInterrupt")
        assert [event["event"] for event in site.get(f"runs/{row['id']}/events")["events"]] == ["stop", "start"]
