"""Plays in plain text: each role of each play is a client, and the task is to foretell the next character."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fewer.data.formats.readers import contents, inside, members, reader, text
from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF, in its order."""
WINDOW = 80
"""How many characters the next one is foretold from."""
NOBODY = -1
"""The client of windows that reach from one role into the next, which are nobody's and not to be used."""

_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-"})
_TABLE = np.full(128, ALPHABET.index(" "), np.uint8)
_TABLE[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))


@FORMATS.register("plays")
@reader("plays (text files, a directory or an archive of them)")
def plays(path: Path, min_samples: int = 200) -> RawDataset:
    """Windows of 80 characters and the character after each, for all roles of `minimum` characters or more.

    Inputs are a view of the text, which is held only once: row i is the 80 characters from place i on. Clients are
    role numbers in the order of `roles`; rows that reach into the next role belong to `NOBODY`.
    """
    if min_samples <= WINDOW:
        raise SettingError(f"minimum = {min_samples} (allowed: more than {WINDOW})")
    parts = [encode(speech) for speech in roles(path, min_samples).values()]
    if not parts:
        raise DataError(
            f"{path} has no role of {min_samples} characters or more (expected: NAME. on a line, then a speech)"
        )
    flat = torch.from_numpy(np.concatenate(parts))
    small = np.min_scalar_type(-len(parts))
    client_ids = np.concatenate(
        [np.repeat(np.array([role, NOBODY], small), [len(part) - WINDOW, WINDOW]) for role, part in enumerate(parts)]
    )
    rows = len(flat) - WINDOW
    return RawDataset(
        flat.unfold(0, WINDOW, 1)[:rows],
        flat[WINDOW:].numpy(),
        client_ids=client_ids[:rows],
        names=tuple(ALPHABET),
        tokens=tuple(ALPHABET),
        in_time=True,
    )


def encode(characters: str) -> NDArray[np.uint8]:
    """The place of each character in the alphabet; those that it lacks count as spaces."""
    codes = np.frombuffer(characters.translate(_PLAIN).encode("utf-32-le", "surrogatepass"), np.uint32)
    return _TABLE[np.where(codes < len(_TABLE), codes, ord(" "))]


def roles(path: Path, min_samples: int = 200) -> dict[str, str]:
    """All that each role says, by the names of play and role, for those who say `minimum` characters or more."""
    path = inside(path, "plays.tar.gz")
    if path.name.endswith((".txt", ".txt.gz")):
        files = [(path.name, contents(path))]
    else:
        files = sorted(members(path, lambda name: name.endswith(".txt")))
    spoken: dict[str, list[str]] = {}
    for name, raw in files:
        play = name.rpartition("/")[2].partition(".txt")[0]
        for role, speech in _speeches(text(raw, name)):
            spoken.setdefault(f"{play}/{role}", []).append(speech)
    joined = {role: "\n".join(speeches) + "\n" for role, speeches in spoken.items()}
    return {role: speech for role, speech in joined.items() if len(speech) >= min_samples}


# --- the form of a play ---------------------------------------------------------------------------------------

_START = re.compile(r"^[ \t]*(?:ACT|SCENE|PROLOGUE|INDUCTION)\b", re.IGNORECASE | re.MULTILINE)
_MOVES = r"(?:Enter|Re-enter|Exit|Exeunt)\b"
_BRACKETS = r"\[(?:[^\[\]\n]|\n(?![ \t]*\n))*\]"
_WHOLE_LINES = re.compile(
    rf"^[ \t]*(?:{_BRACKETS}|\((?:{_MOVES}[^()\n]*|[A-Z][^()\n]*\.)\)|_[^_\n]*_|\[?{_MOVES}.*)[ \t]*$", re.MULTILINE
)
_IN_LINES = re.compile(rf"{_BRACKETS}[ \t]?")
_WORD = r"(?:[A-Z\d][\w'&-]*\.?|and|of|the|de|&)"
_NAME = re.compile(rf"{_WORD}(?:,? +{_WORD}){{0,5}}\.")
_BARE_NAME = re.compile(r"[A-Z][A-Z'-]+(?: [A-Z'-]+){0,3}")
_HEADING = re.compile(r"(?:ACT|SCENE|SONG|EPILOGUE|THE END)\b|(?:Act|Scene) [IVXL\d]+\b")
_NUMBER = re.compile(r"[IVXL\d]+\.")
_DIRECTION = "\x01"
"""Stands for a stage direction that fills its lines."""


def _speeches(play: str) -> list[tuple[str, str]]:
    """Who says what, in order. Whatever stands before the first act (title, persons of the play) is left out.

    A speech ends at an empty line, unless there is but a stage direction between that and what follows.
    """
    start = _START.search(play)
    play = _IN_LINES.sub("", _WHOLE_LINES.sub(_DIRECTION, play[start.start() if start else 0 :]))
    lines_of = ([line.strip() for line in block.split("\n") if line.strip()] for block in re.split(r"\n\s*\n", play))
    blocks = [lines for lines in lines_of if lines]
    names = _names(blocks)
    speeches: list[tuple[str, list[str]]] = []
    speaking = False
    for before, block in pairwise([[""], *blocks]):
        speaking = speaking and _DIRECTION in (before[-1], block[0])
        for line in block:
            if line in names:
                speeches.append((" ".join(line.removesuffix(".").split()), []))
                speaking = True
            elif _HEADING.match(line):
                speaking = False
            elif speaking and line != _DIRECTION:
                speeches[-1][1].append(line)
    return [(role, "\n".join(lines)) for role, lines in speeches if lines]


def _names(blocks: list[list[str]]) -> set[str]:
    """Lines that name who speaks: the first ones of blocks, in the form that is the most frequent in the play."""
    first = Counter(block[0] for block in blocks if len(block) > 1 and not _HEADING.match(block[0]))
    dotted = {line for line in first if _NAME.fullmatch(line) and not _NUMBER.fullmatch(line)}
    bare = {line for line in first if _BARE_NAME.fullmatch(line)}
    capitals = {line for line in dotted if all(word in (word.upper(), "and", "of", "the") for word in line.split())}
    if _total(first, bare) > _total(first, dotted):
        return bare | capitals
    return capitals if 2 * _total(first, capitals) > _total(first, dotted) else dotted


def _total(counts: Counter[str], lines: set[str]) -> int:
    return sum(counts[line] for line in lines)
