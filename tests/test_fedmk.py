"""FedMK: each equation against arithmetic done by hand or finite differences in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer.data import from_clients
from fewer.errors import SettingError
from fewer.learning.augment import MAX_ROTATION, MAX_SCALE, MAX_SHIFT, apply_affine, draw_affine
from fewer.learning.generator import Generator, diversity_loss, train_generator
from fewer.learning.match import (
    REAL_PER_CLASS,
    VARIANCE_EPS,
    class_statistics,
    feature_extractor,
    match_statistics,
    reinitialize,
    statistics_distance,
)
from fewer.methods.base import Client, ContextFactory, Server
from fewer.methods.fedavg import FedAvgAugmented
from fewer.methods.fedmk import FedMK, FedMKPaper, FedMKState, Knowledge, class_balance, concatenate_images
from fewer.models import EncoderHead, SmallCNN, Task, Weights, get_weights, load_weights
from fewer.runtime import HandlerRunner, Inline, Unable, on_client, stream
from fewer.wire import Refused, Shaped, decode, encode

torch.set_num_threads(1)

SHAPE, CLASSES, SEED = (1, 8, 8), 3, 5
DRAW = np.random.default_rng(2)
COUNTS = ([7, 0, 5], [4, 6, 1], [3, 3, 3], [2, 0, 0])
SMALL: dict[str, Any] = {
    "per_class": 2,
    "matching_steps": 2,
    "outer_steps": 2,
    "outer_batch_size": 6,
    "inner_steps": 2,
    "inner_batch_size": 3,
    "server_steps": 3,
    "server_batch_size": 5,
    "generator_steps": 2,
    "min_samples": 1,
    "refine_from": 1,
}


def client_of(counts: list[int]) -> tuple[Any, Any]:
    y = np.repeat(np.arange(CLASSES), counts)
    x = DRAW.normal(size=(len(y), *SHAPE)) + y[:, None, None, None]
    return x.astype(np.float32), y


PAIRS = [client_of(counts) for counts in COUNTS]
TEST = client_of([5, 5, 5])
DATA = from_clients(PAIRS, test=TEST)


def small_cnn() -> nn.Module:
    return SmallCNN(SHAPE, CLASSES)


def task_of(build_net: Callable[[], nn.Module] = small_cnn) -> Task:
    return Task(SHAPE, CLASSES, build_net)


def place_of(folder: Path, task: Task | None = None) -> ContextFactory:
    return ContextFactory(DATA, task or task_of(), SEED, folder)


def make_client(folder: Path, number: int, round: int = 1, task: Task | None = None) -> Client:
    context = place_of(folder, task)(number, round)
    assert isinstance(context, Client)
    return context


def server(folder: Path, task: Task | None = None) -> Server:
    context = place_of(folder, task)(-1, 1)
    assert isinstance(context, Server)
    return context


def inline(method: FedMK, folder: Path, **what: Any) -> Inline:
    handlers = HandlerRunner(method, place_of(folder), SEED, torch.device("cpu"))
    return Inline(len(DATA), SEED, handlers=handlers, **what)


def double_case(build_net: Callable[[], nn.Module] = small_cnn) -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    """A net in float64, its weights, and a D̂ of two images a class."""
    torch.manual_seed(3)
    net = build_net().double()
    images = torch.rand(2 * CLASSES, *SHAPE, dtype=torch.float64) * 2 - 1
    return net, dict(net.named_parameters()), images, torch.arange(CLASSES).repeat_interleave(2)


def real_batch() -> tuple[Tensor, Tensor]:
    x, y = PAIRS[1]
    return torch.from_numpy(x).double(), torch.from_numpy(y)


# --- Eqs 3-8: condensation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["none", "class"])
@pytest.mark.parametrize(
    "how",
    [
        {"inner_steps": 1, "inner_batch_size": None, "augment": False},
        {"inner_steps": 3, "inner_batch_size": None, "augment": False},
        {"inner_steps": 4, "inner_batch_size": 2, "augment": False},
        {"inner_steps": 2, "inner_batch_size": 3, "augment": True},
    ],
)
def test_outer_gradient_is_exact(how: dict[str, Any], weights: str) -> None:
    """∇_D̂ of the loss after the inner steps, against central differences along random directions."""
    method = FedMK(**how, inner_lr=0.5, sample_weights=weights)
    net, start, images, labels = double_case()
    x, y = real_batch()
    balance = torch.tensor([0.5, 1.5, 4.0], dtype=torch.float64)

    def loss(images: Tensor) -> Tensor:
        w_star = method.inner_loop(net, start, images, labels, stream("same draws"))
        return method.outer_loss(net, w_star, x, y, balance)

    images.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(images), images)
    for seed in range(4):
        way = torch.randn(images.shape, dtype=torch.float64, generator=stream(seed, "way"))
        step = 1e-7  # small, as at ReLU's kink the inner gradient jumps
        numeric = (loss(images + step * way) - loss(images - step * way)).item() / (2 * step)
        assert (gradient * way).sum().item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)
    assert gradient.abs().max() > 1e-6


def test_gradient_goes_through_the_inner_step_and_not_around_it() -> None:
    """For a linear model and one inner step: dL/dD̂ = −η (∂²ℓ/∂w∂D̂)ᵀ ∇L(w*), worked out by hand."""
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
    jacobian = np.diag(p) - np.outer(p, p)  # of softmax by scores
    # ⟨outer, r dᵀ⟩ differentiated by d: outerᵀ r, and through r = softmax(w d): wᵀ J (outer d)
    expected = -lr * (outer.T @ r + w.T @ jacobian @ (outer @ d[0]))

    net = nn.Linear(3, 2, bias=False).double()
    images = torch.from_numpy(d).requires_grad_()
    method = FedMK(inner_steps=1, inner_batch_size=None, inner_lr=lr, sample_weights="none", augment=False)
    after = method.inner_loop(
        net, {"weight": torch.from_numpy(w).requires_grad_()}, images, torch.tensor([label]), stream()
    )
    assert np.allclose(after["weight"].detach().numpy(), w_star)
    loss = method.outer_loss(net, after, torch.from_numpy(x), torch.from_numpy(y), torch.ones(2))
    (gradient,) = torch.autograd.grad(loss, images)
    assert np.allclose(gradient.numpy()[0], expected)


def test_dynamic_weights_are_sigmoids_of_the_loss_and_constants() -> None:
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
    evenly = FedMK(sample_weights="none").outer_loss(net, {"weight": w}, x, y, torch.ones(2)).item()
    assert evenly == pytest.approx(sum(losses) / 3)
    balance = torch.tensor([1.5, 0.75])
    classes = FedMK(sample_weights="class").outer_loss(net, {"weight": w}, x, y, balance).item()
    assert classes == pytest.approx((1.5 * losses[0] + 0.75 * (losses[1] + losses[2])) / 3)


def test_class_weights_give_each_held_class_the_same_sum() -> None:
    balance = class_balance(torch.tensor([0, 0, 0, 2]))
    assert balance[[0, 2]].tolist() == pytest.approx([4 / (2 * 3), 4 / (2 * 1)])


@pytest.mark.parametrize("restart", [1, 2])
def test_the_outer_loop_is_descent_from_the_global_model_or_carried_along(restart: int, tmp_path: Path) -> None:
    """Two SGD steps on D̂ over all samples: the second starts from W again, or from where the first led."""
    method = FedMK(
        outer_steps=2, outer_lr=3.0, outer_batch_size=None, optimizer="sgd", inner_steps=1, inner_batch_size=None,
        inner_lr=0.5, restart_every=restart, augment=False, sample_weights="none",
    )  # fmt: skip
    client = make_client(tmp_path, 1)
    net = client.net(client.initial_weights())
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    labels = torch.arange(3).repeat_interleave(2)
    x, y = client.train.slice(0, len(client.train))
    start: dict[str, Tensor] = dict(net.named_parameters())
    expected, weights = images, start
    for step in range(2):
        if step % restart == 0:
            weights = start
        d = expected.detach().requires_grad_()
        gradients = torch.autograd.grad(
            F.cross_entropy(torch.func.functional_call(net, weights, (d,)), labels),
            list(weights.values()),
            create_graph=True,
        )
        moved = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(net, moved, (x,)), y)
        expected = d - 3.0 * torch.autograd.grad(loss, d)[0]
        weights = {name: w.detach().requires_grad_() for name, w in moved.items()}
    assert torch.allclose(method.outer_loop(net, images, labels, client.train, stream("any")), expected, atol=1e-6)
    assert not torch.allclose(expected, images, atol=1e-3)


def test_inner_steps_go_over_shuffled_parts_each_image_once_a_pass() -> None:
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
    first, second = torch.cat(seen[:2]).tolist(), torch.cat(seen[2:]).tolist()
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != list(range(6)) or second != list(range(6))


# --- what D̂ starts from ---------------------------------------------------------------------------------------


def test_d_begins_from_even_noise(tmp_path: Path) -> None:
    labels = torch.zeros(200, dtype=torch.long)
    images = FedMK().initial_images(make_client(tmp_path, 0), labels, {})
    assert -1 <= images.min() < -0.99
    assert 0.99 < images.max() <= 1
    assert images.std() == pytest.approx(1 / math.sqrt(3), rel=0.02)


def test_shared_knowledge_is_taken_by_class_and_the_rest_is_noise(tmp_path: Path) -> None:
    labels = torch.tensor([0, 0, 2, 2])
    shared = {"0": torch.full((1, *SHAPE), 7.0), "1": torch.full((2, *SHAPE), 8.0), "2": torch.full((3, *SHAPE), 9.0)}
    images = FedMK(init_from="shared").initial_images(make_client(tmp_path, 0), labels, shared)
    assert [float(image.max()) if image.std() == 0 else None for image in images] == [7.0, None, 9.0, 9.0]
    ignored = FedMK(init_from="noise").initial_images(make_client(tmp_path, 0), labels, {})
    assert ignored.abs().max() <= 1


def test_sharing_gives_the_knowledge_of_others_only(tmp_path: Path) -> None:
    method = FedMK(init_from="shared", **SMALL)
    state = method.init(task_of(), SEED)
    assert all(
        coded.value is state.empty for coded in method.draw_shared_knowledge(state, [0, 1], stream("a")).values()
    )
    known = {p: {**state.empty, "0": torch.full((1, *SHAPE), float(p))} for p in (0, 2, 3)}
    state = FedMKState(state.model, state.generator, state.empty, known)
    received: dict[int, set[float]] = {0: set(), 1: set()}
    for seed in range(40):
        for who, coded in method.draw_shared_knowledge(state, [0, 1], stream(seed)).items():
            assert isinstance(coded.value, dict)
            received[who].add(float(coded.value["0"].max()))
    assert received == {0: {2.0, 3.0}, 1: {0.0, 2.0, 3.0}}
    quiet = FedMK(init_from="own", **SMALL).draw_shared_knowledge(state, [0, 1], stream("a"))
    assert all(coded.value is state.empty for coded in quiet.values())


def test_own_knowledge_continues_from_the_last_round(tmp_path: Path) -> None:
    method = FedMK(init_from="own", **{**SMALL, "matching_steps": 0, "outer_steps": 1, "outer_lr": 1e-9})
    model, empty = task_of().initial_weights(SEED), method.init(task_of(), SEED).empty
    first = method.condense(make_client(tmp_path, 0, 1), model=model, shared=empty)["knowledge"].value
    second = method.condense(make_client(tmp_path, 0, 2), model=model, shared=empty)["knowledge"].value
    assert torch.allclose(first["0"], second["0"], atol=1e-6)
    other = method.condense(make_client(tmp_path / "elsewhere", 0, 2), model=model, shared=empty)["knowledge"].value
    assert not torch.allclose(first["0"], other["0"], atol=0.1)


def test_labels_are_those_held_or_all(tmp_path: Path) -> None:
    def labels(method: FedMK, number: int) -> list[int]:
        made: list[int] = method.hard_labels(method.eligible_samples(make_client(tmp_path, number)), CLASSES).tolist()
        return made

    assert labels(FedMK(per_class=2, min_samples=1), 0) == [0, 0, 2, 2]
    assert labels(FedMK(per_class=1, min_samples=2), 1) == [0, 1]
    assert labels(FedMK(per_class=1, min_samples=2, labels="all"), 3) == [0, 1, 2]
    with pytest.raises(Unable, match="no class with 3 samples or more"):
        FedMK(min_samples=3).eligible_samples(make_client(tmp_path, 3))


@pytest.mark.parametrize("labels", ["held", "all"])
def test_samples_of_rare_classes_do_not_come_into_d(labels: str, tmp_path: Path) -> None:
    """Client 1 has one sample of class 2: D̂ is the same whatever it looks like."""
    method = FedMK(**{**SMALL, "min_samples": 2, "labels": labels})
    model, empty = task_of().initial_weights(SEED), method.init(task_of(), SEED).empty
    made = []
    for change in (0.0, 5.0):
        x, y = PAIRS[1]
        data = from_clients([PAIRS[0], (x + change * (y == 2)[:, None, None, None].astype(np.float32), y)], test=TEST)
        client = ContextFactory(data, task_of(), SEED, tmp_path / str(change))(1, 1)
        assert isinstance(client, Client)
        torch.manual_seed(0)
        made.append(method.condense(client, model=model, shared=empty)["knowledge"].value)
    assert same(*made)


# --- matching and augmentation --------------------------------------------------------------------------------------


def test_statistics_are_mean_and_deviation_by_class() -> None:
    features = torch.randn(7, 4, dtype=torch.float64, generator=stream("f"))
    means = torch.zeros(2, 7, dtype=torch.float64)
    means[0, :3], means[1, 3:] = 1 / 3, 1 / 4
    mean, deviation = class_statistics(features, means)
    for row, part in enumerate((features[:3], features[3:])):
        assert torch.allclose(mean[row], part.mean(0))
        assert torch.allclose(deviation[row], (part.var(0, correction=0) + VARIANCE_EPS).sqrt())
    other = (mean + 1, deviation - 2)
    assert statistics_distance((mean, deviation), other).item() == pytest.approx(2 * 4 * (1 + 4))
    assert statistics_distance((mean, deviation), (mean, deviation)) == 0


def test_matching_brings_statistics_near_and_leaves_what_it_cannot_match(tmp_path: Path) -> None:
    client = make_client(tmp_path, 0)
    labels = torch.arange(3).repeat_interleave(4)
    images = 2 * torch.rand(12, *SHAPE, generator=stream("D̂")) - 1
    made = match_statistics(
        client.net(client.initial_weights()),
        images,
        labels,
        client.train,
        steps=60,
        lr=0.1,
        augment=False,
        stream=stream("s"),
    )
    assert torch.equal(made[labels == 1], images[labels == 1])  # the client has no sample of class 1

    def gap(images: Tensor, label: int) -> float:
        x, y = client.train.slice(0, len(client.train))
        real, ours = x[y == label], images[labels == label]
        return float((real.mean(0) - ours.mean(0)).square().sum() + (real.std(0) - ours.std(0)).square().sum())

    assert all(gap(made, label) < 0.5 * gap(images, label) for label in (0, 2))


def test_one_matching_step_is_adam_on_the_distance(tmp_path: Path) -> None:
    """Adam's first step moves each pixel by the learning rate against the sign of its gradient."""
    client = make_client(tmp_path, 2)
    labels = torch.arange(3).repeat_interleave(2)
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    torch.manual_seed(8)
    net = client.net(client.initial_weights())
    made = match_statistics(net, images, labels, client.train, steps=1, lr=0.1, augment=False, stream=stream("s"))
    draw = stream("s")
    y = client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    numbers = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(numbers)
    d = images.clone().requires_grad_()
    loss = torch.zeros(())
    for c in range(3):  # `net` still has the weights that were drawn
        ours, theirs = net.encoder[:7](d[labels == c]), net.encoder[:7](x[y == c])  # type: ignore[index, operator]
        loss = loss + (ours.mean(0) - theirs.mean(0)).square().sum()
        deviations = [(f.var(0, correction=0) + VARIANCE_EPS).sqrt() for f in (ours, theirs)]
        loss = loss + (deviations[0] - deviations[1]).square().sum()
    (gradient,) = torch.autograd.grad(loss, d)
    clear = gradient.abs() > 1e-4
    assert torch.allclose(made[clear], (images - 0.1 * gradient.sign())[clear], atol=1e-4)
    assert clear.float().mean() > 0.9


