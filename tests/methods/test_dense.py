"""DENSE and Co-Boosting against their equations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer import CoBoosting, Dense
from fewer.errors import SettingError
from fewer.learning import draw_batches
from fewer.learning.aggregate import stack_models
from fewer.learning.synthesis import NOISE, ImageGenerator, kl_divergence
from fewer.methods.co_boosting import WeightedEnsemble
from fewer.methods.dense import POOL
from fewer.models import get_weights
from fewer.runtime.streams import global_streams
from tests.methods.fedmk_harness import CLASSES, make_contexts, make_task

SMALL: dict[str, Any] = {
    "epochs": 2,
    "generator_steps": 2,
    "generator_batch_size": 4,
    "generator_width": 2,
    "distill_steps": 2,
    "local_steps": 2,
}


class Scores(nn.Module):
    """Scores that do not depend on the input, and a batch norm layer that sees it."""

    def __init__(self, scores: list[list[float]], mean: float | None = None) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))
        self.norm = nn.BatchNorm2d(1) if mean is not None else nn.Identity()
        if mean is not None:
            self.norm.running_mean = torch.tensor([mean])

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores + 0 * self.norm(x).flatten(1)[:, :1]
        return scores


def cross_entropy(scores: list[float], label: int) -> float:
    return math.log(sum(map(math.exp, scores))) - scores[label]


X = torch.zeros(2, 1, 2, 2)
Y = torch.tensor([0, 1])
STUDENT = Scores([[3.0, 1.0], [0.0, 1.0]])


def divergence(teacher: list[float], student: list[float]) -> float:
    return float(kl_divergence(torch.tensor([teacher]), torch.tensor([student])))


def test_the_generator_loss_of_dense() -> None:
    method = Dense(bn_weight=0.5, adversarial_weight=2.0)
    ensemble = method.build_ensemble([Scores([[2.0, 0.0], [2.0, 0.0]], 3.0), Scores([[0.0, 0.0], [4.0, 2.0]], -1.0)])
    assert ensemble(X).tolist() == [[1, 0], [3, 1]]  # the student disagrees with the second only
    assert not any(parameter.requires_grad for parameter in ensemble.parameters()) and not ensemble.training
    batch_norm = ((3 + 1) + (1 + 1)) / 2  # means 0 against 3 and −1, variances 0 against 1
    disagreement = -divergence([3, 1], [0, 1]) / 2
    expected = (cross_entropy([1, 0], 0) + cross_entropy([3, 1], 1)) / 2 + 0.5 * batch_norm + 2 * disagreement
    assert method.generator_loss(ensemble, STUDENT, X, Y).item() == pytest.approx(expected, rel=1e-5)


def test_the_generator_loss_of_co_boosting() -> None:
    method = CoBoosting(adversarial_weight=2.0, bn_weight=0.25)
    ensemble = method.build_ensemble([Scores([[2.0, 0.0], [2.0, 0.0]], 3.0), Scores([[0.0, 0.0], [4.0, 2.0]])])
    assert isinstance(ensemble, WeightedEnsemble)
    ensemble.weights.copy_(torch.tensor([1.0, 0.5]))
    assert ensemble(X).tolist() == [[2, 0], [4, 1]]
    losses = [cross_entropy([2, 0], 0), cross_entropy([4, 1], 1)]
    hard = sum((1 - math.exp(-loss)) * loss for loss in losses) / 2
    adversarial = -(divergence([2, 0], [3, 1]) + divergence([4, 1], [0, 1])) / 2
    expected = hard + 2 * adversarial + 0.25 * (3 + 1) / 2
    assert method.generator_loss(ensemble, STUDENT, X, Y).item() == pytest.approx(expected, rel=1e-5)
    logits = torch.tensor([[2.0, 0.0]], requires_grad=True)  # the difficulty is a constant
    (gradient,) = torch.autograd.grad(
        CoBoosting(adversarial_weight=0).generator_loss(
            WeightedEnsemble([nn.Identity()]), nn.Identity(), logits, Y[:1]
        ),
        logits,
    )
    p = logits.detach().softmax(1)
    assert torch.allclose(gradient, (1 - p[:, :1]) * (p - torch.tensor([[1.0, 0.0]])), atol=1e-6)


def test_the_distillation_loss() -> None:
    method = Dense(temperature=2.0)
    ensemble = method.build_ensemble([Scores([[2.0, 0.0], [2.0, 0.0]])])
    expected = 4 * (divergence([1, 0], [1.5, 0.5]) + divergence([1, 0], [0, 0.5])) / 2
    assert method.distillation_loss(ensemble, STUDENT, X).item() == pytest.approx(expected, rel=1e-5)


def test_weights_of_the_ensemble_follow_the_sign_of_the_gradient() -> None:
    method = CoBoosting(weight_step=0.2, weight_decay_rate=0.5)
    right, wrong = Scores([[3.0, 0.0]]), Scores([[0.0, 3.0]])
    images, labels, batches = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.long), torch.tensor([[0, 1], [2, 3]])
    ensemble = method.build_ensemble([right, wrong])
    assert isinstance(ensemble, WeightedEnsemble) and ensemble.weights.tolist() == [0.5, 0.5]
    method.improve_ensemble(ensemble, images, labels, batches, epoch=0)
    assert ensemble.weights.tolist() == [0.5, 0.5]
    method.improve_ensemble(ensemble, images, labels, batches, epoch=1)  # two steps of 0.1
    assert ensemble.weights.tolist() == pytest.approx([0.7, 0.3])
    CoBoosting(weight_step=0.9, weight_decay_rate=1).improve_ensemble(ensemble, images, labels, batches, epoch=1)
    assert ensemble.weights.tolist() == [1, 0]


def test_diverse_images_move_by_the_sign_of_a_random_direction() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    method = CoBoosting(perturbation=0.25)
    ensemble = method.build_ensemble([net])
    x = torch.randn(5, 1, 2, 2)
    u = 2 * torch.rand(5, 3, generator=torch.Generator().manual_seed(1)) - 1
    moved = method.transform_images(ensemble, x, torch.Generator().manual_seed(1))
    p = (net(x) / 4).softmax(1).detach()
    by_logits = p * (u - (u * p).sum(1, keepdim=True)) / 4  # of uᵀ softmax(z / 4)
    gradient = by_logits @ net[1].weight
    assert torch.allclose(moved, x + 0.25 * gradient.sign().view_as(x), atol=1e-6)


def test_generation_and_distillation_alternate(tmp_path: Path) -> None:
    """Two epochs, written out: Adam on the generator, then momentum with a cosine schedule on the student."""
    method, task = Dense(**SMALL, distill_lr=0.2), make_task()
    members = [task.initial_weights(seed) for seed in (1, 2)]
    model = task.initial_weights(3)
    server = make_contexts(tmp_path).server(0, 1)
    with global_streams("test"):
        trained = method.distill_ensemble(server, model, stack_models(members))
    with global_streams("test"):
        generator = ImageGenerator(task.shape, 2)
    nets = [task.net().eval() for _ in members]
    student, draw = task.net(), server.stream("synthesis")
    for net, weights in zip([*nets, student], [*members, model], strict=True):
        net.load_state_dict(weights)
    adam = torch.optim.Adam(generator.parameters(), method.generator_lr)
    sgd = torch.optim.SGD(student.parameters(), 0.2, momentum=0.9)
    pool: list[Tensor] = []
    step = 0
    for _ in range(2):
        noise, y = torch.randn(4, NOISE, generator=draw), torch.randint(CLASSES, (4,), generator=draw)
        for _ in range(2):
            x = generator(noise)
            teacher, logits = (nets[0](x) + nets[1](x)) / 2, student(x)
            differs = teacher.argmax(1) != logits.argmax(1)
            adversarial = -(kl_divergence(teacher, logits) * differs).mean()
            adam.zero_grad()
            (F.cross_entropy(teacher, y) + 0.5 * adversarial).backward()
            adam.step()
        pool.append(generator(noise).detach())
        images = torch.cat(pool)
        for batch in draw_batches(len(images), 2, 4, draw):
            x = images[batch]
            sgd.param_groups[0]["lr"] = 0.2 * (1 + math.cos(math.pi * step / 4)) / 2
            sgd.zero_grad()
            kl_divergence(((nets[0](x) + nets[1](x)) / 2).detach(), student(x), 4.0).mean().backward()  # type: ignore[no-untyped-call]
            sgd.step()
            step += 1
    assert trained["finite"]
    for name, tensor in get_weights(student).items():
        assert torch.allclose(trained["model"][name], tensor, atol=1e-5), name
        assert not torch.equal(tensor, model[name])


@pytest.mark.parametrize("method_class", [Dense, CoBoosting])
def test_clients_send_one_model_and_divergence_keeps_the_last_one(
    method_class: type[Dense], caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"clients": 3, "model": "cnn", "seed": 1}
    trained = fewer.run(method_class(**SMALL), "digits", **settings)
    fedavg = fewer.run(fewer.FedAvg(rounds=1, local_steps=2), "digits", **settings)
    assert {trained.history[-1][side] for side in ("up", "down")} == {fedavg.history[-1][s] for s in ("up", "down")}
    diverged = fewer.run(method_class(**SMALL, distill_lr=1e30), "digits", **settings)
    initial = diverged.task.initial_weights(1)
    assert all(torch.equal(diverged.state.model[name], tensor) for name, tensor in initial.items())
    assert "lower -o distill_lr" in caplog.text


def test_the_pool_is_limited(tmp_path: Path) -> None:
    sizes = []

    class Watching(Dense):
        def improve_ensemble(self, ensemble: Any, images: Tensor, *args: Any) -> None:
            sizes.append(len(images))

    method = Watching(**{**SMALL, "epochs": POOL + 2, "generator_steps": 1, "distill_steps": 1})
    task = make_task()
    members = stack_models([task.initial_weights(1)])
    method.distill_ensemble(make_contexts(tmp_path).server(0, 1), task.initial_weights(0), members)
    assert sizes == [4 * min(epoch, POOL) for epoch in range(1, POOL + 3)]


def test_inputs_that_are_no_images_are_refused() -> None:
    with pytest.raises(SettingError, match=r"^co-boosting generates images, but inputs have shape \(16,\)$"):
        fewer.run("co-boosting", "usage", clients=5)
