"""FedMK's condensation: each equation against arithmetic or finite differences in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import from_clients
from fewer.learning.augment import apply_affine, cut_tiles, draw_affine
from fewer.methods import fedmk
from fewer.methods.condensed import draw_gaussian
from fewer.methods.context import Client, ContextFactory
from fewer.methods.fedmk import FedMK, FedMKState, class_balance
from fewer.runtime import Unable, stream
from tests.methods.fedmk_harness import (
    CLASSES,
    PAIRS,
    SEED,
    SHAPE,
    SMALL,
    TEST,
    is_same,
    make_client,
    make_task,
    small_cnn,
)


def double_case(build_net: Callable[[], nn.Module] = small_cnn) -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    """A net in float64, its weights, and a D̂ with two images per class."""
    torch.manual_seed(3)
    net = build_net().double()
    images = torch.rand(2 * CLASSES, *SHAPE, dtype=torch.float64) * 2 - 1
    return net, dict(net.named_parameters()), images, torch.arange(CLASSES).repeat_interleave(2)


def real_batch() -> tuple[Tensor, Tensor]:
    x, y = PAIRS[1]
    return torch.from_numpy(x).double(), torch.from_numpy(y)


# --- Eqs 3-8: condensation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["none", "class"])
@pytest.mark.parametrize(
    "options",
    [
        {"inner_steps": 1, "inner_batch_size": None, "augment": False},
        {"inner_steps": 3, "inner_batch_size": None, "augment": False},
        {"inner_steps": 4, "inner_batch_size": 2, "augment": False},
        {"inner_steps": 2, "inner_batch_size": 3, "augment": True},
    ],
)
def test_outer_gradient_is_exact(options: dict[str, Any], weights: str) -> None:
    """∇_D̂ of the loss after the inner steps, against central differences along random directions."""
    method = FedMK(**options, inner_lr=0.5, sample_weights=weights)
    net, start, images, labels = double_case()
    x, y = real_batch()
    balance = torch.tensor([0.5, 1.5, 4.0], dtype=torch.float64)

    def loss(images: Tensor) -> Tensor:
        w_star = method.inner_loop(net, start, images, labels, stream("same draws"))
        return method.outer_loss(net, w_star, x, y, balance)

    images.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(images), images)
    for seed in range(4):
        direction = torch.randn(images.shape, dtype=torch.float64, generator=stream(seed, "way"))
        step = 1e-7  # small, because the inner gradient jumps at ReLU's kink
        numeric = (loss(images + step * direction) - loss(images - step * direction)).item() / (2 * step)
        assert (gradient * direction).sum().item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)
    assert gradient.abs().max() > 1e-6


def test_outer_gradient_of_a_linear_model_matches_the_formula() -> None:
    """For a linear model and one inner step: dL/dD̂ = −η (∂²ℓ/∂w∂D̂)ᵀ ∇L(w*)."""
    draw = np.random.default_rng(0)
    w, d, x = draw.normal(size=(2, 3)), draw.normal(size=(1, 3)), draw.normal(size=(4, 3))
    y, label, lr = np.array([0, 1, 1, 0]), 1, 0.7

    def softmax(z: Any) -> Any:
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    p = softmax(d @ w.T)[0]
    r = p - np.eye(2)[label]
    w_star = w - lr * np.outer(r, d[0])
    outer = ((softmax(x @ w_star.T) - np.eye(2)[y]).T @ x) / len(y)  # ∇ of the mean loss at w*
    jacobian = np.diag(p) - np.outer(p, p)  # of the softmax by the scores
    # The derivative of ⟨outer, r dᵀ⟩ by d is outerᵀ r, plus wᵀ J (outer d) through r = softmax(w d).
    expected = -lr * (outer.T @ r + w.T @ jacobian @ (outer @ d[0]))

    net = nn.Linear(3, 2, bias=False).double()
    images = torch.from_numpy(d).requires_grad_()
    method = FedMK(inner_steps=1, inner_batch_size=None, inner_lr=lr, sample_weights="none", augment=False)
    adapted = method.inner_loop(
        net, {"weight": torch.from_numpy(w).requires_grad_()}, images, torch.tensor([label]), stream()
    )
    assert np.allclose(adapted["weight"].detach().numpy(), w_star)
    loss = method.outer_loss(net, adapted, torch.from_numpy(x), torch.from_numpy(y), torch.ones(2))
    (gradient,) = torch.autograd.grad(loss, images)
    assert np.allclose(gradient.numpy()[0], expected)


def test_dynamic_weights_are_sigmoids_of_the_loss_without_gradient() -> None:
    method = FedMK(tau=2.0)
    losses = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    weights = method.weigh_samples(losses, torch.ones(3))
    assert weights.tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(-6.0))])
    (gradient,) = torch.autograd.grad((weights * losses).mean(), losses)
    assert gradient.tolist() == pytest.approx([w / 3 for w in weights.tolist()])


def test_outer_loss_is_the_weighted_mean() -> None:
    net = nn.Linear(2, 2, bias=False).double()
    w = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1])
    scores = (x @ w.T).tolist()
    losses = [math.log(sum(map(math.exp, row))) - row[label] for row, label in zip(scores, y.tolist(), strict=True)]
    dynamic = sum(loss / (1 + math.exp(-5 * loss)) for loss in losses) / 3
    assert FedMK().outer_loss(net, {"weight": w}, x, y, torch.ones(2)).item() == pytest.approx(dynamic)
    uniform = FedMK(sample_weights="none").outer_loss(net, {"weight": w}, x, y, torch.ones(2)).item()
    assert uniform == pytest.approx(sum(losses) / 3)
    balance = torch.tensor([1.5, 0.75])
    by_class = FedMK(sample_weights="class").outer_loss(net, {"weight": w}, x, y, balance).item()
    assert by_class == pytest.approx((1.5 * losses[0] + 0.75 * (losses[1] + losses[2])) / 3)


def test_class_weights_give_each_held_class_the_same_total() -> None:
    balance = class_balance(torch.tensor([0, 0, 0, 2]))
    assert balance[[0, 2]].tolist() == pytest.approx([4 / (2 * 3), 4 / (2 * 1)])


@pytest.mark.parametrize("restart", [1, 2, None])
def test_the_outer_loop_restarts_from_the_global_model_or_continues(restart: int | None, tmp_path: Path) -> None:
    """Three SGD steps on D̂ with all samples: each starts from W again, or from the weights w* of the step before."""
    method = FedMK(
        outer_steps=3, outer_lr=3.0, outer_batch_size=None, optimizer="sgd", inner_steps=1, inner_batch_size=None,
        inner_lr=0.5, restart_every=restart, augment=False, sample_weights="none",
    )  # fmt: skip
    client = make_client(tmp_path, 1)
    net = client.net(client.initial_weights())
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    labels = torch.arange(3).repeat_interleave(2)
    x, y = client.train.slice(0, len(client.train))
    start: dict[str, Tensor] = dict(net.named_parameters())
    expected, weights = images, start
    for step in range(3):
        if restart and step % restart == 0:
            weights = start
        d = expected.detach().requires_grad_()
        gradients = torch.autograd.grad(
            F.cross_entropy(torch.func.functional_call(net, weights, (d,)), labels),
            list(weights.values()),
            create_graph=True,
        )
        adapted = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(net, adapted, (x,)), y)
        expected = d - 3.0 * torch.autograd.grad(loss, d)[0]
        weights = {name: w.detach().requires_grad_() for name, w in adapted.items()}
    assert torch.allclose(method.outer_loop(net, images, labels, client.train, stream("any")), expected, atol=1e-6)
    assert not torch.allclose(expected, images, atol=1e-3)


def test_inner_steps_use_each_image_once_per_epoch_in_random_order() -> None:
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x[:, 0, 0, 0].detach())
            return x.flatten(1)[:, :2] * self.w

    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 1, 2).contiguous()
    method = FedMK(inner_steps=4, inner_batch_size=3, augment=False)
    net = Spy()
    method.inner_loop(net, dict(net.named_parameters()), images, torch.zeros(6, dtype=torch.long), stream("x"))
    first_epoch, second_epoch = torch.cat(seen[:2]).tolist(), torch.cat(seen[2:]).tolist()
    assert sorted(first_epoch) == sorted(second_epoch) == list(range(6))
    assert first_epoch != list(range(6)) or second_epoch != list(range(6))


# --- initial D̂ -------------------------------------------------------------------------------------------------


def test_d_starts_from_uniform_noise(tmp_path: Path) -> None:
    labels, client = torch.zeros(200, dtype=torch.long), make_client(tmp_path, 0)
    images = FedMK().initial_images(client, labels, {}, client.train)
    assert -1 <= images.min() < -0.99
    assert 0.99 < images.max() <= 1
    assert images.std() == pytest.approx(1 / math.sqrt(3), rel=0.02)


def test_d_starts_from_noise_with_the_mean_and_covariance_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedmk, "SAMPLES_PER_DRAW", 0)
    client = make_client(tmp_path, 0)  # holds the classes 0 and 2
    method = FedMK(start="class", per_class=20_000)
    labels = torch.tensor([0, 1, 2]).repeat_interleave(20_000)
    images = method.initial_images(client, labels, {}, client.train)
    x, y = client.train.all()
    for label in (0, 2):
        drawn, real = images[labels == label].flatten(1), x[y == label].flatten(1)
        assert torch.allclose(drawn.mean(0), real.mean(0), atol=0.05)
        assert torch.allclose(drawn.T.cov(correction=0), real.T.cov(correction=0), atol=0.1)
    assert images[labels == 1].abs().max() <= 1  # nothing is known about other classes
    tiled = FedMK(start="class", per_class=20_000, tiles=2).initial_images(client, labels, {}, client.train)
    small = cut_tiles(tiled[labels == 0][:5000], 2)
    assert torch.allclose(small.mean(), x[y == 0].mean(), atol=0.05)


def test_a_class_needs_twice_as_many_samples_as_images_that_start_from_it(tmp_path: Path) -> None:
    client = make_client(tmp_path, 0)  # 7 samples of class 0
    for per_class, starts in ((3, True), (4, False)):
        labels = torch.zeros(per_class, dtype=torch.long)
        images = FedMK(start="class", per_class=per_class).initial_images(client, labels, {}, client.train)
        uniform = FedMK(per_class=per_class).initial_images(client, labels, {}, client.train)
        assert torch.equal(images, uniform) != starts


def test_draws_of_a_gaussian_show_only_the_mean_and_the_covariance() -> None:
    x = torch.randn(6, 2, 3, generator=stream("x"), dtype=torch.float64)
    draws = draw_gaussian(x, 4, stream("draws"))
    noise, flat = torch.randn(4, 6, generator=stream("draws")).double(), x.flatten(1)
    root = sqrtm(flat.T.cov(correction=0).numpy()).real
    assert torch.allclose(draws, (flat.mean(0) + noise @ torch.from_numpy(root)).view(4, 2, 3), atol=1e-6)
    axis = torch.tensor([[1.0, -1, 2, -2, 3, -3]], dtype=torch.float64)  # orthogonal to the mean
    others = flat - 2 * axis.T @ (axis @ flat) / axis.square().sum()  # a reflection
    assert not torch.allclose(others, flat, atol=0.1)
    assert torch.allclose(draw_gaussian(others.view(6, 2, 3), 4, stream("draws")), draws, atol=1e-6)


def test_d_starts_from_shared_images_by_class_and_noise_otherwise(tmp_path: Path) -> None:
    labels, client = torch.tensor([0, 0, 2, 2]), make_client(tmp_path, 0)
    shared = {"0": torch.full((1, *SHAPE), 7.0), "1": torch.full((2, *SHAPE), 8.0), "2": torch.full((3, *SHAPE), 9.0)}
    images = FedMK(init_from="shared").initial_images(client, labels, shared, client.train)
    assert [float(image.max()) if image.std() == 0 else None for image in images] == [7.0, None, 9.0, 9.0]
    noise = FedMK(init_from="noise").initial_images(client, labels, {}, client.train)
    assert noise.abs().max() <= 1


def test_clients_receive_only_the_knowledge_of_other_clients(tmp_path: Path) -> None:
    method = FedMK(init_from="shared", **SMALL)
    state = method.init(make_task(), SEED)
    assert all(
        knowledge_of_other is state.empty
        for knowledge_of_other in method.draw_shared_knowledge(state, [0, 1], stream("a")).values()
    )
    knowledge = {client: {**state.empty, "0": torch.full((1, *SHAPE), float(client))} for client in (0, 2, 3)}
    state = FedMKState(state.model, state.generator, state.empty, knowledge)
    received: dict[int, set[float]] = {0: set(), 1: set()}
    for seed in range(40):
        for client, knowledge_of_other in method.draw_shared_knowledge(state, [0, 1], stream(seed)).items():
            assert isinstance(knowledge_of_other, dict)
            received[client].add(float(knowledge_of_other["0"].max()))
    assert received == {0: {2.0, 3.0}, 1: {0.0, 2.0, 3.0}}
    not_shared = FedMK(init_from="own", **SMALL).draw_shared_knowledge(state, [0, 1], stream("a"))
    assert all(knowledge_of_other is state.empty for knowledge_of_other in not_shared.values())


def test_own_knowledge_continues_from_the_last_round(tmp_path: Path) -> None:
    method = FedMK(init_from="own", **{**SMALL, "matching_steps": 0, "outer_steps": 1, "outer_lr": 1e-9})
    model, empty = make_task().initial_weights(SEED), method.init(make_task(), SEED).empty
    first = method.condense(make_client(tmp_path, 0, 1), model=model, shared=empty)["knowledge"]
    second = method.condense(make_client(tmp_path, 0, 2), model=model, shared=empty)["knowledge"]
    assert torch.allclose(first["0"], second["0"], atol=1e-6)
    without_store = method.condense(make_client(tmp_path / "elsewhere", 0, 2), model=model, shared=empty)["knowledge"]
    assert not torch.allclose(first["0"], without_store["0"], atol=0.1)


def test_matching_in_a_later_round_undoes_outer_steps(tmp_path: Path) -> None:
    """Matched, then refined: a second round with match_rounds = 1 keeps D̂, with "all" its outer loss rises again."""
    model = make_task().initial_weights(SEED)

    def condense(name: str, round: int, **options: Any) -> Tensor:
        method = FedMK(**{**SMALL, "matching_steps": 30, "inner_steps": 1, "inner_batch_size": None, **options})
        torch.manual_seed(0)
        client = make_client(tmp_path / name, 1, round)
        knowledge = method.condense(client, model=model, shared=method.init(make_task(), SEED).empty)["knowledge"]
        return torch.cat(list(knowledge.values()))

    def loss(images: Tensor) -> float:
        method = FedMK(inner_steps=1, inner_batch_size=None, augment=False)
        client = make_client(tmp_path, 1)
        net, (x, y) = client.net(model), client.train.all()
        labels = torch.arange(CLASSES).repeat_interleave(2)
        w_star = method.inner_loop(net, dict(net.named_parameters()), images, labels, stream("any"))
        return method.outer_loss(net, w_star, x, y, torch.ones(CLASSES)).item()

    refining: dict[str, Any] = {"outer_steps": 60, "outer_lr": 0.1, "augment": False}
    losses = [loss(condense("never", 1, outer_steps=0))]
    for rounds in (1, "all"):
        refined = condense(str(rounds), 1, match_rounds=rounds, **refining)
        kept = condense(str(rounds), 2, match_rounds=rounds, outer_steps=0)
        assert torch.equal(kept, refined) == (rounds == 1)
        losses += [loss(refined), loss(kept)]
    matched, refined_1, kept_1, refined_all, matched_again = losses
    assert kept_1 == refined_1 == refined_all < matched - 0.05
    assert matched_again > refined_all + 0.2 * (matched - refined_all)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"match_rounds": "all"}, [True, True, True, True]),
        ({"match_rounds": 1}, [True, False, False, False]),
        ({"match_rounds": 2}, [True, True, False, False]),
        ({"match_rounds": 1, "init_from": "shared"}, [True, False, False, False]),
        ({"match_rounds": 1, "init_from": "noise"}, [True, True, True, True]),
    ],
)
def test_a_client_matches_in_its_first_rounds(
    options: dict[str, Any], expected: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own rounds count: here it is not in the cohorts of rounds 1, 2 and 4."""
    calls: list[int] = []

    def spy(net: Any, images: Tensor, *_: Any, **settings: Any) -> Tensor:
        calls.append(1)
        return images

    monkeypatch.setattr("fewer.methods.fedmk.match_statistics", spy)
    method, matched = FedMK(**{**SMALL, **options}), []
    model, empty = make_task().initial_weights(SEED), method.init(make_task(), SEED).empty
    for round in (3, 5, 6, 7):
        calls.clear()
        method.condense(make_client(tmp_path, 0, round), model=model, shared=empty)
        matched.append(bool(calls))
    assert matched == expected