def test_random_nets_are_drawn_anew() -> None:
    net = small_cnn()
    before = get_weights(net)
    reinitialize(net)
    after = get_weights(net)
    assert not torch.equal(before["encoder.0.weight"], after["encoder.0.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_features_end_before_the_first_full_layer_or_the_head() -> None:
    x = torch.randn(2, *SHAPE)
    net = small_cnn()
    with feature_extractor(net) as features:
        assert torch.equal(features(x), net.encoder[:7](x))  # type: ignore[index, operator]
    plain = EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), 5, CLASSES)
    with feature_extractor(plain) as features:
        assert torch.equal(features(x), plain.encoder(x))
    assert not plain.head._forward_pre_hooks


def test_augmentation_is_affine_and_differentiable() -> None:
    image = torch.rand(2, 1, 9, 9, dtype=torch.float64)
    same = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]], dtype=torch.float64)
    assert torch.allclose(apply_affine(image, same), image)
    right = torch.tensor([[[1.0, 0, 2 / 9], [0, 1, 0]]], dtype=torch.float64)  # reads one pixel further right
    assert torch.allclose(apply_affine(image, right)[..., :-1], image[..., 1:])
    assert torch.allclose(apply_affine(image, right)[..., -1], image[..., -1])
    moves = draw_affine(400, stream("m"))
    size = moves[:, :, :2].double().det().sqrt()
    assert 1 / (1 + MAX_SCALE) <= size.min() < 0.9 < 1.1 < size.max() <= 1 / (1 - MAX_SCALE) + 1e-6
    assert moves[:, :, 2].abs().max() <= MAX_SHIFT
    assert torch.atan2(moves[:, 1, 0], moves[:, 0, 0]).abs().max() <= MAX_ROTATION + 1e-6
    image.requires_grad_()
    assert torch.autograd.gradcheck(lambda i: apply_affine(i, moves[:2]), (image,))


