"""Records: growing files are read once, in complete lines."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from fewer.runs import records
from fewer.runs.reader import RunFollower
from fewer.runs.records import GrowingFile, read_last_lines
from tests.dash.harness import STOPPED, metrics, write_run


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
    curve = RunFollower(run)
    points = curve.curve()
    assert len(points) == 401 and points[-1]["round"] == 1202 and "clients" not in points[0]
    assert {b["round"] - a["round"] for a, b in pairwise(points)} == {3}
    (run / "metrics.jsonl").write_text(json.dumps(metrics(1)) + "\n")  # a resumed run removes later rounds
    assert [point["round"] for point in curve.curve()] == [1]


def test_the_tally_counts_repeated_rounds_once(tmp_path: Path) -> None:
    absent = [
        {"event": "absent", "round": number, "client": 1, "reason": "late", "handler": "train"} for number in (1, 2, 3)
    ]
    resumed = {"event": "resume", "round": 2}
    run = write_run(tmp_path / "run", events=[*absent, STOPPED, resumed, {**absent[2], "reason": "dropped"}])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "abs\n{"event": "absent"}\n')  # one truncated by a kill, and an incomplete one
    totals = RunFollower(run).totals()
    assert totals["absent"] == {"late": 2, "dropped": 1, "?": 1} and totals["complete"] and totals["fraction_read"] == 1
    train, score = totals["traffic"]
    assert train == {"direction": "up", "kind": "train", "messages": 3, "bytes": 3000}
    assert score == {"direction": "down", "kind": "evaluate/score", "messages": 3, "bytes": 27}
