"""Vocabularies and word vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fewer
from fewer.data.federated import from_arrays
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


def test_word_vectors_are_loaded_for_the_vocabulary(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "v.txt"
    file.write_text("2 3\nhello 1 2 3\nworld 4 5 6\n")
    vectors = load_word_vectors(file, ("<pad>", "<unknown>", "world"))
    assert vectors[2].tolist() == [4, 5, 6] and vectors[0].tolist() == [0, 0, 0]
    file.write_text("hello 1 2 3\nworld 4 5\n")
    with pytest.raises(DataError, match="line 2 has 2 values, expected 3"):
        load_word_vectors(file, ("<pad>",))
    with pytest.raises(DataError, match="No such file"):
        load_word_vectors(file.with_name("none"), ("<pad>",))