# --- Eqs 9-11: the server --------------------------------------------------------------------------------


def learned(method: FedMK, folder: Path, images: Tensor, labels: Tensor) -> tuple[Weights, Weights, FedMKState]:
    state = method.init(task_of(), SEED)
    answer = method.train_global_model(
        server(folder), model=state.model, generator=state.generator, images=images, labels=labels
    )
    return answer["model"], answer["generator"], state


def some_images() -> tuple[Tensor, Tensor]:
    return torch.rand(9, *SHAPE, generator=stream("images")), torch.arange(3).repeat(3)


def test_training_is_descent_on_the_mean_loss_of_d(tmp_path: Path) -> None:
    """Eq 9, two steps with momentum and a decaying learning rate, by hand."""
    method = FedMK(pseudo_weight=0, augment=False, server_steps=2, server_lr=0.4, server_batch_size=4, momentum=0.5)
    images, labels = some_images()
    model, generator, state = learned(method, tmp_path, images, labels)
    assert generator == {}
    net, draw = task_of().net(), server(tmp_path).stream("learning")
    net.load_state_dict(state.model)
    w = [p.detach().clone() for p in net.parameters()]
    speed = [torch.zeros_like(p) for p in w]
    for step in range(2):
        chosen = torch.randint(9, (4,), generator=draw)
        gradients = torch.autograd.grad(F.cross_entropy(net(images[chosen]), labels[chosen]), list(net.parameters()))
        lr = 0.4 * 0.5 * (1 + math.cos(math.pi * step / 2))
        speed = [0.5 * s + g for s, g in zip(speed, gradients, strict=True)]
        w = [p - lr * s for p, s in zip(w, speed, strict=True)]
        with torch.no_grad():
            for p, value in zip(net.parameters(), w, strict=True):
                p.copy_(value)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.values(), get_weights(net).values(), strict=True))
    assert not torch.allclose(model["head.weight"], state.model["head.weight"], atol=1e-3)