def test_labels_are_the_held_classes_or_all_classes(tmp_path: Path) -> None:
    def labels(method: FedMK, client: int) -> list[int]:
        hard_labels: list[int] = method.hard_labels(
            method.eligible_samples(make_client(tmp_path, client)), CLASSES
        ).tolist()
        return hard_labels

    assert labels(FedMK(per_class=2, min_samples=1), 0) == [0, 0, 2, 2]
    assert labels(FedMK(per_class=1, min_samples=2), 1) == [0, 1]
    assert labels(FedMK(per_class=1, min_samples=2, labels="all"), 3) == [0, 1, 2]
    with pytest.raises(Unable, match="no class with 3 samples or more"):
        FedMK(min_samples=3).eligible_samples(make_client(tmp_path, 3))


@pytest.mark.parametrize("labels", ["held", "all"])
def test_samples_of_rare_classes_do_not_influence_d(labels: str, tmp_path: Path) -> None:
    """Client 1 has one sample of class 2. Changing this sample does not change D̂."""
    method = FedMK(**{**SMALL, "min_samples": 2, "labels": labels})
    model, empty = make_task().initial_weights(SEED), method.init(make_task(), SEED).empty
    results = []
    for change in (0.0, 5.0):
        x, y = PAIRS[1]
        data = from_clients([PAIRS[0], (x + change * (y == 2)[:, None, None, None].astype(np.float32), y)], test=TEST)
        client = ContextFactory(data, make_task(), SEED, tmp_path / str(change))(1, 1)
        assert isinstance(client, Client)
        torch.manual_seed(0)
        results.append(method.condense(client, model=model, shared=empty)["knowledge"])
    assert is_same(*results)


