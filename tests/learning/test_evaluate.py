"""Evaluation in batches."""

from __future__ import annotations

import torch

from fewer.learning import evaluate_net
from tests.methods.linear_harness import TEST, WEIGHT, linear


def test_evaluation_adds_up_over_batches() -> None:
    net = linear().train()
    x, y = torch.from_numpy(TEST[0]), torch.from_numpy(TEST[1])
    at_once, in_parts = evaluate_net(net, [(x, y)]), evaluate_net(net, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert at_once.total == in_parts.total == 11 and at_once.correct == in_parts.correct
    assert at_once.correct == int(((TEST[0] @ WEIGHT.T).argmax(axis=1) == TEST[1]).sum())
    assert abs(at_once.loss - in_parts.loss) < 1e-5 and not net.training
