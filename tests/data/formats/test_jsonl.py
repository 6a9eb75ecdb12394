"""JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.data.formats.files import check_refused, needs_real_data, read, read_real, shapes, write

# --- csv and jsonl ----------------------------------------------------------------------------------------------


def test_jsonl_fields_become_samples(tmp_path: Path) -> None:
    lines = [{"raw": "bad news", "label": 20, "by": 3}, {"raw": "été", "label": 2, "by": "x"}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(line) for line in lines) + "\n")
    raw = read("jsonl", path, text="raw", client="by")
    assert raw.x == ["bad news", "été"] and raw.y.tolist() == [20, 2] and not raw.class_names
    assert raw.client_ids is not None and raw.client_ids.tolist() == ["3", "x"]
    check_refused("jsonl", path, r"line 1 has no 'text' \(it has: by, label, raw\)")
    named = write(tmp_path / "b.jsonl", '{"text": "a", "label": "sport"}\n{"text": "b", "label": "art"}\n')
    assert read("jsonl", named).class_names == ("art", "sport")


def test_bad_jsonl_is_refused(tmp_path: Path) -> None:
    good = '{"text": "a", "label": 1}\n'
    for content, message in (
        (good + '{"text": "a", "label"\n', "line 2 is not JSON"),
        (good + "[" * 100_000, "line 2 is not JSON"),
        (good + "[1]", "line 2 is not an object"),
        (good + '{"text": 1, "label": 1}', "line 2 has a 'text' that is not a string"),
        (good + '{"text": "a", "label": [1]}', "'label' that is not a string or integer"),
        (good + "{}", r"line 2 has no 'text' \(it has: nothing\)"),
        ("\n\n", "no samples"),
    ):
        check_refused("jsonl", write(tmp_path / "a.jsonl", content), message)


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
def test_real_huffpost_has_its_published_sizes() -> None:
    raw = read_real("jsonl", "huffpost/huffpost.jsonl", text="raw")
    assert shapes(raw) == ((36_900,), None) and np.bincount(raw.y).tolist() == [900] * 41
