"""`fewer resume`, and the hints to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fewer.dash.control import why_not_resumable
from fewer.errors import QuorumLost
from fewer.report.page import write_report
from fewer.runs.reader import RunReader
from tests.helpers import DIGITS, call, run_contents

SMALL = [*DIGITS, "-o", "local_steps=1", "--no-report", "--out"]


def test_a_finished_run_gets_more_rounds(tmp_path: Path) -> None:
    run = tmp_path / "with space"
    call("run", "fedavg", "--rounds", "1", *SMALL, run)
    finished = call("resume", run, "--no-report")
    hint = f"{run} is already finished: 1 rounds. To add some: fewer resume '{run}' --rounds 6"
    assert hint in finished.stderr and "resumes after" not in finished.stderr
    assert json.loads(call("resume", run, "--no-report", "--json", "-").stdout)["round"] == 1
    call("resume", run, "--rounds", "2", "--no-report")
    call("run", "fedavg", "--rounds", "2", *SMALL, tmp_path / "two")
    assert run_contents(run) == run_contents(tmp_path / "two")
    assert RunReader(run).metadata["hash"] == RunReader(tmp_path / "two").metadata["hash"]
    assert "already finished: 2 rounds" in call("resume", run, "--rounds", "2", "--no-report").stderr
    wrong = call("resume", run, "--rounds", "1", code=2).stderr
    assert wrong == f"fewer: rounds = 1, but {run} has done 2 (allowed: more than 2)\n"
    page = write_report([run, tmp_path / "two"], tmp_path / "report")[0].read_text()
    assert "is at round" not in page and RunReader(run).rounds == 2
    assert "exists already: choose another --out\n" in call("run", "fedavg", *SMALL, run, code=2).stderr


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_the_hint_quotes_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "my run"
    with monkeypatch.context() as patch:
        patch.setattr("fewer.runs.engine._run_round", interrupt)
        assert f"Resume with: fewer resume '{run}'\n" in call("run", "fedavg", *SMALL, run, code=130).stderr
        assert f"Resume with: fewer resume '{run}'\n" in call("resume", run, code=130).stderr
        compared = call("compare", "fedavg", "local", *SMALL, tmp_path / "a b", code=130).stderr
        assert f"Continue with the same command and --out '{tmp_path / 'a b'}'" in compared
    exists = call("run", "fedavg", *SMALL, run, code=2).stderr
    assert f"exists already: choose another --out, or run fewer resume '{run}'\n" in exists
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    assert "choose another --out\n" in call("run", "fedavg", *SMALL, tmp_path / "other", code=2).stderr


def test_a_run_that_has_not_started_has_no_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fewer.runs.engine.RunDirectory.create", interrupt)
    assert call("run", "fedavg", *SMALL, tmp_path / "run", code=130).stderr == "\nStopped.\n"


@pytest.mark.parametrize(
    ("settings", "helps"),
    [
        (["fedavg", "-o", "lr=1e9"], False),  # its weights are not finite
        (["fedmk", "-o", "outer_lr=1e20", "-o", "matching_lr=1e20"], False),  # its clients are unable
        (["fedavg", "--drop", "1"], True),  # with --drop 0
        (["fedavg", "-o", "lr=1e9", "--corrupt", "1"], True),
        (["fedavg", "-o", "lr=1e9", "--drop", "0.5", "--quorum", "1"], False),
    ],
)
def test_a_lost_quorum_has_a_hint_only_if_resuming_can_help(settings: list[str], helps: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = call("run", *settings, "--data", "digits", "--clients", "4", "--no-report", "--out", run, code=2).stderr
    assert "clients answered" in stopped and ("Resume with" in stopped) == helps
    assert ("fewer resume" in call("run", "fedavg", *SMALL, run, code=2).stderr) == helps
    assert RunReader(run).can_resume == helps
    reason = why_not_resumable(RunReader(run))
    assert (not reason) if helps else reason.startswith("it would stop again: QuorumLost: round 1: 0 of 4 clients")


def test_a_wrong_setting_has_no_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    call("run", "fedavg", "--rounds", "1", *SMALL, run)
    assert "Resume with" not in call("resume", run, "--runtime", "pol", code=2).stderr
    assert "Resume with" not in call("resume", run, "--rounds", "0", code=2).stderr

    def lose_quorum(*_: Any) -> None:
        raise QuorumLost("too few")

    monkeypatch.setattr("fewer.runs.engine._run_round", lose_quorum)
    assert f"too few\nResume with: fewer resume {run}\n" in call("resume", run, "--rounds", "2", code=2).stderr
