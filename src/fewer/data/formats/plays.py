"""Plays in plain text. A client is a role of a play; the task is to predict the next character."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fewer.data.formats.readers import decode_text, find_inside, iter_members, read_contents, reader
from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF, in its order."""
WINDOW = 80
"""Characters from which the next one is predicted."""
NO_CLIENT = -1
"""Client id of windows that reach from one role into the next. They are not used."""

_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-"})
_TABLE = np.full(128, ALPHABET.index(" "), np.uint8)
_TABLE[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))


@FORMATS.register("plays")
@reader("plays (a text file, or a directory or archive of text files)")
def read_plays(path: Path, min_characters: int = 200) -> RawDataset:
    """Windows of 80 characters and the next character, for roles of at least `min_characters` characters.

    Inputs are views of a single copy of the text: row i is the 80 characters from position i on. Client ids are
    positions in the result of `read_roles`. Rows that reach into the next role belong to `NO_CLIENT`.
    """
    if min_characters <= WINDOW:
        raise SettingError(f"min_characters must be > {WINDOW}, got {min_characters}")
    parts = [encode_characters(speech) for speech in read_roles(path, min_characters).values()]
    if not parts:
        raise DataError(
            f"{path} has no role of at least {min_characters} characters (expected: NAME. on a line, then a speech)"
        )
    characters = torch.from_numpy(np.concatenate(parts))
    dtype = np.min_scalar_type(-len(parts))
    client_ids = np.concatenate(
        [np.repeat(np.array([role, NO_CLIENT], dtype), [len(part) - WINDOW, WINDOW]) for role, part in enumerate(parts)]
    )
    x, y, client_ids = characters.unfold(0, WINDOW, 1)[:-1], characters[WINDOW:].numpy(), client_ids[:-WINDOW]
    alphabet = tuple(ALPHABET)
    return RawDataset(x, y, client_ids=client_ids, class_names=alphabet, tokens=alphabet, time_ordered=True)


def encode_characters(characters: str) -> NDArray[np.uint8]:
    """Encodes characters as positions in `ALPHABET`. Unknown characters become spaces."""
    codes = np.frombuffer(characters.translate(_PLAIN).encode("utf-32-le", "surrogatepass"), np.uint32)
    return _TABLE[np.where(codes < len(_TABLE), codes, ord(" "))]


def read_roles(path: Path, min_characters: int = 200) -> dict[str, str]:
    """Reads the text of each role, by play/role, for roles of at least `min_characters` characters."""
    path = find_inside(path, "plays.tar.gz")
    if path.name.endswith((".txt", ".txt.gz")):
        files = [(path.name, read_contents(path))]
    else:
        files = sorted(iter_members(path, lambda name: name.endswith(".txt")))
    speeches: dict[str, list[str]] = {}
    for name, content in files:
        play = name.rpartition("/")[2].partition(".txt")[0]
        for role, speech in _parse_speeches(decode_text(content, name)):
            speeches.setdefault(f"{play}/{role}", []).append(speech)
    texts = {role: "\n".join(parts) + "\n" for role, parts in speeches.items()}
    return {role: text for role, text in texts.items() if len(text) >= min_characters}


# --- layout of a play -----------------------------------------------------------------------------------------

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
"""Marks a stage direction on separate lines."""


def _parse_speeches(play: str) -> list[tuple[str, str]]:
    """Returns (role, speech) pairs in order. Text before the first act (title, list of characters) is skipped.

    A speech ends at an empty line, unless only a stage direction separates it from the following text.
    """
    start = _START.search(play)
    play = _IN_LINES.sub("", _WHOLE_LINES.sub(_DIRECTION, play[start.start() if start else 0 :]))
    blocks = [[line.strip() for line in block.split("\n") if line.strip()] for block in re.split(r"\n\s*\n", play)]
    blocks = [lines for lines in blocks if lines]
    names = _find_names(blocks)
    speeches: list[tuple[str, list[str]]] = []
    speaking = False
    for previous, block in pairwise([[""], *blocks]):
        speaking = speaking and _DIRECTION in (previous[-1], block[0])
        for line in block:
            if line in names:
                speeches.append((" ".join(line.removesuffix(".").split()), []))
                speaking = True
            elif _HEADING.match(line):
                speaking = False
            elif speaking and line != _DIRECTION:
                speeches[-1][1].append(line)
    return [(role, "\n".join(lines)) for role, lines in speeches if lines]


def _find_names(blocks: list[list[str]]) -> set[str]:
    """Finds the lines that name a speaker: first lines of blocks, in the most frequent form of the play."""
    first_lines = Counter(block[0] for block in blocks if len(block) > 1 and not _HEADING.match(block[0]))
    dotted = {line for line in first_lines if _NAME.fullmatch(line) and not _NUMBER.fullmatch(line)}
    bare = {line for line in first_lines if _BARE_NAME.fullmatch(line)}
    capitals = {line for line in dotted if all(word in (word.upper(), "and", "of", "the") for word in line.split())}
    kinds = bare, dotted, capitals
    bare_count, dotted_count, capitals_count = (sum(first_lines[line] for line in kind) for kind in kinds)
    if bare_count > dotted_count:
        return bare | capitals
    return capitals if 2 * capitals_count > dotted_count else dotted
