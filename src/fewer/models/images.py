"""Nets for images and for windows of sensor readings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.choices import Norm
from fewer.models.split import EncoderHead
from fewer.registry import MODELS


def norm_layer(kind: Norm, channels: int, dimensions: int = 2) -> nn.Module:
    """Builds a normalization layer. `group` has a single group and needs no batch statistics."""
    if kind == "batch":
        return nn.BatchNorm2d(channels) if dimensions == 2 else nn.BatchNorm1d(channels)
    return nn.GroupNorm(1, channels) if kind == "group" else nn.Identity()


def _conv(
    channels: int, width: int, kernel: int, norm: Norm, stride: int = 1, padding: int = 0, pool: nn.Module | None = None
) -> list[nn.Module]:
    """A convolution with `width` filters, a norm layer, ReLU, and a pool if there is one."""
    layers = [nn.Conv2d(channels, width, kernel, stride, padding), norm_layer(norm, width), nn.ReLU()]
    return layers if pool is None else [*layers, pool]


@MODELS.register("cnn")
class SmallCNN(EncoderHead):
    """The default net: two convolutions of stride 2, then 32 features. 26,434 parameters on 1×28×28, ten classes.

    `feature_relu = false` leaves out the ReLU after the features, as in FedGen's released code.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, norm: Norm = "group", feature_relu: bool = True
    ) -> None:
        channels, height, width = shape
        flat = 16 * ((height + 3) // 4) * ((width + 3) // 4)
        encoder = nn.Sequential(
            *_conv(channels, 6, 3, norm, stride=2, padding=1),
            *_conv(6, 16, 3, norm, stride=2, padding=1),
            *(nn.Flatten(), nn.Linear(flat, 32), *([nn.ReLU()] if feature_relu else [])),
        )
        super().__init__(encoder, 32, classes)


@MODELS.register("lenet5")
class LeNet5(EncoderHead):
    """LeNet-5 with ReLU and max pooling. 61,706 parameters on 1×28×28, ten classes."""

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = "none") -> None:
        channels, height, width = shape
        encoder = nn.Sequential(
            *_conv(channels, 6, 5, norm, padding=2, pool=nn.MaxPool2d(2)),
            *_conv(6, 16, 5, norm, pool=nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
        )
        super().__init__(encoder, 84, classes)


class ChannelsLastConv2d(nn.Conv2d):
    """A convolution whose result has channels last in memory: pools and norm layers after it are faster on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution; layers after it keep the order in memory."""
        return super().forward(input).contiguous(memory_format=torch.channels_last)


@MODELS.register("conv4")
class Conv4(EncoderHead):
    """Four blocks of 3×3 convolution (64 channels), norm, ReLU and pool, common in few-shot learning.

    For inputs of 32×32, only the first two blocks have a pool. ReLU follows the pool: the result is the same at a
    quarter of the cost. With `average`, the features are the mean of the last feature map, one for each channel.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        norm: Norm = "batch",
        width: int = 64,
        pools: int | None = None,
        average: bool = False,
    ) -> None:
        channels, height, image_width = shape
        if pools is None:
            pools = 2 if height == 32 else 4
        layers: list[nn.Module] = []
        for block in range(4):
            layers += [ChannelsLastConv2d(channels, width, 3, padding=1), norm_layer(norm, width)]
            channels = width
            if block < pools:
                layers.append(nn.MaxPool2d(2))
                height, image_width = height // 2, image_width // 2
            layers.append(nn.ReLU())
        if average:
            layers.append(nn.AdaptiveAvgPool2d(1))
            height = image_width = 1
        super().__init__(nn.Sequential(*layers, nn.Flatten()), width * height * image_width, classes)


@MODELS.register("femnist-cnn")
class FemnistCNN(EncoderHead):
    """LEAF's net for FEMNIST: two 5×5 convolutions, 2048 features. 6,603,710 parameters for 62 classes."""

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = "none") -> None:
        channels, height, width = shape
        encoder = nn.Sequential(
            *_conv(channels, 32, 5, norm, padding=2, pool=nn.MaxPool2d(2)),
            *_conv(32, 64, 5, norm, padding=2, pool=nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 2048), nn.ReLU()),
        )
        super().__init__(encoder, 2048, classes)


