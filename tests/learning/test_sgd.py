"""Local training: batches, frozen weights, optimizers and schedules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.errors import SettingError
from fewer.learning import LocalOptimizer, draw_batches, sgd
from fewer.learning.sgd import clip_gradients, draw_subset
from fewer.methods.fedavg import FedAvg
from fewer.models import get_weights
from tests.methods.linear_harness import CLASSES, FEATURES, PAIRS


def test_batches_are_drawn_from_all_samples_with_replacement() -> None:
    indices = draw_batches(5, 200, 3, torch.Generator().manual_seed(0))
    assert indices.shape == (200, 3)
    counts = torch.bincount(indices.reshape(-1), minlength=5)
    assert len(counts) == 5 and int(counts.min()) > 80
    assert any(len(set(row)) < 3 for row in indices.tolist())
    assert torch.equal(indices, draw_batches(5, 200, 3, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(("count", "drawn"), [(4, 4), (12, 12), (99, 12), (None, 12)])
def test_a_subset_has_different_samples_and_at_most_all(count: int | None, drawn: int) -> None:
    samples = Samples(torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.int64))
    x, y = draw_subset(samples, count, torch.Generator().manual_seed(0))
    assert len(x) == len(y) == len(set(x[:, 0].tolist())) == drawn


def test_sgd_does_not_change_frozen_weights() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
    net[0].requires_grad_(False)
    before = get_weights(net)
    sgd(net, [(torch.from_numpy(PAIRS[1][0]), torch.from_numpy(PAIRS[1][1]))], 0.1)
    changed = {name for name, tensor in get_weights(net).items() if not torch.equal(tensor, before[name])}
    assert changed == {"1.weight", "1.bias"} and net.training


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adam": {"weight_decay": 0.1},
    "adamw": {"weight_decay": 0.1},
    "sgd with weight decay": {"weight_decay": 0.1},
}


def torch_loop(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]], name: str, schedule: str, clip: float = math.inf
) -> None:
    """Trains with torch.optim, as its documentation shows."""
    classes: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer = classes[name.split()[0]](net.parameters(), 0.05, **OPTIMIZERS[name])
    schedules: Any = torch.optim.lr_scheduler
    scheduler: Any = {
        "constant": lambda: schedules.ConstantLR(optimizer, 1.0),
        "cosine": lambda: schedules.CosineAnnealingLR(optimizer, len(batches)),
        "linear": lambda: schedules.LambdaLR(optimizer, lambda step: 1 - step / len(batches)),
    }[schedule]()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedules_are_those_of_torch(name: str, schedule: str) -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    expected = copy.deepcopy(net)
    batches = [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in PAIRS if len(y)] * 3
    torch_loop(expected, batches, name, schedule)
    options = LocalOptimizer(optimizer=name.split()[0], lr_schedule=schedule, **OPTIMIZERS[name])
    sgd(net, iter(batches), 0.05, optimizer=options)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_gradients_are_clipped_to_a_norm(limit: float) -> None:
    gradients = torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])
    clip_gradients(limit, gradients)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert torch.isclose(norm, torch.tensor(min(limit, 5.0)))
    assert torch.isclose(gradients[1][0, 0] / gradients[0][0], torch.tensor(4 / 3))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_steps_are_clipped_as_in_torch(schedule: str) -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    expected = copy.deepcopy(net)
    batches = [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in PAIRS if len(y)] * 3
    torch_loop(expected, batches, "sgd", schedule, clip=0.1)
    options: Any = {"momentum": 0.9, "lr_schedule": schedule, "clip_norm": 0.1}
    sgd(net, iter(batches), 0.05, optimizer=LocalOptimizer(**options))
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)  # torch divides by the norm + 1e-6
    unclipped = copy.deepcopy(net)
    sgd(unclipped, iter(batches), 0.05, optimizer=LocalOptimizer(clip_norm=1e9))
    sgd(net, iter(batches), 0.05)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), unclipped.parameters(), strict=True))


def test_momentum_is_refused_for_adam() -> None:
    with pytest.raises(ValidationError):
        LocalOptimizer(optimizer="adam", momentum=0.9)
    with pytest.raises(SettingError, match=r"fedavg: momentum = 0\.9: adam has no momentum; use optimizer = sgd"):
        FedAvg(optimizer="adam", momentum=0.9)
