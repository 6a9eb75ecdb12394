"""Feature matching: statistics by class, and Adam steps on their distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewer.learning.augment import apply_affine, draw_affine
from fewer.learning.match import (
    NET_BATCH_SIZE,
    REAL_PER_CLASS,
    VARIANCE_EPS,
    PerturbedNets,
    RandomNets,
    TrainedNets,
    class_statistics,
    extract_features,
    extract_outputs,
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
        RandomNets(client.net(client.initial_weights())),
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
    nets = RandomNets(net)
    matched = match_statistics(nets, images, labels, client.train, steps=1, lr=0.1, augment=False, stream=stream("s"))
    draw = stream("s")
    y = client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    indices = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(indices)
    d = images.clone().requires_grad_()
    loss = torch.zeros(())
    encode: Any = nets.net.encoder[:7]  # type: ignore[index]  # it still has its random weights
    for c in range(3):
        synthetic, real = encode(d[labels == c]), encode(x[y == c])
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
    (features,) = extract_features(net, x)
    assert torch.equal(features, net.encoder[:7](x))  # type: ignore[index, operator]
    flat = EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), 5, CLASSES)
    assert torch.equal(extract_features(flat, x)[0], flat.encoder(x))
    assert not flat.head._forward_pre_hooks
    for either in (net, flat):
        features, scores = extract_outputs(either, x)
        assert torch.equal(features, extract_features(either, x)[0]) and torch.equal(scores, either(x))


def test_features_need_no_layer_after_the_cut() -> None:
    net, calls = small_cnn(), []
    net.head.register_forward_hook(lambda *_: calls.append("head"))  # type: ignore[union-attr]
    extract_features(net, torch.randn(2, *SHAPE))
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
    nets = RandomNets(net)
    matched = match_statistics(nets, images, labels, client.train, steps=1, lr=0.1, augment=augment, stream=stream("s"))
    draw, y = stream("s"), client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    indices = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(indices)
    d = images.clone().requires_grad_()
    augmented = d
    if augment:
        transform = draw_affine(1, draw)
        x, augmented = apply_affine(x, transform), apply_affine(d, transform)
    encode: Any = nets.net.encoder[:7]  # type: ignore[index]
    loss = torch.zeros(())
    for c in range(3):
        synthetic, real = encode(augmented[labels == c]), encode(x[y == c])
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
    images, nets = torch.rand(3, *SHAPE), RandomNets(client.net(client.initial_weights()))
    match_statistics(nets, images, labels, client.train, steps=3, lr=0.1, augment=False, stream=stream())
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


# --- other nets, and tiles --------------------------------------------------------------------------------------


def test_perturbed_nets_are_at_a_distance_from_the_model() -> None:
    net = small_cnn()
    center = get_weights(net)
    nets = PerturbedNets(net, 2.5, stream("ε"))
    offsets = []
    for _ in range(3):
        drawn = get_weights(nets.draw())
        offsets.append(torch.cat([(drawn[name] - center[name]).flatten() for name in center]))
    assert [offset.norm().item() for offset in offsets] == pytest.approx([2.5] * 3, rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(offsets[0], offsets[1], dim=0)
    assert abs(cosine.item()) < 0.3  # two independent directions


def test_trained_nets_take_turns_train_and_start_again(tmp_path: Path) -> None:
    real = make_client(tmp_path, 2).train
    options = {"count": 2, "steps": 2, "lr": 0.2, "ce_weight": 0.1, "augment": False}
    nets = TrainedNets(small_cnn(), real, **options, stream=stream("q"))  # type: ignore[arg-type]
    drawn = [nets.draw() for _ in range(2)]
    assert drawn[0] is not drawn[1]
    fresh = get_weights(drawn[0])
    assert nets.draw() is drawn[0]  # the third use is the second of the first net: one step of SGD
    reference = small_cnn()
    reference.load_state_dict(fresh)
    assert len(real) < NET_BATCH_SIZE
    x, y = real.all()
    gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(reference(x), y), list(reference.parameters()))
    for (name, w), gradient in zip(reference.named_parameters(), gradients, strict=True):
        assert torch.allclose(get_weights(drawn[0])[name], w - 0.2 * gradient, atol=1e-6)
    nets.draw()
    trained = nets.draw()  # its second and last training step
    before = get_weights(trained)
    nets.draw()
    assert nets.draw() is trained
    moved = max((get_weights(trained)[name] - before[name]).abs().max().item() for name in before)
    assert moved > 0.3  # new random weights, not a small step
    assert not any(parameter.requires_grad for parameter in trained.parameters())


@pytest.mark.parametrize("kind", ["scores", "cross-entropy", "tiles"])
def test_a_matching_step_with_scores_cross_entropy_or_tiles(kind: str, tmp_path: Path) -> None:
    """Adam's first step moves each pixel against the sign of the gradient of this sum."""

    class OneNet(RandomNets):
        match_scores = kind == "scores"
        ce_weight = 50.0 if kind == "cross-entropy" else 0.0

        def draw(self) -> nn.Module:
            return self.net

    client, tiles = make_client(tmp_path, 2), 2 if kind == "tiles" else 1
    labels = torch.arange(3).repeat_interleave(2)
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    net = client.net(client.initial_weights())
    with torch.no_grad():
        net.head.weight *= 30  # type: ignore[operator, union-attr]
    settings = {"steps": 1, "lr": 0.1, "augment": False, "tiles": tiles}
    matched = match_statistics(OneNet(net), images, labels, client.train, **settings, stream=stream("s"))  # type: ignore[arg-type]
    draw, y = stream("s"), client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    x, y = client.train.pick(torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)]))

    def gradient_sign(kind: str) -> Tensor:
        d = images.clone().requires_grad_()
        seen, seen_labels = d, labels
        if kind == "tiles":
            parts = [d[:, :, top : top + 4, left : left + 4] for top in (0, 4) for left in (0, 4)]
            seen = torch.cat([torch.nn.functional.interpolate(part, (8, 8), mode="bilinear") for part in parts])
            seen_labels = labels.repeat(4)
        loss = torch.zeros(())
        layers = [net.encoder[:7], net] if kind == "scores" else [net.encoder[:7]]  # type: ignore[index]
        for layer in layers:
            for c in range(3):
                synthetic, real = layer(seen[seen_labels == c]), layer(x[y == c])  # type: ignore[operator]
                loss = loss + (synthetic.mean(0) - real.mean(0)).square().sum()
                a, b = ((f.var(0, correction=0) + VARIANCE_EPS).sqrt() for f in (synthetic, real))
                loss = loss + (a - b).square().sum()
        if kind == "cross-entropy":
            loss = loss + 50 * torch.nn.functional.cross_entropy(net(seen), seen_labels)
        (gradient,) = torch.autograd.grad(loss, d)
        return gradient.sign() * (gradient.abs() > 1e-3)

    sign = gradient_sign(kind)
    assert torch.allclose(matched[sign != 0], (images - 0.1 * sign)[sign != 0], atol=1e-3)
    assert (sign != 0).float().mean() > 0.8
    assert (sign != gradient_sign("features alone")).float().mean() > 0.01  # the test sees the difference
