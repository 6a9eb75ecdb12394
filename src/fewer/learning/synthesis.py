"""Data-free distillation: a generator of images that is trained on nets, and the losses that it needs.

DAFL (Chen et al., ICCV 2019), DeepInversion (Yin et al., CVPR 2020) and, in federated learning, DENSE and Co-Boosting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

NOISE = 256
"""Number of inputs of an image generator."""


class ImageGenerator(nn.Module):
    """G(z): maps noise to images, from a quarter of their size by two upsamplings.

    The last layer gives each channel mean 0 and variance 1 over a batch, as normalized images have.
    """

    def __init__(self, shape: Sequence[int], width: int) -> None:
        super().__init__()
        channels, height, image_width = shape
        self.quarter = 2 * width, (height + 3) // 4, (image_width + 3) // 4
        half = (height + 1) // 2, (image_width + 1) // 2
        self.project = nn.Linear(NOISE, self.quarter[0] * self.quarter[1] * self.quarter[2])
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(2 * width), nn.Upsample(half), nn.Conv2d(2 * width, 2 * width, 3, padding=1)),
            *(nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
            *(nn.Upsample((height, image_width)), nn.Conv2d(2 * width, width, 3, padding=1)),
            *(nn.BatchNorm2d(width), nn.LeakyReLU(0.2), nn.Conv2d(width, channels, 3, padding=1)),
            nn.BatchNorm2d(channels, affine=False),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Images for a batch of noise."""
        images: Tensor = self.body(self.project(noise).view(-1, *self.quarter))
        return images


def kl_divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """T² · KL(softmax(teacher / T) ‖ softmax(student / T)) of each sample, given logits."""
    log_p, log_q = (F.log_softmax(logits / temperature, dim=1) for logits in (teacher, student))
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(1)


@contextmanager
def batch_norm_distances(nets: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yields a list that each forward pass fills: ‖μ − running mean‖ + ‖σ² − running variance‖ of batch norm layers.

    μ and σ² are the statistics of the layer's input in this batch. Nets without batch norm add nothing.
    """
    distances: list[Tensor] = []

    def measure(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x, (mean, variance) = inputs[0].transpose(0, 1).flatten(1), (layer.running_mean, layer.running_var)
        assert isinstance(mean, Tensor) and isinstance(variance, Tensor)
        distances.append((x.mean(1) - mean).norm() + (x.var(1, correction=0) - variance).norm())

    with ExitStack() as stack:
        for net in nets:
            for layer in net.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
                    stack.enter_context(layer.register_forward_pre_hook(measure))
        yield distances
