"""JSON Lines of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fewer.data.checks import describe_mixed_names
from fewer.data.formats.readers import decode_text, number_labels, read_contents, reader
from fewer.data.raw_dataset import RawDataset
from fewer.data.schema import Schema
from fewer.errors import DataError
from fewer.registry import FORMATS


@FORMATS.register("jsonl")
@reader("JSON Lines")
def read_jsonl(
    path: Path, text: str = "text", label: str = "label", client: str | None = None, schema: Schema | None = None
) -> RawDataset:
    """One JSON object per line; `text`, `label` and `client` name its keys. Optionally compressed with gzip.

    With a schema, labels may be absent: all of them, or none.
    """
    texts: list[str] = []
    labels: list[Any] = []
    client_ids: list[str] = []
    labeled = True
    for number, line in enumerate(decode_text(read_contents(path), path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise DataError(f"{where} is not an object (expected: {{...}})")
        if not texts:
            labeled = schema is None or label in entry
        for key in (text, label if labeled else None, client):
            if key is not None and key not in entry:
                raise DataError(f"{where} has no '{key}' (it has: {', '.join(sorted(entry)) or 'nothing'})")
        if not isinstance(entry[text], str):
            raise DataError(f"{where} has a '{text}' that is not a string")
        if labeled and not isinstance(entry[label], str | int):
            raise DataError(f"{where} has a '{label}' that is not a string or integer")
        if not labeled and label in entry:
            raise DataError(f"{where} has a '{label}', and lines before it have none")
        texts.append(entry[text])
        labels += [entry[label]] if labeled else []
        if client is not None:
            client_ids.append(str(entry[client]))
    if not texts:
        raise DataError(f"{path} has no samples")
    y, class_names = number_labels(labels, path) if labeled else (np.zeros(0, np.int64), ())
    owners = None if client is None else np.array(client_ids)
    return RawDataset(texts, y, client_ids=owners, class_names=class_names, notes=describe_mixed_names(class_names))