# --- options ----------------------------------------------------------------------------------------------------


def test_outer_steps_are_adam_on_random_samples(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Spy(FedMK):
        def outer_loss(self, net: Any, w_star: Any, x: Tensor, y: Tensor, balance: Tensor) -> Tensor:
            seen.append(x)
            return super().outer_loss(net, w_star, x, y, balance)

    options: dict[str, Any] = {"inner_steps": 1, "inner_batch_size": None, "augment": False, "sample_weights": "none"}
    method = Spy(outer_steps=1, outer_lr=0.1, outer_batch_size=4, **options)
    client = make_client(tmp_path, 1)
    net = client.net(client.initial_weights())
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    labels = torch.arange(3).repeat_interleave(2)
    updated = method.outer_loop(net, images, labels, client.train, stream("any"))
    x, y = client.train.pick(torch.randint(len(client.train), (4,), generator=stream("any")))
    assert len(seen) == 1 and torch.equal(seen[0], x)
    d = images.clone().requires_grad_()
    adapted = method.inner_loop(net, dict(net.named_parameters()), d, labels, stream())
    (gradient,) = torch.autograd.grad(method.outer_loss(net, adapted, x, y, torch.ones(3)), d)
    significant = gradient.abs() > 1e-6
    assert significant.float().mean() > 0.5
    assert torch.allclose(updated[significant], (images - 0.1 * gradient.sign())[significant], atol=2e-3)


def test_outer_steps_start_from_the_model_that_was_sent(tmp_path: Path) -> None:
    method = FedMK(**{**SMALL, "matching_steps": 0, "init_from": "noise"})
    empty = method.init(make_task(), SEED).empty
    first, second = (
        method.condense(make_client(tmp_path, 0), model=make_task().initial_weights(seed), shared=empty)["knowledge"][
            "0"
        ]
        for seed in (SEED, SEED + 1)
    )
    assert not torch.allclose(first, second, atol=1e-4)


@pytest.mark.parametrize("augment", [False, True])
def test_inner_steps_augment_each_image_separately_if_asked(augment: bool) -> None:
    net, start, images, labels = double_case()
    method = FedMK(inner_steps=1, inner_batch_size=None, inner_lr=0.5, augment=augment)
    adapted = method.inner_loop(net, start, images, labels, stream("u"))
    x = apply_affine(images, draw_affine(len(images), stream("u"))) if augment else images
    loss = F.cross_entropy(torch.func.functional_call(net, start, (x,)), labels)
    gradients = torch.autograd.grad(loss, list(start.values()))
    for (name, tensor), gradient in zip(start.items(), gradients, strict=True):
        assert torch.allclose(adapted[name], tensor - 0.5 * gradient), name
