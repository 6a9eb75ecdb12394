"""The published results in docs/results: they parse, use known names, and their hashes follow from their settings."""

import json
from pathlib import Path

import pytest

from fewer.experiments import recipes
from fewer.methods import find
from fewer.runs.experiment import make_method
from fewer.runs.settings import neutral_options, settings_hash
from tools.render_results import render_page, update_recipe

RESULTS = Path(__file__).parents[1] / "docs/results"
FILES = sorted(RESULTS.glob("*/*.json"))
CHECKS = json.loads((RESULTS / "checks.json").read_text())
"""Results that were made before key names were renamed, each with a cell that was run again."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_published_result_has_known_names_and_matching_hashes(file: Path) -> None:
    content = json.loads(file.read_text())
    plan, cells = recipes.read_results(content)
    assert cells and content["command"].startswith("fewer reproduce ")
    name = content["command"].split()[2]
    assert plan == recipes.load_recipe(name) and file.stem.startswith(name.split("/")[1])
    page = file.with_suffix(".md").read_text()
    assert page == render_page(file, CHECKS), "run python tools/render_results.py"
    for cell in cells:
        method = find(cell.ours.method)
        assert method.name == cell.ours.method
        assert cell.ours.settings.keys() <= method.model_fields.keys(), (cell.row, cell.column)
        assert all(trial.settings.keys() <= method.model_fields.keys() for trial in cell.ours.trials)
        settings = recipes.cell_settings(plan, cell)
        run = make_method(method, settings)
        assert method.model_fields.keys() - cell.ours.settings.keys() <= neutral_options(run), (cell.row, cell.column)
        assert settings_hash(settings, run) == cell.ours.hash, (cell.row, cell.column)
        assert f"`{cell.ours.hash}`" in page and f"| {cell.row} |" in page
        assert f"{100 * cell.ours.accuracy:.2f}" in page
    counted = [cell.ours.gflop is not None and bool(cell.ours.curves) for cell in cells]
    if all(counted) and any(cell.ours.gflop for cell in cells):
        assert file.with_name(f"{file.stem}-gflop.png").exists(), "run python -m tools.count_operations"
    assert f"Made by `{content['command']}`" in page
    assert ("settings hashes were recomputed" in page) == (f"{file.parent.name}/{file.stem}" in CHECKS)


@pytest.mark.parametrize("change", ["about", "row", "target", "lr"])
def test_a_page_takes_over_a_recipe_only_if_its_cells_follow_from_it(change: str, tmp_path: Path) -> None:
    content = json.loads((RESULTS / "fedmeta/fig3.json").read_text())
    plan = content["recipe"]
    if change == "about":
        plan["about"] = "An earlier text."
    elif change == "row":  # one that was added later
        content["cells"] = [cell for cell in content["cells"] if cell["row"] != plan["row"][-1]["name"]]
        plan["row"].pop()
    elif change == "target":
        plan["target"] = plan["row"][1]["name"]
    else:
        plan["row"][0]["method_options"] |= {"lr": 0.123}
    file = tmp_path / "fig3.json"
    file.write_text(json.dumps(content))
    update_recipe(file)
    updated = recipes.read_results(json.loads(file.read_text()))[0] == recipes.load_recipe("fedmeta/fig3")
    assert updated == (change in ("about", "row"))


def test_other_published_files_parse() -> None:
    before = json.loads((RESULTS / "checks-before.json").read_text())
    assert CHECKS.keys() == before.keys() <= {f"{file.parent.name}/{file.stem}" for file in FILES}
    for name, check in CHECKS.items():
        assert check["digest"] == before[name]["digest"], name  # all accuracies, bit for bit
    for name in ("benchmarks", "benchmarks-features", "benchmarks-few-rounds", "benchmarks-machines"):
        assert json.loads((RESULTS / f"{name}.json").read_text())["metrics"]
