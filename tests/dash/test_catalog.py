"""The catalog finds runs and their states, and reads only changes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from fewer.dash import catalog as catalog_module
from fewer.dash.catalog import Catalog
from fewer.report.style import assign_styles
from fewer.runs import records
from fewer.runs.records import read_last_lines
from tests.dash.harness import FINISHED, STOPPED, hold_lock, metrics, write_run


def states(catalog: Catalog) -> dict[str, str]:
    catalog.refresh(now=True)
    return {run.name: run.state for run in catalog.entries()}


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
    assert (row["round"], row["rounds"], row["value"], row["up"]) == (3, 10, pytest.approx(0.3), 3000)
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
    assert (entry.row["round"], entry.row["value"]) == (5, pytest.approx(0.3))


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
    assert catalog.follow(catalog.entries()[0]).totals()["absent"] == {"late": 1}
    shutil.rmtree(run)
    write_run(run, rounds=7, events=[absent, absent, FINISHED])
    catalog.refresh(now=True)
    totals = catalog.follow(catalog.entries()[0]).totals()
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
        assert bytes_read(lambda: totals.update(catalog.follow(run).totals())) < records.SLICE + records.BLOCK  # noqa: B023
        answers += 1
        if totals["complete"]:
            break
    assert totals["absent"] == {"late": 50_000} and answers == -(-size // records.SLICE)
    with (long / "events.jsonl").open("a") as file:
        file.write(event)
    assert bytes_read(lambda: catalog.refresh(now=True)) < 4 * records.BLOCK
    assert bytes_read(lambda: totals.update(catalog.follow(run).totals())) < records.BLOCK
    assert totals["absent"] == {"late": 50_001}
