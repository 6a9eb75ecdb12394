"""Condensation by distribution matching: synthetic images learn the feature statistics of real ones in many nets.

Zhao, Bilen: Dataset Condensation with Distribution Matching, WACV 2023, matches the mean of each class in random nets.
Here the standard deviation is matched too, because the mean alone ignores noise that differs between images. A step is
cheap: it trains no net and needs no second derivative.

Other nets than random ones are options:

- `PerturbedNets`: nets around a given model. Xiong, Wang, Cheng, Yu, Hsieh: FedDM, CVPR 2023, matches features and
  scores in these.
- `TrainedNets`: a queue of nets that train on the real samples meanwhile, and a cross-entropy on synthetic images.
  Zhao, Li, Qin, Yu: Improved Distribution Matching for Dataset Condensation, CVPR 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.learning.augment import apply_affine, cut_tiles, draw_affine
from fewer.learning.sgd import draw_subset, sgd
from fewer.models.convolution import speed_up_convolutions
from fewer.models.nets import copy_net

REAL_PER_CLASS = 64
"""Real samples per class and step."""
VARIANCE_EPS = 1e-2
"""Added to variances, because the square root has no gradient at 0."""
NET_BATCH_SIZE = 64
"""Real samples per training step of `TrainedNets`."""


class RandomNets:
    """The nets of matching: in each step, the same net with new random weights."""

    match_scores = False
    """Whether the statistics include the scores of the classes."""
    ce_weight = 0.0
    """Weight of the cross-entropy of synthetic images."""

    def __init__(self, net: nn.Module) -> None:
        self.net = speed_up_convolutions(copy_net(net)).requires_grad_(False)  # nets are reused as they are

    def draw(self) -> nn.Module:
        """The net of the next step."""
        reinitialize(self.net)
        return self.net


class PerturbedNets(RandomNets):
    """Nets at distance ρ from a given one, in a random Gaussian direction: w + ρ ε / ‖ε‖. Scores are matched too."""

    match_scores = True

    def __init__(self, net: nn.Module, rho: float, stream: torch.Generator) -> None:
        super().__init__(net)
        self.rho, self.stream = rho, stream
        self.center = [parameter.clone() for parameter in self.net.parameters()]

    def draw(self) -> nn.Module:
        """The net of the next step."""
        noise = [torch.randn(w.shape, generator=self.stream).to(w) for w in self.center]
        scale = self.rho / torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in noise]))
        for parameter, w, part in zip(self.net.parameters(), self.center, noise, strict=True):
            parameter.copy_(w + scale * part)
        return self.net


class TrainedNets(RandomNets):
    """A queue of nets, used in turn. Each use but the first trains a net for one step on real samples.

    After `steps` training steps, a net starts again from random weights.
    """

    def __init__(
        self,
        net: nn.Module,
        real: Samples,
        *,
        count: int,
        steps: int,
        lr: float,
        ce_weight: float,
        augment: bool,
        stream: torch.Generator,
    ) -> None:
        super().__init__(net)
        self.real, self.steps, self.lr, self.augment, self.stream = real, steps, lr, augment, stream
        self.ce_weight = ce_weight
        self.queue = [copy_net(self.net) for _ in range(count)]
        self.drawn = 0

    def draw(self) -> nn.Module:
        """The net of the next step."""
        turn, position = divmod(self.drawn, len(self.queue))
        net = self.queue[position]
        self.drawn += 1
        if turn % (self.steps + 1) == 0:
            reinitialize(net)
            return net
        x, y = draw_subset(self.real, NET_BATCH_SIZE, self.stream)
        if self.augment:
            x = apply_affine(x, draw_affine(len(x), self.stream))
        sgd(net.requires_grad_(True), [(x, y)], self.lr)
        return net.requires_grad_(False)


def match_statistics(
    nets: RandomNets,
    images: Tensor,
    labels: Tensor,
    real: Samples,
    *,
    steps: int,
    lr: float,
    augment: bool,
    stream: torch.Generator,
    tiles: int = 1,
) -> Tensor:
    """Trains `images` to match the class statistics of real samples: `steps` of Adam, each with another net.

    Nets see the tiles of an image (`cut_tiles`).
    """
    images = images.clone().requires_grad_()
    optimizer = torch.optim.Adam([images], lr=lr)
    y, labels = real.labels, labels.repeat_interleave(tiles**2)
    classes = torch.tensor(sorted(set(labels.tolist()) & set(y.tolist())), device=labels.device)
    indices_by_class = [torch.nonzero(y == label).squeeze(1).cpu() for label in classes]
    image_means = _build_averaging_matrix(labels, classes)
    real_means = _build_averaging_matrix(classes.repeat_interleave(REAL_PER_CLASS), classes)
    extract = extract_outputs if nets.match_scores or nets.ce_weight else extract_features
    for _ in range(steps):
        net = nets.draw()
        batch = [
            indices[torch.randint(len(indices), (REAL_PER_CLASS,), generator=stream)] for indices in indices_by_class
        ]
        x, _ = real.pick(torch.cat(batch))
        synthetic = cut_tiles(images, tiles)
        if augment:  # the same map for both
            affine = draw_affine(1, stream)
            x, synthetic = apply_affine(x, affine), apply_affine(synthetic, affine)
        with torch.no_grad():
            real_outputs = extract(net, x)
        outputs = extract(net, synthetic)
        matched = slice(None if nets.match_scores else 1)  # the features, and the scores if they count
        loss = torch.zeros((), device=images.device)
        for values, real_values in zip(outputs[matched], real_outputs[matched], strict=True):
            loss = loss + statistics_distance(
                class_statistics(values, image_means), class_statistics(real_values, real_means)
            )
        if nets.ce_weight:
            loss = loss + nets.ce_weight * F.cross_entropy(outputs[1], labels)
        (images.grad,) = torch.autograd.grad(loss, images)
        optimizer.step()
    return images.detach()


def class_statistics(features: Tensor, averaging: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each class; `averaging` (classes × samples) takes class means."""
    mean = averaging @ features
    variance = (averaging @ features.square() - mean.square()).clamp_min(0)
    return mean, (variance + VARIANCE_EPS).sqrt()