def test_generated_features_add_beta_times_their_loss_to_the_head_only(tmp_path: Path) -> None:
    """Eq 11: one step with and without; the difference is −lr · β · ∇ of the head's loss on what is generated."""
    images, labels = some_images()
    one = {"augment": False, "server_steps": 1, "server_lr": 0.3, "server_batch_size": 8, "generator_steps": 4}
    beta = 0.5
    with_, weights, state = learned(FedMK(pseudo_weight=beta, **one), tmp_path, images, labels)
    generator = Generator(CLASSES, 32)
    generator.load_state_dict(weights)
    generator.train()
    draw = server(tmp_path).stream("learning")
    for _ in range(4):
        generator.draw(8, draw, torch.ones(3))  # what training the generator drew
    chosen = torch.randint(9, (8,), generator=draw)
    noise, y = generator.draw(round(beta * 8), draw, torch.ones(3))
    before = Generator(CLASSES, 32)
    before.load_state_dict(state.generator)
    net = task_of().net()
    net.load_state_dict(state.model)
    with torch.no_grad():
        features = generator(noise, y)
    loss = F.cross_entropy(net(images[chosen]), labels[chosen]) + beta * F.cross_entropy(net.head(features), y)  # type: ignore[operator]
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
        assert torch.allclose(with_[name], parameter - 0.3 * gradient, atol=1e-6), name


def test_the_generator_learns_what_the_head_takes_for_its_class(tmp_path: Path) -> None:
    """Eq 10: cross-entropy through the head falls, the head stays as it is, features of a class differ."""
    torch.manual_seed(0)
    head, generator = nn.Linear(32, CLASSES), Generator(CLASSES, 32)
    before = get_weights(head)
    noise, y = generator.draw(200, stream("try"))
    first = F.cross_entropy(head(generator(noise, y)), y).item()
    train_generator(
        generator, lambda features, _: head(features), torch.ones(3), stream("learn"), steps=60, lr=0.01, batch_size=128
    )
    features = generator(noise, y)
    assert F.cross_entropy(head(features), y).item() < 0.2 * first
    assert all(torch.equal(before[name], tensor) for name, tensor in get_weights(head).items())
    assert head.weight.grad is None
    assert features[y == 0].std(0).mean() > 0.1


