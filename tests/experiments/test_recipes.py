"""Recipes: settings, rows, tables and pictures."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewer.data.sources import EMBEDDED
from fewer.errors import SettingError
from fewer.experiments import Row, pages, recipes
from fewer.experiments.studies import Study, join_studies, parse_study
from fewer.experiments.tune import Trial
from fewer.methods import find
from fewer.methods.fedmk_paper import FedMKPaper
from fewer.report.style import assign_styles
from fewer.report.tables import plot_recipe
from fewer.runs.experiment import make_method, parse_settings
from fewer.statistics import format_interval, format_number, interval
from tests.helpers import call
from tools.count_operations import continue_counts, count_page
from tools.join_columns import join_columns
from tools.render_results import update_recipe


def test_rows_of_a_recipe_may_differ_in_model_and_data() -> None:
    plan = recipes.load_recipe("fedmeta/table3")
    full = {"items": "genres", "max_items": 40, "min_records": 100, "last_item": True}
    for quick, options in ((False, full), (True, {"last_item": True})):
        settings = dict(
            zip([row.name for row in plan.row], recipes.row_settings(plan.column[3], plan, quick), strict=True)
        )
        mixed, meta, alone = settings["MIXED: NN, tuned"], settings["META: MAML + NN, tuned"], settings["SELF: MRU"]
        assert mixed["data_options"] == options and meta["data_options"] == alone["data_options"] == {
            **options,
            "own_classes": True,
        }
        assert mixed["model"] == meta["model"] == "mlp" and alone["model"] == "logistic" and alone["rounds"] == 1
        assert all(
            row["method_options"]["top_k"] == 4 and row["method_options"]["support_fraction"] == 0.05
            for row in settings.values()
        )
        methods = [make_method(find(row["method"]), parse_settings(row)).model_dump() for row in settings.values()]
        assert {method.get("adapt_steps", method["local_steps"]) for method in methods} == {100}


RECIPE = """
title = "A small table"
paper = "Nobody: Nothing, 2026"
seeds = 2
trials = 4
[settings]
data = "digits"
clients = 6
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
method_options = { lr = 0.05 }
paper = [12.5]
[[row]]
name = "FedProx, tuned"
method = "fedprox"
tune = true
"""


def test_a_recipe_prints_our_results_next_to_the_papers(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(f'figure = "rounds"\n{RECIPE}')
    args: list[str | Path] = ["reproduce", file, "--results", tmp_path / "results", "--out", tmp_path / "runs"]
    text = call(*args).stdout
    content = json.loads((tmp_path / "results/small.json").read_text())
    assert content["command"] == f"fewer reproduce {file}" and "torch" in content["machine"]
    cells = {(cell["row"], cell["column"]): cell for cell in content["cells"]}
    assert len(cells) == 4
    recorded_cells = json.loads((tmp_path / "runs/recipe.json").read_text())["cells"]
    assert recorded_cells["alpha-0.5/fedavg-given"] == {"row": "FedAvg, given", "column": "α = 0.5", "paper": 12.5}
    assert {path.parent.name for path in (tmp_path / "runs").glob("*/*/settings.json")} >= {
        f"{cell_path.split('/')[1]}-seed0" for cell_path in recorded_cells
    }
    given = cells["FedAvg, given", "α = 0.5"]
    assert given["paper"] == 12.5 and given["ours"]["seeds"] == [0, 1] and given["ours"]["settings"]["lr"] == 0.05
    assert not given["ours"]["trials"] and len(cells["FedProx, tuned", "α = 5"]["ours"]["trials"]) == 4
    accuracy, half = given["ours"]["accuracy"], given["ours"]["ci95"]
    assert f"| FedAvg, given | {100 * accuracy:.2f} ± {100 * half:.2f} / 12.50 |" in text
    assert given["ours"]["hash"] in text and (tmp_path / "results/small.md").read_text() in text
    before = (tmp_path / "results/small.json").read_text()
    curves = given["ours"]["curves"]
    assert [[line["round"] for line in seed] for seed in curves] == [[1, 2], [1, 2]]
    assert [seed[-1]["accuracy"] for seed in curves] == given["ours"]["accuracies"]
    assert sum(seed[-1]["up"] for seed in curves) / 2e6 == pytest.approx(given["ours"]["mb_up"])
    assert "![Accuracy by round of each row](small.png)" in text
    assert (tmp_path / "results/small.png").read_bytes().startswith(b"\x89PNG")
    again = call(*args)  # all results exist: nothing runs again
    assert "accuracy" not in again.stderr and (tmp_path / "results/small.json").read_text() == before
    quick = call(*args[:2], "--quick", "--results", tmp_path / "results", "--out", tmp_path / "quick").stdout
    assert "**Quick mode**" in quick and (tmp_path / "results/small-quick.md").exists()


def test_operations_of_an_earlier_result_are_counted_by_repeating_its_first_rounds(tmp_path: Path) -> None:
    file, results = tmp_path / "small.toml", tmp_path / "results"
    text = RECIPE.replace("seeds = 2\ntrials = 4", 'target = "FedAvg, given"\nseeds = 2\ntrials = 1')
    file.write_text(text.replace("rounds = 2", "rounds = 5"))
    call("reproduce", file, "--results", results, "--out", tmp_path / "runs")
    data = results / "small.json"
    counted = json.loads(data.read_text())
    earlier = json.loads(data.read_text())
    for cell in earlier["cells"]:
        del cell["ours"]["counted_rounds"]
        cell["ours"]["gflop"] = cell["target_cost"]["gflop"] = None
        for point in cell["ours"]["curves"][0]:
            del point["flops"]
    data.write_text(json.dumps(earlier))
    (results / "small-gflop.png").unlink()
    assert count_page(data, rounds=2) == 4 and count_page(data, rounds=2) == 0
    again = json.loads(data.read_text())
    assert {cell["ours"].pop("counted_rounds") for cell in again["cells"]} == {2}
    assert count_page(data, rounds=5, rows=["FedAvg, given"]) == 2  # all rounds
    more = json.loads(data.read_text())["cells"]
    assert [cell["ours"]["counted_rounds"] for cell in more] == [None, 2, None, 2]
    assert {cell["ours"].pop("counted_rounds") for cell in counted["cells"]} == {None}
    assert again == counted  # all clients take part in all rounds, so all rounds cost the same
    assert (results / "small-gflop.png").read_bytes().startswith(b"\x89PNG")
    text = pages.render_file(data)
    assert "≈: counted later, in the first 2 rounds;" in text and text.count("| ≈ ") == 1


def test_rounds_after_the_counted_ones_add_the_mean_of_these_without_the_first() -> None:
    assert [continue_counts([10, 13, 18], round) for round in range(1, 6)] == [10, 13, 18, 22, 26]


def test_a_row_runs_again_and_the_others_stay(tmp_path: Path) -> None:
    file, results = tmp_path / "small.toml", tmp_path / "results"
    recipe = RECIPE.replace("seeds = 2\ntrials = 4", "seeds = 1\ntrials = 1").replace("clients = 6", "model = 'mlp'")
    file.write_text(recipe)
    args: list[str | Path] = ["reproduce", file, "--results", results]
    missing = call(*args, "--row", "FedAvg, given", "--out", tmp_path / "again", code=2).stderr
    assert "which does not exist; run all rows first" in missing
    call(*args, "--out", tmp_path / "runs")
    before = json.loads((results / "small.json").read_text())
    file.write_text(recipe.replace("lr = 0.05", "lr = 0.07"))  # this row runs again
    text = call(*args, "--row", "FedAvg, given", "--out", tmp_path / "again").stdout
    assert {path.parent.name for path in (tmp_path / "again").glob("*/*/settings.json")} == {"fedavg-given-seed0"}
    after = json.loads((results / "small.json").read_text())
    pairs = list(zip(before["cells"], after["cells"], strict=True))
    assert [(old["row"], old["column"]) for old, _ in pairs] == [(new["row"], new["column"]) for _, new in pairs]
    assert [old == new for old, new in pairs] == [False, True, False, True]
    assert {new["ours"]["settings"]["lr"] for _, new in pairs[::2]} == {0.07}
    assert "With `--row`, after the others:\n\n- FedAvg, given\n" in text and after["later"] == ["FedAvg, given"]
    # A table keeps no row that its recipe would make with other settings, or not at all.
    for change, wrong in (("rounds = 2\n", "rounds = 3\n"), ("trials = 1", "trials = 2"), ("seeds = 1", "seeds = 2")):
        assert change in recipe
        file.write_text(recipe.replace(change, wrong, 1))
        refused = call(*args, "--row", "FedAvg, given", "--out", tmp_path / "refused", code=2).stderr
        assert "row 'FedProx, tuned' in column 'α = 0.5' was made with other settings" in " ".join(refused.split())
    file.write_text(recipe + "[[row]]\nname = 'Local'\nmethod = 'local'\n")
    refused = call(*args, "--row", "FedAvg, given", "--out", tmp_path / "refused", code=2).stderr
    assert "row 'Local' in column 'α = 0.5' is missing" in " ".join(refused.split())
    assert "unknown row 'Fed'" in call(*args, "--row", "Fed", "--out", tmp_path / "refused", code=2).stderr
    assert not list((tmp_path / "refused").glob("*/*"))
    assert "leave out one of both" in call(*args, "--row", "Local", "--quick", code=2).stderr
    # Another number of trials changes tuned rows only.
    file.write_text(recipe.replace("trials = 1", "trials = 2", 1).replace("lr = 0.05", "lr = 0.07"))
    call(*args, "--row", "FedProx, tuned", "--out", tmp_path / "more")
    tuned = json.loads((results / "small.json").read_text())["cells"]
    assert [cell == old for cell, old in zip(tuned, after["cells"], strict=True)] == [True, False, True, False]


def test_columns_that_were_made_one_by_one_are_joined(tmp_path: Path) -> None:
    file, args = tmp_path / "small.toml", ("--out", tmp_path / "runs", "--results", tmp_path)
    file.write_text(RECIPE.replace("tune = true", ""))
    call("reproduce", file, "--column", "α = 0.5", *args)
    with pytest.raises(SystemExit, match=r"small.toml lacks 2 cells, such as FedAvg, given in α = 5"):
        join_columns(str(file), tmp_path / "small")
    call("reproduce", file, "--column", "α = 5", *args)
    join_columns(str(file), tmp_path / "small")
    joined = json.loads((tmp_path / "small.json").read_text())["cells"]
    call("reproduce", file, *args)
    assert json.loads((tmp_path / "small.json").read_text())["cells"] == joined
    assert not list(tmp_path.glob("small-*.json"))
    more = file.read_text().replace("[[row]]", '[[column]]\nname = "IID"\npartition = "iid"\n[[row]]', 1)
    file.write_text(more)
    call("reproduce", file, "--column", "IID", *args)
    with pytest.raises(SystemExit, match=r"small.json was made with another version"):
        join_columns(str(file), tmp_path / "small")
    noted = {
        **json.loads((tmp_path / "small.json").read_text()),
        "notes": ["Made earlier."],
        "later": ["FedProx, tuned"],
    }
    (tmp_path / "small.json").write_text(json.dumps(noted))
    update_recipe(tmp_path / "small.json")
    join_columns(str(file), tmp_path / "small")
    page = (tmp_path / "small.md").read_text()
    assert "Made earlier. (columns: α = 0.5, α = 5)" in page and "after the others:\n\n- FedProx, tuned\n" in page
    longer = json.loads((tmp_path / "small.json").read_text())["cells"]
    assert [cell["column"] for cell in longer] == ["α = 0.5"] * 2 + ["α = 5"] * 2 + ["IID"] * 2
    assert longer[:4] == joined and not list(tmp_path.glob("small-*.json"))


def test_studies_of_columns_are_joined_in_one_table() -> None:
    page = "\n## Copies\n\n| | images |\n|---|---|\n| FedMK, {} | 20 |\n\nA note.\n"
    contents = [{"study": {f"FedMK, {name}": 20}, "study_page": page.format(name)} for name in ("1 round", "3 rounds")]
    joined = join_studies(contents)
    assert joined and joined.metrics == {"FedMK, 1 round": 20, "FedMK, 3 rounds": 20}
    rows = "| FedMK, 1 round | 20 |\n| FedMK, 3 rounds | 20 |"
    assert joined.render_markdown("x") == page.format("1 round").replace("| FedMK, 1 round | 20 |", rows)
    newer = {"study": {"FedMK, 1 round": 7}, "study_page": page.format("1 round").replace("20", "7")}
    again = join_studies([joined.as_json("x"), newer])
    assert again and again.metrics == {"FedMK, 1 round": 7, "FedMK, 3 rounds": 20}
    assert again.render_markdown("x") == joined.render_markdown("x").replace("1 round | 20", "1 round | 7")
    assert join_studies([]) is None and join_studies([{"cells": []}]) is None


def test_a_row_is_added_to_a_table_with_a_study(tmp_path: Path) -> None:
    file, results = tmp_path / "small.toml", tmp_path / "results"
    recipe = RECIPE.replace("seeds = 2\ntrials = 4", "seeds = 1\ntrials = 1").replace(
        "clients = 6", "fraction = 0.5\nmodel = 'mlp'"
    )
    recipe = recipe.replace("tune = true", "") + '[study]\nname = "unused"\n'
    file.write_text(recipe)
    args: list[str | Path] = ["reproduce", file, "--results", results]
    call(*args, "--out", tmp_path / "runs")
    before = json.loads((results / "small.json").read_text())
    before |= {"notes": ["Made earlier."], "later": ["FedProx, tuned"]}
    (results / "small.json").write_text(json.dumps(before))
    file.write_text(recipe + '[[row]]\nname = "FedDyn"\nmethod = "feddyn"\n')
    text = call(*args, "--row", "FedDyn", "--out", tmp_path / "more").stdout
    after = json.loads((results / "small.json").read_text())
    assert after["study"].keys() - before["study"].keys() == {"FedDyn, α = 0.5", "FedDyn, α = 5"}
    assert after["study"].items() >= before["study"].items()
    assert [cell for cell in after["cells"] if cell["row"] != "FedDyn"] == before["cells"]
    assert after["notes"] == ["Made earlier."] and after["later"] == ["FedProx, tuned", "FedDyn"]
    unused = [line for line in text.splitlines() if line.startswith("| ") and ", α = " in line]
    assert len(unused) == 6 and "FedDyn, α = 5" in unused[-1]
    # A row that runs again replaces its lines, and those of rows that are gone go.
    file.write_text(recipe)
    call(*args, "--row", "FedAvg, given", "--out", tmp_path / "fewer")
    assert json.loads((results / "small.json").read_text())["study"].keys() == before["study"].keys()
    for wrong, reason in (
        (recipe.replace('"unused"', '"embedding"'), "has a study over all its rows"),
        (recipe.replace('"unused"', '"copies"'), "was made with another study"),
        (
            recipe.replace('name = "FedAvg, given"', 'name = "FedAvg, given"\ncolumns = ["α = 5"]'),
            "in column 'α = 0.5'",
        ),
    ):
        file.write_text(wrong)
        only = () if "columns" not in wrong else ("--column", "α = 0.5")
        refused = call(*args, *only, "--row", "FedAvg, given", "--out", tmp_path / "refused", code=2).stderr
        assert reason in " ".join(refused.split())


def test_recipes_are_listed_and_valid() -> None:
    listed = call("reproduce", "--list").stdout
    assert {"baselines/mnist", "fedmk/table1", "fedmk/fig2"} <= {line.split()[0] for line in listed.splitlines()}
    for name in recipes.list_recipes():
        plan = recipes.load_recipe(name)
        assert all(len(row.paper) <= len(plan.column) for row in plan.row)
        for study in (plan.study, {**plan.study, **plan.quick.get("study", {})}):
            if study:
                parse_study(study)
        for titles in ([row.name for row in plan.row], [column.name for column in plan.column]):
            assert len({recipes.slugify(title) for title in titles}) == len(titles)  # each has its own directory
        for column, quick in itertools.product(plan.column, (False, True)):
            for row, row_settings in zip(plan.row, recipes.row_settings(column, plan, quick), strict=True):
                settings = parse_settings(row_settings)
                method = make_method(find(settings.method), settings)
                assert method.name == row.method, (name, column.name, row.name)
                assert not quick or settings.data in EMBEDDED
                if isinstance(method, FedMKPaper):  # its literal form, or that of tables made before
                    literal = name in ("fedmk/paper", "fedmk/table7")
                    assert method.matching_steps == 0 and (quick or (method.inner_steps > 1) == literal), name


def test_a_recipe_changes_parts_of_its_base(tmp_path: Path) -> None:
    base, file = tmp_path / "base.toml", tmp_path / "changed.toml"
    base.write_text(RECIPE)
    first, second = recipes.load_recipe(str(base)).row[:2]
    text = f'base = "{base}"\ntitle = "Other data"\n[settings]\nclients = 3\n[[row]]\nname = "{second.name}"\n'
    file.write_text(text + "method_options = { lr = 0.7 }\n")
    original, changed = recipes.load_recipe(str(base)), recipes.load_recipe(str(file))
    assert changed.title == "Other data" and changed.settings == {**original.settings, "clients": 3}
    assert changed.row[0] == first and changed.column == original.column and changed.quick == original.quick
    assert changed.row[1] == second.model_copy(update={"method_options": {"lr": 0.7}})
    file.write_text(text.replace(second.name, "Nobody"))
    with pytest.raises(SettingError, match=r"unknown row in recipe '.*changed.toml' 'Nobody'"):
        recipes.load_recipe(str(file))


def test_settings_combine_recipe_column_and_row() -> None:
    text = RECIPE.replace("rounds = 2\n", "rounds = 2\nmethod_options = { mu = 0.3, lr = 0.2 }\n")
    text = text.replace(
        "alpha = 5.0\n",
        "alpha = 5.0\nmethod_options = { lr = 0.4 }\nquick = { alpha = 7.0, method_options = { mu = 0.6 } }\n",
    )

    def read_settings(column: int, quick: bool = False, text: str = text) -> list[tuple[float, int, dict[str, float]]]:
        plan = recipes.Recipe(**tomllib.loads(text))
        settings = recipes.row_settings(plan.column[column], plan, quick)
        return [(given["alpha"], given["rounds"], given["method_options"]) for given in settings]

    assert read_settings(0) == [(0.5, 2, {"lr": 0.05}), (0.5, 2, {"mu": 0.3, "lr": 0.2})]  # fedavg has no mu
    assert read_settings(1) == [(5.0, 2, {"lr": 0.05}), (5.0, 2, {"mu": 0.3, "lr": 0.4})]
    assert read_settings(1, quick=True) == [(7.0, 1, {"lr": 0.05}), (7.0, 1, {"mu": 0.6, "lr": 0.4})]
    row_quick = text.replace("paper = [12.5]\n", "quick = { alpha = 9.0 }\n")
    assert read_settings(1, quick=True, text=row_quick)[0] == (9.0, 1, {"lr": 0.05})
    assert read_settings(1, text=row_quick) == read_settings(1)
    with pytest.raises(SettingError, match="no method has an option 'nu'"):
        read_settings(0, text=text.replace("mu = 0.3", "nu = 0.3"))


def test_a_recipe_can_average_over_clients_and_change_settings_of_a_row(tmp_path: Path) -> None:
    text = RECIPE.replace("seeds = 2\ntrials = 4\n", 'seeds = 1\ntrials = 2\nmean = "clients"\n')
    text = text.replace('[[column]]\nname = "α = 5"\nalpha = 5.0\n', "")
    text = text.replace("paper = [12.5]\n", "settings = { validation = 0.3 }\n")
    file = tmp_path / "small.toml"
    file.write_text(text)
    plan, (given, tuned) = recipes.reproduce(str(file), tmp_path / "runs")
    run = tmp_path / "runs/alpha-0.5/fedavg-given-seed0"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads((run / "settings.json").read_text())["settings"]["validation"] == 0.3
    assert given.ours.accuracy == pytest.approx(np.mean(list(last["clients"].values()))) != last["accuracy"]
    assert "Mean accuracy over clients" in pages.render_markdown(plan, [given, tuned], "", False)
    other = tmp_path / "runs/alpha-0.5/fedprox-tuned-seed0/settings.json"
    assert json.loads(other.read_text())["settings"]["validation"] == 0 and len(tuned.ours.trials) == 2


def test_a_row_can_run_in_some_columns_only(tmp_path: Path) -> None:
    text = RECIPE.replace("seeds = 2\ntrials = 4\n", 'seeds = 1\ntrials = 2\nrivals = ["FedAvg, given"]\n')
    text = text.replace("paper = [12.5]\n", 'columns = ["α = 5"]\n')
    file = tmp_path / "small.toml"
    file.write_text(text)
    plan, cells = recipes.reproduce(str(file), tmp_path / "runs")
    assert [(cell.row, cell.column) for cell in cells] == [
        ("FedProx, tuned", "α = 0.5"),
        ("FedAvg, given", "α = 5"),
        ("FedProx, tuned", "α = 5"),
    ]
    tuned, given, _ = cells
    page = pages.render_markdown(plan, cells, "", False)
    assert f"| FedAvg, given | – | {given.format_accuracy()} |\n" in page  # costs are in a table of their own
    assert f"| FedAvg, given | α = 5 | {format_number(given.ours.mb_up)} |" in page
    assert (
        "α = 0.5:\n\n| method | minus FedAvg, given |\n|---|---|\n| FedProx, tuned | – |\n" in page
    )  # no rival ran there
    assert f"{tuned.format_accuracy()} | {cells[2].format_accuracy()} |\n" in page
    file.write_text(text.replace('["α = 5"]', '["α = 6"]'))
    with pytest.raises(SettingError, match="unknown column .α = 6., did you mean .α = 5"):
        recipes.reproduce(str(file), tmp_path / "runs")


def test_a_slow_row_may_have_fewer_seeds(tmp_path: Path) -> None:
    text = RECIPE.replace('[[column]]\nname = "α = 5"\nalpha = 5.0\n', "").replace("tune = true", "seeds = 1")
    file = tmp_path / "small.toml"
    file.write_text('rivals = ["FedAvg, given"]\nmean = "clients"\n' + text)
    plan, (full, slow) = recipes.reproduce(str(file), tmp_path / "runs")
    assert full.ours.seeds == [0, 1] and slow.ours.seeds == [0]
    page = pages.render_markdown(plan, [full, slow], "", False)
    assert "Rows with fewer seeds, because they are slow: FedProx, tuned 1." in page
    ours, rival = slow.ours.unit_accuracies[0], full.ours.unit_accuracies[0]  # seed 0 of both
    difference = interval([ours[client] - rival[client] for client in ours])
    assert f"| FedProx, tuned | {format_interval(difference, 1)} |" in page


def test_a_slow_column_may_have_fewer_seeds(tmp_path: Path) -> None:
    text = RECIPE.replace('name = "α = 5"\n', 'name = "α = 5"\nseeds = 1\n').replace("tune = true", "")
    file = tmp_path / "small.toml"
    file.write_text(text)
    plan, cells = recipes.reproduce(str(file), tmp_path / "runs")
    assert {cell.column: cell.ours.seeds for cell in cells} == {"α = 0.5": [0, 1], "α = 5": [0]}
    page = pages.render_markdown(plan, cells, "", False)
    assert "Columns with fewer seeds, because they are slow: α = 5 1." in page and "Rows with" not in page


def make_row(method: str, curves: list[list[float]], first: int = 1) -> Row:
    """A row of synthetic runs that send 3 MB up and 1 MB down per round."""
    last = [curve[-1] for curve in curves]
    lines = [
        [
            {"round": number, "accuracy": accuracy, "up": 3_000_000 * number, "down": 1_000_000 * number}
            for number, accuracy in enumerate(curve, first)
        ]
        for curve in curves
    ]
    mean, half = interval(last)
    return Row(method, mean, half, mean, 2, 6, 2, 1, [0, 1], last, lines, {}, "hash")


def make_cells(**keys: Any) -> tuple[recipes.Recipe, list[recipes.Cell]]:
    plan = recipes.Recipe(**{**tomllib.loads(RECIPE), **keys})
    given, tuned = [[0.1, 0.3], [0.1, 0.5]], [[0.2, 0.6], [0.4, 0.6]]
    rows = {"FedAvg, given": make_row("fedavg", given), "FedAvg, tuned": make_row("fedavg", tuned)}
    plan = plan.model_copy(
        update={"row": [recipes.RecipeRow(name=name, method="fedavg", tune="tuned" in name) for name in rows]}
    )
    columns = [column.name for column in plan.column]
    return plan, [recipes.Cell(name, column, ours, None) for column in columns for name, ours in rows.items()]


def test_a_recipe_draws_one_plot_by_round_and_one_by_megabytes(tmp_path: Path) -> None:
    plan, cells = make_cells(figure="rounds and megabytes")
    drawn = plot_recipe(plan, cells)
    assert list(drawn) == ["rounds", "megabytes"]
    ends = [np.asarray(figure.axes[0].lines[0].get_xdata())[-1] for figure in drawn.values()]
    assert ends == pytest.approx([2, 8])
    pictures = dict.fromkeys(drawn, b"picture")
    written = pages.write_results("small", plan, cells, tmp_path, "fewer reproduce small", False, pictures)
    assert [path.name for path in written] == ["small.md", "small.json", "small-rounds.png", "small.png"]
    assert "(small-rounds.png)" in written[0].read_text() and "(small.png)" in written[0].read_text()


@pytest.mark.parametrize(("figure", "x"), [("rounds", [1, 2]), ("megabytes", [4, 8])])
def test_a_recipe_draws_curves_in_a_panel_for_each_column(figure: str, x: list[float]) -> None:
    drawn = plot_recipe(*make_cells(figure=figure))[figure]
    assert [axes.get_title("left") for axes in drawn.axes] == ["α = 0.5", "α = 5"]
    for axes in drawn.axes:
        given, tuned = axes.lines
        assert list(given.get_xdata()) == pytest.approx(x)  # type: ignore[arg-type]
        assert list(given.get_ydata()) == pytest.approx([10, 40])  # type: ignore[arg-type]
        style = assign_styles(["fedavg"])["fedavg"]
        assert given.get_color() == tuned.get_color() == style.color
        assert (tuned.get_linestyle(), tuned.get_marker()) == (style.dash, style.marker)
        assert given.get_linestyle() != tuned.get_linestyle() and given.get_marker() != tuned.get_marker()
        assert len(axes.collections) == 2  # bands
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["FedAvg, given", "FedAvg, tuned"]
    low, high = drawn.axes[0].get_ylim()
    assert drawn.axes[1].get_ylim() == (low, high) and low == 0 and high == 100  # the bands are wide


def test_a_recipe_draws_its_columns() -> None:
    (axes,) = plot_recipe(*make_cells(figure="columns"))["columns"].axes
    given = axes.lines[0]
    assert list(given.get_ydata()) == pytest.approx([40, 40])  # type: ignore[arg-type]
    assert np.round(np.asarray(given.get_xdata())).tolist() == [0, 1]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["α = 0.5", "α = 5"]
    drawn = plot_recipe(*make_cells(figure="columns", by_round=[1, 2]))["columns"]
    assert [axes.get_title("left") for axes in drawn.axes] == ["1 rounds", "2 rounds"]
    assert [axes.lines[0].get_ydata()[0] for axes in drawn.axes] == pytest.approx([10, 40])  # type: ignore[index]
    assert plot_recipe(*make_cells()) == {}


def test_a_recipe_draws_its_table_as_a_heat_map() -> None:
    (axes,) = plot_recipe(*make_cells(figure="heatmap"))["heatmap"].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["FedAvg, given", "FedAvg, tuned"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["α = 0.5", "α = 5"]
    assert len(axes.texts) == 4 and axes.texts[0].get_text().startswith("40.0")


def test_counted_operations_get_a_plot_and_columns() -> None:
    plan, cells = make_cells()
    counted = [
        replace(cell, ours=replace(cell.ours, gflop=3.0, seconds=7.0, curves=add_flops(cell.ours.curves)))
        for cell in cells
    ]
    (kind,), (figure,) = zip(*plot_recipe(plan, counted).items(), strict=True)
    assert kind == "gflop" and list(figure.axes[0].lines[0].get_xdata()) == pytest.approx([1.5, 3.0])
    text = pages.render_markdown(plan, counted, "command", quick=False, images={"gflop": "x-gflop.png"})
    assert "| MB up | MB down | GFLOP | seconds |" in text and "| 6 | 2 | 3 | 7 |" in text and "(x-gflop.png)" in text
    assert "GFLOP" not in pages.render_markdown(plan, cells, "command", quick=False)


def test_rows_whose_operations_were_not_counted_have_no_cost_in_operations_and_seconds() -> None:
    plan, cells = make_cells()
    first, *others = cells
    others = [replace(cell, ours=replace(cell.ours, gflop=3.0, seconds=7.0)) for cell in others]
    text = pages.render_markdown(plan, [first, *others], "command", quick=False)
    assert (
        "| MB up | MB down | GFLOP | seconds |" in text and "–: not shown, because operations were not counted" in text
    )
    rows = [line for line in text.split("\n") if line.startswith(("| FedAvg, given |", "| FedAvg, tuned |"))][:2]
    assert [row.split(" | ")[-4:] for row in rows] == [["6", "2", "–", "– |"], ["6", "2", "3", "7 |"]]


def add_flops(curves: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The curves with 1.5 GFLOP per round, counted with the first seed."""
    return [[{**line, "flops": 1.5e9 * line["round"]} for line in curves[0]], *curves[1:]]


