"""FedMK: each equation against explicit arithmetic or finite differences in float64."""

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


def make_samples(counts: list[int]) -> tuple[Any, Any]:
    y = np.repeat(np.arange(CLASSES), counts)
    x = DRAW.normal(size=(len(y), *SHAPE)) + y[:, None, None, None]
    return x.astype(np.float32), y


PAIRS = [make_samples(counts) for counts in COUNTS]
TEST = make_samples([5, 5, 5])
DATA = from_clients(PAIRS, test=TEST)


def small_cnn() -> nn.Module:
    return SmallCNN(SHAPE, CLASSES)


def make_task(build_net: Callable[[], nn.Module] = small_cnn) -> Task:
    return Task(SHAPE, CLASSES, build_net)


def make_contexts(folder: Path, task: Task | None = None) -> ContextFactory:
    return ContextFactory(DATA, task or make_task(), SEED, folder)


def make_client(folder: Path, id: int, round: int = 1, task: Task | None = None) -> Client:
    context = make_contexts(folder, task)(id, round)
    assert isinstance(context, Client)
    return context


def make_server(folder: Path, task: Task | None = None) -> Server:
    context = make_contexts(folder, task)(-1, 1)
    assert isinstance(context, Server)
    return context


def make_clients(method: FedMK, folder: Path, **options: Any) -> Inline:
    handlers = HandlerRunner(method, make_contexts(folder), SEED, torch.device("cpu"))
    return Inline(len(DATA), SEED, handlers=handlers, **options)


def double_case(build_net: Callable[[], nn.Module] = small_cnn) -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    """A net in float64, its weights, and a D̂ with two images per class."""
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


@pytest.mark.parametrize("restart", [1, 2])
def test_the_outer_loop_restarts_from_the_global_model_or_continues(restart: int, tmp_path: Path) -> None:
    """Two SGD steps on D̂ with all samples: the second starts from W again, or from the weights after the first."""
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


# --- initial D̂ ------------------------------------------------------------------------------------------------


def test_d_starts_from_uniform_noise(tmp_path: Path) -> None:
    labels = torch.zeros(200, dtype=torch.long)
    images = FedMK().initial_images(make_client(tmp_path, 0), labels, {})
    assert -1 <= images.min() < -0.99
    assert 0.99 < images.max() <= 1
    assert images.std() == pytest.approx(1 / math.sqrt(3), rel=0.02)


def test_d_starts_from_shared_images_by_class_and_noise_otherwise(tmp_path: Path) -> None:
    labels = torch.tensor([0, 0, 2, 2])
    shared = {"0": torch.full((1, *SHAPE), 7.0), "1": torch.full((2, *SHAPE), 8.0), "2": torch.full((3, *SHAPE), 9.0)}
    images = FedMK(init_from="shared").initial_images(make_client(tmp_path, 0), labels, shared)
    assert [float(image.max()) if image.std() == 0 else None for image in images] == [7.0, None, 9.0, 9.0]
    noise = FedMK(init_from="noise").initial_images(make_client(tmp_path, 0), labels, {})
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


# --- matching and augmentation --------------------------------------------------------------------------------------


def test_statistics_are_mean_and_deviation_by_class() -> None:
    features = torch.randn(7, 4, dtype=torch.float64, generator=stream("f"))
    averaging = torch.zeros(2, 7, dtype=torch.float64)
    averaging[0, :3], averaging[1, 3:] = 1 / 3, 1 / 4
    mean, deviation = class_statistics(features, averaging)
    for row, part in enumerate((features[:3], features[3:])):
        assert torch.allclose(mean[row], part.mean(0))
        assert torch.allclose(deviation[row], (part.var(0, correction=0) + VARIANCE_EPS).sqrt())
    other = (mean + 1, deviation - 2)
    assert statistics_distance((mean, deviation), other).item() == pytest.approx(2 * 4 * (1 + 4))
    assert statistics_distance((mean, deviation), (mean, deviation)) == 0


