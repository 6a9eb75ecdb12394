"""The API of the dashboard, its changes, and its command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from fewer.dash.server import REPORT
from fewer.report.page import PAGE
from tests.dash.harness import FINISHED, RESTORE_CTRL_C, metrics, running, serving, write_run
from tests.helpers import call, wait_for

# --- access control ---------------------------------------------------------------------------------------------


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
        assert page["rows"] == [[3, 0, "down", "evaluate/score", 9], [3, 0, "up", "train", 1000]]
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
        assert site.row("one")["value"] is None


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


# --- the command ------------------------------------------------------------------------------------------------


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


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", events=[FINISHED])
    names = {"names": ["healthy", "ill"], "support": [98, 2]}
    scores = {"recall": [0.99, 0.0], "precision": [0.98, 0.0], "f1": [0.98, 0.0]}
    last = {
        **metrics(3, 0.975),
        "majority_baseline": 0.98,
        "cost": 2.5,
        "classes": {**names, **scores},
        "client_metrics": {"4": {"samples": 10, "accuracy": 0.9}},
    }
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (last, metrics(4, None))))
    settings = json.loads((run / "settings.json").read_text())
    settings["settings"]["metrics"] = ["costs.py:cost"]
    (run / "settings.json").write_text(json.dumps(settings))
    with serving(tmp_path) as site:
        figures = site.get(f"runs/{site.row('run')['id']}/figures")
    assert figures["metrics"] == [
        {"name": "majority baseline", "value": 0.98, "percent": True},
        {"name": "macro F1", "value": None, "percent": True},
        {"name": "ECE", "value": None, "percent": True},
        {"name": "cost", "value": 2.5, "percent": False},
    ]
    assert figures["classes"][1] == {"class": "ill", "support": 2, "recall": 0.0, "precision": 0.0, "f1": 0.0}
    assert figures["clients"] == [{"client": 4, "samples": 10, "accuracy": 0.9}]
    assert figures["shortfall"].startswith("97.5 % is below the majority baseline: always predicting 'healthy'")
