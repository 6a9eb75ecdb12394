"""FedMK's training on the server, against torch and explicit loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.augment import apply_affine, draw_affine
from fewer.learning.generator import Generator
from fewer.methods.context import Server
from fewer.methods.fedmk import FedMK, FedMKState
from fewer.models import Task, Weights, get_weights, load_weights
from fewer.runtime import stream
from tests.methods.fedmk_harness import CLASSES, SEED, SHAPE, make_contexts, make_task


def make_server(folder: Path, task: Task | None = None) -> Server:
    context = make_contexts(folder, task).server(0, 1)
    assert isinstance(context, Server)
    return context


# --- Eqs 9-11: training on the server ---------------------------------------------------------------------------


def train_on_server(method: FedMK, folder: Path, images: Tensor, labels: Tensor) -> tuple[Weights, Weights, FedMKState]:
    state = method.init(make_task(), SEED)
    answer = method.train_global_model(
        make_server(folder), model=state.model, generator=state.generator, images=images, labels=labels
    )
    return answer["model"], answer["generator"], state


def random_images() -> tuple[Tensor, Tensor]:
    return torch.rand(9, *SHAPE, generator=stream("images")), torch.arange(3).repeat(3)


def test_server_training_is_sgd_on_the_mean_loss_of_d(tmp_path: Path) -> None:
    """Eq 9: two steps with momentum and a decaying learning rate."""
    method = FedMK(pseudo_weight=0, augment=False, server_steps=2, server_lr=0.4, server_batch_size=4, momentum=0.5)
    images, labels = random_images()
    model, generator, state = train_on_server(method, tmp_path, images, labels)
    assert generator == {}
    net, draw = make_task().net(), make_server(tmp_path).stream("learning")
    net.load_state_dict(state.model)
    w = [p.detach().clone() for p in net.parameters()]
    velocity = [torch.zeros_like(p) for p in w]
    for step in range(2):
        chosen = torch.randint(9, (4,), generator=draw)
        gradients = torch.autograd.grad(F.cross_entropy(net(images[chosen]), labels[chosen]), list(net.parameters()))
        lr = 0.4 * 0.5 * (1 + math.cos(math.pi * step / 2))
        velocity = [0.5 * v + g for v, g in zip(velocity, gradients, strict=True)]
        w = [p - lr * v for p, v in zip(w, velocity, strict=True)]
        with torch.no_grad():
            for p, value in zip(net.parameters(), w, strict=True):
                p.copy_(value)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.values(), get_weights(net).values(), strict=True))
    assert not torch.allclose(model["head.weight"], state.model["head.weight"], atol=1e-3)


@pytest.mark.parametrize(("output", "activation"), [("encoder", nn.ReLU()), ("linear", None)])
def test_generated_features_add_beta_times_their_loss(
    output: str, activation: nn.Module | None, tmp_path: Path
) -> None:
    """Eq 11: one step on the loss of D̂ plus β times the head's loss on generated features."""
    images, labels = random_images()
    options = {"augment": False, "server_steps": 1, "server_lr": 0.3, "server_batch_size": 8, "generator_steps": 4}
    beta = 0.5
    model, generator_weights, state = train_on_server(
        FedMK(pseudo_weight=beta, generator_output=output, **options), tmp_path, images, labels
    )
    generator = Generator(CLASSES, 32, activation)
    generator.load_state_dict(generator_weights)
    generator.train()
    draw = make_server(tmp_path).stream("learning")
    for _ in range(4):
        generator.draw(8, draw, torch.ones(3))  # the draws of the generator's training
    chosen = torch.randint(9, (8,), generator=draw)
    noise, y = generator.draw(round(beta * 8), draw, torch.ones(3))
    before = Generator(CLASSES, 32)
    before.load_state_dict(state.generator)
    net = make_task().net()
    net.load_state_dict(state.model)
    with torch.no_grad():
        features = generator(noise, y)
    loss = F.cross_entropy(net(images[chosen]), labels[chosen]) + beta * F.cross_entropy(net.head(features), y)  # type: ignore[operator]
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
        assert torch.allclose(model[name], parameter - 0.3 * gradient, atol=1e-6), name


