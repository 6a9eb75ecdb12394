"""Run directories are read, grouped and checked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fewer.errors import RunError
from fewer.report.groups import RunGroup
from fewer.report.page import tabulate_worst_clients, write_report
from fewer.runs.reader import RunReader
from tests.report.harness import copy_run, fake_run, group_runs

# --- the page ---------------------------------------------------------------------------------------------------


def test_runs_with_different_settings_are_never_averaged(tmp_path: Path, runs: Path) -> None:
    original = runs / "fedavg-0"
    faster = copy_run(tmp_path, original, method={"lr": 0.3}, settings={"seed": 1})
    skewed = copy_run(tmp_path, original, settings={"seed": 1, "alpha": 0.1})
    pooled = copy_run(tmp_path, original, settings={"seed": 1, "runtime": "pool", "data_dir": "/elsewhere"})

    def seeds(*paths: Path) -> dict[str, list[int]]:
        return {group.label: [run.seed for run in group.runs] for group in group_runs(paths)}

    assert seeds(pooled, original) == {"fedavg": [0, 1]}
    assert seeds(original, faster) == {"fedavg lr=0.1": [0], "fedavg lr=0.3": [1]}
    assert seeds(original, skewed, runs / "local-0") == {
        "fedavg alpha=1.0": [0],
        "fedavg alpha=0.1": [1],
        "local": [0],
    }
    several = copy_run(tmp_path, original, settings={"alpha": 0.1, "drop": 0.1, "slow": 0.1})
    assert seeds(original, several) == {"fedavg": [0], "fedavg (2)": [0]}
    again = [copy_run(tmp_path, original), copy_run(tmp_path, original)]
    assert seeds(original, *again) == {"fedavg": [0], "fedavg (2)": [0], "fedavg (3)": [0]}
    assert seeds(original, original) == {"fedavg": [0]}


def test_absent_answers_of_a_repeated_round_count_once(tmp_path: Path, runs: Path) -> None:
    copy = copy_run(tmp_path, runs / "bold")
    events = (copy / "events.jsonl").read_text()
    (copy / "events.jsonl").write_text(events + events)
    assert group_runs([copy])[0].absent_counts == group_runs([runs / "bold"])[0].absent_counts


def make_run(
    history: list[dict[str, Any]], events: Sequence[dict[str, Any]] = (), path: Path = Path("run")
) -> RunReader:
    metadata = {"settings": {"method": "fedavg", "seed": 0}, "method": {"rounds": len(history)}, "objects": []}
    return fake_run(path, metadata, history, events)


def test_faults_of_repeated_rounds_do_not_count() -> None:
    absent = {"event": "absent", "round": 3, "client": 1, "reason": "late", "handler": "train"}
    events: list[dict[str, Any]] = [{"event": "start"}, {**absent, "round": 2}, absent, {"event": "resume", "round": 2}]
    run = make_run([{"round": number} for number in (1, 2, 3)], events)
    assert run.absent_counts == {"late": 1} and run.interruptions == 1
    # it had finished
    assert make_run([{"round": 1}], [{"event": "start"}, {"event": "resume", "round": 1}]).interruptions == 0


def test_an_unfinished_round_is_not_in_the_traffic(tmp_path: Path) -> None:
    (tmp_path / "ledger.csv").write_text("round,client,direction,kind,bytes\n1,0,up,train,5\n2,0,up,train,7\n")
    assert make_run([{"round": 1}], path=tmp_path).traffic == {("up", "train"): 5}


def test_the_worst_tenth_by_arithmetic() -> None:
    clients = {str(client): client / 100 for client in range(1, 21)}
    table = tabulate_worst_clients([RunGroup("fedavg", [make_run([{"round": 1, "clients": clients}])])])
    assert table.rows == [("fedavg", "10.5", "1.5", "client 1 1.0, client 2 2.0, client 3 3.0")]


def test_an_incomplete_last_line_is_ignored(tmp_path: Path, runs: Path) -> None:
    cut = copy_run(tmp_path, runs / "fedavg-0")
    text = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text + '{"round": 3, "acc')
    assert len(group_runs([cut])[0].runs[0].history) == 2


def test_incomplete_events_are_accepted() -> None:
    events: list[dict[str, Any]] = [{"event": "start"}, {"event": "resume"}, {"event": "absent"}]
    run = make_run([{"round": 1}], events)
    assert (run.method_name, run.interruptions, run.absent_counts) == ("fedavg", 1, {"?": 1})


def test_invalid_run_directories_are_errors(tmp_path: Path, runs: Path) -> None:
    out = tmp_path / "report"
    with pytest.raises(RunError, match="is not a run directory: it does not exist"):
        write_report([tmp_path / "nothing"], out)
    with pytest.raises(RunError, match="is not a run directory: it has no settings.json"):
        write_report([runs / "fedavg-0", tmp_path], out)
    with pytest.raises(RunError, match="no runs to report on"):
        write_report([], out)
    broken = copy_run(tmp_path, runs / "fedavg-0")
    (broken / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="has no completed round yet"):
        write_report([broken], out)
    (broken / "metrics.jsonl").write_text('{"round": 1, "acc\n')
    with pytest.raises(RunError, match="metrics.jsonl cannot be read"):
        write_report([broken], out)
    (broken / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="metrics.jsonl cannot be read"):  # the checkpoint has rounds
        write_report([broken], out)
    (broken / "settings.json").write_text('{"format": 2}')
    with pytest.raises(RunError, match="settings.json cannot be read"):
        write_report([broken], out)
    assert not out.exists()
    out.write_text("in the way")
    with pytest.raises(RunError, match="cannot write to .*: File exists"):
        write_report([runs / "fedavg-0"], out)


# --- bars, maps, traffic, rings ---------------------------------------------------------------------------------


def test_a_damaged_ledger_is_an_error(tmp_path: Path, runs: Path) -> None:
    broken = copy_run(tmp_path, runs / "fedavg-0")
    (broken / "ledger.csv").write_text("round,client,direction,kind,bytes\n1,2,up,train,many\n")
    with pytest.raises(RunError, match="ledger.csv cannot be read"):
        write_report([broken], tmp_path / "report")