def test_tuned_rows_show_their_trials_and_what_is_at_an_edge() -> None:
    plan, cells = make_cells()
    trials = [Trial({"lr": lr}, value, 0.01) for lr, value in ((0.1, 0.5), (0.3, 0.7), (0.9, None), (0.03, 0.6))]
    tuned = [replace(cell, ours=replace(cell.ours, trials=trials, settings={"lr": 0.3})) for cell in cells]
    text = pages.render_markdown(plan, tuned, "command", quick=False)
    assert "| FedAvg, tuned | α = 5 | lr 0.3 | 4 | 50.0 | 60.0 | 70.0 ± 1.0 | 1 |" in text and "beyond" not in text
    at_edge = [replace(cell, ours=replace(cell.ours, trials=trials[:2], settings={"lr": 0.3})) for cell in cells]
    text = pages.render_markdown(plan, at_edge, "c", False)
    assert "| FedAvg, tuned | α = 5 | lr 0.3\\* | 2 |" in text and "a better one may lie beyond" in text


def test_a_recipe_over_samples_pairs_its_rows_by_seed() -> None:
    plan, cells = make_cells(rivals=["FedAvg, given"])
    text = pages.render_markdown(plan, cells, "command", quick=False)
    half = 12.706204736432095 * 0.1  # t(1 degree, 97.5 %); the differences are 0.3 and 0.1
    assert text.count(f"| FedAvg, tuned | 20.0 ± {100 * half:.1f} |") == 2 and "α = 5:\n\n| method | minus" in text
    assert "Paired by seed" in text and "Of 2 comparisons, about 0.1 exclude 0 by chance." in text


