"""Nets for images and for windows of sensor readings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.choices import Norm
from fewer.models.split import Split
from fewer.registry import MODELS


def norm_layer(kind: Norm, channels: int, dimensions: int = 2) -> nn.Module:
    """A normalization layer; `group` is one group, which needs no batch statistics."""
    if kind == "batch":
        return nn.BatchNorm2d(channels) if dimensions == 2 else nn.BatchNorm1d(channels)
    return nn.GroupNorm(1, channels) if kind == "group" else nn.Identity()


@MODELS.register("cnn")
class SmallCNN(Split):
    """FedMK's net: two convolutions of stride 2, then 32 features. 26,434 parameters on 1×28×28, ten classes."""

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = "group") -> None:
        channels, height, width = shape
        flat = 16 * ((height + 3) // 4) * ((width + 3) // 4)
        encoder = nn.Sequential(
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
        super().__init__(encoder, 32, classes)


@MODELS.register("lenet5")
class LeNet5(Split):
    """LeNet-5 with ReLU and max pooling (MetaFed on 28×28). 61,706 parameters on 1×28×28, ten classes."""

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = "none") -> None:
        channels, height, width = shape
        encoder = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2),
            norm_layer(norm, 6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            norm_layer(norm, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        super().__init__(encoder, 84, classes)


@MODELS.register("conv4")
class Conv4(Split):
    """Four blocks of conv3 64, norm, ReLU, pool (FRL, few-shot work). On 32×32 the last two pools are left out.

    ReLU goes after the pool, which changes no number and leaves it a quarter of the work.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, norm: Norm = "batch", width: int = 64, pools: int | None = None
    ) -> None:
        channels, height, wide = shape
        if pools is None:
            pools = 2 if height == 32 else 4
        layers: list[nn.Module] = []
        for number in range(4):
            layers += [nn.Conv2d(channels, width, 3, padding=1), norm_layer(norm, width)]
            channels = width
            if number < pools:
                layers.append(nn.MaxPool2d(2))
                height, wide = height // 2, wide // 2
            layers.append(nn.ReLU())
        super().__init__(nn.Sequential(*layers, nn.Flatten()), width * height * wide, classes)


@MODELS.register("femnist-cnn")
class FemnistCNN(Split):
    """LEAF's net for FEMNIST (FedMeta): conv5 32, pool, conv5 64, pool, 2048. 6,603,710 parameters for 62 classes."""

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = "none") -> None:
        channels, height, width = shape
        encoder = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            norm_layer(norm, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            norm_layer(norm, 64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), 2048),
            nn.ReLU(),
        )
        super().__init__(encoder, 2048, classes)


class DropBlock(nn.Module):
    """Drops whole squares of a feature map in training (Ghiasi, Lin, Le, NeurIPS 2018)."""

    def __init__(self, chance: float, block: int) -> None:
        super().__init__()
        self.chance, self.block = chance, block

    def forward(self, x: Tensor) -> Tensor:
        """Features with squares set to zero, the rest scaled up to the same sum."""
        if not self.training or self.chance == 0:
            return x
        block = min(self.block, x.shape[2], x.shape[3])
        inside = (x.shape[2] - block + 1) * (x.shape[3] - block + 1)
        lr = self.chance * x.shape[2] * x.shape[3] / (block * block * inside)
        seeds = torch.rand(x.shape[0], x.shape[1], x.shape[2] - block + 1, x.shape[3] - block + 1, device=x.device) < lr
        dropped = F.max_pool2d(F.pad(seeds.to(x.dtype), [block - 1] * 4), block, stride=1)
        keep = 1 - dropped
        return x * keep * (keep.numel() / keep.sum().clamp(min=1))


class ResidualBlock(nn.Module):
    """Three 3×3 convolutions beside a 1×1 shortcut, then a pool."""

    def __init__(self, before: int, after: int, norm: Norm, drop: float, block: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(3):
            layers += [
                nn.Conv2d(before if number == 0 else after, after, 3, padding=1, bias=False),
                norm_layer(norm, after),
            ]
            if number < 2:
                layers.append(nn.LeakyReLU(0.1))
        self.path = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, bias=False), norm_layer(norm, after))
        self.after = nn.Sequential(nn.LeakyReLU(0.1), nn.MaxPool2d(2), DropBlock(drop, block))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, half as wide and high."""
        out: Tensor = self.after(self.path(x) + self.shortcut(x))
        return out


@MODELS.register("resnet12")
class ResNet12(Split):
    """ResNet-12 with DropBlock (F2L on images): 64, 160, 320, 640 channels times `width`."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, norm: Norm = "batch", width: float = 1.0, drop: float = 0.1
    ) -> None:
        widths = [max(1, round(channels * width)) for channels in (64, 160, 320, 640)]
        before = [shape[0], *widths]
        blocks = [ResidualBlock(before[i], widths[i], norm, drop if i >= 2 else 0.0, 5) for i in range(4)]
        super().__init__(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1], classes)


@MODELS.register("alexnet")
class AlexNet(Split):
    """AlexNet in the shape of the 'one weird trick' paper (MetaFed on VLCS), with norm layers as an option."""

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = "none", drop: float = 0.5) -> None:
        plan = [
            (64, 11, 4, 2, True),
            (192, 5, 1, 2, True),
            (384, 3, 1, 1, False),
            (256, 3, 1, 1, False),
            (256, 3, 1, 1, True),
        ]
        layers: list[nn.Module] = []
        before = shape[0]
        for after, kernel, stride, padding, pool in plan:
            layers += [nn.Conv2d(before, after, kernel, stride, padding), norm_layer(norm, after), nn.ReLU()]
            if pool:
                layers.append(nn.MaxPool2d(3, 2))
            before = after
        layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten()]
        layers += [
            nn.Dropout(drop),
            nn.Linear(256 * 36, 4096),
            nn.ReLU(),
            nn.Dropout(drop),
            nn.Linear(4096, 4096),
            nn.ReLU(),
        ]
        super().__init__(nn.Sequential(*layers), 4096, classes)


@MODELS.register("sensor-cnn")
class SensorCNN(Split):
    """Two 1-d convolutions over a window of sensor readings, channels × time (MetaFed on PAMAP)."""

    def __init__(self, shape: tuple[int, int], classes: int, norm: Norm = "batch") -> None:
        channels, length = shape
        encoder = nn.Sequential(
            nn.Conv1d(channels, 16, 9, padding=4),
            norm_layer(norm, 16, 1),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 9, padding=4),
            norm_layer(norm, 32, 1),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Flatten(),
            nn.Linear(32 * (length // 4), 64),
            nn.ReLU(),
        )
        super().__init__(encoder, 64, classes)
