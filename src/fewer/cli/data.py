"""`fewer data`: what there is, what is in it, and where it comes from."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fewer.cli.options import with_settings
from fewer.cli.printing import Json, print_rows, told, write_json
from fewer.errors import SettingError
from fewer.runs.settings import Settings

app = typer.Typer(help="List, inspect and download data.", no_args_is_help=True)
DataDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Where data files lie. \\[default: $FEWER_DATA]")]


NOT_DATA = (
    "data",
    *(name for name, field in Settings.model_fields.items() if field.title != "Data" and name != "seed"),
)


@app.command("list")
@told
def list_data(data_dir: DataDir = None, json_file: Json = None) -> None:
    """List the sets that can be named, and the formats that can be read."""
    from fewer.data.download import SETS
    from fewer.data.sources import EMBEDDED, FILES
    from fewer.registry import FORMATS

    root = data_dir or (Path(found) if (found := os.environ.get("FEWER_DATA")) else None)
    rows = {name: {"where": "in the package", "text": _first_line(make)} for name, make in EMBEDDED.items()}
    for name, known in FILES.items():
        here = root is not None and (root / known.path).exists()
        where = "here" if here else f"fewer data get {name}" if name in SETS else f"put it at {known.path}"
        rows[name] = {"where": where, "text": known.text}
    formats = {name: _first_line(read) for name, read in FORMATS.items()}
    if write_json(json_file, {"sets": rows, "formats": formats}):
        return
    print_rows(("method_options", "where", "what"), [(name, row["where"], row["text"]) for name, row in rows.items()])
    print()
    print_rows(("format", "what --data FORMAT:PATH reads"), list(formats.items()))


@app.command()
@told
@with_settings(without=NOT_DATA)
def inspect(
    given: dict[str, Any],
    name: Annotated[str, typer.Argument(metavar="NAME", help="A set, or FORMAT:PATH.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the pictures go.")] = Path(),
    json_file: Json = None,
) -> None:
    """Count classes, clients and samples of a data set, and draw who holds what and a sheet of examples.

    [dim]fewer data inspect glyphs --partition natural[/dim]
    """
    import numpy as np

    from fewer.report import partition_picture, sheet_picture
    from fewer.runs.experiment import load_data, parse_settings

    begun = time.monotonic()
    data = load_data(parse_settings({**given, "data": name}))
    sizes = np.array([data.size(client) for client in range(len(data))])
    facts = {
        "name": name,
        "input": list(data.shape),
        "classes": data.classes,
        "clients": len(data),
        "training samples": int(sizes.sum()),
        "test samples": len(data.test),
        "samples of a client": {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        "clients without samples": int((sizes == 0).sum()),
        "vocabulary": data.vocabulary,
        "fingerprint": data.fingerprint(),
        "seconds": round(time.monotonic() - begun, 2),
    }
    out.mkdir(parents=True, exist_ok=True)
    stem = "".join(c if c.isalnum() or c in "-._" else "-" for c in name)
    pictures = []
    for kind, picture in (("partition", partition_picture(data)), ("examples", sheet_picture(data))):
        if picture is not None:
            pictures.append(out / f"{stem}-{kind}.png")
            picture.savefig(pictures[-1])
    if write_json(json_file, {**facts, "pictures": [str(path) for path in pictures]}):
        return
    for key, value in facts.items():
        if value not in (None, 0):
            told_value = ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key:<24}{told_value}")
    for path in pictures:
        print(f"{'picture':<24}{path}")


@app.command()
@told
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A public data set.")],
    data_dir: DataDir = None,
) -> None:
    """Download a public data set, checked by its checksum; a download that broke off goes on where it was."""
    from fewer.data.download import get as fetch

    root = data_dir or os.environ.get("FEWER_DATA")
    if not root:
        raise SettingError("where to? (--data-dir DIR, or FEWER_DATA)")
    shown = -1

    def progress(done: int, total: int | None) -> None:
        nonlocal shown
        percent = 100 * done // total if total else done // 1_000_000
        if percent != shown and (sys.stderr.isatty() or percent % 10 == 0):
            shown = percent
            print(
                f"\r{name}  {done / 1e6:.1f} MB" + (f" of {total / 1e6:.1f}" if total else ""), end="", file=sys.stderr
            )

    folder = fetch(name, root, progress)
    print(file=sys.stderr)
    print(f"{name} is in {folder}")


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]