def statistics_distance(statistics: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """Squared distance of means and standard deviations, summed over classes and features."""
    return sum(((a - b).square().sum() for a, b in zip(statistics, target, strict=True)), torch.zeros(()))


def reinitialize(net: nn.Module) -> None:
    """Draws new random weights for every layer with `reset_parameters`, from the global random state."""
    for module in net.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


class _Cut(Exception):
    """Ends a forward pass before the cut layer, with the features."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


def extract_features(net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Runs the net up to the end of its feature maps, and no layer after that.

    The cut is before the first linear layer that follows a convolution, or else before the last linear layer. For a
    net without linear layers, the features are its scores.
    """

    def cut(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Cut(inputs[0])

    with _hooked(net, cut):
        try:
            features: Tensor = net(x)
        except _Cut as end:
            features = end.features
    return (features.flatten(1),)


def extract_outputs(net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The features of `extract_features`, and the scores of the classes."""
    captured: list[Tensor] = []
    with _hooked(net, lambda _, inputs: captured.append(inputs[0])):
        scores: Tensor = net(x)
    return (captured[0] if captured else scores).flatten(1), scores


@contextmanager
def _hooked(net: nn.Module, hook: Callable[[nn.Module, tuple[Tensor, ...]], None]) -> Iterator[None]:
    """Calls `hook` with the input of the cut layer."""
    layer = _find_cut_layer(net)
    handle = layer.register_forward_pre_hook(hook) if layer else None
    try:
        yield
    finally:
        if handle:
            handle.remove()


def _build_averaging_matrix(labels: Tensor, classes: Tensor) -> Tensor:
    """Classes × samples: multiplied by features, it gives class means."""
    mask = (classes[:, None] == labels).float()
    return mask / mask.sum(1, keepdim=True)


def _find_cut_layer(net: nn.Module) -> nn.Module | None:
    seen_convolution, linear = False, None
    for module in net.modules():
        seen_convolution |= isinstance(module, nn.Conv1d | nn.Conv2d)
        if isinstance(module, nn.Linear):
            linear = module
            if seen_convolution:
                break
    return linear
