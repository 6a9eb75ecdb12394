"""Texts in lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fewer.data.formats.readers import contents, numbered, reader
from fewer.data.formats.readers import text as decoded
from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS


@FORMATS.register("jsonl")
@reader("lines of JSON")
def jsonl(path: Path, text: str = "text", label: str = "label", client: str | None = None) -> RawDataset:
    """One object on each line; `text`, `label` and `client` name its keys. Packed with gzip or not."""
    texts: list[str] = []
    labels: list[Any] = []
    owners: list[str] = []
    for number, line in enumerate(decoded(contents(path), path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = _object(line, where)
        for key in (text, label, client):
            if key is not None and key not in entry:
                raise DataError(
                    f"{path}, line {number} has no '{key}' (it has: {', '.join(sorted(entry)) or 'nothing'})"
                )
        if not isinstance(entry[text], str) or not isinstance(entry[label], str | int):
            raise DataError(f"{where} has a '{text}' that is no text or a '{label}' that is no class")
        texts.append(entry[text])
        labels.append(entry[label])
        if client is not None:
            owners.append(str(entry[client]))
    if not texts:
        raise DataError(f"{path} has no samples")
    y, names = numbered(labels, path)
    return RawDataset(texts, y, client_ids=None if client is None else np.array(owners), names=names)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where} is not an object (expected: {{...}})")
    return entry
