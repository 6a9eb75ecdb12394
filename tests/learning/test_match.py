"""Feature matching: statistics by class, and Adam steps on their distance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fewer.learning.augment import apply_affine, draw_affine
from fewer.learning.match import (
    REAL_PER_CLASS,
    VARIANCE_EPS,
    class_statistics,
    feature_extractor,
    match_statistics,
    reinitialize,
    statistics_distance,
)
from fewer.models import EncoderHead, get_weights
from fewer.runtime import stream
from tests.methods.fedmk_harness import CLASSES, SHAPE, make_client, small_cnn

# --- matching and augmentation ----------------------------------------------------------------------------------


def test_statistics_are_mean_and_deviation_by_class() -> None:
    features = torch.randn(7, 4, dtype=torch.float64, generator=stream("f"))
    averaging = torch.zeros(2, 7, dtype=torch.float64)
    averaging[0, :3], averaging[1, 3:] = 1 / 3, 1 / 4
    mean, deviation = class_statistics(features, averaging)
    for row, part in enumerate((features[:3], features[3:])):
        assert torch.allclose(mean[row], part.mean(0))
        assert torch.allclose(deviation[row], (part.var(0, correction=0) + VARIANCE_EPS).sqrt())
    other = (mean + 1, deviation - 2)
    assert statistics_distance((mean, deviation), other).item() == pytest.approx(2 * 4 * (1 + 4))
    assert statistics_distance((mean, deviation), (mean, deviation)) == 0


def test_matching_reduces_the_distance_and_skips_classes_without_samples(tmp_path: Path) -> None:
    client = make_client(tmp_path, 0)
    labels = torch.arange(3).repeat_interleave(4)
    images = 2 * torch.rand(12, *SHAPE, generator=stream("D̂")) - 1
    matched = match_statistics(
        client.net(client.initial_weights()),
        images,
        labels,
        client.train,
        steps=60,
        lr=0.1,
        augment=False,
        stream=stream("s"),
    )
    assert torch.equal(matched[labels == 1], images[labels == 1])  # the client has no sample of class 1

    def gap(images: Tensor, label: int) -> float:
        x, y = client.train.slice(0, len(client.train))
        real, synthetic = x[y == label], images[labels == label]
        return float(
            (real.mean(0) - synthetic.mean(0)).square().sum() + (real.std(0) - synthetic.std(0)).square().sum()
        )

    assert all(gap(matched, label) < 0.5 * gap(images, label) for label in (0, 2))


def test_one_matching_step_is_adam_on_the_distance(tmp_path: Path) -> None:
    """Adam's first step moves each pixel by the learning rate against the sign of its gradient."""
    client = make_client(tmp_path, 2)
    labels = torch.arange(3).repeat_interleave(2)
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    torch.manual_seed(8)
    net = client.net(client.initial_weights())
    matched = match_statistics(net, images, labels, client.train, steps=1, lr=0.1, augment=False, stream=stream("s"))
    draw = stream("s")
    y = client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    indices = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(indices)
    d = images.clone().requires_grad_()
    loss = torch.zeros(())
    for c in range(3):  # `net` still has its random weights
        synthetic, real = net.encoder[:7](d[labels == c]), net.encoder[:7](x[y == c])  # type: ignore[index, operator]
        loss = loss + (synthetic.mean(0) - real.mean(0)).square().sum()
        deviations = [(f.var(0, correction=0) + VARIANCE_EPS).sqrt() for f in (synthetic, real)]
        loss = loss + (deviations[0] - deviations[1]).square().sum()
    (gradient,) = torch.autograd.grad(loss, d)
    significant = gradient.abs() > 1e-4
    assert torch.allclose(matched[significant], (images - 0.1 * gradient.sign())[significant], atol=1e-4)
    assert significant.float().mean() > 0.9


def test_reinitialize_draws_new_weights() -> None:
    net = small_cnn()
    before = get_weights(net)
    reinitialize(net)
    after = get_weights(net)
    assert not torch.equal(before["encoder.0.weight"], after["encoder.0.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_features_are_taken_before_the_first_linear_layer_or_the_head() -> None:
    x = torch.randn(2, *SHAPE)
    net = small_cnn()
    with feature_extractor(net) as features:
        assert torch.equal(features(x), net.encoder[:7](x))  # type: ignore[index, operator]
    flat = EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), 5, CLASSES)
    with feature_extractor(flat) as features:
        assert torch.equal(features(x), flat.encoder(x))
    assert not flat.head._forward_pre_hooks


def test_features_need_no_layer_after_the_cut() -> None:
    net, calls = small_cnn(), []
    net.head.register_forward_hook(lambda *_: calls.append("head"))  # type: ignore[union-attr]
    with feature_extractor(net) as features:
        features(torch.randn(2, *SHAPE))
    assert not calls
    net(torch.randn(2, *SHAPE))
    assert calls == ["head"]


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [False, True])
def test_a_matching_step_augments_real_and_synthetic_images_alike(augment: bool, tmp_path: Path) -> None:
    client = make_client(tmp_path, 2)
    labels = torch.arange(3).repeat_interleave(2)
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    net = client.net(client.initial_weights())
    matched = match_statistics(net, images, labels, client.train, steps=1, lr=0.1, augment=augment, stream=stream("s"))
    draw, y = stream("s"), client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    indices = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(indices)
    d = images.clone().requires_grad_()
    augmented = d
    if augment:
        transform = draw_affine(1, draw)
        x, augmented = apply_affine(x, transform), apply_affine(d, transform)
    loss = torch.zeros(())
    for c in range(3):
        synthetic, real = net.encoder[:7](augmented[labels == c]), net.encoder[:7](x[y == c])  # type: ignore[index, operator]
        loss = loss + (synthetic.mean(0) - real.mean(0)).square().sum()
        a, b = ((f.var(0, correction=0) + VARIANCE_EPS).sqrt() for f in (synthetic, real))
        loss = loss + (a - b).square().sum()
    (gradient,) = torch.autograd.grad(loss, d)
    significant = gradient.abs() > 1e-4
    assert significant.float().mean() > 0.9
    assert torch.allclose(matched[significant], (images - 0.1 * gradient.sign())[significant], atol=1e-4)


def test_matching_uses_a_new_random_net_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(net: nn.Module) -> None:
        reinitialize(net)
        seen.append(next(net.parameters()).detach().clone())

    monkeypatch.setattr("fewer.learning.match.reinitialize", spy)
    client = make_client(tmp_path, 2)
    labels = torch.arange(3)
    images, net = torch.rand(3, *SHAPE), client.net(client.initial_weights())
    match_statistics(net, images, labels, client.train, steps=3, lr=0.1, augment=False, stream=stream())
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
