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
    assert "unknown option of data glyphs 'siz', did you mean 'size'" in wrong


def test_data_get_needs_a_target_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEWER_DATA", raising=False)
    assert "no target directory: pass --data-dir or set FEWER_DATA" in call("data", "get", "mnist", code=2).stderr
    assert "unknown" in call("data", "get", "mnst", "--data-dir", tmp_path, code=2).stderr
