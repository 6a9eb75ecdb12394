"""FedFSL is FL-MAML with an adversarial loss."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.func import functional_call
from torch.nn import functional as F

from fewer.data import ArrayData
from fewer.learning.adapt import trainable_weights
from fewer.methods.fedfsl import FedFSL
from fewer.methods.fine_tuned import load_n_way_net
from fewer.methods.fl_maml import FLMAML
from fewer.models import Weights
from tests.methods.f2l_harness import FAST, WAY, draw_task, make_client, run


def test_fedfsl_is_fl_maml_plus_an_adversarial_loss(data: ArrayData, tmp_path: Path) -> None:
    settings = FAST | {"rounds": 2, "fine_tune_lr": 0.3}
    for zero_head in (True, False):
        maml, fedfsl = (
            run(FLMAML(**settings, zero_head=zero_head), data),
            run(FedFSL(**settings, zero_head=zero_head, adversarial_weight=0), data),
        )
        assert all(torch.equal(tensor, fedfsl.state.model[name]) for name, tensor in maml.state.model.items())
    method = FedFSL(**settings, adversarial_weight=0.7, first_order=False, zero_head=False)
    client = make_client(data, tmp_path)
    received = method.initial_weights(client.task, 0)
    net = load_n_way_net(client, received, WAY)
    torch.manual_seed(0)
    theta = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in trainable_weights(net).items()}
    task = draw_task(data)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}

    def fine_tune(weights: Weights) -> Weights:
        inner = F.cross_entropy(functional_call(net, weights, (task.support_x,)), task.support_y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        return {name: weights[name] - 0.3 * gradient for name, gradient in zip(weights, gradients, strict=True)}

    scores = functional_call(net, fine_tune(leaves), (task.query_x,))
    start = {name: received[name].clone().requires_grad_() for name in leaves}
    received_probabilities = functional_call(net, fine_tune(start), (task.query_x,)).softmax(1).detach()
    adversarial_loss = 0.7 * (scores.softmax(1) - received_probabilities).abs().mean()
    query_loss = F.cross_entropy(scores, task.query_y)
    task_gradients = method.task_gradient(net, theta, received, task)
    # With a zero head, only the encoder has gradients.
    encoder_gradients = FedFSL(**settings, adversarial_weight=0.7, zero_head=True).task_gradient(
        net, theta, received, task
    )
    assert encoder_gradients.keys() == {name for name in task_gradients if name.startswith("encoder.")}
    assert all(torch.equal(gradient, task_gradients[name]) for name, gradient in encoder_gradients.items())
    for part, loss in (("encoder.", query_loss + adversarial_loss), ("head.", query_loss - adversarial_loss)):
        names = [name for name in leaves if name.startswith(part)]
        expected_gradients = torch.autograd.grad(loss, [leaves[name] for name in names], retain_graph=True)
        for name, expected_gradient in zip(names, expected_gradients, strict=True):
            assert torch.allclose(task_gradients[name], expected_gradient, atol=1e-6), name
