"""Renames the keys of results published before the clients-and-server vocabulary, without changing a number.

    python tools/rename_results.py OLD_RESULTS [docs/results]

For every JSON file in OLD_RESULTS it renames settings, method options, row names and score keys, and recomputes the
settings hashes. It first translates the new settings of every cell back to the old names and checks that they give the
published hash: the new hash is therefore the hash of the same settings. It then writes the pages from the renamed JSON,
and checks that the tables of the old and the new page have the same numbers. Plots are drawn again from the JSON;
pictures of studies are copied.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from check_results import add_footer, load_checks

from fewer.audit import Audit
from fewer.audit.summary import HEADS, LIMITS, MEANING, summary_rows
from fewer.experiments import recipes
from fewer.experiments.recipes import Cell, Recipe
from fewer.methods import find
from fewer.report import plot_recipe
from fewer.report.style import png
from fewer.runs.experiment import make_method
from fewer.runs.settings import RUNTIME_SETTINGS, settings_hash

# --- old name -> new name ---------------------------------------------------------------------------------------

FEDAVG = {"rate": "lr", "steps": "local_steps", "batch": "batch_size", "active": "cohort"}
NEW_CLIENTS = {
    "support": "support_fraction",
    "query_share": "query_fraction",
    "top": "top_k",
    "most": "max_samples",
    "judge": "eval_clients",
    "flops": "count_flops",
    "active": "cohort",
}
META = {
    **FEDAVG,
    **NEW_CLIENTS,
    "optimiser": "optimizer",
    "adapt_rate": "adapt_lr",
    "outer_rate": "outer_lr",
    "order": "first_order",
}
FEW_SHOT = {
    "rate": "lr",
    "decay": "weight_decay",
    "judge": "eval_classes",
    "fine_rate": "fine_tune_lr",
    "steps": "fine_tune_steps",
    "reading": "predictor",
    "client_rate": "client_lr",
    "drop": "dropout",
    "heads": "attention_heads",
    "mi": "mi_scope",
    "adversary": "adversarial_weight",
    "active": "cohort",
    "order": "first_order",
}
GROUPS = {
    "rate": "lr",
    "batch": "batch_size",
    "meta_rate": "meta_lr",
    "optimiser": "optimizer",
    "uploaded": "prototypes_from",
    "keep": "keep_best",
    "groups": "eval_groups",
    "unseen": "unseen_classes",
    "members": "group_size",
    "division": "partition",
    "samples": "samples_per_class",
    "support_share": "support_fraction",
    "prepare_rate": "pretrain_lr",
    "warm": "warmup_rounds",
    "active": "cohort",
}
FEDMK = {
    "least": "min_samples",
    "begin": "init_from",
    "matching": "matching_steps",
    "matching_rate": "matching_lr",
    "outer_rate": "outer_lr",
    "outer_batch": "outer_batch_size",
    "optimiser": "optimizer",
    "inner_rate": "inner_lr",
    "inner_batch": "inner_batch_size",
    "restart": "restart_every",
    "keep": "keep_images",
    "server_rate": "server_lr",
    "server_batch": "server_batch_size",
    "generator_rate": "generator_lr",
    "weights": "sample_weights",
    "pseudo": "pseudo_weight",
    "decay": "lr_decay",
    "active": "cohort",
}
FEDMETA = {
    **NEW_CLIENTS,
    "inner_rate": "inner_lr",
    "steps": "inner_steps",
    "rate": "meta_lr",
    "local_rate": "local_lr",
    "clip": "clip_norm",
    "batch": "batch_size",
    "weights": "weighting",
}
FEDGEN = {
    **FEDAVG,
    "weight": "generator_weight",
    "fade": "generator_decay",
    "generator_rate": "generator_lr",
    "generator_batch": "generator_batch_size",
}
FEDDISTILL = {**FEDAVG, "weight": "distill_weight"}
METAFED = {
    **FEDAVG,
    "weight": "distill_weight",
    "enough": "distill_threshold",
    "poor": "ignore_threshold",
    "alone": "warmup_steps",
    "own_norms": "keep_norms",
    "inside": "inner_method",
    "inside_rounds": "inner_rounds",
    "inside_set": "inner_options",
}
OPTIONS: dict[str, dict[str, str]] = {
    **dict.fromkeys(["fedavg", "fedavg-moved", "fedprox", "fedbn", "local", "fedensemble"], FEDAVG),
    **dict.fromkeys(["feddistill", "feddistill-logits"], FEDDISTILL),
    "fedgen": FEDGEN,
    **dict.fromkeys(["fedmk", "fedmk-paper"], FEDMK),
    "fedmeta": FEDMETA,
    **dict.fromkeys(["fedavg-meta", "reptile", "per-fedavg"], META),
    "alone": {**FEDAVG, **NEW_CLIENTS},
    **dict.fromkeys(
        ["frl", "frl-deploy", "frl-scratch", "frl-fine-tuning", "frl-per-fedavg", "frl-lasting", "frl-warm"], GROUPS
    ),
    "metafed": METAFED,
    **dict.fromkeys(["f2l", "fl-maml", "fl-proto", "fedfsl", "local-maml", "local-proto"], FEW_SHOT),
}
"""Method options by the old name of the method."""
METHODS = {"fedavg-moved": "fedavg-augmented", "frl-lasting": "frl-meta-head", "frl-warm": "frl-warm-start"}
SETTINGS = {
    "set": "method_options",
    "data_set": "data_options",
    "model_set": "model_options",
    "active": "cohort",
    "parties": "clients",
    "minimum": "min_samples_per_client",
    "classes_per_party": "classes_per_client",
    "words": "vocab_size",
    "length": "max_length",
}
DATA = {
    "unseen": "unseen_classes",
    "own": "own_classes",
    "most": "max_items",
    "least": "min_records",
    "grey": "gray",
}
STUDY = {"most": "max_samples"}
VALUES: dict[tuple[str, Any], Any] = {
    ("stages", "personalise"): "personalize",
    ("transfer", "distil"): "distill",
    ("order", "first"): True,
    ("order", "exact"): False,
}
"""Renamed values by the old name of the option."""
ROW = {"everywhere": "global_accuracy", "judged": "unit_accuracies"}
AUDIT = {
    "figures": "metrics",
    "parties": "clients",
    "party": "client",
    "by_party": "by_client",
    "least": "min",
    "share": "fraction",
    "of": "total",
    "hits": "true_positive_rate",
    "at_once": "batch_size",
    "from": "gradients_of",
}
BENCHMARKS = {
    "whole": "end_to_end",
    "what": "name",
    "most": "at_most",
    "least": "at_least",
    "accuracy apart, at most": "largest accuracy difference",
    "first list of all, nothing known": "first list of all runs, nothing cached",
    "a sifted and sorted page": "a filtered and sorted page",
    "faults and ledger of it, one answer": "faults and ledger of that run, one answer",
    "a round written until a follower is told": "from the end of a round to its follower",
    "Flower's own bytes in a message": "Flower's overhead per message",
}
TEXTS = {
    "## On training samples that nobody was given": "## Accuracy on unused training samples",
    "colours: classes": "colors: classes",
    "circles: those of the other members": "circles: samples of the other members",
    "Parties of fedavg send no synthetic data: its nearness to real samples is not looked at.": (
        "Clients of fedavg send no synthetic data that could be compared with real samples."
    ),
    "Deep leakage is shown at its strongest, from the gradient of one step on one sample. Parties of this run sent "
    "what 20 steps on 32 samples each gave, which should tell less.": (
        "Deep leakage is shown in its strongest form: from the gradient of one step on one sample. Clients of this run "
        "sent the result of 20 steps on 32 samples each, which should reveal less."
    ),
    "Of each class the synthetic image that is nearest to a real one of its party, and that real one. Below: their "
    "distance against the typical distance between a real image of that class and the nearest other one. Parties with "
    "the nearest ones come first.": (
        "For each class: the synthetic image closest to a real image of its client, and that real image. Number below: "
        "their distance, divided by the median distance between a real image of the class and its nearest neighbor. "
        "Clients with the closest images come first."
    ),
    "Deep leakage: images of party 0 restored from the gradient of synthetic images, under the first and the trained "
    "model. The attacker knows the label.": (
        "Deep leakage on client 0, under the first and the trained model. Images are restored from the gradients of "
        "synthetic images. The attacker knows the labels."
    ),
    "Deep leakage: images of party 0 restored from the gradient of training images, if its party sent it after one "
    "step, under the first and the trained model. The attacker knows the label; at best, each image gave a gradient of "
    "its own.": (
        "Deep leakage on client 0, under the first and the trained model. Training images are restored from the "
        "gradient of a single step. The attacker knows the labels; in the easiest case, each image has its own "
        "gradient."
    ),
}
"""Phrases of the pages' study sections."""


