"""What a model does with pixels before its first layer. It belongs to the model, so that it is declared once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PIXEL_SHIFT, PIXEL_SCALE = 0.0, 1 / 255
"""The normalization of byte images for a model with its own `Preprocess`: pixels on a scale of 0 … 1."""


class Preprocess(nn.Module):
    """Resizes images to `size` pixels and normalizes their channels. Inputs are pixels on a scale of 0 … 1.

    A model that contains this module gets such pixels, whatever the normalization of the data is. `mean` and `std` have
    one value for all channels or one for each. Gray images are copied to as many channels as these have.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int | None, mean: Sequence[float], std: Sequence[float], mode: str = "bilinear") -> None:
        super().__init__()
        self.size, self.mode = size, mode
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def extra_repr(self) -> str:
        """The size and the mode, which are part of the key of cached features."""
        return f"size={self.size}, mode={self.mode}"

    def forward(self, x: Tensor) -> Tensor:
        """Resized and normalized images."""
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode=self.mode, align_corners=False)
        return (x - self.mean) / self.std


def takes_pixels(net: nn.Module) -> bool:
    """True if the net normalizes pixels itself."""
    return any(isinstance(module, Preprocess) for module in net.modules())