class DropBlock(nn.Module):
    """Drops square blocks of a feature map in training (Ghiasi, Lin, Le, NeurIPS 2018)."""

    def __init__(self, drop_prob: float, block_size: int) -> None:
        super().__init__()
        self.drop_prob, self.block_size = drop_prob, block_size

    def forward(self, x: Tensor) -> Tensor:
        """Features with blocks set to zero; the rest is scaled up to keep the expected sum."""
        if not self.training or self.drop_prob == 0:
            return x
        size = min(self.block_size, x.shape[2], x.shape[3])
        rows, columns = x.shape[2] - size + 1, x.shape[3] - size + 1
        gamma = self.drop_prob * x.shape[2] * x.shape[3] / (size * size * (rows * columns))
        corners = torch.rand(x.shape[0], x.shape[1], rows, columns, device=x.device) < gamma
        dropped = F.max_pool2d(F.pad(corners.to(x.dtype), [size - 1] * 4), size, stride=1)
        keep = 1 - dropped
        return x * keep * (keep.numel() / keep.sum().clamp(min=1))


class ResidualBlock(nn.Module):
    """Three 3×3 convolutions with a 1×1 shortcut, then a pool."""

    def __init__(self, in_channels: int, out_channels: int, norm: Norm, drop_prob: float, block_size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(3):
            channels = in_channels if index == 0 else out_channels
            layers += [nn.Conv2d(channels, out_channels, 3, padding=1, bias=False), norm_layer(norm, out_channels)]
            if index < 2:
                layers.append(nn.LeakyReLU(0.1))
        self.path = nn.Sequential(*layers)
        shortcut = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.shortcut = nn.Sequential(shortcut, norm_layer(norm, out_channels))
        self.after = nn.Sequential(nn.LeakyReLU(0.1), nn.MaxPool2d(2), DropBlock(drop_prob, block_size))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, at half the width and height."""
        out: Tensor = self.after(self.path(x) + self.shortcut(x))
        return out


@MODELS.register("resnet12")
class ResNet12(EncoderHead):
    """ResNet-12 with DropBlock in its last two blocks: 64, 160, 320, 640 channels times `width`."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, norm: Norm = "batch", width: float = 1.0, dropout: float = 0.1
    ) -> None:
        widths = [max(1, round(base * width)) for base in (64, 160, 320, 640)]
        channels = [shape[0], *widths]
        blocks = [ResidualBlock(channels[i], widths[i], norm, dropout if i >= 2 else 0.0, 5) for i in range(4)]
        super().__init__(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1], classes)


@MODELS.register("alexnet")
class AlexNet(EncoderHead):
    """AlexNet in the "one weird trick" version, with optional norm layers."""

    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = "none", dropout: float = 0.5) -> None:
        encoder = nn.Sequential(
            *_conv(shape[0], 64, 11, norm, stride=4, padding=2, pool=nn.MaxPool2d(3, 2)),
            *_conv(64, 192, 5, norm, padding=2, pool=nn.MaxPool2d(3, 2)),
            *_conv(192, 384, 3, norm, padding=1),
            *_conv(384, 256, 3, norm, padding=1),
            *_conv(256, 256, 3, norm, padding=1, pool=nn.MaxPool2d(3, 2)),
            *(nn.AdaptiveAvgPool2d(6), nn.Flatten()),
            *(nn.Dropout(dropout), nn.Linear(256 * 36, 4096), nn.ReLU()),
            *(nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU()),
        )
        super().__init__(encoder, 4096, classes)


@MODELS.register("sensor-cnn")
class SensorCNN(EncoderHead):
    """Two 1-d convolutions over a window of sensor readings, channels × time."""

    def __init__(self, shape: tuple[int, int], classes: int, norm: Norm = "batch") -> None:
        channels, length = shape
        encoder = nn.Sequential(
            *(nn.Conv1d(channels, 16, 9, padding=4), norm_layer(norm, 16, 1), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Conv1d(16, 32, 9, padding=4), norm_layer(norm, 32, 1), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Flatten(), nn.Linear(32 * (length // 4), 64), nn.ReLU()),
        )
        super().__init__(encoder, 64, classes)
