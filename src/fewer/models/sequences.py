"""Nets for text and for flat features. All are twice differentiable."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.models.split import EncoderHead
from fewer.registry import MODELS

PAD = 0
"""The token that pads short texts."""


class LSTM(nn.LSTM):
    """A twice differentiable LSTM: in training it avoids cuDNN's fused kernel, which has no second derivative."""

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        """Outputs (batch × time × features) and the final states."""
        with torch.backends.cudnn.flags(enabled=not (self.training and x.is_cuda)):
            out: tuple[Tensor, tuple[Tensor, Tensor]] = super().forward(x, hx)
        return out


@MODELS.register("char-lstm")
class CharLSTM(EncoderHead):
    """LEAF's net for Shakespeare: embedding of 8, two LSTM layers of 256; predicts the next character.

    `context` limits the input to the last `context` characters. The cost falls in proportion.
    """

    feature_activation = nn.Tanh  # an LSTM outputs tanh times a gate

    def __init__(
        self, shape: tuple[int], classes: int, vocabulary: int, hidden: int = 256, context: int | None = None
    ) -> None:
        if context is not None and not 1 <= context <= shape[0]:
            raise SettingError(f"context of char-lstm must be between 1 and {shape[0]}, got {context}")
        super().__init__(_LastOutput(vocabulary, 8, hidden, context or shape[0]), hidden, classes)


class _LastOutput(nn.Module):
    """An embedding and a two-layer LSTM; features are the last output."""

    def __init__(self, vocabulary: int, width: int, hidden: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = LSTM(width, hidden, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(self.embedding(x[:, -self.context :]))[0]
        return out[:, -1]


class _WordLSTM(nn.Module):
    """An LSTM over fixed word vectors: loaded from a file, or drawn once at random."""

    def __init__(self, vocabulary: int, width: int, vectors: Tensor | None, hidden: int, **options: int) -> None:
        super().__init__()
        if vectors is None:
            vectors = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(0)) / width**0.5
            vectors[PAD] = 0
        shape, needed = tuple(vectors.shape), (vocabulary, vectors.shape[1])
        if shape != needed:
            raise SettingError(f"word vectors have shape {shape}, but the model needs {needed}")
        self.vectors: Tensor
        self.register_buffer("vectors", vectors, persistent=False)
        self.lstm = LSTM(needed[1], hidden, batch_first=True, **options)

    def outputs(self, x: Tensor) -> Tensor:
        """The outputs at each word."""
        out: Tensor = self.lstm(self.vectors[x])[0]
        return out


@MODELS.register("text-bilstm")
class TextBiLSTM(EncoderHead):
    """A bidirectional LSTM (2 × 50) over word vectors; features are its mean output over the words."""

    feature_activation = nn.Tanh

    def __init__(
        self, shape: tuple[int], classes: int, vocabulary: int, width: int = 300, vectors: Tensor | None = None
    ) -> None:
        super().__init__(_MeanOutput(vocabulary, width, vectors, 50, bidirectional=True), 100, classes)


class _MeanOutput(_WordLSTM):
    """Features are the mean output over words that are not padding."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != PAD).unsqueeze(2)
        return (self.outputs(x) * mask).sum(1) / mask.sum(1).clamp(min=1)


@MODELS.register("sentiment-lstm")
class SentimentLSTM(EncoderHead):
    """Two LSTM layers of 100 over 300-d word vectors, as for Sent140."""

    feature_activation = nn.Tanh

    def __init__(
        self, shape: tuple[int], classes: int, vocabulary: int, width: int = 300, vectors: Tensor | None = None
    ) -> None:
        super().__init__(_LastWord(vocabulary, width, vectors, 100, num_layers=2), 100, classes)


class _LastWord(_WordLSTM):
    """Features are the output at the last word before the padding."""

    def forward(self, x: Tensor) -> Tensor:
        last = (x != PAD).sum(1).clamp(min=1) - 1
        return self.outputs(x)[torch.arange(len(x), device=x.device), last]


@MODELS.register("embedding-bag")
class EmbeddingBag(EncoderHead):
    """The sum of trained word vectors, then one hidden layer. It is fast, and ignores the order of words."""

    def __init__(self, shape: tuple[int], classes: int, vocabulary: int, width: int = 32, hidden: int = 64) -> None:
        encoder = nn.Sequential(_WordSum(vocabulary, width), nn.Linear(width, hidden), nn.ReLU())
        super().__init__(encoder, hidden, classes)


class _WordSum(nn.Embedding):
    """The sum of the vectors of n words that are not padding, divided by √n: the variance is that of one vector.

    `nn.EmbeddingBag` has no second derivative.
    """

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != PAD).unsqueeze(2)
        return (super().forward(x) * mask).sum(1) / mask.sum(1).clamp(min=1).sqrt()


@MODELS.register("mlp")
class MLP(EncoderHead):
    """A perceptron with one hidden layer over flat inputs, such as 103-64-40 for a recommender."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        size = int(torch.Size(shape).numel())
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU()), hidden, classes)


@MODELS.register("logistic")
class LogisticRegression(EncoderHead):
    """Logistic regression: class scores are linear in the inputs."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), int(torch.Size(shape).numel()), classes)