# --- renaming ---------------------------------------------------------------------------------------------------


def rename_options(options: Mapping[str, Any], methods: Iterable[str]) -> dict[str, Any]:
    """Renames options that are shared by these methods (old names). A key may name its method: `fedmk.matching`."""
    renamed = {}
    for key, value in options.items():
        prefix, dot, name = key.rpartition(".")
        takers = [prefix] if dot else list(methods)
        names = {OPTIONS[method][name] for method in takers if name in OPTIONS[method]} or {name}
        if len(names) > 1:
            raise SystemExit(f"option {key} has several new names: {names}")
        new = VALUES.get((name, value), value) if not isinstance(value, dict | list) else value
        if name == "inside_set":
            new = rename_options(value, [options["inside"]])
        renamed[f"{METHODS.get(prefix, prefix)}{dot}{names.pop()}"] = new
    return renamed


def rename_settings(settings: Mapping[str, Any], methods: Iterable[str]) -> dict[str, Any]:
    """Renames the settings of a recipe, a column, a row or `quick`."""
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        new = value
        if key == "set":
            new = rename_options(value, methods)
        elif key == "data_set":
            new = {DATA.get(name, name): option for name, option in value.items()}
        elif key in ("settings", "quick"):
            new = rename_settings(value, methods)
        elif key == "study":
            new = {STUDY.get(name, name): option for name, option in value.items()}
        elif key == "method":
            new = METHODS.get(value, value)
        renamed[SETTINGS.get(key, key)] = new
    return renamed


