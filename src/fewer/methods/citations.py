"""The papers behind each method, as BibTeX."""

from __future__ import annotations

import re
from pathlib import Path

_PAPERS = Path(__file__).with_name("papers.bib")
_METHODS = re.compile(r"^  methods = \{(.+)\},\n", re.MULTILINE)
"""The field of an entry that lists its methods."""


def cite(name: str) -> list[str]:
    """Returns the BibTeX entries of a method's papers; an empty list if it has none."""
    return [_METHODS.sub("", entry) for entry, methods in read_papers() if name in methods]


def read_papers() -> list[tuple[str, list[str]]]:
    """Returns all BibTeX entries, each with its methods."""
    entries = re.findall(r"^@.+?^\}$", _PAPERS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [(entry, [name for names in _METHODS.findall(entry) for name in names.split(", ")]) for entry in entries]
