"""`fewer data`: list, inspect and download datasets."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fewer.cli.options import App, with_settings
from fewer.cli.printing import Json, print_rows, short_name, write_json
from fewer.errors import SettingError

if TYPE_CHECKING:
    from fewer.data import Data
    from fewer.data.raw_dataset import RawDataset

app = App(help="List, inspect and download data.", no_args_is_help=True)
DataDir = Annotated[Path | None, Option(metavar="DIR", help="Directory of the data files. \\[default: $FEWER_DATA]")]


@app.command("list")
def list_data(data_dir: DataDir = None, json_file: Json = None) -> None:
    """List the datasets and the file formats."""
    from fewer.data.download import DOWNLOADS
    from fewer.data.sources import EMBEDDED, FILES
    from fewer.registry import FORMATS

    root = data_dir or (Path(directory) if (directory := os.environ.get("FEWER_DATA")) else None)
    rows = {name: {"where": "in the package", "text": _first_line(make)} for name, make in EMBEDDED.items()}
    for name, dataset in FILES.items():
        present = root is not None and (root / dataset.path).exists()
        where = "present" if present else f"fewer data get {name}" if name in DOWNLOADS else f"put it at {dataset.path}"
        rows[name] = {"where": where, "text": dataset.description}
    formats = {name: _first_line(read) for name, read in FORMATS.items()}
    if write_json(json_file, {"sets": rows, "formats": formats}):
        return
    print_rows(("dataset", "where", "what"), [(name, row["where"], row["text"]) for name, row in rows.items()])
    print()
    print_rows(("format", "what --data FORMAT:PATH reads"), list(formats.items()))


@app.command()
@with_settings(group="Data", without=("data",))
def inspect(
    given: dict[str, Any],
    name: Annotated[str, Argument(metavar="NAME", help="A dataset, or FORMAT:PATH.")],
    out: Annotated[Path, Option(metavar="DIR", help="Directory of the plots.")] = Path(),
    json_file: Json = None,
) -> None:
    """Count classes, clients and samples of a dataset; plot the label distribution by client, and examples.

    The first lines describe the data as it is stored, and the others what the clients get.

    [dim]fewer data inspect glyphs --partition natural[/dim]
    """
    import numpy as np

    from fewer.report.pictures import plot_examples, plot_partition
    from fewer.runs.experiment import load_data, parse_settings, read_stored_data

    started, settings = time.monotonic(), parse_settings({**given, "data": name})
    stored = _describe_stored(read_stored_data(settings))
    if json_file is None:
        print("as stored")
        _print_facts(stored)
        print(f"\nby client (partition {settings.partition})", flush=True)  # stays if the partition is impossible
    data = load_data(settings)
    sizes = np.array([data.size(client) for client in range(len(data))])
    facts = {
        "name": name,
        "input": list(data.shape),
        "classes" if data.has_classes else "outputs": data.classes,
        "clients": len(data),
        "training samples": int(sizes.sum()),
        "test samples": len(data.test),
        "samples per client": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "clients without samples": int((sizes == 0).sum()),
        "samples per class": _count_classes(data),
        "vocabulary": data.vocab_size,
        "fingerprint": data.fingerprint(),
        "seconds": round(time.monotonic() - started, 2),
    }
    out.mkdir(parents=True, exist_ok=True)
    stem = short_name(name)
    pictures = []
    for kind, plot in (("partition", plot_partition), ("examples", plot_examples)) if data.has_classes else ():
        if (picture := plot(data)) is not None:
            pictures.append(out / f"{stem}-{kind}.png")
            picture.savefig(pictures[-1])
    files = [str(path) for path in pictures]
    if write_json(json_file, {**facts, "stored": stored, "pictures": files, "notes": data.notes}):
        return
    _print_facts(facts)
    for note in data.notes:
        print(f"{'note':<24}{note}")
    for path in pictures:
        print(f"{'plot':<24}{path}")


@app.command()
def get(name: Annotated[str, Argument(metavar="NAME", help="A public dataset.")], data_dir: DataDir = None) -> None:
    """Download a public dataset and verify its checksum. An interrupted download resumes."""
    from fewer.data.download import download

    root = data_dir or os.environ.get("FEWER_DATA")
    if not root:
        raise SettingError("no target directory: pass --data-dir or set FEWER_DATA")
    shown = -1

    def progress(done: int, total: int | None) -> None:
        nonlocal shown
        percent = 100 * done // total if total else done // 1_000_000
        if percent != shown and (sys.stderr.isatty() or percent % 10 == 0):
            shown = percent
            of_total = f" of {total / 1e6:.1f}" if total else ""
            print(f"\r{name}  {done / 1e6:.1f} MB{of_total}", end="", file=sys.stderr)

    folder = download(name, root, progress)
    print(file=sys.stderr)
    print(f"{name} is in {folder}")


def _describe_stored(raw: RawDataset) -> dict[str, Any]:
    """The facts about data before it is partitioned."""
    import numpy as np

    targets = np.asarray(raw.y)
    counts = np.unique(targets, return_counts=True) if targets.ndim == 1 and targets.dtype.kind in "iu" else ((), ())
    names = dict(enumerate(raw.class_names))
    owners = () if raw.client_ids is None else np.unique(raw.client_ids[raw.client_ids != -1])
    return {
        "samples": len(raw.x),
        "test samples": "none: each client holds some out" if raw.test is None else len(raw.test[0]),
        "input": "text" if isinstance(raw.x, list) else list(raw.x.shape[1:]),
        "columns": [column.name for column in raw.columns],
        "classes": len(counts[0]) or None,
        "samples per class": {
            names.get(int(label), str(label)): int(count) for label, count in zip(*counts, strict=True)
        },
        "clients": f"{len(owners)} (partition natural keeps them)"
        if len(owners)
        else "not named: partition makes them",
    }


def _print_facts(facts: Mapping[str, Any]) -> None:
    """Prints the facts that are not empty, one per line."""
    from fewer.data.checks import list_names

    for key, value in facts.items():
        if isinstance(value, dict):
            text = list_names([f"{name} {number:g}" for name, number in value.items()])
        else:
            text = list_names(value) if key == "columns" else str(value)
        if value not in (None, 0, {}, []):
            print(f"{key:<24}{text}")


def _count_classes(data: Data) -> dict[str, int]:
    """The number of training samples of each class, by its name."""
    import torch

    from fewer.data import ArrayData

    if not data.has_classes or not isinstance(data, ArrayData):
        return {}
    counts = torch.bincount(data.source.y[torch.from_numpy(data.train.rows)], minlength=data.classes).tolist()
    names = dict(enumerate(data.class_names))
    return {names.get(label, str(label)): count for label, count in enumerate(counts)}


def _first_line(function: Any) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]