def test_matching_reduces_the_distance_and_skips_classes_without_samples(tmp_path: Path) -> None:
    client = make_client(tmp_path, 0)
    labels = torch.arange(3).repeat_interleave(4)
    images = 2 * torch.rand(12, *SHAPE, generator=stream("D̂")) - 1
    matched = match_statistics(
        client.net(client.initial_weights()),
        images,
        labels,
        client.train,
        steps=60,
        lr=0.1,
        augment=False,
        stream=stream("s"),
    )
    assert torch.equal(matched[labels == 1], images[labels == 1])  # the client has no sample of class 1

    def gap(images: Tensor, label: int) -> float:
        x, y = client.train.slice(0, len(client.train))
        real, synthetic = x[y == label], images[labels == label]
        return float(
            (real.mean(0) - synthetic.mean(0)).square().sum() + (real.std(0) - synthetic.std(0)).square().sum()
        )

    assert all(gap(matched, label) < 0.5 * gap(images, label) for label in (0, 2))


def test_one_matching_step_is_adam_on_the_distance(tmp_path: Path) -> None:
    """Adam's first step moves each pixel by the learning rate against the sign of its gradient."""
    client = make_client(tmp_path, 2)
    labels = torch.arange(3).repeat_interleave(2)
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    torch.manual_seed(8)
    net = client.net(client.initial_weights())
    matched = match_statistics(net, images, labels, client.train, steps=1, lr=0.1, augment=False, stream=stream("s"))
    draw = stream("s")
    y = client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    indices = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(indices)
    d = images.clone().requires_grad_()
    loss = torch.zeros(())
    for c in range(3):  # `net` still has its random weights
        synthetic, real = net.encoder[:7](d[labels == c]), net.encoder[:7](x[y == c])  # type: ignore[index, operator]
        loss = loss + (synthetic.mean(0) - real.mean(0)).square().sum()
        deviations = [(f.var(0, correction=0) + VARIANCE_EPS).sqrt() for f in (synthetic, real)]
        loss = loss + (deviations[0] - deviations[1]).square().sum()
    (gradient,) = torch.autograd.grad(loss, d)
    significant = gradient.abs() > 1e-4
    assert torch.allclose(matched[significant], (images - 0.1 * gradient.sign())[significant], atol=1e-4)
    assert significant.float().mean() > 0.9


def test_reinitialize_draws_new_weights() -> None:
    net = small_cnn()
    before = get_weights(net)
    reinitialize(net)
    after = get_weights(net)
    assert not torch.equal(before["encoder.0.weight"], after["encoder.0.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_features_are_taken_before_the_first_linear_layer_or_the_head() -> None:
    x = torch.randn(2, *SHAPE)
    net = small_cnn()
    with feature_extractor(net) as features:
        assert torch.equal(features(x), net.encoder[:7](x))  # type: ignore[index, operator]
    flat = EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), 5, CLASSES)
    with feature_extractor(flat) as features:
        assert torch.equal(features(x), flat.encoder(x))
    assert not flat.head._forward_pre_hooks


def test_augmentation_is_affine_and_differentiable() -> None:
    image = torch.rand(2, 1, 9, 9, dtype=torch.float64)
    identity = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]], dtype=torch.float64)
    assert torch.allclose(apply_affine(image, identity), image)
    shift = torch.tensor([[[1.0, 0, 2 / 9], [0, 1, 0]]], dtype=torch.float64)  # reads one pixel further right
    assert torch.allclose(apply_affine(image, shift)[..., :-1], image[..., 1:])
    assert torch.allclose(apply_affine(image, shift)[..., -1], image[..., -1])
    moves = draw_affine(400, stream("m"))
    scale = moves[:, :, :2].double().det().sqrt()
    assert 1 / (1 + MAX_SCALE) <= scale.min() < 0.9 < 1.1 < scale.max() <= 1 / (1 - MAX_SCALE) + 1e-6
    assert moves[:, :, 2].abs().max() <= MAX_SHIFT
    assert torch.atan2(moves[:, 1, 0], moves[:, 0, 0]).abs().max() <= MAX_ROTATION + 1e-6
    image.requires_grad_()
    assert torch.autograd.gradcheck(lambda i: apply_affine(i, moves[:2]), (image,))


