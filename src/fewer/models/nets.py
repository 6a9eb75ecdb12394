"""The nets that the package brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from torch import Tensor, nn

from fewer.errors import SettingError, unknown
from fewer.vocabulary import Norm


def norm_layer(kind: Norm, channels: int) -> nn.Module:
    """A normalisation layer for images; `group` is one group, which needs no batch statistics."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(1, channels) if kind == "group" else nn.Identity()


class SmallCNN(nn.Module):
    """FedMK's net: two convolutions of stride 2, then 32 features. 26,434 parameters on 1×28×28, ten classes."""

    def __init__(self, shape: tuple[int, ...], classes: int, norm: Norm = "group") -> None:
        super().__init__()
        channels, height, width = shape
        flat = 16 * ((height + 3) // 4) * ((width + 3) // 4)
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, 6, 3, stride=2, padding=1),
            norm_layer(norm, 6),
            nn.ReLU(),
            nn.Conv2d(6, 16, 3, stride=2, padding=1),
            norm_layer(norm, 16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(flat, 32),
            nn.ReLU(),
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        scores: Tensor = self.head(self.encoder(x))
        return scores


NETS: dict[str, Callable[[tuple[int, ...], int, Norm], nn.Module]] = {"cnn": SmallCNN}


def build(name: str, shape: tuple[int, ...], classes: int, norm: Norm = "group") -> nn.Module:
    """The named net for inputs of this shape."""
    if name not in NETS:
        raise unknown("model", name, [*NETS, "FILE.py:Name"])
    if norm not in get_args(Norm):
        raise unknown("norm", norm, get_args(Norm))
    if len(shape) != 3:
        raise SettingError(f"model '{name}' needs images (channels, height, width), but inputs have shape {shape}")
    return NETS[name](shape, classes, norm)