def test_accuracy_by_round_is_in_a_table() -> None:
    plan, cells = make_cells(by_round=True)
    half = 12.706204736432095 * 0.2 / math.sqrt(2) / math.sqrt(2)  # t(1 degree, 97.5 %), two seeds that differ by 0.2
    text = pages.render_markdown(plan, cells, "command", quick=False)
    table = f"| method | 1 | 2 |\n|---|---|---|\n| FedAvg, given | 10.0 ± 0.0 | 40.0 ± {100 * half:.1f} |"
    assert text.count(table) == 2 and "α = 5:\n\n| method | 1 |" in text and "![" not in text
    plan, cells = make_cells(by_round=[2, 3])
    late = recipes.Cell("FedAvg, given", "α = 0.5", make_row("fedavg", [[0.1, 0.3], [0.1, 0.5]], first=2), None)
    text = pages.render_markdown(plan, [late, *cells[1:]], "command", quick=False)
    assert "| method | 2 | 3 |" in text and "| FedAvg, given | 10.0 ± 0.0 | 40.0 ±" in text
    assert "| FedAvg, tuned | 60.0 ± 0.0 | – |" in text
    assert "| method | 1 |" not in text and "Accuracy by round" not in pages.render_markdown(
        *make_cells(), "command", False
    )