# --- Eqs 9-11: training on the server -------------------------------------------------------------------------


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


def test_generated_features_add_beta_times_their_loss(tmp_path: Path) -> None:
    """Eq 11: one step on the loss of D̂ plus β times the head's loss on generated features."""
    images, labels = random_images()
    options = {"augment": False, "server_steps": 1, "server_lr": 0.3, "server_batch_size": 8, "generator_steps": 4}
    beta = 0.5
    model, generator_weights, state = train_on_server(FedMK(pseudo_weight=beta, **options), tmp_path, images, labels)
    generator = Generator(CLASSES, 32)
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


def test_the_server_augments_images_only_if_asked(tmp_path: Path) -> None:
    images, labels = random_images()
    options = {"pseudo_weight": 0, "server_steps": 1, "server_batch_size": 8}
    plain, _, _ = train_on_server(FedMK(augment=False, **options), tmp_path, images, labels)
    augmented, _, _ = train_on_server(FedMK(augment=True, **options), tmp_path, images, labels)
    assert not torch.equal(plain["head.weight"], augmented["head.weight"])


def test_fedavg_augmented_is_sgd_on_augmented_images(tmp_path: Path) -> None:
    method = FedAvgAugmented(local_steps=2, batch_size=3, lr=0.2)
    client = make_client(tmp_path, 1)
    answer = method.local_train(client, model=client.initial_weights())["model"]
    net, draw = make_task().net(), client.stream("moves")
    net.load_state_dict(client.initial_weights())
    for indices in torch.randint(len(client.train), (2, 3), generator=client.stream("batches")):
        x, y = client.train.pick(indices)
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


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    return all(is_same(getattr(first, name), getattr(second, name)) for name in vars(first))


@pytest.mark.parametrize("init_from", ["own", "shared"])
def test_pool_and_resume_give_the_same_bits(init_from: str, tmp_path: Path) -> None:
    method = FedMK(rounds=3, cohort=2, **{**SMALL, "init_from": init_from})
    uninterrupted = run(tmp_path / "a", method)
    pool = run(tmp_path / "b", method, runtime="pool", workers=2)
    assert is_same(uninterrupted.state, pool.state)

    class Stop(Exception): ...

    class Interrupt:
        def on_run_start(self, method: str, done: int, rounds: int) -> None: ...
        def on_answer(self, round: int, done: int, asked: int) -> None:
            if round == 2 and done == 2:
                raise Stop

        def on_round_end(self, metrics: Any) -> None: ...

    with pytest.raises(Stop):
        run(tmp_path / "c", method, progress=Interrupt())
    resumed = fewer.resume(tmp_path / "c", method=method, data=DATA)
    assert is_same(uninterrupted.state, resumed.state)
    assert (tmp_path / "a/ledger.csv").read_text() == (tmp_path / "c/ledger.csv").read_text()


def test_upload_has_the_size_of_the_images(tmp_path: Path) -> None:
    """An image has 64 values of 1, 2 or 4 bytes; headers add little."""
    for codec, width in (("uint8", 1), ("float16", 2), ("float32", 4)):
        result = run(tmp_path / codec, FedMK(rounds=1, cohort=4, **{**SMALL, "codec": codec}))
        images = sum(len(tensor) for knowledge in result.state.knowledge.values() for tensor in knowledge.values())
        assert images == 2 * (2 + 3 + 3 + 1)
        up = result.metrics["up"]
        assert images * 64 * width < up < images * 64 * width + 4 * 700


