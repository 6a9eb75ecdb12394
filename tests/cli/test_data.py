"""The commands that list and inspect data."""

import json
from pathlib import Path

import pytest

from tests.helpers import call


def test_data_list_and_inspect(tmp_path: Path) -> None:
    listed = json.loads(call("data", "list", "--json", "-").stdout)
    assert {"glyphs", "shakespeare-mini", "mnist"} <= listed["sets"].keys() and "csv" in listed["formats"]
    result = call("data", "inspect", "digits", "--clients", "5", "--partition", "shards", "--out", tmp_path)
    assert "clients                 5" in result.stdout and "training samples        1438" in result.stdout
    assert (tmp_path / "digits-partition.png").stat().st_size > 5000
    assert (tmp_path / "digits-examples.png").stat().st_size > 5000
    facts = json.loads(call("data", "inspect", "shakespeare-mini", "--out", tmp_path, "--json", "-").stdout)
    assert facts["vocabulary"] == 80 and facts["pictures"] == [str(tmp_path / "shakespeare-mini-partition.png")]
    assert "did you mean 'digits'" in call("data", "inspect", "digit", code=2).stderr
    wrong = call("data", "inspect", "glyphs", "--data-option", "siz=32", code=2).stderr
    assert "data glyphs has no option 'siz', did you mean 'size'" in wrong


def test_inspect_lists_columns_classes_and_notes(tmp_path: Path) -> None:
    rows = "".join(f"{row % 9},text {row},{'yes' if row % 3 else 'no'}\n" for row in range(60))
    (tmp_path / "a.csv").write_text(f"a,remark,label\n{rows}")
    arguments = ["data", "inspect", f"csv:{tmp_path}/a.csv", "--clients=2", "--partition=iid", f"--out={tmp_path}"]
    printed = call(*arguments).stdout
    assert "samples per class       no 16, yes 32" in printed
    assert "note                    columns: the inputs are a; the label is label" in printed
    assert "note                    columns: ignored remark (text; " in printed
    facts = json.loads(call(*arguments, "--json", "-").stdout)
    assert facts["samples per class"] == {"no": 16, "yes": 32} and len(facts["notes"]) == 3


def test_inspect_describes_data_as_it_is_stored(tmp_path: Path) -> None:
    rows = "".join(f"{row},{row % 3},{'yes' if row % 2 else 'no'},{'ABC'[row % 3]}\n" for row in range(12))
    (tmp_path / "a.csv").write_text(f"a,b,label,ward\n{rows}")
    arguments = ["data", "inspect", f"csv:{tmp_path}/a.csv", "--data-option=client=ward", f"--out={tmp_path}"]
    failed = call(*arguments, "--partition=iid", "--clients=50", code=2)  # the first lines help to choose --clients
    lines = failed.stdout.splitlines()
    assert lines[0] == "as stored" and "samples                 12" in lines and "input                   [2]" in lines
    assert "columns                 a, b" in lines and "samples per class       no 6, yes 6" in lines
    assert "clients                 3 (partition natural keeps them)" in lines and "cannot partition" in failed.stderr
    stored = json.loads(call(*arguments, "--partition=natural", "--json=-").stdout)["stored"]
    assert stored["classes"] == 2 and stored["test samples"].startswith("none")
    printed = call("data", "inspect", "shakespeare-mini", "--out", tmp_path).stdout
    assert printed.index("as stored") < printed.index("by client (partition ") < printed.index("vocabulary")
    images = json.loads(call("data", "inspect", "fashion-mini", "--out", tmp_path, "--json", "-").stdout)["stored"]
    assert images["test samples"] == 1000 and images["samples"] == 6000 and images["samples per class"]["coat"] == 600


def test_data_get_needs_a_target_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEWER_DATA", raising=False)
    assert "no target directory: pass --data-dir or set FEWER_DATA" in call("data", "get", "mnist", code=2).stderr
    assert "unknown" in call("data", "get", "mnst", "--data-dir", tmp_path, code=2).stderr