@pytest.mark.parametrize("units", ["groups", "tasks"])
def test_a_table_says_what_its_intervals_cover(units: str) -> None:
    plan, cells = make_cells(rivals=["FedAvg, given"])
    accuracies = [[{"0": 0.1, "1": 0.2}] * 2, [{"0": 0.2, "1": 0.4}] * 2]
    cells = [
        replace(cell, ours=replace(cell.ours, groups=4, units=units, unit_accuracies=accuracies["tuned" in cell.row]))
        for cell in cells
    ]
    text = pages.render_markdown(plan, cells, "command", quick=False)
    assert f"95 % CI over 4 {units}." in text and f"over all {units} that both rows were evaluated on" in text
    assert "| FedAvg, tuned | 15.0 ±" in text and "| FedAvg, given | – |" in text


def test_a_lead_over_tasks_needs_a_lead_over_seeds() -> None:
    """Tasks of a seed share one trained model: many of them do not make up for few seeds."""

    def describe(*leads: float) -> str:
        tasks = [str(number) for number in range(100)]
        rows = {"A": [dict.fromkeys(tasks, 0.5 + lead) for lead in leads], "B": [dict.fromkeys(tasks, 0.5)] * 3}
        cells = []
        for name, units in rows.items():
            row = make_row("fedavg", [[seed["0"]] for seed in units])
            cells.append(recipes.Cell(name, "x", replace(row, groups=100, units="tasks", unit_accuracies=units), None))
        return pages.describe_result(cells)

    assert "leads significantly" in describe(0.1, 0.11, 0.1)
    assert "no lead is significant" in describe(0.3, 0.01, 0.02)  # over 300 tasks, this is 11 ± 1 points


