"""The progress of runs: a bar on a terminal and in a notebook, lines or nothing elsewhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fewer
from fewer import FedAvg
from fewer.data import Data


@pytest.fixture(scope="module")
def digits() -> Data:
    return fewer.data.load("digits", clients=3)


METHOD = FedAvg(rounds=2, local_steps=1)


def test_a_script_without_a_terminal_is_silent_unless_it_asks(
    digits: Data, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fewer.run(METHOD, digits, out=tmp_path / "run")
    fewer.compare([METHOD], digits)
    fewer.tune(METHOD, digits, trials=1)
    fewer.resume(tmp_path / "run")
    assert capfd.readouterr() == ("", "")
    fewer.run(METHOD, digits, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["fedavg", "round 1/2"], ["fedavg", "round 2/2"]]
    assert "accuracy" in lines[0] and "MB" in lines[0] and lines[0].endswith(" left") and lines[1].endswith(" total")


def test_labels_say_which_run_of_how_many(digits: Data, capfd: pytest.CaptureFixture[str]) -> None:
    fewer.compare([METHOD, "fedprox"], digits, seeds=2, rounds=1, tune=True, trials=2, progress=True)
    labels = [line.split("  ")[0] for line in capfd.readouterr().err.splitlines()]
    fedavg = ["fedavg trial 1/2", "fedavg trial 2/2", "1/4 fedavg seed 0", "2/4 fedavg seed 1"]
    assert labels == [
        *fedavg,
        "fedprox trial 1/2",
        "fedprox trial 2/2",
        "3/4 fedprox seed 0",
        "4/4 fedprox seed 1",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(
    digits: Data, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")

    class Print(fewer.Callback):
        def on_round_end(self, run: fewer.Run, metrics: Any) -> None:
            print("mine", run.round)

    result = fewer.run(METHOD, digits, callbacks=[Print()])
    shown = terminal.getvalue()
    assert "fedavg" in shown and "2/2 accuracy" in shown and f"{result.accuracy:.1%}" in shown and "━" in shown
    assert capfd.readouterr().out == "mine 1\nmine 2\n"  # standard output is not the terminal, and keeps its lines
    terminal.truncate(0)
    fewer.run(METHOD, digits, progress=False)
    assert not terminal.getvalue().strip("\0")


def test_a_notebook_shows_one_bar_per_cell(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    def display(content: dict[str, str], raw: bool, display_id: bool = False) -> Any:
        assert raw and display_id == (not shown)
        shown.append(content)
        return SimpleNamespace(update=display)

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(module, "display", display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    fewer.compare([METHOD, "fedprox"], digits, rounds=1)
    assert shown[0]["text/plain"].startswith("1/2 fedavg  0/1") and 'value="0.00" max="1"' in shown[0]["text/html"]
    assert shown[-1]["text/plain"].startswith("2/2 fedprox  1/1  accuracy")
    shown.clear()
    fewer.run(METHOD, digits, progress=False)
    shell.kernel = None  # IPython on a terminal that is no terminal here
    fewer.run(METHOD, digits)
    assert not shown


def test_a_comparison_shows_a_table_with_a_row_per_method(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")  # a dumb terminal shows the last state only
    monkeypatch.setenv("COLUMNS", "120")
    table = fewer.compare([METHOD, "fedprox"], digits, seeds=2, rounds=1, tune=True, trials=2)
    titles, *lines = terminal.getvalue().strip().splitlines()
    assert titles.split("  ")[0] == "method" and len(lines) == 4
    for line, row in zip([lines[1], lines[3]], table.rows, strict=True):
        name, _, runs, _, accuracy, *rest = line.split()
        assert (name, runs, accuracy) == (row.method, "2/2", f"{row.accuracy:.1%}")
        assert f"{row.mb_up + row.mb_down:.2f}"[:3] in " ".join(rest)
    assert [line.split("  ")[0] for line in lines] == ["fedavg, tuning", "fedavg", "fedprox, tuning", "fedprox"]


def test_many_runs_print_a_line_at_their_end_and_once_a_minute(
    digits: Data, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fewer.compare([FedAvg(rounds=3, local_steps=1)], digits, seeds=2, progress=True)
    lines = [line.split("  ")[:2] for line in capfd.readouterr().err.splitlines()]
    assert lines == [["1/2 fedavg seed 0", "round 3/3"], ["2/2 fedavg seed 1", "round 3/3"]]
    monkeypatch.setattr("fewer.runs.progress.LINE_SECONDS", 0.0)
    fewer.compare([FedAvg(rounds=3, local_steps=1)], digits, progress=True)
    assert len(capfd.readouterr().err.splitlines()) == 3