def test_diversity_by_a_double_loop() -> None:
    noise, features = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    total = 0.0
    for i in range(5):
        for j in range(5):
            apart = sum((noise[i] - noise[j]).square().tolist()) / 3
            total += apart * sum((features[i] - features[j]).abs().tolist()) / 2
    assert diversity_loss(noise, features).item() == pytest.approx(math.exp(-total / 25))


def test_the_server_augments_images_only_if_asked(tmp_path: Path) -> None:
    images, labels = some_images()
    one = {"pseudo_weight": 0, "server_steps": 1, "server_batch_size": 8}
    plain, _, _ = learned(FedMK(augment=False, **one), tmp_path, images, labels)
    moved, _, _ = learned(FedMK(augment=True, **one), tmp_path, images, labels)
    assert not torch.equal(plain["head.weight"], moved["head.weight"])


def test_fedavg_augmented_is_descent_on_augmented_images(tmp_path: Path) -> None:
    method = FedAvgAugmented(local_steps=2, batch_size=3, lr=0.2)
    client = make_client(tmp_path, 1)
    answer = method.local_train(client, model=client.initial_weights())["model"].value
    net, draw = task_of().net(), client.stream("moves")
    net.load_state_dict(client.initial_weights())
    for numbers in torch.randint(len(client.train), (2, 3), generator=client.stream("batches")):
        x, y = client.train.pick(numbers)
        gradients = torch.autograd.grad(
            F.cross_entropy(net(apply_affine(x, draw_affine(3, draw))), y), list(net.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.2 * gradient)
    assert all(torch.allclose(answer[name], tensor, atol=1e-6) for name, tensor in get_weights(net).items())


# --- rounds ---------------------------------------------------------------------------------------------------


def run(folder: Path, method: FedMK | None = None, **settings: Any) -> fewer.Result:
    method = method or FedMK(rounds=2, cohort=3, **SMALL)
    return fewer.run(method, DATA, model="cnn", seed=SEED, out=folder, **settings)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(same(getattr(one, name), getattr(other, name)) for name in vars(one))


@pytest.mark.parametrize("begin", ["own", "shared"])
def test_pool_and_resume_give_the_same_bits(begin: str, tmp_path: Path) -> None:
    method = FedMK(rounds=3, cohort=2, **{**SMALL, "init_from": begin})
    whole = run(tmp_path / "a", method)
    pool = run(tmp_path / "b", method, runtime="pool", workers=2)
    assert same(whole.state, pool.state)

    class Stop(Exception): ...

    class Watch:
        def on_run_start(self, method: str, done: int, rounds: int) -> None: ...
        def on_answer(self, round: int, done: int, asked: int) -> None:
            if round == 2 and done == 2:
                raise Stop

        def on_round_end(self, metrics: Any) -> None: ...

    with pytest.raises(Stop):
        run(tmp_path / "c", method, progress=Watch())
    again = fewer.resume(tmp_path / "c", method=method, data=DATA)
    assert same(whole.state, again.state)
    assert (tmp_path / "a/ledger.csv").read_text() == (tmp_path / "c/ledger.csv").read_text()


def test_bytes_are_those_of_the_images(tmp_path: Path) -> None:
    """Each image is 64 values: one byte each as uint8, four as float32; little is added."""
    for codec, width in (("uint8", 1), ("float16", 2), ("float32", 4)):
        result = run(tmp_path / codec, FedMK(rounds=1, cohort=4, **{**SMALL, "codec": codec}))
        images = sum(len(some) for known in result.state.knowledge.values() for some in known.values())
        assert images == 2 * (2 + 3 + 3 + 1)
        up = result.metrics["up"]
        assert images * 64 * width < up < images * 64 * width + 4 * 700


def test_what_is_kept_is_what_travelled(tmp_path: Path) -> None:
    """The server has D̂ as decoded: at uint8, 256 levels a class at most."""
    result = run(tmp_path, FedMK(rounds=1, cohort=4, **{**SMALL, "codec": "uint8", "per_class": 6}))
    some = result.state.knowledge[2]["1"]
    steps = ((some - some.min()) / ((some.max() - some.min()) / 255)).double()
    assert torch.allclose(steps, steps.round(), atol=1e-3)


def test_latest_of_all_or_of_the_round_only(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Spy(FedMK):
        def train_global_model(self, *args: Any, **fields: Any) -> dict[str, Any]:
            sizes.append(len(fields["images"]))
            return super().train_global_model(*args, **fields)

        train_global_model.__side__ = "server"  # type: ignore[attr-defined]

    for keep in ("latest", "round"):
        method = Spy(rounds=3, cohort=1, **{**SMALL, "keep_images": keep, "matching_steps": 1, "outer_steps": 0})
        folder = tmp_path / keep
        clients, state = inline(method, folder), method.init(task_of(), SEED)
        sizes.clear()
        asked = []
        for round in (1, 2, 3):
            clients.round = round
            asked.append(method.sample_cohort(clients)[0])
            state = method.round(state, clients)
        held = [2 * sum(count > 0 for count in COUNTS[p]) for p in asked]
        kept = [2 * sum(count > 0 for p in set(asked[: n + 1]) for count in COUNTS[p]) for n in range(3)]
        assert sizes == (kept if keep == "latest" else held)
        assert set(state.knowledge) == set(asked)


def test_the_image_history_follows_the_client_that_was_first(tmp_path: Path) -> None:
    result = run(tmp_path, FedMK(rounds=3, cohort=4, **SMALL))
    first = next(iter(result.state.knowledge))
    assert list(result.state.image_history) == [1, 2, 3]
    last = result.state.image_history[3]
    assert all(torch.equal(image, result.state.knowledge[first][label][:1]) for label, image in last.items())
    assert not same(result.state.image_history[1], last)


def test_answers_that_do_not_fit_are_refused() -> None:
    schema = {"knowledge": {"0": Shaped((range(3), *SHAPE)), "1": Shaped((range(3), *SHAPE))}}

    def knowledge(zero: Tensor, one: Tensor) -> Any:
        return decode(encode("condense", {"knowledge": {"0": zero, "1": one}}), schema)[1]["knowledge"]

    good = torch.zeros(2, *SHAPE)
    assert knowledge(good, good[:0])["1"].shape == (0, *SHAPE)
    for bad in (torch.zeros(3, *SHAPE), torch.zeros(2, 1, 8, 9), torch.zeros(2, *SHAPE, dtype=torch.float64)):
        with pytest.raises(Refused):
            knowledge(good, bad)
    with pytest.raises(Refused):
        decode(encode("condense", {"knowledge": {"0": good}}), schema)
    with pytest.raises(Refused):
        knowledge(good, torch.full((1, *SHAPE), torch.nan))


class Liar(FedMK):
    """Client 0 sends arbitrary values."""

    value: float = 0.0
    none: bool = False

    @on_client
    def condense(self, client: Client, model: Weights, shared: Knowledge) -> dict[str, Any]:
        answer = super().condense(client, model, shared)
        if client.id == 0 or self.none:
            answer["knowledge"] = {
                label: images[:0] if self.none else torch.full_like(images, self.value)
                for label, images in answer["knowledge"].value.items()
            }
        return answer


def test_one_liar_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wild = run(tmp_path / "a", Liar(rounds=2, cohort=4, value=3e38, **SMALL))
    assert 0 not in wild.state.knowledge and "diverged" not in caplog.text
    assert "beyond 1000" in (tmp_path / "a/events.jsonl").read_text()
    loud = run(tmp_path / "b", Liar(rounds=2, cohort=4, value=999.0, **{**SMALL, "server_lr": 1e6}))
    assert all(bool(tensor.isfinite().all()) for tensor in loud.state.model.values())
    assert "round 1: training on D̂ diverged, so the last model is kept" in caplog.text
    mute = Liar(rounds=1, cohort=4, none=True, **SMALL)
    assert same(run(tmp_path / "c", mute).state, mute.init(task_of(), SEED))


def test_absent_clients_and_a_client_without_enough_samples_leave_the_round_whole(tmp_path: Path) -> None:
    result = run(tmp_path, FedMK(rounds=3, cohort=4, **{**SMALL, "min_samples": 3}), drop=0.3)
    assert 3 not in result.state.knowledge  # two samples only
    assert "unable" in (tmp_path / "events.jsonl").read_text()
    assert math.isfinite(result.metrics["loss"])


def test_wrong_settings_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="nothing would be condensed"):
        FedMK(matching_steps=0, outer_steps=0).init(task_of(), SEED)
    flat = Task((4,), 2, lambda: EncoderHead(nn.Linear(4, 3), 3, 2))
    with pytest.raises(SettingError, match="augment = true"):
        FedMK().init(flat, SEED)
    assert FedMK(augment=False).init(flat, SEED).empty["0"].shape == (0, 4)
    words = Task((4,), 2, lambda: EncoderHead(nn.Sequential(nn.Embedding(9, 3), nn.Flatten()), 12, 2))
    with pytest.raises(SettingError, match="real-valued inputs"):
        FedMK(augment=False).init(words, SEED)


def test_any_model_will_do_without_a_generator() -> None:
    whole = Task(SHAPE, CLASSES, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)))
    with pytest.raises(SettingError, match="no encoder"):
        FedMK().init(whole, SEED)
    result = fewer.run(FedMK(rounds=2, **{**SMALL, "pseudo_weight": 0}), DATA, model=whole.build_net, seed=SEED)
    assert result.state.generator == {}
    assert len(result.state.knowledge) == 4