def test_a_page_counts_the_tests_behind_its_result() -> None:
    plan, cells = make_cells()
    columns, rows = {cell.column for cell in cells}, {cell.row for cell in cells}
    count = len(columns) * (len(rows) - 1)
    assert f"each rival tested separately ({count} tests)." in pages.render_markdown(plan, cells, "", quick=False)


def test_the_result_is_one_sentence_computed_from_the_numbers() -> None:
    def describe(**rows: list[float]) -> str:
        return pages.describe_result(
            [
                recipes.Cell(name, "x", make_row("fedavg", [[value] for value in row]), None)
                for name, row in rows.items()
            ]
        )

    assert describe(A=[0.5, 0.7], B=[0.4, 0.6]) == (
        "*A* leads significantly with 60.00 ± 127.06 %, ahead of *B* with 50.00 ± 127.06 %."  # always by 10 points
    )
    assert describe(A=[0.5, 0.5], B=[0.4, 0.5]).endswith(
        "ahead of *B* with 45.00 ± 63.53 %, but no lead is significant."
    )
    three = describe(A=[0.5, 0.5], B=[0.4, 0.4], C=[0.3, 0.45])
    assert three.endswith("50.00 ± 0.00 %, significantly ahead of all but *C* with 37.50 ± 95.30 %.")
    plan, cells = make_cells()
    ceiling = [row.model_copy(update={"reference": row.name == "FedAvg, tuned"}) for row in plan.row]
    page = pages.render_markdown(plan.model_copy(update={"row": ceiling}), cells, "", False)
    assert "FedAvg, tuned" not in page.splitlines()[2] and "| FedAvg, tuned |" in page
    assert pages.describe_result(cells) == (
        "*FedAvg, tuned* leads with 60.00 ± 0.00 % (α = 0.5, not significantly), "
        "60.00 ± 0.00 % (α = 5, not significantly)."
    )
    many = [replace(cell, column=f"{cell.column} {number}") for number in range(2) for cell in cells]
    assert pages.describe_result(many) == "best in 4 columns: *FedAvg, tuned* in 4; 0 of these leads are significant."
    single = [replace(cell, ours=replace(cell.ours, ci95=None, seeds=[0])) for cell in cells[:2]]
    assert pages.describe_result(single).endswith("ahead of *FedAvg, given* with 40.00 %; one seed only.")
    lower = {"name": "rmse", "higher_is_better": False, "percent": False}
    cells = [replace(cell, ours=replace(cell.ours, metric=lower)) for cell in cells[:2]]
    assert pages.describe_result(cells).startswith("*FedAvg, given* has the lowest mean, 0.4 ± 1.3")
    assert pages.describe_result(cells[:1]) == "*FedAvg, given* reaches 0.4 ± 1.3."


