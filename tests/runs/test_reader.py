"""The reader of run directories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fewer.errors import RunError
from fewer.runs.directory import RunDirectory
from fewer.runs.reader import FORMAT, PARTS, RunReader

LEDGER = "round,client,direction,kind,bytes\n1,0,down,train,8\n1,0,up,train,5\n1,0,up,evaluate/score,9\n"


def write_run(path: Path, *events: dict[str, object]) -> Path:
    path.mkdir()
    metadata = {**dict.fromkeys(PARTS), "format": FORMAT, "settings": {"method": "fedavg"}, "method": {"rounds": 2}}
    (path / "settings.json").write_text(json.dumps({**metadata, "objects": []}))
    (path / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n{"round": 2, "acc')
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "ledger.csv").write_text(LEDGER)
    return path


def test_reading_a_run_does_not_import_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"event": "start", "method": "fedavg"}, {"event": "stop", "reason": "by hand"})
    code = (
        "import sys; from pathlib import Path; from fewer.runs.reader import RunFollower, RunReader\n"
        "path = Path(sys.argv[1]); run = RunReader(path)\n"
        "print(run.method_name, run.history, dict(run.traffic), run.absent_counts, run.status(), run.unfinished)\n"
        "RunFollower(path).totals(); import fewer.dash.catalog\n"
        "assert 'torch' not in sys.modules"
    )
    output = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=True).stdout
    assert "fedavg [{'round': 1, 'accuracy': 0.5}]" in output and "stopped" in output and "by hand" in output


def test_messages_are_those_of_training_in_completed_rounds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for more in ("2,1,up,train,7\n", "2,1,up,trai"):  # a round in progress, and a line that is being written
        (run / "ledger.csv").write_text(LEDGER + more)
        assert RunReader(run).traffic == {("down", "train"): 8, ("up", "train"): 5}
        assert RunReader(run).participants == [0]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([{"event": "start"}], "crashed"),
        ([{"event": "start"}, {"event": "stop", "reason": "Ctrl-C"}], "stopped"),
        ([{"event": "start"}, {"event": "finish"}], "finished"),
        ([{"event": "finish"}, {"event": "resume", "round": 2}], "finished"),
        ([{"event": "stop"}, {"event": "resume", "round": 1}], "crashed"),
    ],
)
def test_the_last_event_tells_the_state(tmp_path: Path, events: list[dict[str, object]], state: str) -> None:
    run = RunReader(write_run(tmp_path / "run", *events))
    assert run.status().state == state
    with RunDirectory(run.path):
        assert run.status().state == "running"


def test_a_missing_python_object_is_named(tmp_path: Path) -> None:
    run = RunReader(write_run(tmp_path / "run"))
    run.metadata["objects"] = ["model"]
    run.check_objects(data=None, model=object())
    with pytest.raises(RunError, match=r"was run with your own model: pass model=… in Python"):
        run.check_objects(data=None, model=None)
