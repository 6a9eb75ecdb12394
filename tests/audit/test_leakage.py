"""Gradients reveal an image."""

import pytest
import torch
from torch import Tensor, nn

from fewer.audit.leakage import (
    LR,
    compute_gradients,
    invert_features,
    psnr,
    replace_relu,
    restore_images,
    total_variation,
)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def test_gradients_are_computed_per_batch() -> None:
    net = small_net()
    x, y = torch.randn(2, 3, 1, 4, 4), torch.tensor([[0, 1, 2], [2, 2, 1]])
    gradients = compute_gradients(net, x, y)
    nn.functional.cross_entropy(net(x[1]), y[1]).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    assert torch.allclose(gradients[1], expected, atol=1e-6) and gradients.shape == (2, 51)


def test_gradient_matching_restores_an_image() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.rand(2, 1, 1, 4, 4)
    y = torch.tensor([[1], [2]])
    observed = compute_gradients(net, x, y).detach()
    generator = torch.Generator().manual_seed(1)
    images, mismatch = restore_images(net, observed, y, x.flatten(0, 1), generator, steps=300, starts=6, smooth=0.0)
    assert images.shape == x.shape and (mismatch < 1e-3).all()
    assert (images - x).abs().mean() < 0.05
    unrelated, _ = restore_images(
        net, observed.flip(0), y.flip(0), x.flatten(0, 1), generator, steps=300, starts=6, smooth=0.0
    )
    assert (unrelated - x).abs().mean() > 0.15  # the gradient of another sample reveals nothing


def test_sign_descent_returns_the_best_of_several_starts() -> None:
    net, data, y = small_net(), torch.rand(5, 1, 4, 4), torch.tensor([[0], [1]])
    observed = compute_gradients(net, data[:2, None], y).detach()

    def restore(starts: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return restore_images(net, observed, y, data, generator, steps=2, starts=starts, smooth=0.0)

    images, mismatch = restore(4)
    similarity = nn.functional.cosine_similarity(compute_gradients(net, images, y), observed)
    assert torch.allclose(1 - similarity, mismatch, atol=1e-6)
    fewer = [restore(starts)[1] for starts in (1, 2, 3)]
    assert (mismatch <= torch.stack(fewer).min(0).values + 1e-7).all() and (mismatch < fewer[0] - 1e-3).any()
    images, _ = restore(1)
    initial = torch.randn(2, 1, 1, 4, 4, generator=torch.Generator().manual_seed(0)).clamp_(data.min(), data.max())
    moved = (images - initial).abs()[
        (images > data.min()) & (images < data.max()) & (initial > data.min()) & (initial < data.max())
    ]
    # Adam on signs, with lr factors 1 and 1/2: a constant sign moves 1.5 steps, a flipped one 1 − 0.01 / 0.19 / 2
    assert len(moved) > 5
    assert all(any(abs(step - LR * size) < 1e-4 for size in (1.5, 1 - 0.005 / 0.19)) for step in moved.tolist())


def test_replace_relu_returns_a_copy_with_softplus() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    soft = replace_relu(net)
    assert not any(isinstance(module, nn.ReLU) for module in soft.modules())
    assert any(isinstance(module, nn.ReLU) for module in net.modules())
    x = torch.tensor([[1.0, -2.0]])
    assert torch.allclose(soft(x), net(x), atol=0.1)


def test_total_variation_and_psnr_by_arithmetic() -> None:
    image = torch.tensor([[0.0, 1.0], [3.0, 3.0]]).view(1, 1, 1, 2, 2)
    assert total_variation(image).item() == (3 + 2) / 2 + (1 + 0) / 2
    assert psnr(torch.full((1, 4), 0.1), torch.zeros(1, 4), 1.0).item() == pytest.approx(20)
    assert psnr(torch.full((1, 4), 0.1), torch.zeros(1, 4), 10.0).item() == pytest.approx(40)


def test_features_that_are_pixels_give_the_image_back() -> None:
    image = torch.tensor([[0.0, 1.0], [0.25, 0.5]]).view(1, 1, 2, 2)
    mean = image.flatten(1)
    restored, mismatch = invert_features(
        nn.Flatten(), mean, image, torch.Generator().manual_seed(0), steps=300, starts=2, smooth=0.0
    )
    assert restored.shape == image.shape and (restored - image).abs().max() < 0.02
    # ‖f(image) − mean‖² / ‖mean‖²
    expected = (restored - image).square().sum() / (1 + 0.25**2 + 0.5**2)
    assert mismatch.item() == pytest.approx(expected.item(), rel=1e-4)