def test_a_page_follows_from_its_json(tmp_path: Path) -> None:
    plan, cells = make_cells(figure="rounds", about="One. " * 4)
    study = Study(["", "## A study", "", "Text."], {"number": 1})
    written = pages.write_results(
        "small", plan, cells, tmp_path, "c", False, {"rounds": b"p"}, study, ["FedAvg, tuned"]
    )
    page = written[0].read_text()
    assert pages.render_file(written[1]) == page and "(small.png)" in page
    assert page.index("**Result:**") < page.index("| method |") < page.index("small.png") < page.index("## A study")
    assert page.index("## A study") < page.index("## Setting") < page.index("<details") and "- FedAvg, tuned\n" in page
    assert "One. One. One.\n\nOne.\n" in page
    written[2].unlink()
    assert "small.png" not in pages.render_file(written[1]) and "A note." in pages.render_file(written[1], ["A note."])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("title", "titel"), "has no option 'titel', did you mean 'title'?"),
        (('method = "fedavg"', 'method = "fedavgg"'), "unknown method 'fedavgg'"),
        (("rounds = 2", 'rounds = "many"'), "rounds must be a valid integer, got 'many'"),
        (("[settings]", "[settings"), "is not valid TOML"),
        (("seeds = 2", "seeds = 0"), "seeds must be > 0, got 0"),
        (
            ("seeds = 2", "figure = 'pie'"),
            "figure must be 'rounds', 'megabytes', 'rounds and megabytes', 'columns' or 'heatmap', got 'pie'",
        ),
    ],
)
def test_a_wrong_recipe_gives_a_one_line_error(change: tuple[str, str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(RECIPE.replace(*change))
    result = call("reproduce", file, "--out", tmp_path / "runs", code=2)
    assert result.stderr.startswith("fewer: ") and text in result.stderr and result.stderr.count("\n") == 1


def test_an_unknown_recipe_suggests_the_nearest_name() -> None:
    assert "did you mean 'baselines/mnist'" in call("reproduce", "baseline/mnist", code=2).stderr
