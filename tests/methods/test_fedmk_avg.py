"""FedMK-Avg: a round of FedMK, then averages of locally trained models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fewer
from fewer.errors import SettingError
from fewer.learning.aggregate import stack_models
from fewer.learning.augment import apply_affine, draw_affine
from fewer.methods.condensed import concatenate_images
from fewer.methods.fedmk import FedMK
from fewer.methods.fedmk_avg import FedMKAvg, LRSchedule, keep_unheld, mix_by_class, mix_pairs
from fewer.models import Task, get_weights
from fewer.runtime import HandlerRunner, Inline
from tests.helpers import Interrupt
from tests.methods.fedmk_harness import COUNTS, DATA, SEED, SHAPE, SMALL, is_same, make_client, make_contexts, make_task

QUICK: dict[str, Any] = {**SMALL, "local_steps": 2, "first_steps": 3, "batch_size": 3}
NOTHING_MIXED = {"images": torch.empty(0, *SHAPE), "labels": torch.empty(0, dtype=torch.long)}


def make_clients(method: FedMK, folder: Path, round: int) -> Inline:
    handlers = HandlerRunner(method, make_contexts(folder), SEED, torch.device("cpu"))
    clients = Inline(len(DATA), SEED, handlers=handlers)
    clients.round = round
    return clients


def test_without_local_training_the_first_round_is_fedmks(tmp_path: Path) -> None:
    same = {"start": "class", "server_lr": 0.1, "pseudo_weight": 0.0, "cohort": 3}
    hybrid, fedmk = FedMKAvg(train_first=False, **QUICK, **same), FedMK(**SMALL, **same)
    states = [
        method.round(method.init(make_task(), SEED), make_clients(method, tmp_path / method.name, 1))
        for method in (hybrid, fedmk)
    ]
    assert is_same(*states) and states[0].knowledge


def test_the_server_trains_the_mean_model_on_the_condensed_images(tmp_path: Path) -> None:
    method = FedMKAvg(cohort=4, **QUICK)
    before = method.init(make_task(), SEED)
    after = method.round(before, make_clients(method, tmp_path / "round", 1))
    answers = [
        method.condense(make_client(tmp_path, id, 1), model=before.model, shared=before.empty) for id in range(4)
    ]
    sizes = [sum(counts) for counts in COUNTS]
    assert [answer["size"] for answer in answers] == sizes
    mean = {
        name: torch.stack([size * answer["model"][name] for size, answer in zip(sizes, answers, strict=True)]).sum(0)
        / sum(sizes)
        for name in before.model
    }
    images, labels = concatenate_images(after.knowledge.values())
    expected = method.distill(
        make_contexts(tmp_path / "server").server(0, 1),
        model=mean,
        generator=before.generator,
        images=images,
        labels=labels,
        members=stack_models([answer["model"] for answer in answers]),
        counts=torch.tensor(COUNTS),
    )
    assert all(torch.allclose(after.model[name], tensor, atol=1e-5) for name, tensor in expected["model"].items())
    assert not is_same(answers[0]["model"], before.model)


@pytest.mark.parametrize("mix", [False, True])
@pytest.mark.parametrize("teacher_weight", [0.0, 0.3])
@pytest.mark.parametrize("held", [1, 0])
def test_targets_mix_labels_and_the_opinion_of_clients_that_hold_a_class(
    held: int, teacher_weight: float, mix: bool, tmp_path: Path
) -> None:
    """One server step from the mean model, without momentum or augmentation. Class 2 has one sample, or none."""
    changed = {
        "server_steps": 1,
        "mix_pairs": mix,
        "lr_decay": False,
        "augment": False,
        "momentum": 0.0,
        "server_lr": 0.5,
    }
    method = FedMKAvg(**{**QUICK, **changed, "teacher_weight": teacher_weight})
    server, stream = make_contexts(tmp_path).server(0, 1), make_contexts(tmp_path).server(0, 1).stream("learning")
    images, labels = torch.rand(6, *SHAPE), torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        nets = [make_task().net() for _ in range(3)]
    counts = torch.tensor([[3, 0, held], [1, 4, 0], [0, 4, 0]])
    batch = torch.randint(6, (5,), generator=stream)
    x, y = images[batch], F.one_hot(labels[batch], 3).float()
    if mix:  # the teachers see the mixtures, too
        x, y = mix_pairs(x, y, make_contexts(tmp_path).server(0, 1).stream("pairs"))
    own, first, second = (net(x).softmax(1).detach() for net in nets)
    p = torch.stack([own[:, 0] ** 0.75 * first[:, 0] ** 0.25, (first[:, 1] * second[:, 1]) ** 0.5, held * own[:, 2]], 1)
    p = p / p.sum(1, keepdim=True)
    if not held:  # the label's share of class 2 stays
        p = p * (1 - y[:, 2:]) + F.pad(y[:, 2:], (2, 0))
    targets = (1 - teacher_weight) * y + teacher_weight * p
    loss = -(targets * nets[0](x).log_softmax(1)).sum(1).mean()
    gradients = torch.autograd.grad(loss, list(nets[0].parameters()))
    result = method.distill(
        server,
        model=get_weights(nets[0]),
        generator={},
        images=images,
        labels=labels,
        members=stack_models([get_weights(net) for net in nets]),
        counts=counts,
    )
    for (name, parameter), gradient in zip(nets[0].named_parameters(), gradients, strict=True):
        assert torch.allclose(result["model"][name], parameter - 0.5 * gradient, atol=1e-6)


def test_a_class_that_no_client_holds_has_no_teacher_and_nobody_rules_out_a_class() -> None:
    counts = torch.tensor([[2, 0, 1], [0, 0, 1]])
    p = mix_by_class([torch.zeros(1, 3), torch.zeros(1, 3)], counts)
    assert torch.allclose(p, torch.tensor([[0.5, 0, 0.5]]))
    sure = mix_by_class([torch.tensor([[0.0, 0, 0]]), torch.tensor([[99.0, 0, 0]])], counts)
    odds = math.exp(0.5 * math.log(1 / 3) - 4) / (1 / 3)  # of class 2 to class 0: half of each client's opinion
    assert math.isclose(sure[0, 2] / sure[0, 0], odds, rel_tol=1e-5)


def test_pairs_are_mixed_with_their_targets() -> None:
    x, targets = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 2, 2), torch.eye(4)
    mixed, soft = mix_pairs(x, targets, torch.Generator().manual_seed(0))
    assert torch.allclose(mixed.mean((1, 2, 3)), soft @ torch.arange(4.0))
    assert torch.allclose(soft.sum(1), torch.ones(4)) and bool(((soft > 0) & (soft < 1)).any())


def test_an_image_of_a_class_that_no_client_holds_keeps_its_label() -> None:
    counts = torch.tensor([[2, 0, 1], [1, 0, 0]])
    soft = torch.tensor([[0.25, 0.0, 0.75]])
    assert torch.equal(keep_unheld(soft, torch.tensor([[0.0, 0.0, 1.0]]), counts), soft)
    mixed = keep_unheld(soft, torch.tensor([[0.0, 0.4, 0.6]]), counts)  # two fifths of an image of class 1
    assert torch.allclose(mixed, torch.tensor([[0.15, 0.4, 0.45]]))


@pytest.mark.parametrize("condense_rounds", [1, 2])
def test_later_rounds_average_by_size_and_keep_the_images(condense_rounds: int, tmp_path: Path) -> None:
    method = FedMKAvg(cohort=4, condense_rounds=condense_rounds, distill_until=0, **QUICK)
    state = method.init(make_task(), SEED)
    for round in range(1, condense_rounds + 1):
        state = method.round(state, make_clients(method, tmp_path, round))
    assert set(state.image_history) == set(range(1, condense_rounds + 1))
    round = condense_rounds + 1
    after = method.round(state, make_clients(method, tmp_path, round))
    models = [
        method.local_train(make_client(tmp_path, id, round), model=state.model, **NOTHING_MIXED, counted=False)
        for id in range(4)
    ]
    sizes = [sum(counts) for counts in COUNTS]
    assert [answer["size"] for answer in models] == sizes
    for name, tensor in after.model.items():
        expected = sum(size / sum(sizes) * answer["model"][name] for size, answer in zip(sizes, models, strict=True))
        assert torch.allclose(tensor, torch.as_tensor(expected), atol=1e-6)
    assert not is_same(after.model, state.model)
    assert is_same(after.knowledge, state.knowledge) and is_same(after.generator, state.generator)


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize("mixed", [0, 2])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("momentum", "clip"), [(0.0, None), (0.9, 0.1)])
def test_local_training_is_sgd(
    momentum: float, clip: float | None, schedule: str, augment: bool, calibrate: bool, mixed: int, tmp_path: Path
) -> None:
    """Three steps. With a cosine, learning rates are lr, 3/4 lr and 1/4 lr: (1 + cos(π s / 3)) / 2 in step s."""
    options: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "lr": 0.3, "augment_local": augment}
    options["lr_schedule"] = schedule
    options["mixed_images"] = mixed
    options |= {"calibrate": calibrate, "clip_norm": clip, "local_momentum": momentum}
    method, client = FedMKAvg(**options), make_client(tmp_path, 1, round=2)
    model = client.initial_weights()
    images, labels = torch.rand(5, *SHAPE), torch.tensor([0, 1, 2, 1, 0])
    sent = {"images": images, "labels": labels} if mixed else NOTHING_MIXED
    answer = method.local_train(client, model=model, **sent, counted=False)["model"]
    net, moves, mixing = make_task().net(), client.stream("moves"), client.stream("mixing")
    net.load_state_dict(model)
    indices = torch.randint(len(client.train), (3, 4), generator=client.stream("batches"))
    counts = torch.tensor([float(n) for n in COUNTS[1]])
    frequencies = (counts + 1) / (counts.sum() + 3)
    if mixed:  # 2 of 6 images in a batch, 2/5, 2/5 and 1/5 of them of the classes
        frequencies = (4 * frequencies + 2 * torch.tensor([0.4, 0.4, 0.2])) / 6
    shift = frequencies.log() if calibrate else torch.zeros(3)
    buffers = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for step, batch in enumerate(indices):
        x, y = client.train.pick(batch)
        if mixed:
            drawn = torch.randint(5, (2,), generator=mixing)
            x, y = torch.cat([x, images[drawn]]), torch.cat([y, labels[drawn]])
        if augment:
            x = apply_affine(x, draw_affine(len(x), moves))
        lr = 0.3 * (1 + math.cos(math.pi * step / 3)) / 2 if schedule == "cosine" else 0.3
        gradients = torch.autograd.grad(F.cross_entropy(net(x) + shift, y), list(net.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert norm > 0.1
        scale = 1.0 if clip is None else clip / norm
        with torch.no_grad():
            buffers = [
                momentum * buffer + scale * gradient for buffer, gradient in zip(buffers, gradients, strict=True)
            ]
            for parameter, buffer in zip(net.parameters(), buffers, strict=True):
                parameter.sub_(lr * buffer)
    assert all(torch.allclose(answer[name], tensor, atol=1e-6) for name, tensor in get_weights(net).items())


def test_clients_receive_a_few_condensed_images_of_each_class_only_to_mix_them(tmp_path: Path) -> None:
    sent: dict[int, list[tuple[Tensor, Tensor]]] = {0: [], 2: []}

    class Spy(FedMKAvg):
        def local_train(self, client: Any, **fields: Any) -> dict[str, Any]:  # type: ignore[override]
            sent[self.mixed_images].append((fields["images"], fields["labels"]))
            return super().local_train(client, **fields)

        local_train.__side__ = "client"  # type: ignore[attr-defined]

    for mixed in (0, 2):
        method = Spy(cohort=4, mixed_images=mixed, mixed_per_class=5, codec="float32", **QUICK)
        state = method.round(method.init(make_task(), SEED), make_clients(method, tmp_path / str(mixed), 1))
        method.round(state, make_clients(method, tmp_path / str(mixed), 2))
    assert [len(images) for images, _ in sent[0]] == [0] * 4
    images, labels = sent[2][0]
    assert all(torch.equal(images, other) for other, _ in sent[2][1:])  # the same for all clients of a round
    assert torch.bincount(labels).tolist() == [5, 4, 5]  # two clients hold class 1, and sent two images each
    known = {
        (int(label), image.numpy().tobytes())
        for d_hat in state.knowledge.values()
        for label, kept in d_hat.items()
        for image in kept
    }
    drawn = {(int(label), image.numpy().tobytes()) for image, label in zip(images, labels, strict=True)}
    assert len(drawn) == 14 and drawn <= known


def test_the_mean_of_a_later_round_is_distilled_until_a_given_round(tmp_path: Path) -> None:
    plain = FedMKAvg(cohort=4, distill_until=1, **QUICK)
    method = FedMKAvg(cohort=4, distill_until=2, distill_steps=2, distill_lr=0.03, **QUICK)
    state = plain.round(plain.init(make_task(), SEED), make_clients(plain, tmp_path / "plain", 1))
    mean = plain.round(state, make_clients(plain, tmp_path / "plain", 2))
    after = method.round(state, make_clients(method, tmp_path / "distilled", 2))
    answers = [
        method.local_train(make_client(tmp_path, id, 2), model=state.model, **NOTHING_MIXED, counted=True)
        for id in range(4)
    ]
    images, labels = concatenate_images(state.knowledge.values())
    same = FedMKAvg(**{**QUICK, "server_steps": 2, "server_lr": 0.03, "condense_rounds": 2})  # round 2 is as round 1
    expected = same.distill(
        make_contexts(tmp_path / "server").server(0, 2),
        model=mean.model,
        generator=state.generator,
        images=images,
        labels=labels,
        members=stack_models([answer["model"] for answer in answers]),
        counts=torch.tensor(COUNTS),
    )
    assert all(torch.allclose(after.model[name], tensor, atol=1e-6) for name, tensor in expected["model"].items())
    assert not any(
        torch.allclose(after.model[name], tensor, atol=1e-4) for name, tensor in mean.model.items() if tensor.dim() > 1
    )
    assert is_same(
        method.round(after, make_clients(method, tmp_path / "distilled", 3)).model,
        plain.round(after, make_clients(plain, tmp_path / "plain", 3)).model,
    )


def test_the_models_of_round_1_decay_their_learning_rate(tmp_path: Path) -> None:
    method, before = FedMKAvg(**QUICK), make_client(tmp_path, 0, 1).initial_weights()
    empty = method.init(make_task(), SEED).empty
    sent = method.condense(make_client(tmp_path / "sent", 0, 1), model=before, shared=empty)
    schedules: list[tuple[LRSchedule, bool]] = [("cosine", True), ("constant", False)]
    for schedule, equal in schedules:
        trained = method.fit_model(make_client(tmp_path, 0, 1), before, 3, schedule)
        assert is_same(sent["model"], trained) is equal


def test_resumed_runs_have_the_same_bits(tmp_path: Path) -> None:
    method = FedMKAvg(rounds=4, cohort=2, mixed_images=1, **QUICK)
    settings: dict[str, Any] = {"model": "cnn", "seed": SEED}
    full = fewer.run(method, DATA, out=tmp_path / "full", **settings)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, DATA, out=tmp_path / "cut", callbacks=[Interrupt(1)], **settings)
    resumed = fewer.resume(tmp_path / "cut", method=method, data=DATA)
    assert is_same(full.state, resumed.state)
    assert (tmp_path / "full/ledger.csv").read_text() == (tmp_path / "cut/ledger.csv").read_text()


def test_settings_that_do_not_fit_are_rejected() -> None:
    flat = Task((64,), 3, lambda: torch.nn.Linear(64, 3))
    with pytest.raises(SettingError, match="augment_local = true needs images, but inputs have shape"):
        FedMKAvg(augment=False).init(flat, SEED)
    FedMKAvg(augment=False, augment_local=False, pseudo_weight=0).init(flat, SEED)
    with pytest.raises(SettingError, match="tiles = 3 needs images whose height and width it divides"):
        FedMKAvg(tiles=3).init(make_task(), SEED)


def test_the_tuning_grid_contains_the_default() -> None:
    assert FedMKAvg().lr in FedMKAvg.tunable["lr"]
