"""Writes all pages of docs/results again from their JSON files: python tools/render_results.py.

A page depends on its JSON file, on the pictures next to it, and on docs/results/checks.json (tools/check_results.py).
It shows the recipe of today, if that plans all of its cells alike.
A result of an older version has its study on the page only; it is copied to the JSON file first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewer.experiments import pages
from fewer.experiments.recipes import load_recipe, plans_alike, read_results

RESULTS = Path(__file__).parents[1] / "docs/results"
RENAMED = (
    "Key names in this result were renamed after it was made; no number changed. The settings hashes were recomputed "
    "from the recorded settings, which give the originally published hashes under the old names."
)


def load_checks(path: Path) -> dict[str, Any]:
    """Loads the finished checks by the name of the result."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def render_page(data: Path, checks: Mapping[str, Any]) -> str:
    """Renders the page of a JSON file, with a note on what was verified."""
    check = checks.get(f"{data.parent.name}/{data.stem}")
    return pages.render_file(data, [RENAMED, describe_check(check)] if check else [])


def describe_check(check: Mapping[str, Any]) -> str:
    """Describes the outcome of a check in words."""
    text = f"The cell *{check['row']}, {check['column']}, seed {check['seed']}* was re-run with the renamed code"
    compared = [f"{check['rounds_compared']} evaluated rounds"] if check["rounds_compared"] > 1 else []
    compared += [f"{check['units_compared']} clients or groups"] if check["units_compared"] else []
    accuracy = "accuracy" + (f" (final, and of {' and '.join(compared)})" if compared else "")
    published, new = (f"{100 * check['accuracy'][key]:.2f} %" for key in ("published", "new"))
    if check["agrees"]:
        return f"{text}: {accuracy} agrees exactly with the published numbers. {_describe_bytes(check)}"
    if check.get("agrees_with_reference"):
        return (
            f"{text} and, on the same machine, with the code before the renaming (commit 5a0abda): {accuracy} agrees "
            f"exactly. Both give {new} on that machine, where {published} is published: floating-point results depend "
            f"on the processor. {_describe_bytes(check)}"
        )
    return f"{text} and does not agree: {new} where {published} is published."


def _describe_bytes(check: Mapping[str, Any]) -> str:
    up, down = check["bytes_up"], check["bytes_down"]
    if up["new"] == up["published"] and down["new"] == down["published"]:
        return "The bytes sent are the published ones."
    changes = [f"{total['new'] - total['published']:+,} of {total['published']:,}" for total in (up, down)]
    return f"Traffic differs by the length of renamed fields: {changes[0]} bytes up, {changes[1]} bytes down."


def copy_study(data: Path) -> None:
    """Copies the study from the page of an older version, where it follows the first heading, to the JSON file."""
    content = json.loads(data.read_text())
    if "study" in content and "study_page" not in content:
        _, heading, study = data.with_suffix(".md").read_text().partition("\n---\n\n")[0].partition("\n## ")
        data.write_text(json.dumps({**content, "study_page": heading + study}, indent=1) + "\n")


def update_recipe(data: Path) -> None:
    """Takes over the recipe of today, if it plans all cells alike: only its text or other cells have changed."""
    content = json.loads(data.read_text())
    earlier, cells = read_results(content)
    recipe = load_recipe(content["command"].split()[2])
    alike = (recipe.target, recipe.study) == (earlier.target, earlier.study)
    if recipe != earlier and alike and all(plans_alike(recipe, earlier, cell) for cell in cells):
        data.write_text(json.dumps({**content, "recipe": recipe.model_dump(mode="json")}, indent=1) + "\n")


def render_all(results: Path = RESULTS) -> None:
    """Writes all pages in a directory of results."""
    checks = load_checks(results / "checks.json")
    for data in sorted(results.glob("*/*.json")):
        copy_study(data)
        update_recipe(data)
        data.with_suffix(".md").write_text(render_page(data, checks))


if __name__ == "__main__":
    render_all()