def rename_recipe(old: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the keys of a recipe. Its texts stay as they are."""
    methods = [row["method"] for row in old["row"]]
    renamed = rename_settings(old, methods)
    if old.get("mean") == "parties":
        renamed["mean"] = "clients"
    renamed["column"] = [rename_settings(column, methods) for column in old["column"]]
    renamed["row"] = [rename_settings(row, [row["method"]]) for row in old["row"]]
    return Recipe(**renamed).model_dump(mode="json")


def update_texts(renamed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the current recipe of this name, which must differ from the renamed one in its texts only."""
    current = recipes.load_recipe(name).model_dump(mode="json")

    def strip(recipe: Mapping[str, Any]) -> dict[str, Any]:
        texts = ("title", "about", "paper", "target", "rivals")
        kept = {key: value for key, value in recipe.items() if key not in texts}
        for kind in ("row", "column"):
            kept[kind] = [{key: value for key, value in item.items() if key != "name"} for item in recipe[kind]]
        return kept

    if strip(renamed) != strip(current):
        raise SystemExit(f"{name}: the published recipe has other settings than the current one")
    rows = name_map(renamed, current, "row")
    named = [*renamed["rivals"], *([renamed["target"]] if renamed["target"] else [])]
    if [rows[row] for row in named] != [*current["rivals"], *([current["target"]] if current["target"] else [])]:
        raise SystemExit(f"{name}: the published recipe has other rivals or another target than the current one")
    return current


def name_map(old: Mapping[str, Any], new: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Maps the old names of the rows or columns to the new ones, by position."""
    return {a["name"]: b["name"] for a, b in zip(old[kind], new[kind], strict=True)}


def rename_cell(cell: Mapping[str, Any], rows: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, Any]:
    """Renames the keys of one cell. Its hash stays the old one."""
    ours = {ROW.get(key, key): value for key, value in cell["ours"].items()}
    method = ours["method"]
    ours["method"] = METHODS.get(method, method)
    ours.setdefault("curves", [])  # the oldest result has none
    ours["settings"] = rename_options(ours["settings"], [method])
    ours["trials"] = [{**trial, "settings": rename_options(trial["settings"], [method])} for trial in ours["trials"]]
    return {
        "row": rows[cell["row"]],
        "column": columns[cell["column"]],
        "ours": ours,
        "paper": cell["paper"],
        "target_cost": cell.get("reached"),
    }


def rename_study(
    study: Mapping[str, Any], rows: Mapping[str, str], columns: Mapping[str, str], hashes: Mapping[str, str]
) -> dict[str, Any]:
    """Renames the keys of a study: cells or columns, and inside them those of a privacy audit."""
    cells = {f"{row}, {column}": f"{rows[row]}, {columns[column]}" for row in rows for column in columns}

    def rename_audit(value: Any) -> Any:
        if isinstance(value, dict):
            names = {**AUDIT, "others": "nonmembers"} if "auc" in value else AUDIT
            return {names.get(key, key): rename_audit(item) for key, item in value.items()}
        if isinstance(value, list):
            return [rename_audit(item) for item in value]
        return hashes.get(value, TEXTS.get(value, value)) if isinstance(value, str) else value

    return {{**cells, **columns}[key]: rename_audit(value) for key, value in study.items()}


def rename_benchmarks(old: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the keys and names of benchmark results."""

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {BENCHMARKS.get(key, key): rename(item) for key, item in value.items()}
        if isinstance(value, list):
            return [rename(item) for item in value]
        return BENCHMARKS.get(value, value.replace("parties", "clients")) if isinstance(value, str) else value

    return {**{key: value for key, value in old.items() if key != "figures"}, "metrics": rename(old["figures"])}


# --- hashes -----------------------------------------------------------------------------------------------------


def hash_with_old_names(plan: Recipe, cell: Cell) -> str:
    """Computes the hash of a cell as it was before the renaming, from its settings under the new names."""
    settings = recipes.cell_settings(plan, cell)
    method = make_method(find(settings.method), settings)
    values = settings.model_dump(mode="json", exclude={*RUNTIME_SETTINGS, "rounds", "cohort", "method_options"})
    old_settings = {new: old for old, new in SETTINGS.items()}
    inside = {old_settings.get(name, name): value for name, value in values.items()}
    inside["data_set"] = {_old_name(DATA, name): value for name, value in values["data_options"].items()}
    inside["method"] = _old_name(METHODS, settings.method)
    inside["method_settings"] = _old_options(inside["method"], method.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(inside, sort_keys=True).encode()).hexdigest()[:12]


def _old_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values = {(old, new): value for (old, value), new in VALUES.items()}
    renamed: dict[str, Any] = {}
    for new, value in options.items():
        old = _old_name(OPTIONS[method], new)
        renamed[old] = values.get((old, value), value) if not isinstance(value, dict | list) else value
        if old == "inside_set":
            renamed[old] = _old_options(options["inner_method"], value)
    return renamed


def _old_name(names: Mapping[str, str], new: str) -> str:
    return next((old for old, name in names.items() if name == new), new)


# --- pages ------------------------------------------------------------------------------------------------------


def study_section(old_page: str, content: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Returns the section of a page after its table: what the study measured, and its pictures."""
    section = old_page.partition("</details>\n")[2]
    for old, new in {**TEXTS, **names}.items():
        section = section.replace(old, new)
    if content["recipe"]["study"].get("name") == "leakage":
        return _render_audits(section, content["study"])
    return section


def _render_audits(old_section: str, study: Mapping[str, Any]) -> str:
    lines = ["", "## Privacy audit", ""]
    for cell, values in study.items():
        audit = Audit(**values)
        lines += [f"| {cell} | {HEADS[1]} | {HEADS[2]} |", "|---|---|---|"]
        lines += ["| " + " | ".join(row) + " |" for row in summary_rows(audit)]
        lines += ["", *(f"{note}\n" for note in audit.notes)]
    pictures = old_section[old_section.index("![") :]
    return "\n".join([*lines, MEANING, "", LIMITS, "", pictures])


def table_numbers(page: str) -> Counter[str]:
    """Counts the numbers in the tables of a page."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return Counter(number for line in lines for number in re.findall(r"\d[\d.,]*", line))


# --- all of it --------------------------------------------------------------------------------------------------


def convert(source: Path, target: Path, checks: Mapping[str, Any]) -> int:
    """Renames one result and writes its JSON, page and picture; returns the number of its cells."""
    old = json.loads(source.read_text())
    if "recipe" not in old:
        target.write_text(json.dumps(rename_benchmarks(old), indent=2) + "\n")
        return 0
    renamed = rename_recipe(old["recipe"])
    recipe = update_texts(renamed, old["command"].split()[2])
    rows, columns = name_map(renamed, recipe, "row"), name_map(renamed, recipe, "column")
    command = old["command"]
    for name, new_name in columns.items():
        command = command.replace(f'--column "{name}"', f'--column "{new_name}"')
    cells = [rename_cell(cell, rows, columns) for cell in old["cells"]]
    content = {"recipe": recipe, "command": command, "machine": old["machine"], "cells": cells}
    plan, parsed = recipes.read_results({**content})
    hashes = {}
    for cell, values in zip(parsed, cells, strict=True):
        if hash_with_old_names(plan, cell) != cell.ours.hash:
            raise SystemExit(f"{source}: {cell.row}, {cell.column}: the settings do not give the published hash")
        settings = recipes.cell_settings(plan, cell)
        hashes[cell.ours.hash] = settings_hash(settings, make_method(find(settings.method), settings))
        values["ours"]["hash"] = hashes[cell.ours.hash]
    if "study" in old:
        content["study"] = rename_study(old["study"], rows, columns, hashes)
    plan, parsed = recipes.read_results(content)
    content["cells"] = [asdict(cell) for cell in parsed]
    text = json.dumps(content, indent=1) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    old_page, image = source.with_suffix(".md").read_text(), source.with_suffix(".png")
    page = recipes.render_markdown(
        plan, parsed, command, False, image.name if image.exists() else None, content["machine"]
    )
    if "study" in content:
        page += study_section(old_page, content, rows | columns)
    if table_numbers(page) != table_numbers(old_page):
        raise SystemExit(f"{target}: the numbers of the tables changed: {_difference(page, old_page)}")
    target.with_suffix(".md").write_text(add_footer(page, checks.get(_key(target))))
    figure = plot_recipe(plan, parsed)
    if image.exists() and figure is not None:
        target.with_suffix(".png").write_bytes(png(figure))
    for extra in source.parent.glob(f"{source.stem}-*.png"):
        if not extra.with_suffix(".json").exists() and not target.with_name(extra.name).exists():
            shutil.copyfile(extra, target.with_name(extra.name))
    return len(cells)


def _key(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def _difference(page: str, old_page: str) -> dict[str, int]:
    counts = table_numbers(page)
    counts.subtract(table_numbers(old_page))
    return {number: count for number, count in counts.items() if count}


def main() -> None:
    """Converts all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old_results", type=Path)
    parser.add_argument("results", type=Path, nargs="?", default=Path("docs/results"))
    args = parser.parse_args()
    checks = load_checks(args.results / "checks.json")
    total = 0
    for source in sorted(args.old_results.rglob("*.json")):
        total += convert(source, args.results / source.relative_to(args.old_results), checks)
    print(f"{total} cells: every published hash follows from the recorded settings under the old names")


if __name__ == "__main__":
    main()
