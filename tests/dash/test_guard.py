"""Access control: paths, other sites, tokens."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from fewer.dash import server
from fewer.dash.control import LOG
from fewer.dash.guard import choose_token
from fewer.errors import SettingError
from tests.dash.harness import FINISHED, serving, write_run


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