def test_outer_steps_start_in_the_given_round(tmp_path: Path) -> None:
    model, empty = task_of().initial_weights(SEED), FedMK().init(task_of(), SEED).empty
    late, never = (FedMK(**{**SMALL, "refine_from": 2, "outer_steps": steps}) for steps in (2, 0))
    for round, alike in ((1, True), (2, False)):
        made = []
        for name, method in (("late", late), ("never", never)):
            torch.manual_seed(0)  # random nets come from the global stream
            answer = method.condense(make_client(tmp_path / name, 0, round), model=model, shared=empty)
            made.append(answer["knowledge"].value["0"])
        assert torch.equal(*made) == alike


def test_the_papers_form_has_two_departures() -> None:
    method = FedMKPaper()
    assert (method.optimizer, method.outer_batch_size) == ("adam", 256)
    assert (method.matching_steps, method.augment, method.inner_steps, method.inner_batch_size) == (0, False, 1, None)
    assert (method.refine_from, method.momentum, method.lr_decay) == (1, 0.0, False)
    assert (method.init_from, method.keep_images, method.min_samples, method.codec) == ("shared", "round", 1, "float32")
    assert (method.sample_weights, method.tau, method.per_class, method.restart_every) == ("dynamic", 5.0, 20, 1)


def test_concatenated_images_keep_their_labels() -> None:
    known: list[Knowledge] = [
        {"0": torch.ones(2, 1), "1": torch.ones(0, 1)},
        {"0": torch.ones(0, 1), "1": torch.zeros(1, 1)},
    ]
    images, labels = concatenate_images(known)
    assert images.flatten().tolist() == [1.0, 1.0, 0.0]
    assert labels.tolist() == [0, 0, 1]


