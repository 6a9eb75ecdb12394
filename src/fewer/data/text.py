"""Texts as token numbers: a vocabulary from training text only, and word vectors from a file."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewer.data.cache import cached
from fewer.errors import DataError

PAD, UNKNOWN = "<pad>", "<unknown>"
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[^\sa-z0-9]")


def words(text: str) -> list[str]:
    """Lower-case words, numbers and single marks."""
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[str], most: int = 20_000, least: int = 2) -> tuple[str, ...]:
    """The commonest words, at most `most`, each seen at least `least` times; before them fill and unknown."""
    counts = Counter(word for text in texts for word in words(text))
    common = sorted((word for word in counts if counts[word] >= least), key=lambda word: (-counts[word], word))
    return (PAD, UNKNOWN, *common[: most - 2])


def encode(texts: Sequence[str], tokens: Sequence[str], length: int) -> NDArray[np.int64]:
    """Token numbers, one row of `length` for each text: cut off or filled up with 0."""
    numbers = {word: number for number, word in enumerate(tokens)}
    rows = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        found = [numbers.get(word, 1) for word in words(text)[:length]]
        rows[row, : len(found)] = found
    return rows


def own_vectors(rows: NDArray[np.int64], vocabulary: int, width: int) -> Tensor:
    """Vectors for tokens, from which tokens occur in the same texts: made once for these texts, then kept."""
    key = hashlib.sha256(repr((rows.shape, vocabulary, width)).encode() + rows.tobytes()).hexdigest()[:16]
    kept = cached(f"vectors-{key}", lambda: {"vectors": _own_vectors(rows, vocabulary, width).numpy()})
    return torch.from_numpy(kept["vectors"])


def _own_vectors(rows: NDArray[np.int64], vocabulary: int, width: int) -> Tensor:
    """Where no file of vectors is at hand.

    Positive pointwise mutual information, cut to its first singular vectors (Levy, Goldberg, Dagan, TACL 2015, with
    contexts smoothed by 0.75); all of one length, with numbers about as large as GloVe's. Those of the fill, of
    unknown words and of words that are always alone are zero.
    """
    from scipy.sparse import coo_matrix
    from sklearn.utils.extmath import randomized_svd

    pairs = [(rows[:, :-far].ravel(), rows[:, far:].ravel()) for far in range(1, rows.shape[1])]
    one, other = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    known = (one > 1) & (other > 1)
    there, back = one[known], other[known]
    both = np.concatenate([there, back]), np.concatenate([back, there])
    counts = coo_matrix((np.ones(len(both[0])), both), (vocabulary, vocabulary)).tocsr().tocoo()
    if min(counts.shape) <= width or not counts.nnz:
        raise DataError(f"{vocabulary} words are too few for word vectors of {width} (allowed: a smaller width)")
    word, context = (np.asarray(counts.sum(axis)).ravel() for axis in (1, 0))
    smooth = context**0.75 / (context**0.75).sum()
    strength = np.log(counts.data / word[counts.row] / smooth[counts.col]).clip(min=0)
    table = coo_matrix((strength, (counts.row, counts.col)), counts.shape).tocsr()
    left, size, _ = randomized_svd(table, width, random_state=0)
    vectors = torch.from_numpy(left * np.sqrt(size) * (word > 0)[:, None]).float()
    even: Tensor = torch.nn.functional.normalize(vectors, dim=1) * (width**0.5 / 2)
    return even


def word_vectors(path: Path, tokens: Sequence[str]) -> Tensor:
    """Vectors of the tokens from a text file (a word and its numbers on each line, as GloVe and fastText have them).

    Words that the file lacks get small random vectors, the same every time; the filling token is zero.
    """
    wanted = {word: number for number, word in enumerate(tokens)}
    vectors: Tensor | None = None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                word, *values = line.rstrip().split(" ")
                if number == 0 and len(values) == 1:  # fastText's first line: how many words, how long
                    continue
                if vectors is None:
                    width = len(values)
                    vectors = torch.randn(len(tokens), width, generator=torch.Generator().manual_seed(0)) * 0.1
                if len(values) != vectors.shape[1]:
                    raise DataError(f"{path}, line {number + 1}: {len(values)} numbers where {vectors.shape[1]} belong")
                if word in wanted:
                    vectors[wanted[word]] = torch.tensor([float(value) for value in values])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not a file of word vectors: {error}") from error
    if vectors is None:
        raise DataError(f"{path} has no word vectors")
    vectors[0] = 0
    return vectors