def test_the_server_augments_images_only_if_asked(tmp_path: Path) -> None:
    images, labels = random_images()
    options = {"pseudo_weight": 0, "server_steps": 1, "server_batch_size": 8}
    plain, _, _ = train_on_server(FedMK(augment=False, **options), tmp_path, images, labels)
    augmented, _, _ = train_on_server(FedMK(augment=True, **options), tmp_path, images, labels)
    assert not torch.equal(plain["head.weight"], augmented["head.weight"])


# --- options ----------------------------------------------------------------------------------------------------


def test_features_are_generated_in_proportion_to_the_labels_of_d(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[Any] = []
    draw = Generator.draw

    def spy(self: Generator, count: int, stream: Any, class_weights: Tensor | None = None) -> Any:
        seen.append((count, class_weights is not None and class_weights.tolist()))
        return draw(self, count, stream, class_weights)

    monkeypatch.setattr(Generator, "draw", spy)
    method = FedMK(server_steps=2, generator_steps=2, pseudo_weight=0.5, server_batch_size=8)
    train_on_server(method, tmp_path, torch.rand(4, *SHAPE), torch.tensor([0, 0, 0, 2]))
    assert seen == [(8, [3, 0, 1])] * 2 + [(4, [3, 0, 1])] * 2


def test_the_generator_continues_from_the_last_round(tmp_path: Path) -> None:
    images, labels = torch.rand(6, *SHAPE), torch.arange(3).repeat(2)
    method = FedMK(server_steps=1, generator_steps=1, generator_lr=1e-9)
    torch.manual_seed(1)
    _, generator, state = train_on_server(method, tmp_path, images, labels)
    assert torch.allclose(generator["body.0.weight"], state.generator["body.0.weight"], atol=1e-6)


def test_server_lr_decays_or_stays_constant(tmp_path: Path) -> None:
    images, labels = torch.rand(9, *SHAPE), torch.arange(3).repeat(3)
    options = {
        "pseudo_weight": 0,
        "augment": False,
        "server_steps": 2,
        "server_batch_size": 4,
        "momentum": 0.0,
        "server_lr": 0.4,
    }
    decaying, _, state = train_on_server(FedMK(lr_decay=True, **options), tmp_path, images, labels)
    constant, _, _ = train_on_server(FedMK(lr_decay=False, **options), tmp_path, images, labels)
    one_step, _, _ = train_on_server(FedMK(lr_decay=False, **{**options, "server_steps": 1}), tmp_path, images, labels)
    for name in state.model:  # with decay, the second step has half the length
        assert torch.allclose(decaying[name] - one_step[name], 0.5 * (constant[name] - one_step[name]), atol=1e-6)
    assert not torch.allclose(constant["head.weight"], one_step["head.weight"], atol=1e-4)


def test_without_its_own_lr_the_server_has_that_of_the_inner_loop(tmp_path: Path) -> None:
    images, labels = torch.rand(9, *SHAPE), torch.arange(3).repeat(3)
    models = [
        train_on_server(FedMK(server_steps=1, server_lr=lr, inner_lr=0.3), tmp_path, images, labels)[0]
        for lr in (None, 0.3, 0.05)
    ]
    assert torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    assert not torch.equal(models[0]["head.weight"], models[2]["head.weight"])


def test_the_server_augments_each_image_separately(tmp_path: Path) -> None:
    images, labels = torch.rand(9, *SHAPE), torch.arange(3).repeat(3)
    method = FedMK(pseudo_weight=0, server_steps=1, server_lr=0.5, server_batch_size=8)
    model, _, state = train_on_server(method, tmp_path, images, labels)
    draw = stream(SEED, 1, -1, "learning")
    chosen = torch.randint(9, (8,), generator=draw)
    net = make_task().net()
    load_weights(net, state.model)
    loss = F.cross_entropy(net(apply_affine(images[chosen], draw_affine(8, draw))), labels[chosen])
    for (name, w), gradient in zip(
        net.named_parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
    ):
        assert torch.allclose(model[name], w - 0.5 * gradient, atol=1e-6), name


def test_the_generator_gets_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = []
    monkeypatch.setattr("fewer.methods.fedmk.train_generator", lambda *_, **options: settings.append(options))
    method = FedMK(server_steps=1, server_lr=0.3, generator_steps=7, generator_lr=0.02, server_batch_size=9)
    train_on_server(method, tmp_path, torch.rand(3, *SHAPE), torch.arange(3))
    assert settings == [{"steps": 7, "lr": 0.02, "batch_size": 9}]
