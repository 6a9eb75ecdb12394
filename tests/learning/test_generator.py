"""The generator of features and its losses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fewer.learning.generator import Generator, GeneratorOutput, build_generator, diversity_loss, train_generator
from fewer.models import Task, get_weights, load_weights, split_net
from fewer.registry import MODELS
from fewer.runtime import stream
from tests.methods.fedmk_harness import CLASSES
from tests.models.harness import TASK_INFO, build_net

# --- Eqs 9-11: training on the server ---------------------------------------------------------------------------


def test_the_generator_learns_features_that_the_head_classifies(tmp_path: Path) -> None:
    """Eq 10: cross-entropy through the head falls, the head does not change, and features of a class differ."""
    torch.manual_seed(0)
    head, generator = nn.Linear(32, CLASSES), Generator(CLASSES, 32)
    before = get_weights(head)
    noise, y = generator.draw(200, stream("try"))
    initial_loss = F.cross_entropy(head(generator(noise, y)), y).item()
    train_generator(
        generator, lambda features, _: head(features), torch.ones(3), stream("learn"), steps=60, lr=0.01, batch_size=128
    )
    features = generator(noise, y)
    assert F.cross_entropy(head(features), y).item() < 0.2 * initial_loss
    assert all(torch.equal(before[name], tensor) for name, tensor in get_weights(head).items())
    assert head.weight.grad is None
    assert features[y == 0].std(0).mean() > 0.1


def test_diversity_loss_matches_a_double_loop() -> None:
    noise, features = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    total = 0.0
    for i in range(5):
        for j in range(5):
            noise_distance = sum((noise[i] - noise[j]).square().tolist()) / 3
            total += noise_distance * sum((features[i] - features[j]).abs().tolist()) / 2
    assert diversity_loss(noise, features).item() == pytest.approx(math.exp(-total / 25))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_generated_features_have_the_range_of_the_encoder(name: str) -> None:
    """Features ≥ 0 for a ReLU, in (−1, 1) for an LSTM, and any number otherwise."""
    facts = TASK_INFO[name]
    net = build_net(name, **({"width": 0.1} if name == "resnet12" else {})).eval()
    task = Task(facts["shape"], facts["classes"], lambda: net)
    x = 3 * torch.randn(4, *task.shape) if "vocabulary" not in facts else torch.randint(1, 80, (4, *task.shape))
    real = split_net(net)[0](x).detach()
    outputs: tuple[GeneratorOutput, ...] = ("encoder", "linear")
    for output in outputs:
        generator = build_generator(task, net, output)
        with torch.no_grad():
            generator.state_dict()["body.3.weight"].mul_(30)
        generated = generator(*generator.draw(50, stream("try"))).detach()
        assert generated.shape[1] == real.shape[1]
        if output == "encoder":
            assert bool((generated < 0).any()) == bool((real < 0).any())
            assert bool((generated.abs() > 1).any()) == ("lstm" not in name)
        else:
            assert generated.min() < -1


# --- options ----------------------------------------------------------------------------------------------------


def test_one_step_of_the_generator_is_adam_on_both_terms() -> None:
    torch.manual_seed(0)
    head, generator = nn.Linear(32, CLASSES), Generator(CLASSES, 32)
    initial = get_weights(generator)
    noise, y = generator.draw(16, stream("one"), torch.ones(3))
    features = generator(noise, y)
    loss = F.cross_entropy(head(features), y) + diversity_loss(noise, features)
    gradients = torch.autograd.grad(loss, list(generator.parameters()))
    load_weights(generator, initial)
    train_generator(
        generator, lambda features, _: head(features), torch.ones(3), stream("one"), steps=1, lr=0.01, batch_size=16
    )
    for (name, parameter), gradient in zip(generator.named_parameters(), gradients, strict=True):
        significant = gradient.abs() > 1e-5
        assert torch.allclose(
            parameter[significant], (initial[name] - 0.01 * gradient.sign())[significant], atol=1e-4
        ), name