def test_the_server_stores_the_decoded_images(tmp_path: Path) -> None:
    """The server stores the decoded D̂: with uint8, at most 256 levels per class."""
    result = run(tmp_path, FedMK(rounds=1, cohort=4, **{**SMALL, "codec": "uint8", "per_class": 6}))
    images = result.state.knowledge[2]["1"]
    levels = ((images - images.min()) / ((images.max() - images.min()) / 255)).double()
    assert torch.allclose(levels, levels.round(), atol=1e-3)


def test_keep_images_trains_on_all_latest_images_or_on_the_rounds(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Spy(FedMK):
        def train_global_model(self, *args: Any, **fields: Any) -> dict[str, Any]:
            sizes.append(len(fields["images"]))
            return super().train_global_model(*args, **fields)

        train_global_model.__side__ = "server"  # type: ignore[attr-defined]

    for keep in ("latest", "round"):
        method = Spy(rounds=3, cohort=1, **{**SMALL, "keep_images": keep, "matching_steps": 1, "outer_steps": 0})
        folder = tmp_path / keep
        clients, state = make_clients(method, folder), method.init(make_task(), SEED)
        sizes.clear()
        asked = []
        for round in (1, 2, 3):
            clients.round = round
            asked.append(method.sample_cohort(clients)[0])
            state = method.round(state, clients)
        of_round = [2 * sum(count > 0 for count in COUNTS[client]) for client in asked]
        of_all = [
            2 * sum(count > 0 for client in set(asked[: index + 1]) for count in COUNTS[client]) for index in range(3)
        ]
        assert sizes == (of_all if keep == "latest" else of_round)
        assert set(state.knowledge) == set(asked)


def test_the_image_history_follows_the_first_client(tmp_path: Path) -> None:
    result = run(tmp_path, FedMK(rounds=3, cohort=4, **SMALL))
    first_client = next(iter(result.state.knowledge))
    assert list(result.state.image_history) == [1, 2, 3]
    last = result.state.image_history[3]
    assert all(torch.equal(image, result.state.knowledge[first_client][label][:1]) for label, image in last.items())
    assert not is_same(result.state.image_history[1], last)


def test_answers_that_do_not_fit_are_refused() -> None:
    schema = {"knowledge": {"0": Shaped((range(3), *SHAPE)), "1": Shaped((range(3), *SHAPE))}}

    def decode_knowledge(zero: Tensor, one: Tensor) -> Any:
        return decode(encode("condense", {"knowledge": {"0": zero, "1": one}}), schema)[1]["knowledge"]

    good = torch.zeros(2, *SHAPE)
    assert decode_knowledge(good, good[:0])["1"].shape == (0, *SHAPE)
    for bad in (torch.zeros(3, *SHAPE), torch.zeros(2, 1, 8, 9), torch.zeros(2, *SHAPE, dtype=torch.float64)):
        with pytest.raises(Refused):
            decode_knowledge(good, bad)
    with pytest.raises(Refused):
        decode(encode("condense", {"knowledge": {"0": good}}), schema)
    with pytest.raises(Refused):
        decode_knowledge(good, torch.full((1, *SHAPE), torch.nan))


class Liar(FedMK):
    """Client 0 sends `value` in all pixels, or all clients send no images."""

    value: float = 0.0
    no_images: bool = False

    @on_client
    def condense(self, client: Client, model: Weights, shared: Knowledge) -> dict[str, Any]:
        answer = super().condense(client, model, shared)
        if client.id == 0 or self.no_images:
            answer["knowledge"] = {
                label: images[:0] if self.no_images else torch.full_like(images, self.value)
                for label, images in answer["knowledge"].items()
            }
        return answer


def test_a_run_survives_invalid_knowledge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    huge = run(tmp_path / "a", Liar(rounds=2, cohort=4, value=3e38, **SMALL))
    assert 0 not in huge.state.knowledge and "diverged" not in caplog.text
    assert "beyond 1000" in (tmp_path / "a/events.jsonl").read_text()
    large = run(tmp_path / "b", Liar(rounds=2, cohort=4, value=999.0, **{**SMALL, "server_lr": 1e6}))
    assert all(bool(tensor.isfinite().all()) for tensor in large.state.model.values())
    assert "round 1: training on D̂ diverged, so the last model is kept" in caplog.text
    empty = Liar(rounds=1, cohort=4, no_images=True, **SMALL)
    assert is_same(run(tmp_path / "c", empty).state, empty.init(make_task(), SEED))


def test_a_run_survives_absent_clients_and_a_client_with_too_few_samples(tmp_path: Path) -> None:
    result = run(tmp_path, FedMK(rounds=3, cohort=4, **{**SMALL, "min_samples": 3}), drop=0.3)
    assert 3 not in result.state.knowledge  # two samples only
    assert "unable" in (tmp_path / "events.jsonl").read_text()
    assert math.isfinite(result.metrics["loss"])


def test_wrong_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="nothing would be condensed"):
        FedMK(matching_steps=0, outer_steps=0).init(make_task(), SEED)
    flat = Task((4,), 2, lambda: EncoderHead(nn.Linear(4, 3), 3, 2))
    with pytest.raises(SettingError, match="augment = true"):
        FedMK().init(flat, SEED)
    assert FedMK(augment=False).init(flat, SEED).empty["0"].shape == (0, 4)
    tokens = Task((4,), 2, lambda: EncoderHead(nn.Sequential(nn.Embedding(9, 3), nn.Flatten()), 12, 2))
    with pytest.raises(SettingError, match="real-valued inputs"):
        FedMK(augment=False).init(tokens, SEED)


