"""Tables as files, and the commands that look at data and runs."""

import json
from pathlib import Path

import pytest

from fewer.experiments import recipes
from tests.test_cli import DIGITS, call

RECIPE = """
title = "A small table"
paper = "Nobody: Nothing, 2026"
seeds = 2
trials = 4
[settings]
data = "digits"
parties = 6
rounds = 2
[quick]
rounds = 1
seeds = 1
[[column]]
name = "α = 0.5"
alpha = 0.5
[[column]]
name = "α = 5"
alpha = 5.0
[[row]]
name = "FedAvg, given"
method = "fedavg"
set = { rate = 0.05 }
paper = [12.5]
[[row]]
name = "FedProx, tuned"
method = "fedprox"
tune = true
"""


def test_a_recipe_gives_ours_beside_theirs(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE)
    words: list[str | Path] = ["reproduce", file, "--results", tmp_path / "results", "--out", tmp_path / "runs"]
    text = call(*words).stdout
    content = json.loads((tmp_path / "results/small.json").read_text())
    assert content["command"] == f"fewer reproduce {file}" and "torch" in content["machine"]
    cells = {(cell["row"], cell["column"]): cell for cell in content["cells"]}
    assert len(cells) == 4
    given = cells["FedAvg, given", "α = 0.5"]
    assert given["paper"] == 12.5 and given["ours"]["seeds"] == [0, 1] and given["ours"]["settings"]["rate"] == 0.05
    assert not given["ours"]["trials"] and len(cells["FedProx, tuned", "α = 5"]["ours"]["trials"]) == 4
    accuracy, half = given["ours"]["accuracy"], given["ours"]["ci95"]
    assert f"| FedAvg, given | {100 * accuracy:.2f} ± {100 * half:.2f} / 12.50 |" in text
    assert given["ours"]["hash"] in text and (tmp_path / "results/small.md").read_text() in text
    before = (tmp_path / "results/small.json").read_text()
    again = call(*words)  # everything is there: nothing is run again
    assert "accuracy" not in again.stderr and (tmp_path / "results/small.json").read_text() == before
    quick = call(*words[:2], "--quick", "--results", tmp_path / "results", "--out", tmp_path / "quick").stdout
    assert "**Quick mode**" in quick and (tmp_path / "results/small-quick.md").exists()


def test_recipes_are_listed_and_sound() -> None:
    listed = call("reproduce", "--list").stdout
    assert "baselines/mnist" in listed
    for name in recipes.names():
        plan = recipes.recipe(name)
        assert all(len(row.paper) in (0, len(plan.column)) for row in plan.row)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("title", "titel"), "unknown setting of recipe"),
        (('method = "fedavg"', 'method = "fedavgg"'), "unknown method 'fedavgg'"),
        (("rounds = 2", 'rounds = "many"'), "rounds = 'many'"),
        (("[settings]", "[settings"), "is not TOML"),
        (("seeds = 2", "seeds = 0"), "seeds = 0"),
    ],
)
def test_a_wrong_recipe_gets_one_line(change: tuple[str, str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(RECIPE.replace(*change))
    result = call("reproduce", file, "--out", tmp_path / "runs", code=2)
    assert result.stderr.startswith("fewer: ") and text in result.stderr and result.stderr.count("\n") == 1


def test_an_unknown_recipe_names_the_nearest() -> None:
    assert "did you mean 'baselines/mnist'" in call("reproduce", "baseline/mnist", code=2).stderr


# --- looking ------------------------------------------------------------------------------------------------------


def test_data_list_and_inspect(tmp_path: Path) -> None:
    listed = json.loads(call("data", "list", "--json", "-").stdout)
    assert {"glyphs", "shakespeare-mini", "mnist"} <= listed["sets"].keys() and "csv" in listed["formats"]
    result = call("data", "inspect", "digits", "--parties", "5", "--partition", "shards", "--out", tmp_path)
    assert "parties                 5" in result.stdout and "training samples        1438" in result.stdout
    assert (tmp_path / "digits-partition.png").stat().st_size > 5000
    assert (tmp_path / "digits-examples.png").stat().st_size > 5000
    facts = json.loads(call("data", "inspect", "shakespeare-mini", "--out", tmp_path, "--json", "-").stdout)
    assert facts["vocabulary"] == 80 and facts["pictures"] == [str(tmp_path / "shakespeare-mini-partition.png")]
    assert "did you mean 'digits'" in call("data", "inspect", "digit", code=2).stderr
    wrong = call("data", "inspect", "glyphs", "--data-set", "siz=32", code=2).stderr
    assert "unknown option of data glyphs 'siz', did you mean 'size'" in wrong


def test_data_get_says_where_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEWER_DATA", raising=False)
    assert "where to? (--data-dir DIR, or FEWER_DATA)" in call("data", "get", "mnist", code=2).stderr
    assert "unknown" in call("data", "get", "mnst", "--data-dir", tmp_path, code=2).stderr


def test_run_compare_and_report_write_a_page(tmp_path: Path) -> None:
    out = call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "run").stdout
    assert f"see {tmp_path / 'run/report/report.html'}" in out
    assert "<img" in (tmp_path / "run/report/report.html").read_text()
    call("compare", "fedavg", "local", *DIGITS, "--rounds", "1", "--out", tmp_path / "both")
    page = (tmp_path / "both/report/report.html").read_text()
    assert "fedavg" in page and "local" in page
    call("report", tmp_path / "both", tmp_path / "run", "--out", tmp_path / "page")
    assert (tmp_path / "page/report.html").exists()
    call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "bare", "--no-report")
    assert not (tmp_path / "bare/report").exists()
    assert "is not a run of Fewer" in call("report", tmp_path / "none", code=2).stderr
