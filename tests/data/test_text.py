"""Vocabularies and word vectors."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fewer
from fewer.data.federated import from_arrays
from fewer.data.sources import find_word_vectors, names_word_vectors
from fewer.data.text import build_vocabulary, encode, load_word_vectors
from fewer.errors import DataError

# --- data -------------------------------------------------------------------------------------------------------


def test_word_vectors_of_related_words_are_similar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fewer.data import text
    from fewer.data.text import compute_word_vectors

    monkeypatch.setenv("FEWER_CACHE", str(tmp_path))
    rng = np.random.default_rng(0)
    topics = rng.integers(2, size=400)
    rows = 2 + 8 * topics[:, None] + rng.integers(8, size=(400, 6))
    rows[:, 5] = rng.integers(2, size=400)  # padding or an unknown word
    vectors = compute_word_vectors(rows, 18, 4)
    assert vectors.shape == (18, 4) and float(vectors[:2].abs().max()) == 0
    similarity = F.normalize(vectors[2:], dim=1) @ F.normalize(vectors[2:], dim=1).T
    assert float(similarity[:8, :8].mean()) > float(similarity[:8, 8:].mean()) + 0.5
    assert torch.equal(vectors, text._factorize_ppmi(rows[::-1].copy(), 18, 4))
    with pytest.raises(fewer.errors.DataError, match="too small for vectors"):
        compute_word_vectors(rows, 18, 18)
    with monkeypatch.context() as context:
        context.delattr(text, "_factorize_ppmi")
        assert torch.equal(vectors, compute_word_vectors(rows, 18, 4))  # from the cache
    assert compute_word_vectors(rows, 18, 3).shape == (18, 3) and len(list(tmp_path.glob("vectors-*[0-9a-f]"))) == 2


# --- texts ------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_built_from_training_text_only() -> None:
    texts = [f"common word{n % 3} it's" for n in range(40)]
    data = from_arrays(
        texts, np.arange(40) % 2, test=(["secret secret common"] * 4, [0, 1, 0, 1]), clients=2, partition="iid"
    )
    assert data.vocab_size == 2 + 5  # padding, unknown, common, it's, word0, word1, word2
    assert data.shape == (30,)
    row = data.test.slice(0, 1)[0][0].tolist()
    assert row[:2] == [1, 1] and row[2] > 1 and set(row[3:]) == {0}


def test_the_vocabulary_keeps_the_most_frequent_words() -> None:
    tokens = build_vocabulary(["b b a", "a b c"], max_size=4, min_count=1)
    assert tokens == ("<pad>", "<unknown>", "b", "a")
    assert encode(["a x b a", ""], tokens, 3).tolist() == [[3, 1, 2], [0, 0, 0]]


WORDS = ("<pad>", "<unknown>", "world", "rare")


def test_word_vectors_are_loaded_for_the_vocabulary(tmp_path: Path) -> None:
    text = "2 3\nhello 1 2 3\nworld 4 5 6 \nin world 7 8 9\nworld war 7 8 9\n\n"  # a header, words with spaces
    file, packed = tmp_path / "v.txt", tmp_path / "v.txt.gz"
    file.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (file, packed):
        vectors, found = load_word_vectors(path, WORDS)
        assert vectors[2].tolist() == [4, 5, 6] and vectors[0].tolist() == [0, 0, 0] and found == 1
        assert 0 < float(vectors[3].abs().max()) < 1 and not torch.equal(vectors[1], vectors[3])
    lines = (b"%d " % number + b"x " * 100 for number in range(20_000))  # only words of the vocabulary become numbers
    file.write_bytes(b"world" + b" 1.5" * 100 + b"\n" + b"\n".join(lines))
    assert load_word_vectors(file, WORDS)[0][2].tolist() == [1.5] * 100


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"hello 1 2 3\nworld 4 5\n", "line 2 has 2 values, expected 3"),
        (b"world 1 x 3\n", "is not a file of word vectors: could not convert string to float"),
        (b"world 1 nan 3\n", "has values that are not finite"),
        (b"", "has no word vectors"),
        (None, "cannot read .*: No such file"),
    ],
)
def test_damaged_word_vectors_are_reported(content: bytes | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "v.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=problem):
        load_word_vectors(file, WORDS)


@pytest.mark.parametrize("damaged", [b"not packed", gzip.compress(b"world 1 2 3\n" * 9)[:-12]], ids=["text", "cut off"])
def test_damaged_packed_word_vectors_are_reported(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / "v.txt.gz").write_bytes(damaged)
    with pytest.raises(DataError, match=r"cannot read .*v.txt.gz: "):
        load_word_vectors(tmp_path / "v.txt.gz", WORDS)


def test_word_vectors_have_names_in_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWER_DATA", raising=False)
    with pytest.raises(DataError, match=r"glove.6B.100d.txt or .* in DIR/glove; pass --data-dir DIR or set FEWER_DATA"):
        find_word_vectors("glove")
    with pytest.raises(DataError, match=rf"glove.6B.50d needs glove.6B.50d.txt .* in {tmp_path}/glove \(source"):
        find_word_vectors("glove.6B.50d", tmp_path)
    with pytest.raises(DataError, match="vectors = GloVe: there is no such file .allowed: own, glove, glove.6B.100d"):
        find_word_vectors("GloVe", tmp_path)
    folder = tmp_path / "glove"
    folder.mkdir()
    packed, plain = folder / "glove.6B.100d.txt.gz", folder / "glove.6B.100d.txt"
    packed.touch()
    monkeypatch.setenv("FEWER_DATA", str(tmp_path))
    assert find_word_vectors("glove") == find_word_vectors("glove.6B.100d") == find_word_vectors(str(packed)) == packed
    plain.touch()
    assert find_word_vectors("glove") == plain
    names = ["glove", "glove.6B.100d", "glove.twitter.27B.25d"]
    assert all(map(names_word_vectors, names)) and not any(names_word_vectors(f"{name}.txt") for name in names)