def test_without_a_generator_any_model_works() -> None:
    task = Task(SHAPE, CLASSES, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), nn.Tanh()))
    with pytest.raises(SettingError, match="no encoder"):
        FedMK().init(task, SEED)
    result = fewer.run(FedMK(rounds=2, **{**SMALL, "pseudo_weight": 0}), DATA, model=task.build_net, seed=SEED)
    assert result.state.generator == {}
    assert len(result.state.knowledge) == 4


def test_a_plain_net_with_a_linear_head_has_a_generator() -> None:
    quick = {**SMALL, "pseudo_weight": 0.5, "server_steps": 3}
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    result = fewer.run(FedMK(rounds=2, **quick), DATA, model=net, seed=SEED)
    assert result.state.generator["body.3.weight"].shape[0] == 6  # as many features as the last layer takes


def test_outer_steps_start_in_the_given_round(tmp_path: Path) -> None:
    model, empty = make_task().initial_weights(SEED), FedMK().init(make_task(), SEED).empty
    late, never = (FedMK(**{**SMALL, "refine_from": 2, "outer_steps": steps}) for steps in (2, 0))
    for round, equal in ((1, True), (2, False)):
        results = []
        for name, method in (("late", late), ("never", never)):
            torch.manual_seed(0)  # random nets come from the global stream
            answer = method.condense(make_client(tmp_path / name, 0, round), model=model, shared=empty)
            results.append(answer["knowledge"]["0"])
        assert torch.equal(*results) == equal


def test_the_papers_variant_has_two_deviations() -> None:
    method = FedMKPaper()
    assert (method.optimizer, method.outer_batch_size) == ("adam", 256)
    assert (method.matching_steps, method.augment, method.inner_steps, method.inner_batch_size) == (0, False, 1, None)
    assert (method.refine_from, method.momentum, method.lr_decay) == (1, 0.0, False)
    assert (method.init_from, method.keep_images, method.min_samples, method.codec) == ("shared", "round", 1, "float32")
    assert (method.sample_weights, method.tau, method.per_class, method.restart_every) == ("dynamic", 5.0, 20, 1)


def test_concatenated_images_keep_their_labels() -> None:
    knowledge: list[Knowledge] = [
        {"0": torch.ones(2, 1), "1": torch.ones(0, 1)},
        {"0": torch.ones(0, 1), "1": torch.zeros(1, 1)},
    ]
    images, labels = concatenate_images(knowledge)
    assert images.flatten().tolist() == [1.0, 1.0, 0.0]
    assert labels.tolist() == [0, 0, 1]


