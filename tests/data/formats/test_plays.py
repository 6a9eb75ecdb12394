"""Plays as windows of characters, by speaker."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fewer.data.formats.plays import ALPHABET, NO_CLIENT, encode_characters, read_roles
from fewer.errors import SettingError
from tests.data.formats.files import check_refused, count, needs_real_data, read, write, write_tar

# --- files of every format --------------------------------------------------------------------------------------


PLAY = """THE TITLE

by Somebody

Dramatis Personae

KING.
A man of whom much is said before the play begins.

ACT I.

SCENE I. A room in the palace.

[Enter the KING and
a FOOL.]

KING.
Hear me [Aside.] now, good fool: the day is long,
And night is “longer”—so they say…

[Exit a servant.]

And so it goes on after a direction.

FIRST FOOL.
Ay.
KING.
Right after, without an empty line.

Nobody says this.

SCENE II. Another room,
with a long name.

FIRST FOOL.
(Exit.)
_Exeunt all._
Enter a Messenger.
Alone.
"""

# --- plays ------------------------------------------------------------------------------------------------------


def test_the_alphabet_is_the_one_of_leaf() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80 and ALPHABET[0] == "\n" and ALPHABET[-1] == "}"
    assert encode_characters("\n}é’a\U0001f600").tolist() == [0, 79, 1, ALPHABET.index("'"), ALPHABET.index("a"), 1]


def test_speeches_are_separated_from_directions_and_headings(tmp_path: Path) -> None:
    roles = read_roles(write(tmp_path / "lear.txt", PLAY), min_characters=1)
    assert roles == {
        "lear/KING": "Hear me now, good fool: the day is long,\nAnd night is “longer”—so they say…\n"
        "And so it goes on after a direction.\nRight after, without an empty line.\n",
        "lear/FIRST FOOL": "Ay.\nAlone.\n",
    }
    without_periods = PLAY.replace("KING.\n", "KING\n").replace("FOOL.\n", "FOOL\n")
    assert read_roles(write(tmp_path / "lear.txt", without_periods), min_characters=1) == roles
    title_case = PLAY.replace("KING.\n", "King.\n").replace("FIRST FOOL.\n", "1 Fool.\n")
    assert list(read_roles(write(tmp_path / "lear.txt", title_case), min_characters=1)) == ["lear/King", "lear/1 Fool"]


def test_plays_are_windows_into_one_copy_of_the_text(tmp_path: Path) -> None:
    lines = {"ANN": "Ann says this. " * 20, "BOB": "Bob says that! " * 30, "CAT": "Little."}
    play = "ACT I.\n\n" + "\n\n".join(f"{name}.\n{line}" for name, line in lines.items()) + "\n"
    raw = read(
        "plays", write_tar(tmp_path / "plays.tar.gz", {"plays/a.txt": play.encode(), "plays/b.txt": play.encode()})
    )
    assert isinstance(raw.x, torch.Tensor) and raw.x.dtype == torch.uint8 and raw.client_ids is not None
    roles = read_roles(tmp_path)
    assert list(roles) == ["a/ANN", "a/BOB", "b/ANN", "b/BOB"]
    text = "".join(roles.values())
    assert raw.x.untyped_storage().nbytes() == len(text) and raw.x.shape == (len(text) - 80, 80)
    assert len(raw.y) == len(raw.client_ids) == len(text) - 80 and raw.time_ordered and len(raw.tokens) == 80
    windows = dict.fromkeys(range(4), 0)
    for row, client in enumerate(raw.client_ids.tolist()):
        if client != NO_CLIENT:
            window = "".join(ALPHABET[code] for code in [*raw.x[row].tolist(), raw.y[row]])
            assert list(roles.values())[client][windows[client] :].startswith(window)
            windows[client] += 1
    assert list(windows.values()) == [len(role) - 80 for role in roles.values()]
    check_refused("plays", tmp_path, "min_characters must be > 80, got 80", SettingError, min_characters=80)
    check_refused("plays", tmp_path, "no role of at least 9999", min_characters=9999)


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
def test_real_plays_have_their_published_sizes() -> None:
    path = Path(os.environ["FEWER_DATA"]) / "shakespeare"
    raw = read("plays", path)
    assert (
        1300 < len(read_roles(path, min_characters=1)) < 1500
        and len({role.partition("/")[0] for role in read_roles(path)}) == 37
    )
    assert isinstance(raw.x, torch.Tensor) and raw.x.untyped_storage().nbytes() < 5_000_000 < raw.x.numel()
    assert count(raw.client_ids) == len(read_roles(path)) + 1
