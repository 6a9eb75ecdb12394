"""Batches and frozen weights in local SGD."""

from __future__ import annotations

import torch
from torch import nn

from fewer.learning import draw_batches, sgd
from fewer.models import get_weights
from tests.methods.linear_harness import CLASSES, FEATURES, PAIRS


def test_batches_are_drawn_from_all_samples_with_replacement() -> None:
    indices = draw_batches(5, 200, 3, torch.Generator().manual_seed(0))
    assert indices.shape == (200, 3)
    counts = torch.bincount(indices.reshape(-1), minlength=5)
    assert len(counts) == 5 and int(counts.min()) > 80
    assert any(len(set(row)) < 3 for row in indices.tolist())
    assert torch.equal(indices, draw_batches(5, 200, 3, torch.Generator().manual_seed(0)))


def test_sgd_does_not_change_frozen_weights() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
    net[0].requires_grad_(False)
    before = get_weights(net)
    sgd(net, [(torch.from_numpy(PAIRS[1][0]), torch.from_numpy(PAIRS[1][1]))], 0.1)
    changed = {name for name, tensor in get_weights(net).items() if not torch.equal(tensor, before[name])}
    assert changed == {"1.weight", "1.bias"} and net.training