# --- one setting, one line -----------------------------------------------------------------------------------------


def test_features_are_generated_in_proportion_to_the_labels_of_d(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[Any] = []
    draw = Generator.draw

    def spy(self: Generator, count: int, stream: Any, class_weights: Tensor | None = None) -> Any:
        seen.append((count, class_weights is not None and class_weights.tolist()))
        return draw(self, count, stream, class_weights)

    monkeypatch.setattr(Generator, "draw", spy)
    method = FedMK(server_steps=2, generator_steps=2, pseudo_weight=0.5, server_batch_size=8)
    learned(method, tmp_path, torch.rand(4, *SHAPE), torch.tensor([0, 0, 0, 2]))
    assert seen == [(8, [3, 0, 1])] * 2 + [(4, [3, 0, 1])] * 2


def test_one_step_of_the_generator_is_adam_on_both_terms() -> None:
    torch.manual_seed(0)
    head, generator = nn.Linear(32, CLASSES), Generator(CLASSES, 32)
    first = get_weights(generator)
    noise, y = generator.draw(16, stream("one"), torch.ones(3))
    features = generator(noise, y)
    loss = F.cross_entropy(head(features), y) + diversity_loss(noise, features)
    gradients = torch.autograd.grad(loss, list(generator.parameters()))
    load_weights(generator, first)
    train_generator(
        generator, lambda features, _: head(features), torch.ones(3), stream("one"), steps=1, lr=0.01, batch_size=16
    )
    for (name, now), gradient in zip(generator.named_parameters(), gradients, strict=True):
        clear = gradient.abs() > 1e-5
        assert torch.allclose(now[clear], (first[name] - 0.01 * gradient.sign())[clear], atol=1e-4), name


def test_the_generator_continues_from_the_last_round(tmp_path: Path) -> None:
    images, labels = torch.rand(6, *SHAPE), torch.arange(3).repeat(2)
    method = FedMK(server_steps=1, generator_steps=1, generator_lr=1e-9)
    torch.manual_seed(1)
    _, now, state = learned(method, tmp_path, images, labels)
    assert torch.allclose(now["body.0.weight"], state.generator["body.0.weight"], atol=1e-6)


def test_a_constant_lr_stays(tmp_path: Path) -> None:
    images, labels = torch.rand(9, *SHAPE), torch.arange(3).repeat(3)
    how = {
        "pseudo_weight": 0,
        "augment": False,
        "server_steps": 2,
        "server_batch_size": 4,
        "momentum": 0.0,
        "server_lr": 0.4,
    }
    falling, _, state = learned(FedMK(lr_decay=True, **how), tmp_path, images, labels)
    steady, _, _ = learned(FedMK(lr_decay=False, **how), tmp_path, images, labels)
    one, _, _ = learned(FedMK(lr_decay=False, **{**how, "server_steps": 1}), tmp_path, images, labels)
    for name in state.model:  # the second step is half as long where the rate falls
        assert torch.allclose(falling[name] - one[name], 0.5 * (steady[name] - one[name]), atol=1e-6)
    assert not torch.allclose(steady["head.weight"], one["head.weight"], atol=1e-4)


def test_d_steps_by_adam_on_drawn_samples(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Spy(FedMK):
        def outer_loss(self, net: Any, w_star: Any, x: Tensor, y: Tensor, balance: Tensor) -> Tensor:
            seen.append(x)
            return super().outer_loss(net, w_star, x, y, balance)

    how: dict[str, Any] = {"inner_steps": 1, "inner_batch_size": None, "augment": False, "sample_weights": "none"}
    method = Spy(outer_steps=1, outer_lr=0.1, outer_batch_size=4, **how)
    client = make_client(tmp_path, 1)
    net = client.net(client.initial_weights())
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    labels = torch.arange(3).repeat_interleave(2)
    made = method.outer_loop(net, images, labels, client.train, stream("any"))
    x, y = client.train.pick(torch.randint(len(client.train), (4,), generator=stream("any")))
    assert len(seen) == 1 and torch.equal(seen[0], x)
    d = images.clone().requires_grad_()
    after = method.inner_loop(net, dict(net.named_parameters()), d, labels, stream())
    (gradient,) = torch.autograd.grad(method.outer_loss(net, after, x, y, torch.ones(3)), d)
    clear = gradient.abs() > 1e-6
    assert clear.float().mean() > 0.5
    assert torch.allclose(made[clear], (images - 0.1 * gradient.sign())[clear], atol=2e-3)


def test_outer_steps_start_from_the_model_that_was_sent(tmp_path: Path) -> None:
    method = FedMK(**{**SMALL, "matching_steps": 0, "init_from": "noise"})
    empty = method.init(task_of(), SEED).empty
    one, other = (
        method.condense(make_client(tmp_path, 0), model=task_of().initial_weights(seed), shared=empty)[
            "knowledge"
        ].value["0"]
        for seed in (SEED, SEED + 1)
    )
    assert not torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("augment", [False, True])
def test_inner_steps_augment_each_image_separately_if_asked(augment: bool) -> None:
    net, start, images, labels = double_case()
    method = FedMK(inner_steps=1, inner_batch_size=None, inner_lr=0.5, augment=augment)
    after = method.inner_loop(net, start, images, labels, stream("u"))
    x = apply_affine(images, draw_affine(len(images), stream("u"))) if augment else images
    loss = F.cross_entropy(torch.func.functional_call(net, start, (x,)), labels)
    gradients = torch.autograd.grad(loss, list(start.values()))
    for (name, tensor), gradient in zip(start.items(), gradients, strict=True):
        assert torch.allclose(after[name], tensor - 0.5 * gradient), name


def test_the_server_augments_each_image_separately(tmp_path: Path) -> None:
    images, labels = torch.rand(9, *SHAPE), torch.arange(3).repeat(3)
    method = FedMK(pseudo_weight=0, server_steps=1, server_lr=0.5, server_batch_size=8)
    model, _, state = learned(method, tmp_path, images, labels)
    draw = stream(SEED, 1, -1, "learning")
    chosen = torch.randint(9, (8,), generator=draw)
    net = task_of().net()
    load_weights(net, state.model)
    loss = F.cross_entropy(net(apply_affine(images[chosen], draw_affine(8, draw))), labels[chosen])
    for (name, w), gradient in zip(
        net.named_parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
    ):
        assert torch.allclose(model[name], w - 0.5 * gradient, atol=1e-6), name


@pytest.mark.parametrize("augment", [False, True])
def test_a_matching_step_augments_real_and_synthetic_images_alike(augment: bool, tmp_path: Path) -> None:
    client = make_client(tmp_path, 2)
    labels = torch.arange(3).repeat_interleave(2)
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    net = client.net(client.initial_weights())
    made = match_statistics(net, images, labels, client.train, steps=1, lr=0.1, augment=augment, stream=stream("s"))
    draw, y = stream("s"), client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    numbers = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(numbers)
    d = images.clone().requires_grad_()
    seen = d
    if augment:
        one = draw_affine(1, draw)
        x, seen = apply_affine(x, one), apply_affine(d, one)
    loss = torch.zeros(())
    for c in range(3):
        ours, theirs = net.encoder[:7](seen[labels == c]), net.encoder[:7](x[y == c])  # type: ignore[index, operator]
        loss = loss + (ours.mean(0) - theirs.mean(0)).square().sum()
        a, b = ((f.var(0, correction=0) + VARIANCE_EPS).sqrt() for f in (ours, theirs))
        loss = loss + (a - b).square().sum()
    (gradient,) = torch.autograd.grad(loss, d)
    clear = gradient.abs() > 1e-4
    assert clear.float().mean() > 0.9
    assert torch.allclose(made[clear], (images - 0.1 * gradient.sign())[clear], atol=1e-4)


def test_matching_takes_another_random_net_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(net: nn.Module) -> None:
        reinitialize(net)
        seen.append(next(net.parameters()).detach().clone())

    monkeypatch.setattr("fewer.learning.match.reinitialize", spy)
    client = make_client(tmp_path, 2)
    labels = torch.arange(3)
    images, net = torch.rand(3, *SHAPE), client.net(client.initial_weights())
    match_statistics(net, images, labels, client.train, steps=3, lr=0.1, augment=False, stream=stream())
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_matching_gets_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = []

    def spy(net: Any, images: Tensor, *_: Any, **how: Any) -> Tensor:
        settings.append(how)
        return images

    monkeypatch.setattr("fewer.methods.fedmk.match_statistics", spy)
    for augment in (False, True):
        method = FedMK(**{**SMALL, "matching_steps": 7, "matching_lr": 0.3, "augment": augment, "outer_steps": 0})
        method.condense(
            make_client(tmp_path, 0), model=task_of().initial_weights(SEED), shared=method.init(task_of(), SEED).empty
        )
    assert [(how["steps"], how["lr"], how["augment"]) for how in settings] == [(7, 0.3, False), (7, 0.3, True)]


def test_shared_knowledge_travels_as_d_does() -> None:
    for codec in ("uint8", "float16", "float32"):
        method = FedMK(init_from="shared", codec=codec)
        shared = method.draw_shared_knowledge(method.init(task_of(), SEED), [0], stream())
        assert shared[0].codec == codec


def test_a_diverged_d_is_never_the_start_of_the_next(tmp_path: Path) -> None:
    class Once(FedMK):
        def outer_loop(self, *args: Any) -> Tensor:
            return super().outer_loop(*args) * (float("nan") if self.tau == 7 else 1)

    good, bad = (Once(**{**SMALL, "tau": tau}) for tau in (5, 7))
    model, empty = task_of().initial_weights(SEED), good.init(task_of(), SEED).empty
    for round, method in enumerate((good, bad, good), 1):
        try:
            made = method.condense(make_client(tmp_path, 0, round), model=model, shared=empty)["knowledge"].value
        except Exception as error:
            assert method is bad and type(error).__name__ == "Unable"
    assert made["0"].isfinite().all()


def test_the_generator_gets_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = []
    monkeypatch.setattr("fewer.methods.fedmk.train_generator", lambda *_, **how: settings.append(how))
    method = FedMK(server_steps=1, server_lr=0.3, generator_steps=7, generator_lr=0.02, server_batch_size=9)
    learned(method, tmp_path, torch.rand(3, *SHAPE), torch.arange(3))
    assert settings == [{"steps": 7, "lr": 0.02, "batch_size": 9}]


@pytest.mark.parametrize("kind", [FedMK, FedMKPaper])
def test_tuning_tries_the_defaults_too(kind: type[FedMK]) -> None:
    assert all(getattr(kind(), name) in grid for name, grid in kind.tunable.items())
