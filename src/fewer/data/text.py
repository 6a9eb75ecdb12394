"""Texts as token ids: a vocabulary built from training text only, and word vectors."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewer.data.cache import load_or_build
from fewer.errors import DataError

PAD, UNKNOWN = "<pad>", "<unknown>"
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[^\sa-z0-9]")


def tokenize(text: str) -> list[str]:
    """Splits a text into lower-case words, numbers and punctuation marks."""
    return _WORD.findall(text.lower())


def build_vocabulary(texts: Iterable[str], max_size: int = 20_000, min_count: int = 2) -> tuple[str, ...]:
    """Returns the padding and unknown tokens, then the most frequent words that occur at least `min_count` times."""
    counts = Counter(word for text in texts for word in tokenize(text))
    frequent = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
    return (PAD, UNKNOWN, *frequent[: max_size - 2])


def encode(texts: Sequence[str], tokens: Sequence[str], length: int) -> NDArray[np.int64]:
    """Encodes each text as a row of `length` token ids, truncated or padded with 0."""
    ids = {word: index for index, word in enumerate(tokens)}
    rows = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        encoded = [ids.get(word, 1) for word in tokenize(text)[:length]]
        rows[row, : len(encoded)] = encoded
    return rows


def compute_word_vectors(rows: NDArray[np.int64], vocab_size: int, width: int) -> Tensor:
    """Computes word vectors from co-occurrence in the given texts. The result is cached."""
    key = hashlib.sha256(repr((rows.shape, vocab_size, width)).encode() + rows.tobytes()).hexdigest()[:16]
    arrays = load_or_build(f"vectors-{key}", lambda: {"vectors": _factorize_ppmi(rows, vocab_size, width).numpy()})
    return torch.from_numpy(arrays["vectors"])


def _factorize_ppmi(rows: NDArray[np.int64], vocab_size: int, width: int) -> Tensor:
    """Truncated SVD of positive pointwise mutual information (Levy, Goldberg, Dagan, TACL 2015).

    Context counts are smoothed by the power 0.75. All vectors have the same length, with values about as large as
    GloVe's. Padding, unknown words and words without co-occurrences get zero vectors.
    """
    from scipy.sparse import coo_matrix
    from sklearn.utils.extmath import randomized_svd

    pairs = [(rows[:, :-distance].ravel(), rows[:, distance:].ravel()) for distance in range(1, rows.shape[1])]
    left_ids, right_ids = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    known = (left_ids > 1) & (right_ids > 1)
    left_ids, right_ids = left_ids[known], right_ids[known]
    symmetric = np.concatenate([left_ids, right_ids]), np.concatenate([right_ids, left_ids])
    counts = coo_matrix((np.ones(len(symmetric[0])), symmetric), (vocab_size, vocab_size)).tocsr().tocoo()
    if min(counts.shape) <= width or not counts.nnz:
        raise DataError(f"a vocabulary of {vocab_size} words is too small for vectors of width {width}; lower width")
    word_counts, context_counts = (np.asarray(counts.sum(axis)).ravel() for axis in (1, 0))
    smoothed = context_counts**0.75 / (context_counts**0.75).sum()
    information = np.log(counts.data / word_counts[counts.row] / smoothed[counts.col]).clip(min=0)
    ppmi = coo_matrix((information, (counts.row, counts.col)), counts.shape).tocsr()
    left, singular_values, _ = randomized_svd(ppmi, width, random_state=0)
    vectors = torch.from_numpy(left * np.sqrt(singular_values) * (word_counts > 0)[:, None]).float()
    normalized: Tensor = torch.nn.functional.normalize(vectors, dim=1) * (width**0.5 / 2)
    return normalized


def load_word_vectors(path: Path, tokens: Sequence[str]) -> tuple[Tensor, int]:
    """Loads the vectors of `tokens` from a text file with one word and its values per line, packed by gzip or not.

    This is the format of GloVe, fastText and word2vec. Also returns how many tokens were found. The other tokens get
    small random vectors from a fixed seed. The padding token gets a zero vector.
    """
    ids = {word.encode(): index for index, word in enumerate(tokens)}
    vectors: Tensor | None = None
    found = set()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for index, line in enumerate(file):
                word, _, text = line.rstrip().partition(b" ")
                width = text.count(b" ") + 1
                if not word or (index == 0 and width == 1):  # the header of fastText and word2vec: words, width
                    continue
                if vectors is None:
                    vectors = torch.randn(len(tokens), width, generator=torch.Generator().manual_seed(0)) * 0.1
                if width < vectors.shape[1]:
                    raise DataError(f"{path}, line {index + 1} has {width} values, expected {vectors.shape[1]}")
                if word in ids and width == vectors.shape[1]:  # in a longer line, the word contains spaces
                    vectors[ids[word]] = torch.tensor([float(value) for value in text.split(b" ")])
                    found.add(word)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not a file of word vectors: {error}") from error
    if vectors is None:
        raise DataError(f"{path} has no word vectors")
    if not vectors.isfinite().all():
        raise DataError(f"{path} has values that are not finite")
    vectors[0] = 0
    return vectors, len(found)