# --- options ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("augment", [False, True])
def test_a_matching_step_augments_real_and_synthetic_images_alike(augment: bool, tmp_path: Path) -> None:
    client = make_client(tmp_path, 2)
    labels = torch.arange(3).repeat_interleave(2)
    images = 2 * torch.rand(6, *SHAPE, generator=stream("D̂")) - 1
    net = client.net(client.initial_weights())
    matched = match_statistics(net, images, labels, client.train, steps=1, lr=0.1, augment=augment, stream=stream("s"))
    draw, y = stream("s"), client.train.labels
    drawn = [torch.randint(3, (REAL_PER_CLASS,), generator=draw) for _ in range(3)]
    indices = torch.cat([torch.nonzero(y == c)[:, 0][drawn[c]] for c in range(3)])
    x, y = client.train.pick(indices)
    d = images.clone().requires_grad_()
    augmented = d
    if augment:
        transform = draw_affine(1, draw)
        x, augmented = apply_affine(x, transform), apply_affine(d, transform)
    loss = torch.zeros(())
    for c in range(3):
        synthetic, real = net.encoder[:7](augmented[labels == c]), net.encoder[:7](x[y == c])  # type: ignore[index, operator]
        loss = loss + (synthetic.mean(0) - real.mean(0)).square().sum()
        a, b = ((f.var(0, correction=0) + VARIANCE_EPS).sqrt() for f in (synthetic, real))
        loss = loss + (a - b).square().sum()
    (gradient,) = torch.autograd.grad(loss, d)
    significant = gradient.abs() > 1e-4
    assert significant.float().mean() > 0.9
    assert torch.allclose(matched[significant], (images - 0.1 * gradient.sign())[significant], atol=1e-4)


def test_matching_uses_a_new_random_net_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def spy(net: Any, images: Tensor, *_: Any, **options: Any) -> Tensor:
        settings.append(options)
        return images

    monkeypatch.setattr("fewer.methods.fedmk.match_statistics", spy)
    for augment in (False, True):
        method = FedMK(**{**SMALL, "matching_steps": 7, "matching_lr": 0.3, "augment": augment, "outer_steps": 0})
        method.condense(
            make_client(tmp_path, 0),
            model=make_task().initial_weights(SEED),
            shared=method.init(make_task(), SEED).empty,
        )
    assert [(options["steps"], options["lr"], options["augment"]) for options in settings] == [
        (7, 0.3, False),
        (7, 0.3, True),
    ]


def test_a_diverged_d_is_not_stored_for_the_next_round(tmp_path: Path) -> None:
    class DivergesOnTau7(FedMK):
        def outer_loop(self, *args: Any) -> Tensor:
            return super().outer_loop(*args) * (float("nan") if self.tau == 7 else 1)

    good, bad = (DivergesOnTau7(**{**SMALL, "tau": tau}) for tau in (5, 7))
    model, empty = make_task().initial_weights(SEED), good.init(make_task(), SEED).empty
    for round, method in enumerate((good, bad, good), 1):
        try:
            knowledge = method.condense(make_client(tmp_path, 0, round), model=model, shared=empty)["knowledge"]
        except Exception as error:
            assert method is bad and type(error).__name__ == "Unable"
    assert knowledge["0"].isfinite().all()


def test_the_generator_gets_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = []
    monkeypatch.setattr("fewer.methods.fedmk.train_generator", lambda *_, **options: settings.append(options))
    method = FedMK(server_steps=1, server_lr=0.3, generator_steps=7, generator_lr=0.02, server_batch_size=9)
    train_on_server(method, tmp_path, torch.rand(3, *SHAPE), torch.arange(3))
    assert settings == [{"steps": 7, "lr": 0.02, "batch_size": 9}]


@pytest.mark.parametrize("kind", [FedMK, FedMKPaper])
def test_tuning_grids_contain_the_defaults(kind: type[FedMK]) -> None:
    assert all(getattr(kind(), name) in grid for name, grid in kind.tunable.items())
