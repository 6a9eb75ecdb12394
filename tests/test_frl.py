"""FRL: prototypes and losses against formulas, an episode against loops written out, odd groups, deployment."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer.data import ArrayData, from_clients
from fewer.data.episodes import split_support_query
from fewer.errors import DataError, FewerError, SettingError
from fewer.experiments.recipes import load_recipe, row_settings
from fewer.experiments.studies import _embed_member, embed_samples
from fewer.experiments.tune import coordinate_search, tune_experiment
from fewer.learning import Counts, weighted_mean
from fewer.learning.evaluate import MAX_LOSS, count_correct
from fewer.learning.prototypes import (
    class_positions,
    class_prototypes,
    distance_loss,
    merge_prototypes,
    prototype_logits,
)
from fewer.learning.sgd import epoch_batches
from fewer.methods import find, frl
from fewer.methods.base import ContextFactory
from fewer.methods.frl import (
    FRL,
    GroupModel,
    PreparingMethod,
    compute_features,
    compute_prototypes,
    convergence_bound,
    convergence_error,
    redraw_head,
    use_batch_statistics,
    valid_answers,
)
from fewer.methods.frl_baselines import FRLFineTuning, FRLMetaHead, FRLPerFedAvg, FRLScratch, FRLWarmStart
from fewer.methods.frl_deploy import PREPARED_FILE
from fewer.methods.groups import TUNING_GROUPS
from fewer.models import EncoderHead, Weights, get_weights, load_weights
from fewer.models.images import Conv4
from fewer.runs.experiment import build_experiment, make_method, parse_settings
from fewer.runs.inference import deploy
from fewer.runs.result import open_run
from fewer.runs.statistics import half_width
from fewer.runtime import Absent, Answer, Clients, stream
from tests.examples import Stop, Stopping
from tests.test_cli import call

torch.set_num_threads(1)

# --- prototypes and losses ------------------------------------------------------------------------------------


def test_prototypes_are_means_by_class_and_carry_gradient() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    found = class_prototypes(features, torch.tensor([7, 2, 7]))
    assert found.classes.tolist() == [2, 7] and found.counts.tolist() == [1, 2]
    assert found.means.tolist() == [[3.0, 6.0], [3.0, 3.5]]
    (gradient,) = torch.autograd.grad(found.means[1, 0], features)
    assert gradient.tolist() == [[0.5, 0.0], [0.0, 0.0], [0.5, 0.0]]


def test_global_prototypes_are_means_over_those_who_hold_the_class() -> None:
    one = class_prototypes(torch.tensor([[1.0], [3.0], [10.0]]), torch.tensor([0, 0, 4]))
    two = class_prototypes(torch.tensor([[8.0], [5.0]]), torch.tensor([0, 1]))
    found = merge_prototypes([one, two])
    assert found.classes.tolist() == [0, 1, 4] and found.counts.tolist() == [3, 1, 1]
    assert found.means[:, 0].tolist() == [4.0, 5.0, 10.0]  # (1 + 3 + 8) / 3; others are not shrunk by who lacks them


def eq2(features: Tensor, labels: Tensor, classes: Sequence[int], means: Tensor) -> Tensor:
    """Eq 2 sample by sample, with the true class in the sum."""
    total = torch.zeros((), dtype=features.dtype)
    for x, label in zip(features, labels.tolist(), strict=True):
        distances = torch.stack([(x - mean).square().sum() for mean in means])
        total = total + distances[list(classes).index(label)] + torch.logsumexp(-distances, 0)
    return total / len(labels)


def test_the_loss_is_eq_2_with_the_true_class() -> None:
    draw = torch.Generator().manual_seed(0)
    features, means = (torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (9, 4))
    classes = torch.tensor([1, 3, 5, 8])
    labels = classes[torch.randint(4, (9,), generator=draw)]
    assert torch.allclose(distance_loss(features, labels, classes, means), eq2(features, labels, [1, 3, 5, 8], means))
    scores = prototype_logits(features, means)
    exact = -(features[:, None] - means).square().sum(2)
    assert torch.allclose(scores - scores[:, :1], exact - exact[:, :1])


def test_one_class_and_classes_without_prototype_cost_nothing() -> None:
    features = torch.tensor([[1.0], [2.0]], requires_grad=True)
    alone = distance_loss(features, torch.tensor([3, 3]), torch.tensor([3]), torch.tensor([[0.5]]))
    assert float(alone.detach()) == 0
    none = distance_loss(features, torch.tensor([3, 3]), torch.tensor([1, 2]), torch.tensor([[0.5], [0.7]]))
    assert float(none.detach()) == 0 and torch.autograd.grad(none, features)[0].abs().sum() == 0
    half = distance_loss(features, torch.tensor([3, 1]), torch.tensor([1, 2]), torch.tensor([[0.5], [0.7]]))
    assert torch.allclose(half, eq2(features[1:], torch.tensor([1]), [1, 2], torch.tensor([[0.5], [0.7]])) / 2)
    assert not class_positions(torch.zeros(0, dtype=torch.int64), torch.tensor([2]))[1].any()


class Small(EncoderHead):
    """Two inputs to three features, so that everything can be written out."""

    def __init__(self, shape: tuple[int, ...] = (2,), classes: int = 6) -> None:
        super().__init__(nn.Sequential(nn.Linear(shape[0], 3), nn.Tanh()), 3, classes)


def moved_loss(
    method: FRL, net: nn.Module, batch: tuple[Tensor, Tensor], known: Any, direction: Weights, far: float
) -> float:
    there = {name: tensor + far * direction[name] for name, tensor in net.state_dict().items()}
    other = Small().double()
    load_weights(other, there)
    return float(method.loss(other, *batch, known)[0].detach())


@pytest.mark.parametrize("head", ["linear", "distance", "gpal"])
def test_gradients_of_eq_3_agree_with_finite_differences(head: Any) -> None:
    torch.manual_seed(3)
    net = Small().double()
    batch = torch.randn(8, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 4, 4, 4, 1, 0])
    classes = torch.tensor([0, 1, 2, 4])
    known = None if head == "distance" else (classes, torch.randn(4, 3, dtype=torch.float64))
    method = FRL(head=head, gamma=0.3)
    loss, own = method.loss(net, *batch, known)
    gradients = dict(
        zip(
            dict(net.named_parameters()),
            torch.autograd.grad(loss, list(net.parameters()), allow_unused=True),
            strict=True,
        )
    )
    if head == "gpal":
        assert known
        features = net.encoder(batch[0])
        local, aux = eq2(features, batch[1], [0, 1, 4], own.means), eq2(features, batch[1], [0, 1, 2, 4], known[1])
        assert torch.allclose(loss, 0.3 * local + 0.7 * aux)
    for _ in range(3):
        direction = {name: torch.randn_like(tensor) for name, tensor in net.state_dict().items()}
        along = sum(
            float((gradient * direction[name]).sum()) for name, gradient in gradients.items() if gradient is not None
        )
        ends = [moved_loss(method, net, batch, known, direction, far) for far in (1e-6, -1e-6)]
        assert along == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_without_global_prototypes_the_loss_is_the_local_one_alone() -> None:
    net, batch = Small(), (torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert torch.equal(FRL(gamma=0.1).loss(net, *batch, None)[0], FRL(head="distance").loss(net, *batch, None)[0])


def test_images_are_laid_with_their_channels_last_and_mean_the_same() -> None:
    laid: list[bool] = []
    net = Conv4((1, 8, 8), 3, width=4, pools=2)
    net.encoder.register_forward_pre_hook(lambda _, args: laid.append(args[0].stride()[1] == 1))
    x = torch.randn(5, 1, 8, 8)
    assert torch.allclose(compute_features(net, x), net.encoder(x), atol=1e-6) and laid == [True, False]
    assert torch.equal(compute_features(first_net(), x[:, 0, :2, 0]), first_net().encoder(x[:, 0, :2, 0]))  # type: ignore[operator]


def test_a_new_head_is_xavier_and_the_encoder_stays() -> None:
    model = Small(classes=400).state_dict()
    fresh = redraw_head(model, stream(1))
    most = (6 / (400 + 3)) ** 0.5
    assert float(fresh["head.bias"].abs().sum()) == 0 and 0.9 * most < float(fresh["head.weight"].abs().max()) <= most
    assert all(torch.equal(fresh[name], model[name]) for name in model if not name.startswith("head."))


# --- an episode written out ------------------------------------------------------------------------------------

DRAW = np.random.default_rng(5)
HELD = [[0, 1], [1, 2], [3], [0, 4], [2, 4]]
"""Classes of each client: the third has one only, and class 3 nobody else has."""
PAIRS = [
    (
        np.concatenate([DRAW.normal([label, -label], 0.5, (size, 2)) for label in labels]).astype(np.float32),
        np.repeat(labels, size),
    )
    for labels, size in zip(HELD, (4, 6, 8, 4, 2), strict=True)
]
UNSEEN = DRAW.normal(0, 1, (60, 2)).astype(np.float32), DRAW.integers(4, 6, 60)


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    """Clients whose samples are in time: the first half of each class is the support."""
    return replace(from_clients(pairs, test=UNSEEN), time_ordered=True)


def first_net() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def split(client: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, y = (torch.from_numpy(array) for array in PAIRS[client])
    first = torch.cat([torch.nonzero(y == label)[:, 0][: int((y == label).sum()) // 2] for label in HELD[client]])
    rest = torch.tensor([row for row in range(len(y)) if row not in first.tolist()])
    return (x[first].double(), y[first]), (x[rest].double(), y[rest])


def means_of(features: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {int(label): features[y == label].mean(0) for label in torch.unique(y)}


def f(
    method: FRL, net: nn.Module, x: Tensor, y: Tensor, known: dict[int, Tensor], own: dict[int, Tensor] | None
) -> Tensor:
    features = net.encoder(x)  # type: ignore[operator]
    if method.head == "linear":
        scores = net.head(features)[:, sorted(known)]  # type: ignore[operator]
        return F.cross_entropy(scores, torch.tensor([sorted(known).index(int(label)) for label in y]))
    local = means_of(features, y) if own is None else own
    total = eq2(features, y, list(local), torch.stack(list(local.values())))
    if method.head == "gpal" and known:
        aux = eq2(features, y, list(known), torch.stack(list(known.values())))
        total = method.gamma * total + (1 - method.gamma) * aux
    return total


def gradients_of(loss: Tensor, net: nn.Module) -> Weights:
    found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)
    return dict(zip(dict(net.named_parameters()), found, strict=True))


def loaded(weights: Weights) -> nn.Module:
    net = Small().double()
    load_weights(net, weights)
    return net


def episode(
    method: FRL, first: Weights, cohort: Sequence[int] = range(5)
) -> tuple[Weights, Weights, dict[int, Tensor]]:
    """Algorithm 1, line by line: the gradient that φ moves by, θ^R and Γ."""
    theta = first
    known: dict[int, Tensor] = dict.fromkeys(range(5), torch.zeros(0)) if method.head == "linear" else {}
    last: dict[int, dict[int, Tensor]] = {}
    sizes = {client: len(split(client)[0][1]) for client in cohort}
    for _ in range(method.group_rounds):
        models, protos = {}, {}
        for client in cohort:
            (x, y), _ = split(client)
            local = theta
            for step in range(method.epochs):
                net = loaded(local)
                if step == 0:
                    protos[client] = means_of(net.encoder(x).detach(), y)  # type: ignore[operator]
                gradients = gradients_of(f(method, net, x, y, known, None), net)
                local = {name: local[name] - method.lr * gradients[name] for name in local}
            if method.prototypes_from == "after":
                protos[client] = means_of(loaded(local).encoder(x).detach(), y)  # type: ignore[operator]
            models[client] = local
        theta = {name: sum(sizes[p] * models[p][name] for p in cohort) / sum(sizes.values()) for name in theta}  # type: ignore[misc]
        if method.head != "linear":
            known = {}
            for label in range(6):
                holders = {p: int((split(p)[0][1] == label).sum()) for p in cohort if label in protos[p]}
                if holders:
                    known[label] = sum(n * protos[p][label] for p, n in holders.items()) / sum(holders.values())  # type: ignore[assignment]
        last = protos
    moved = [name for name in first if isinstance(method, FRLMetaHead) or not name.startswith("head.")]
    mean = {name: torch.zeros_like(first[name]) for name in moved}
    total = sum(len(PAIRS[client][1]) for client in cohort)
    for client in cohort:
        x, y = split(client)[1]
        net = loaded(theta)
        own = last[client] if method.query_prototypes == "support" else None
        gradients = gradients_of(f(method, net, x, y, known if method.head != "distance" else {}, own), net)
        mean = {name: gradient + len(PAIRS[client][1]) / total * gradients[name] for name, gradient in mean.items()}
    return mean, theta, known


def double(weights: Weights) -> Weights:
    return {name: tensor.double() for name, tensor in weights.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"head": "linear", "epochs": 2},
        {"kind": FRLMetaHead, "epochs": 2},
        {"kind": FRLMetaHead, "optimizer": "adam", "meta_lr": 0.05},
        {"head": "distance"},
        {"head": "distance", "query_prototypes": "support"},
        {"head": "gpal", "gamma": 0.4, "epochs": 2},
        {"head": "gpal", "prototypes_from": "after"},
        {"head": "gpal", "query_prototypes": "support", "group_rounds": 2},
        {"head": "gpal", "optimizer": "adam", "meta_lr": 0.05},
    ],
    ids=str,
)
def test_two_episodes_by_loops(settings: dict[str, Any], tmp_path: Path) -> None:
    options = {
        "optimizer": "sgd",
        "lr": 0.2,
        "meta_lr": 0.5,
        "batch_size": None,
        "cohort": 5,
        "eval_groups": 1,
        "way": 2,
        "group_size": 2,
        **settings,
    }
    chosen = options.pop("kind", FRL)
    each = settings.get("group_rounds", 3) + 1
    method = chosen(rounds=2 * each, **options)
    runs = [
        fewer.run(method.model_copy(update={"rounds": r}), federation(), model=first_net(), out=tmp_path / str(r))
        for r in (each, 2 * each)
    ]
    phi = {name: tensor.requires_grad_() for name, tensor in double(first_net().state_dict()).items()}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[method.optimizer]
    optimizer = kind(list(phi.values()), lr=method.meta_lr)
    for number, run in enumerate(runs):
        start = {name: tensor.detach().clone() for name, tensor in phi.items()}
        if method.head == "linear" and not isinstance(method, FRLMetaHead):
            start = double(
                redraw_head(
                    {n: t.float() for n, t in start.items()}, stream(0, number * each + 1, "coordinator", "head")
                )
            )
        gradients, theta, known = episode(method, start)
        for name, gradient in gradients.items():
            phi[name].grad = gradient
        optimizer.step()
        for name, tensor in run.state.initial.items():
            assert torch.allclose(tensor.double(), phi[name], atol=2e-5), name
        for name, tensor in run.state.model.items():
            assert torch.allclose(tensor.double(), theta[name], atol=2e-5), name
        if method.head == "gpal":
            assert run.state.classes.tolist() == sorted(known) == [0, 1, 2, 3, 4]
            assert torch.allclose(run.state.means.double(), torch.stack([known[c] for c in sorted(known)]), atol=2e-5)
        assert method.optimizer == "adam" or not any(tensor.any() for tensor in run.state.second_moment.values())
    moved = max(float((phi[name] - tensor).detach().abs().max()) for name, tensor in first_net().state_dict().items())
    assert moved > 0.05


def test_steps_on_parts_of_the_support_send_the_prototypes_of_all_of_it() -> None:
    method, samples = FRL(batch_size=3, lr=0.5), federation().client(1).train
    net = first_net()
    expected = compute_prototypes(net, samples)
    answer = method.fit_support(net, samples, None, True, stream(0))
    assert torch.allclose(answer["means"], expected.means) and answer["counts"].tolist() == [6, 6]
    assert not torch.allclose(compute_prototypes(net, samples).means, expected.means)
    parts = list(epoch_batches(samples, 2, 5, stream(1)))
    assert [len(y) for _, y in parts] == [5, 5, 2] * 2
    for start in (0, 3):
        seen = torch.cat([x for x, _ in parts[start : start + 3]])
        assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, samples.slice(0, 12)[0].tolist()))


def test_a_sample_that_is_left_over_goes_with_the_step_before() -> None:
    samples = federation().client(1).train
    assert [len(y) for _, y in epoch_batches(samples, 2, 11, stream(1))] == [12, 12]
    assert [len(y) for _, y in epoch_batches(samples, 1, 1, stream(1))] == [1] * 12
    assert [len(y) for _, y in epoch_batches(samples.select(torch.tensor([3])), 1, 5, stream(1))] == [1]


SMALL: dict[str, Any] = {"way": 2, "group_size": 2, "eval_groups": 1}


def messages(path: Path) -> list[tuple[int, int, str, str, int]]:
    lines = [line.split(",") for line in (path / "ledger.csv").read_text().splitlines()[1:]]
    return [(int(r), int(p), direction, kind, int(size)) for r, p, direction, kind, size in lines]


def test_a_group_stays_together_for_an_episode_and_only_what_is_needed_is_sent(tmp_path: Path) -> None:
    pairs = [PAIRS[number % 5] for number in range(20)]
    for head in ("distance", "gpal", "linear"):
        fewer.run(
            FRL(rounds=8, cohort=4, head=head, way=2, group_size=2, eval_groups=1),
            federation(pairs),
            model=first_net(),
            out=tmp_path / head,
        )
    sent = messages(tmp_path / "gpal")
    groups = [{p for r, p, direction, _, _ in sent if r == number and direction == "down"} for number in range(1, 9)]
    assert all(group == groups[0] for group in groups[:4]) and all(group == groups[4] for group in groups[4:])
    assert len(groups[0]) == len(groups[4]) == 4 and groups[0] != groups[4]
    assert {kind for r, _, _, kind, _ in sent if r in (4, 8)} == {"answer_queries"}
    sizes = {
        head: {
            (r, direction): [
                s for q, _, w, k, s in messages(tmp_path / head) if (q, w) == (r, direction) and k != "hold_out_classes"
            ]
            for r in (1, 2, 4)
            for direction in ("up", "down")
        }
        for head in ("distance", "gpal", "linear")
    }
    assert sizes["gpal"][1, "down"] == sizes["distance"][1, "down"]  # no prototypes before there are any
    head_bytes = 4 * (3 * 6 + 6)
    for round in (2, 4):  # at most six prototypes of three floats, with their class numbers and names
        more = sizes["gpal"][round, "down"][0] - sizes["distance"][round, "down"][0]
        assert 2 * (4 * 3 + 8) <= more <= 6 * (4 * 3 + 8) + 300
    assert 0 < sizes["gpal"][1, "up"][0] - sizes["distance"][1, "up"][0] < 2 * (4 * 3 + 8 + 8) + 400
    assert sizes["linear"][1, "up"][0] - sizes["distance"][1, "up"][0] >= head_bytes  # else the head stays at home
    assert {kind for _, _, _, kind, _ in messages(tmp_path / "linear")} == {
        "hold_out_classes",
        "local_train",
        "answer_queries",
    }


def test_support_and_queries_are_drawn_anew_for_each_episode_and_halve_each_class() -> None:
    seen: dict[tuple[int, int], set[tuple[int, ...]]] = {}

    class Watched(FRL):
        def support_and_query(self, client: Any) -> Any:
            support, queries = super().support_and_query(client)
            assert support.rows is not None and queries.rows is not None
            seen.setdefault((client.id, (client.round - 1) // 4), set()).add(tuple(sorted(support.rows.tolist())))
            assert not set(support.rows.tolist()) & set(queries.rows.tolist())
            labels = support.labels.tolist()
            assert all(labels.count(c) == queries.labels.tolist().count(c) for c in HELD[client.id])
            return support, queries

    data = from_clients(PAIRS, test=UNSEEN)
    fewer.run(Watched(rounds=12, cohort=5, way=2, group_size=2, eval_groups=1), data, model=first_net())
    assert len(seen) == 15 and all(len(found) == 1 for found in seen.values())
    assert len({found for key, (found,) in seen.items() if key[0] == 1}) > 1


def test_only_so_many_queries_are_answered() -> None:
    sizes: list[int] = []

    class Watched(FRL):
        def loss(self, net: Any, x: Any, y: Any, known: Any, own: Any = None) -> Any:
            sizes.append(len(y))
            return super().loss(net, x, y, known, own)

    fewer.run(Watched(rounds=4, cohort=5, batch_size=None, queries=3, **SMALL), federation(), model=first_net())
    assert sorted(sizes[15:20]) == [2, 3, 3, 3, 3]  # their queries are 2, 4, 4, 4 and 6


def test_the_meta_update_weighs_clients_by_all_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[list[int]] = []

    def mean(models: Any, by: Any) -> Any:
        weights.append(list(by))
        return weighted_mean(models, by)

    monkeypatch.setattr(frl, "weighted_mean", mean)
    pairs = [(x[:n], y[:n]) for (x, y), n in zip(PAIRS, (3, 6, 5, 4, 2), strict=True)]
    fewer.run(FRL(rounds=4, cohort=5, **SMALL), federation(pairs), model=first_net())
    assert sorted(weights[3]) == sorted(len(y) for _, y in pairs)
    assert sorted(weights[0]) == sorted(
        len(split_support_query(federation(pairs).client(p).train, 0.5, None, True)[0]) for p in range(5)
    )


def test_prototypes_use_the_statistics_of_the_batch() -> None:
    net = EncoderHead(nn.BatchNorm1d(2), 2, 6)
    net.state_dict()["encoder.running_mean"] += 100
    samples = federation().client(0).train
    x, y = samples.slice(0, len(samples))
    normal = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    assert torch.allclose(compute_prototypes(net, samples).means[0], normal[y == 0].mean(0), atol=1e-5)


def test_prototypes_of_another_episode_are_not_used() -> None:
    kept = {"episode": 1, "prototypes": [torch.tensor([2]), torch.zeros(1, 3), torch.tensor([4])]}
    method = FRL(query_prototypes="support")

    def found(method: FRL, round: int) -> Any:
        return method.stored_prototypes(SimpleNamespace(round=round, store={"prototypes": kept}))  # type: ignore[arg-type]

    assert found(method, 8).classes.tolist() == [2]  # rounds 5 to 8 are episode 1
    assert found(method, 4) is None and found(method, 12) is None and found(FRL(), 8) is None


def test_prototypes_that_only_the_client_needs_stay_with_it(tmp_path: Path) -> None:
    kinds: list[Any] = ["queries", "support"]
    for kind in kinds:
        method = FRL(rounds=4, cohort=5, head="distance", query_prototypes=kind, **SMALL)
        fewer.run(method, federation(), model=first_net(), out=tmp_path / kind)
    assert messages(tmp_path / "queries") == messages(tmp_path / "support")


# --- groups -----------------------------------------------------------------------------------------------------

GROUPS: dict[str, Any] = {"way": 3, "group_size": 4, "eval_groups": 3, "samples_per_class": 8}


def digits(**settings: Any) -> ArrayData:
    options = {
        "clients": 12,
        "partition": "shards",
        "data_options": {"unseen_classes": "6-9"},
        "fraction": 0.3,
        **settings,
    }
    return fewer.data.load("digits", **options)


@pytest.mark.parametrize("division", ["iid", "shards"])
def test_groups_have_their_classes_and_members_their_shards(division: Any) -> None:
    data = digits()
    method = FRL(**{**GROUPS, "samples_per_class": 16, "group_size": 6}, partition=division)
    assert data.unseen_classes == {6, 7, 8, 9}
    drawn = [method.draw_group(data.test, [6, 7, 8, 9], 2, 3, number) for number in range(8)]
    for group in drawn:
        labels = {int(label) for support in group.supports for label in support.labels}
        assert len(labels) == 3 and len(labels & {6, 7, 8, 9}) == 2
        rows = [row for support in group.supports for row in support.rows.tolist()]  # type: ignore[union-attr]
        queries = group.queries.rows.tolist()  # type: ignore[union-attr]
        assert len(set(rows)) + len(set(queries)) == 3 * 16 and not set(rows) & set(queries)
        assert queries != sorted(queries)
        held = [len(set(support.labels.tolist())) for support in group.supports]
        assert max(held) <= 2 if division == "shards" else max(held) == 3
        assert len(group.supports) == 6
    assert len({tuple(sorted(set(group.queries.labels.tolist()))) for group in drawn}) > 1
    again = FRLScratch(**{**GROUPS, "samples_per_class": 16, "group_size": 6}, partition=division)
    same = again.draw_group(data.test, [6, 7, 8, 9], 2, 3, 5).queries.rows
    assert torch.equal(same, drawn[5].queries.rows)  # type: ignore[arg-type]


def test_by_default_groups_have_as_many_unseen_classes_as_there_are() -> None:
    class Watched(FRLScratch):
        def draw_group(self, samples: Any, unseen: Any, num_unseen: int, seed: int, number: int) -> Any:
            assert (sorted(unseen), num_unseen) == ([6, 7, 8, 9], 4)
            return super().draw_group(samples, unseen, num_unseen, seed, number)

    scores = fewer.run(Watched(**{**GROUPS, "way": 5}), digits()).metrics
    assert len(scores["groups"]) == 3 and scores["accuracy"] == pytest.approx(np.mean(scores["groups"]))
    for wrong in ({"way": 11}, {"unseen_classes": 5, "way": 5}):
        with pytest.raises(SettingError, match="the test data has 4 and 6"):
            fewer.run(FRLScratch(**{**GROUPS, **wrong}), digits())


def test_a_member_learns_from_its_share_of_each_class() -> None:
    data = digits()
    options = {**GROUPS, "samples_per_class": 16, "group_size": 1, "partition": "iid", "support_fraction": 0.25}
    for number in range(3):
        group = FRL(**options).draw_group(data.test, [6, 7, 8, 9], 3, 0, number)
        assert sorted(torch.bincount(group.supports[0].labels).tolist())[-3:] == [4, 4, 4]
    client: Any = SimpleNamespace(train=federation().client(2).train, time_ordered=False, seed=0, id=2, round=1)
    support, queries = FRL(support_fraction=0.25).support_and_query(client)
    assert (len(support), len(queries)) == (2, 6)


def test_metrics_of_groups() -> None:
    class Watched(FRLScratch):
        def evaluate_groups(self, *_: Any) -> Any:
            return [Counts(1, 2, 3.0), Counts(3, 3, 1.0)]

    scores = Watched().evaluate(None, None, None)  # type: ignore[arg-type]
    assert scores == {"accuracy": 0.75, "loss": 0.8, "groups": [0.5, 1.0]}


def test_groups_may_be_evaluated_after_another_number_of_rounds(tmp_path: Any) -> None:
    seeds, turns = [], []

    class Watched(FRLScratch):
        def fit_support(self, net: Any, support: Any, known: Any, upload: bool, generator: Any) -> Any:
            seeds.append(generator.initial_seed())
            return super().fit_support(net, support, known, upload, generator)

        def aggregate(self, group: Any, updates: Any) -> Any:
            turns.append(group.rounds_done)
            return super().aggregate(group, updates)

    fewer.run(
        Watched(deploy_rounds=2, **{**SMALL, "eval_groups": 2}), federation(), model=first_net(), out=tmp_path / "run"
    )
    assert turns == [0, 1, 0, 1] and len(set(seeds)) == 8
    fewer.run(FRLScratch(deploy_rounds=2, **SMALL), federation(), model=first_net(), out=tmp_path / "other")
    assert deploy(tmp_path / "other", federation(), model=Small).method.rounds == 2


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"way": 2, "unseen_classes": 3}, "unseen_classes must be at most way = 2, got 3"),
        (
            {"samples_per_class": 1, "partition": "iid"},
            "4 members and 3 classes has no queries: no member has two samples",
        ),
        ({"samples_per_class": 1}, "8 shards need at least 8 samples, got 3"),
        ({"group_size": 300}, "600 shards need at least 600 samples, got 24"),
    ],
    ids=str,
)
def test_impossible_groups_are_reported_before_the_first_round(wrong: dict[str, Any], text: str) -> None:
    class Never(FRLScratch):
        def round(self, state: Any, clients: Clients) -> Any:
            raise AssertionError

    with pytest.raises(SettingError, match=text):
        fewer.run(Never(**{**GROUPS, **wrong}), digits())


def test_a_trial_with_impossible_groups_is_reported() -> None:
    experiment = build_experiment(
        parse_settings({"method": "frl-scratch"}), FRLScratch(**{**GROUPS, "unseen_classes": 3}), digits()
    )
    with pytest.raises(SettingError, match="a group needs 3 unseen and 0 seen classes, but the test data has 1 and 5"):
        tune_experiment(experiment, 1)


def test_groups_that_diverge_are_logged_and_count_as_wrong(caplog: pytest.LogCaptureFixture) -> None:
    scores = fewer.run(FRLScratch(lr=1e30, head="linear", **GROUPS), digits()).metrics
    assert scores["groups"] == [0, 0, 0]
    assert "frl-scratch: the models of 3 of 3 groups diverged" in caplog.text


def test_a_class_that_is_ruled_out_adds_no_loss() -> None:
    scores = torch.tensor([[1.0, -torch.inf, 2.0], [3.0, -torch.inf, 1.0]])
    alone = count_correct(scores[1:], torch.tensor([0]))
    assert count_correct(scores, torch.tensor([1, 0])) == (1, 2, alone.loss) and 0 < alone.loss < 1
    assert count_correct(scores, torch.tensor([1, 1])) == (0, 2, 0.0)
    assert count_correct(scores * torch.nan, torch.tensor([1, 0])).loss == MAX_LOSS


def test_a_trial_never_sees_the_test_samples() -> None:
    data = digits()
    method, seen = FRL(**{**GROUPS, "eval_groups": 100}).tuning_split(data, 0.2, 3)
    assert (
        seen.unseen_classes
        and not seen.unseen_classes & data.unseen_classes
        and not set(seen.test.labels.tolist()) & data.unseen_classes
    )
    assert seen.test.x is data.source.x and seen.test.rows is not None
    assert set(seen.test.rows.tolist()) <= set(data.train.rows.tolist())
    assert isinstance(method, FRL) and method.eval_groups == TUNING_GROUPS < 100


def test_trials_are_evaluated_on_held_out_training_classes() -> None:
    data = digits()
    held = data.hold_out_classes(0.2, 3)
    assert len(held.unseen_classes) == 1 and held.unseen_classes < set(range(6))
    trained = {int(label) for client in range(12) for label in held.client(client).train.labels}
    assert trained == set(range(6)) - held.unseen_classes and set(held.test.labels.tolist()) == set(range(6))
    before, after = (sum(source.size(client) for client in range(12)) for source in (data, held))
    assert after + len(held.test) == before
    assert len(held.client(0).test) == len(data.hold_out(0.2, 3).client(0).test)
    assert list(FRLScratch(head="linear").search_space()["lr"]) == pytest.approx([0.01, 0.03, 0.1])
    assert FRL(head="distance").search_space() == {"meta_lr": (0.003, 0.01, 0.03), "lr": (0.001, 0.003, 0.01)}
    assert FRL().search_space()["gamma"] == (0.5, 5 / 6) and FRL(optimizer="sgd").search_space()["meta_lr"] == (
        0.1,
        0.3,
        1.0,
    )
    experiment = build_experiment(
        parse_settings({"method": "frl-scratch", "method_options": GROUPS}), FRLScratch(**GROUPS), data
    )
    tuned, trials = tune_experiment(experiment, 2)
    assert len(trials) == 2 and tuned.method.eval_groups == 3 and tuned.data is experiment.data  # type: ignore[attr-defined]


# --- odd groups -------------------------------------------------------------------------------------------------

NOTHING = np.zeros((0, 2), np.float32), np.zeros(0, np.int64)
ODD = {
    "fewer clients than K": PAIRS[:3],
    "one class each": [(x[y == y[0]], y[y == y[0]]) for x, y in PAIRS],
    "all the same class": [(x, np.zeros_like(y)) for x, y in PAIRS],
    "one sample, and nothing": [*PAIRS, (PAIRS[0][0][:1], PAIRS[0][1][:1]), NOTHING],
    "one client": PAIRS[:1],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("head", ["linear", "distance", "gpal"])
def test_odd_groups_do_not_break_a_round(head: Any, odd: str, tmp_path: Path) -> None:
    pairs, options = ODD[odd], {"way": 2, "group_size": 2, "eval_groups": 1}
    methods = [FRL(rounds=4, head=head, **options), FRLPerFedAvg(rounds=1, head=head, **options)]
    for number, method in enumerate(methods if head == "gpal" else methods[:1]):
        run = tmp_path / str(number)
        result = fewer.run(method, from_clients(pairs, test=UNSEEN), model=first_net(), out=run)
        assert all(torch.isfinite(tensor).all() for tensor in method.broadcast(result.state).values())
        events = (run / "events.jsonl").read_text()
        assert '"failed"' not in events
        if "nothing" in odd:
            assert "no training data" in events and "no class with two samples" in events
        group = deploy(
            run, from_clients(pairs, test=UNSEEN), model=Small, method_options={"keep_best": 1} if number else {}
        )
        held = sorted({int(label) for _, y in pairs for label in y}) if not number else group.state.classes.tolist()
        assert group.state.classes.tolist() == held
        scores = group.model(torch.zeros(1, 2))
        assert scores.shape == (1, 6) and torch.isfinite(scores[0, held]).all()
        assert (scores[0, [label for label in range(6) if label not in held]] == -torch.inf).all()


def test_invalid_answers_are_refused() -> None:
    class NoClients(Clients):
        def _deliver_calls(self, calls: Any) -> Any:
            return iter(())

    refused: list[Absent] = []
    kinds: set[str] = set()

    def note(absent: Absent, kind: str) -> None:
        refused.append(absent)
        kinds.add(kind)

    clients = NoClients(3, 0, on_absent=note)
    good = {"classes": torch.tensor([1, 4]), "means": torch.zeros(2, 3), "counts": torch.tensor([1, 2])}
    bad = [
        {**good, "classes": torch.tensor([4, 1])},
        {**good, "classes": torch.tensor([1, 1])},
        {**good, "classes": torch.tensor([-1, 1])},
        {**good, "classes": torch.tensor([1, 5])},
        {**good, "counts": torch.tensor([0, 1])},
        {**good, "means": torch.zeros(1, 3)},
    ]
    answers = [Answer(number, fields) for number, fields in enumerate([*bad, good])]
    assert [answer.client for answer in valid_answers(answers, clients, 5, "hold_out_classes")] == [6]
    assert (
        [one.client for one in refused] == [0, 1, 2, 3, 4, 5]
        and refused[0].reason == "refused"
        and kinds == {"hold_out_classes"}
    )
    with pytest.raises(FewerError, match="no client sent valid classes and prototypes"):
        valid_answers(answers[:2], clients, 5, "hold_out_classes")


# --- baselines --------------------------------------------------------------------------------------------------


def test_one_shot_averages_the_models_that_do_best_on_what_they_held_out() -> None:
    method = FRLScratch(keep_best=2, head="gpal", way=2, group_size=2)
    group = method.empty_group(build_experiment(parse_settings({}), method, federation(), first_net()).task)
    found = [
        {
            "model": {"w": torch.tensor([float(number)])},
            "size": number + 1,
            "score": scored,
            "classes": torch.tensor([number]),
            "means": torch.full((1, 3), float(number)),
            "counts": torch.tensor([1]),
        }
        for number, scored in enumerate([0.5, 0.9, 0.1, 0.9])
    ]
    end = method.aggregate(group, found)
    assert float(end.model["w"]) == pytest.approx((2 * 1 + 4 * 3) / 6) and end.classes.tolist() == [1, 3]
    samples = federation().client(1).train
    for head in ("linear", "gpal"):
        known = (torch.tensor([1, 2]), torch.zeros(2, 0)) if head == "linear" else None
        answer = FRLScratch(keep_best=2, head=head).fit_support(first_net(), samples, known, True, stream(0))
        assert answer["size"] == 10 and answer["score"] in (0.0, 0.5, 1.0)  # two of twelve are held out


def test_fine_tuning_prepares_by_fedavg_and_per_fedavg_by_its_first_order_step() -> None:
    options: dict[str, Any] = {
        "rounds": 1,
        "cohort": 5,
        "batch_size": None,
        "lr": 0.3,
        "pretrain_lr": 0.2,
        "eval_groups": 1,
    }
    options |= {"way": 2, "group_size": 2, "head": "linear"}
    ends: dict[str, list[Weights]] = {"fine": [], "per": []}
    for client in range(5):
        x, y = (torch.from_numpy(array) for array in PAIRS[client])
        net = loaded(double(first_net().state_dict()))
        start = get_weights(net)
        gradients = gradients_of(F.cross_entropy(net(x.double()), y), net)
        ends["fine"].append({name: start[name] - 0.2 * gradients[name] for name in start})
        halved = stream(0, 1, client, "batches")
        inner, outer = split_support_query(federation().client(client).train, 0.5, halved, by_class=True)
        gradients = gradients_of(F.cross_entropy(net(inner.slice(0, 99)[0].double()), inner.labels), net)
        near = loaded({name: start[name] - 0.3 * gradients[name] for name in start})
        gradients = gradients_of(F.cross_entropy(near(outer.slice(0, 99)[0].double()), outer.labels), near)
        ends["per"].append({name: start[name] - 0.2 * gradients[name] for name in start})
    sizes = np.array([len(y) for _, y in PAIRS]) / sum(len(y) for _, y in PAIRS)
    for kind, key in ((FRLFineTuning, "fine"), (FRLPerFedAvg, "per")):
        model = fewer.run(kind(**options), federation(), model=first_net()).state.model
        for name, tensor in model.items():
            mean = sum(share * end[name] for share, end in zip(sizes, ends[key], strict=True))
            assert torch.allclose(tensor.double(), mean, atol=1e-6), (key, name)


def test_a_warm_start_is_fedavg_and_then_frl_from_there() -> None:
    options: dict[str, Any] = {"cohort": 5, "batch_size": None, "lr": 0.2, "pretrain_lr": 0.2, "meta_lr": 0.5}
    options |= {"eval_groups": 1, "way": 2, "group_size": 2, "optimizer": "sgd"}
    warm = fewer.run(FRLWarmStart(rounds=8, warmup_rounds=4, **options), federation(), model=first_net())
    first = {name: value for name, value in options.items() if name not in ("meta_lr", "optimizer")}
    begun = fewer.run(FRLFineTuning(rounds=4, **first), federation(), model=first_net()).state.model
    gradients, theta, _ = episode(
        FRL(rounds=4, **{n: v for n, v in options.items() if n != "pretrain_lr"}), double(begun)
    )
    for name, tensor in warm.state.model.items():
        assert torch.allclose(tensor.double(), theta[name], atol=2e-5), name
    for name, gradient in gradients.items():
        moved = begun[name].double() - 0.5 * gradient
        assert torch.allclose(warm.state.initial[name].double(), moved, atol=2e-5), name
    for wrong in (3, 8):
        with pytest.raises(
            SettingError, match=rf"warmup_rounds must be a multiple of 4 .* below rounds = 8, got {wrong}"
        ):
            fewer.run(FRLWarmStart(rounds=8, warmup_rounds=wrong, **options), federation(), model=first_net())


def test_a_client_of_one_shot_reports_its_accuracy_on_what_it_held_out() -> None:
    x = np.concatenate([np.tile([-2.0, 2.0], (10, 1)), np.tile([2.0, -2.0], (10, 1))]).astype(np.float32)
    samples = from_clients([(x, np.repeat([0, 1], 10))], test=UNSEEN).client(0).train
    answer = FRLScratch(keep_best=1, head="distance", lr=1e-6).fit_support(first_net(), samples, None, True, stream(0))
    assert answer["score"] == 1


def test_per_fedavg_takes_each_step_from_where_the_last_one_ended() -> None:
    client: Any = SimpleNamespace(train=federation().client(1).train, task=SimpleNamespace(classes=6))
    client.stream = lambda purpose: stream(0, 1, 1, purpose)
    method = FRLPerFedAvg(head="linear", batch_size=3, lr=0.3, pretrain_lr=0.2)
    net, other, draw = first_net(), first_net(), stream(0, 1, 1, "batches")
    method.fit(net, client)
    inner, outer = split_support_query(client.train, 0.5, draw, by_class=True)
    for (x, y), (u, v) in zip(epoch_batches(inner, 1, 3, draw), epoch_batches(outer, 1, 3, draw), strict=True):
        start = get_weights(other)
        gradients = gradients_of(F.cross_entropy(other(x), y), other)
        load_weights(other, {name: start[name] - 0.3 * gradients[name] for name in start})
        gradients = gradients_of(F.cross_entropy(other(u), v), other)
        load_weights(other, {name: start[name] - 0.2 * gradients[name] for name in start})
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True)
    )


# --- deployment -------------------------------------------------------------------------------------------------


def test_a_whole_group_deploys_unless_the_cohort_is_smaller(tmp_path: Any) -> None:
    pairs = [PAIRS[number % 5] for number in range(12)]
    fewer.run(FRLScratch(**SMALL), federation(), model=first_net(), out=tmp_path / "run")
    for cohort, asked in ((None, 12), (3, 3)):
        more: dict[str, Any] = {} if cohort is None else {"cohort": cohort}
        deploy(tmp_path / "run", federation(pairs), model=Small, rounds=1, out=tmp_path / str(cohort), **more)
        sent = messages(tmp_path / str(cohort))
        assert len({p for _, p, direction, kind, _ in sent if (direction, kind) == ("down", "local_train")}) == asked


def test_a_group_resumes_and_is_used_after_the_prepared_model_is_gone(tmp_path: Path) -> None:
    fewer.run(FRLScratch(**SMALL), federation(), model=first_net(), out=tmp_path / "run")
    for name, progress in (("whole", None), ("broken", Stopping())):
        group = partial(deploy, tmp_path / "run", federation(), model=Small, out=tmp_path / name, progress=progress)
        if progress is None:
            group()
        else:
            with pytest.raises(Stop):
                group()
    shutil.rmtree(tmp_path / "run")
    again = fewer.resume(tmp_path / "broken", data=federation(), model=Small)
    x = torch.from_numpy(UNSEEN[0])
    answers = [fewer.open_run(tmp_path / name, data=federation(), model=Small).model(x) for name in ("whole", "broken")]
    assert len(again.history) == 3 and torch.equal(answers[0], answers[1]) and torch.equal(again.model(x), answers[0])


def test_a_group_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    words = replace(federation(), tokens=("a", "b"))
    fewer.run(FRLScratch(**SMALL), words, model=first_net(), out=tmp_path / "run")
    deploy(tmp_path / "run", words, model=Small, rounds=1)
    for tokens in ((), ("b", "a")):
        with pytest.raises(SettingError, match="was prepared with another vocabulary"):
            deploy(tmp_path / "run", replace(words, tokens=tokens), model=Small)


def test_prototypes_to_predict_with_are_sent_where_the_model_is_evaluated(tmp_path: Path) -> None:
    fewer.run(FRLScratch(head="distance", **SMALL), federation(), model=first_net(), out=tmp_path / "run")
    sizes = {}
    for every in (1, 3):
        out = tmp_path / str(every)
        end = deploy(tmp_path / "run", federation(), model=Small, out=out, evaluate_every=every)
        sizes[every] = {
            r: [s for q, _, direction, _, s in messages(out) if (q, direction) == (r, "up")] for r in (1, 2, 3)
        }
        assert end.state.classes.tolist() == [0, 1, 2, 3, 4]
    assert sizes[1][3] == sizes[3][3] and all(a > b for a, b in zip(sizes[1][2], sizes[3][2], strict=True))


@pytest.mark.parametrize(
    ("kind", "head"), [(FRL, "linear"), (FRLMetaHead, "linear"), (FRL, "distance"), (FRL, "gpal")], ids=str
)
def test_a_deployed_group_gets_the_model_that_it_was_evaluated_by(kind: type[FRL], head: Any, tmp_path: Path) -> None:
    method = kind(rounds=4, head=head, batch_size=None, lr=0.2, way=2, group_size=2, eval_groups=1)
    prepared = fewer.run(method, federation(), model=first_net(), out=tmp_path / "prepared")
    group = deploy(tmp_path / "prepared", federation(), model=Small)
    assert group.method.rounds == 3 and (tmp_path / "prepared" / PREPARED_FILE).exists()
    supports = [federation().client(client).train for client in range(5)]

    class Context:  # with the head that the deployed group drew
        seed, task = 0, group.task

        def net(self, weights: Weights) -> nn.Module:
            net = Small()
            load_weights(net, weights)
            return net

    simulated = type(
        "Simulated",
        (FRL,),
        {"start_group": lambda self, g, model, _: FRL.start_group(self, g, model, stream(0, "head"))},
    )
    net = simulated(**method.model_dump()).group_model(Context(), prepared.state.initial, supports, 0).eval()
    x = torch.from_numpy(UNSEEN[0])
    assert torch.allclose(net(x)[:, :5], group.model(x)[:, :5], atol=1e-5)
    right = float((net(x).argmax(1) == torch.from_numpy(UNSEEN[1])).float().mean())
    assert group.accuracy == pytest.approx(right)


def test_prepare_deploy_and_predict_from_the_command_line(tmp_path: Path) -> None:
    words = ["--data", "digits", "--partition", "shards", "-o", "way=3", "-o", "eval_groups=2", "-o", "group_size=3"]
    run, group = tmp_path / "run", tmp_path / "group"
    more = ["--data-option", "unseen_classes=5-9", "--clients", "12", "--rounds", "4", "-o", "lr=0.02", "--no-report"]
    output = call("prepare", *words, *more, "--out", run).stdout
    assert "Mean over 2 groups" in output and f"fewer deploy {run}" in output
    mine = ["--data", "digits", "--data-option", "classes=5-9", "--clients", "4", "--alpha", "1"]
    call("deploy", run / PREPARED_FILE, *mine, "--out", group, "--rounds", "2", "--no-report")
    found = json.loads((group / "settings.json").read_text())
    assert found["method"]["lr"] == 0.02 and found["method"]["rounds"] == 2 and found["method"]["head"] == "gpal"
    members, all_of_it = (embed_samples(open_run(path), max_samples=40) for path in (run, group))
    assert members and members.own.any() and len(members.points) == 40 + members.own.sum()
    assert all_of_it and not all_of_it.own.any() and set(all_of_it.prototype_labels.tolist()) == set(range(5, 10))
    outputs = [call("report", path, "--out", tmp_path / "page").stdout for path in (run, group)]
    assert len(outputs) == 2 and (tmp_path / "page/pictures/embedding.csv").read_text().count("prototype") == 5
    (run / PREPARED_FILE).rename(tmp_path / PREPARED_FILE)  # it is all that a group needs
    again = call("deploy", tmp_path / PREPARED_FILE, *mine, "--out", tmp_path / "again", "--rounds", "2", "--no-report")
    assert again.stdout.split("MB")[0] == call("resume", tmp_path / "again", "--no-report").stdout.split("MB")[0]
    lines = call("predict", tmp_path / "again", "--data", "digits", "--data-option", "classes=5-9").stdout.splitlines()
    assert {line.split(",")[1] for line in lines[1:]} <= set("56789") and len(lines) > 150
    assert len(call("export", tmp_path / "again").stdout.splitlines()) == 3
    for wrong, text in (
        (["deploy", run / "events.jsonl", *mine], "is not a prepared model"),
        (["deploy", tmp_path / "nowhere", *mine], "no prepared model"),
        (["deploy", tmp_path / "again", *mine], "no prepared model"),
        (
            ["deploy", tmp_path / PREPARED_FILE, "--data", "fashion-mini", "--clients", "4"],
            "was prepared for another net",
        ),
        (["prepare", "fedavg"], "fedavg does not prepare a model for groups (allowed: frl, "),
        (["predict", run, "--data", "digits"], "run `fewer deploy`"),
        (
            ["run", "frl", "--data", "digits", "--rounds", "6"],
            "rounds must be a multiple of 4 (",
        ),
    ):
        assert text in call(*wrong, code=2).stderr


# --- promises ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        FRL(rounds=8, cohort=4, **GROUPS),
        FRL(rounds=8, cohort=4, head="linear", codec="float16", **GROUPS),
        FRL(rounds=8, cohort=4, head="distance", query_prototypes="support", queries=3, **GROUPS),
        FRLMetaHead(rounds=8, cohort=4, **GROUPS),
        FRLWarmStart(rounds=8, cohort=4, warmup_rounds=4, head="linear", **GROUPS),
        FRLPerFedAvg(rounds=4, cohort=4, keep_best=2, **GROUPS),
    ],
    ids=lambda method: f"{method.name} {method.head}",
)
def test_pool_and_resume_in_an_episode_give_the_same_numbers(method: PreparingMethod, tmp_path: Path) -> None:
    data = digits()
    whole = fewer.run(method, data, seed=2)
    with pytest.raises(Stop):
        fewer.run(method, data, seed=2, out=tmp_path / "run", progress=Stopping())
    for other in (fewer.run(method, data, seed=2, runtime="pool"), fewer.resume(tmp_path / "run")):
        assert [{**h, "seconds": 0} for h in other.history] == [{**h, "seconds": 0} for h in whole.history]
        mine, theirs = method.broadcast(other.state), method.broadcast(whole.state)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    evaluated = [line["round"] for line in whole.history if "accuracy" in line]
    warmup = range(1, getattr(method, "warmup_rounds", 0) + 1)
    assert evaluated == ([*warmup, *range(len(warmup) + 4, 9, 4)] if isinstance(method, FRL) else [1, 2, 3, 4])


def test_batch_norm_answers_by_the_statistics_of_the_batch() -> None:
    class Normed(EncoderHead):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), 3, 6)

    torch.manual_seed(0)
    net = Normed()
    answering = GroupModel(net, torch.tensor([0, 4]), torch.randn(2, 3), 6).eval()
    x = torch.randn(16, 2)
    assert torch.allclose(answering(x), answering(3 * x + 5), atol=1e-2)  # whatever the running statistics say
    assert net.encoder[1].training and not net.encoder[2].training  # type: ignore[index]
    with pytest.raises(DataError, match="batch norm needs at least two samples to predict; prepare with --norm group"):
        answering(x[:1])
    use_batch_statistics(net.train())
    assert net.encoder[1].training and not net.training  # type: ignore[index]
    state = fewer.run(FRL(rounds=4, cohort=5, way=2, group_size=2, eval_groups=1), federation(), model=Normed).state
    assert int(state.initial["encoder.1.num_batches_tracked"]) > 0  # carried along, for whoever wants them


# --- Theorem 1 --------------------------------------------------------------------------------------------------

CONSTANTS: dict[str, float] = {"smoothness": 2.0, "sample_variance": 3.0, "client_variance": 5.0}


def test_the_bound_is_that_of_theorem_1() -> None:
    assert convergence_error(0.01, 3, 60, 10, **CONSTANTS) == pytest.approx(0.01 * 2 * 32 * (3 / 60 + 5 / 10))
    assert convergence_bound(100, 7.0, 0.01, 0.352) == pytest.approx(28 / (0.01 * 100) + 0.352)
    with pytest.raises(SettingError, match="clients must be >= 1, got batch_size = 60, clients = 0"):
        convergence_error(0.01, 3, 60, 0, **CONSTANTS)
    with pytest.raises(SettingError, match="got episodes = 0, meta_lr = 0.01"):
        convergence_bound(0, 7.0, 0.01, 0.352)
    assert convergence_error(0.01, 4, 60, 10, **CONSTANTS) == pytest.approx(
        2 * convergence_error(0.01, 3, 60, 10, **CONSTANTS)
    )


@pytest.mark.parametrize("far", [8.0, 0.0], ids=["far", "at the optimum"])
@pytest.mark.parametrize(("beta", "rounds", "k"), [(0.05, 1, 2), (0.05, 3, 5), (0.01, 2, 10)])
def test_preparation_of_quadratics_stays_below_the_bound(beta: float, rounds: int, k: int, far: float) -> None:
    """f_k(φ) = L/2 (φ − c_k)²: a group ends at q φ + (1 − q) c̄, q = (1 − αL)^R, so ∇F(φ) = L q² (φ − mean of c).

    A gradient on 5 samples is off by noise. From the optimum the bound is ε alone.
    """
    draw, smooth, alpha, clients, episodes = np.random.default_rng(1), 1.5, 0.2, 40, 400
    centers = draw.normal(0, 2, clients)
    left = (1 - alpha * smooth) ** rounds
    phi = first = centers.mean() + far
    squares = []
    for _ in range(episodes):
        squares.append((smooth * left**2 * (phi - centers.mean())) ** 2)
        group = centers[draw.choice(clients, k, replace=False)]
        noise = draw.normal(0, 3 / np.sqrt(5), k)
        phi -= beta * float(np.mean(smooth * (left * phi + (1 - left) * group.mean() - group) + noise))
    gap = smooth / 2 * left**2 * (first - centers.mean()) ** 2
    variance = smooth**2 * float(centers.var())
    error = convergence_error(beta, rounds, 5, k, smoothness=smooth, sample_variance=9.0, client_variance=variance)
    assert 0 < np.mean(squares) <= convergence_bound(episodes, gap, beta, error)
    assert not far or abs(phi - centers.mean()) < far


# --- recipes and classes set apart ------------------------------------------------------------------------------


def test_a_recipe_draws_one_members_embedding_and_has_intervals_over_groups(tmp_path: Path) -> None:
    text = """
title = "Small"
paper = "Nobody"
seeds = 2
[settings]
fraction = 0.3
data = "digits"
data_options = { unseen_classes = "5-9" }
partition = "shards"
clients = 12
rounds = 4
evaluate_every = 4
method_options = { eval_groups = 2, group_size = 4, samples_per_class = 12 }
[study]
name = "embedding"
max_samples = 40
[[column]]
name = "digits"
[[row]]
name = "distance"
method = "frl"
method_options = { head = "distance" }
[[row]]
name = "GPAL"
method = "frl"
"""
    file = tmp_path / "small.toml"
    file.write_text(text)
    output = call("reproduce", file, "--results", tmp_path, "--out", tmp_path / "runs").stdout
    found = json.loads((tmp_path / "small.json").read_text())
    assert "95 % CI over 4 groups" in output and "![Embedding of one member of a group](small-embedding.png)" in output
    assert (tmp_path / "small-embedding.png").read_bytes().startswith(b"\x89PNG")
    for row, cell in zip(("distance", "GPAL"), found["cells"], strict=True):
        groups = [
            value
            for seed in (0, 1)
            for value in json.loads(
                (tmp_path / f"runs/digits/{row.lower()}-seed{seed}/metrics.jsonl").read_text().splitlines()[-1]
            )["groups"]
        ]
        assert cell["ours"]["groups"] == 4 and cell["ours"]["ci95"] == half_width(groups)
        assert 0 <= found["study"][f"{row}, digits"]["others"] <= 1


FRL_RECIPES = ("table1", "table2", "table3")


@pytest.mark.parametrize("name", FRL_RECIPES)
def test_every_tuned_row_tries_its_grids_wholly_and_begins_in_them(name: str) -> None:
    plan = load_recipe(f"frl/{name}")
    rows = zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True)
    experiments = [(row, make_method(find(row.method), parse_settings(settings))) for row, settings in rows]
    for row, method in experiments:
        search_space = method.search_space()
        first = {key: float(getattr(method, key)) for key in search_space}
        assert "paper's settings" in row.name or row.tune
        if not row.tune:
            continue
        assert all(first[key] in grid for key, grid in search_space.items()), row.name
        seen: list[dict[str, float]] = []
        coordinate_search(lambda point, seen=seen: seen.append(point) or 0.0, search_space, first, plan.trials)  # type: ignore[misc]
        assert len(seen) == plan.trials
        assert all({point[key] for point in seen} >= set(grid) for key, grid in search_space.items()), row.name
    assert {"gamma", "meta_lr"} <= {key for row, method in experiments if row.tune for key in method.search_space()}
    assert not any("gamma" in row.method_options for row in plan.row) and "gamma" not in plan.settings["method_options"]


@pytest.mark.parametrize("name", ["fig2", "fig3"])
def test_figures_have_the_settings_that_table_2_chose(name: str) -> None:
    table = json.loads((Path(__file__).parents[1] / "docs/results/frl/table2-glyphs.json").read_text())
    chosen = {cell["row"]: cell["ours"]["settings"] for cell in table["cells"]}
    plan = load_recipe(f"frl/{name}")
    for row, settings in zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True):
        mine = make_method(find(row.method), parse_settings(settings)).model_dump()
        wanted = chosen[f"{row.name}, tuned"]
        assert {key: mine[key] for key in ("lr", "gamma")} == {key: wanted[key] for key in ("lr", "gamma")}
        for key in {"meta_lr", "pretrain_lr"} & set(mine):
            assert mine[key] == wanted[key], (row.name, key)


def test_a_finer_search_leaves_no_setting_where_it_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def gone(experiment: Any, *_: Any) -> Any:
        tried.append(experiment.method.gamma)
        return SimpleNamespace(accuracy=experiment.method.gamma)

    monkeypatch.setattr(sys.modules[tune_experiment.__module__], "run_experiment", gone)
    experiment = build_experiment(
        parse_settings({"method": "frl", "method_options": {**GROUPS, "way": 1}}), FRL(**{**GROUPS, "way": 1}), digits()
    )
    assert len(tune_experiment(experiment, 30)[1]) == 30 and len(set(tried)) > 2 and 5 / 6 <= max(tried) <= 1


def test_a_members_embedding_is_that_after_its_own_training() -> None:
    method = FRL(rounds=4, head="distance", lr=1.0, unseen_classes=1, **{**GROUPS, "samples_per_class": 30})
    result = fewer.run(method, digits())
    cloud, everything, _ = _embed_member(result, 1, 2, 40)
    server: Any = ContextFactory(result.data, result.task, 0, Path())(-1, 0)
    drawn = method.draw_group(server.global_test, [6, 7, 8, 9], 1, 0, 1)
    assert set(cloud.labels.tolist()) == set(drawn.queries.labels.tolist())
    assert len({6, 7, 8, 9} & set(cloud.labels.tolist())) == 1
    end = method.simulate_group(server, result.state.initial, drawn.supports, 1, 3)[1]
    net = method.simulate_group(server, result.state.initial, drawn.supports, 1, 2)[0]
    shares = []
    for trained in (False, True):
        if trained:
            method.fit_support(net, drawn.supports[2], None, False, stream(0, "embedding"))
        use_batch_statistics(net)
        x, y = drawn.queries.slice(0, len(drawn.queries))
        near = torch.cdist(compute_features(net, x).detach(), end.means).argmin(1)
        shares.append(float((end.classes[near] == y).double().mean()))
    assert everything == shares[1] != shares[0]


def test_classes_set_apart_are_for_testing_only() -> None:
    whole = fewer.data.load("digits", clients=5, partition="iid")
    data = fewer.data.load(
        "digits", clients=5, partition="iid", data_options={"classes": "0-3,5", "unseen_classes": [8, 9]}
    )
    every = torch.cat([whole.source.y[whole.train.rows], whole.global_test.labels])
    trained = torch.cat([data.client(client).train.labels for client in range(5)])
    assert set(trained.tolist()) == {0, 1, 2, 3, 5} and data.unseen_classes == {8, 9} and data.classes == 10
    for label in (8, 9):
        assert int((data.test.labels == label).sum()) == int((every == label).sum())
    for label in (0, 5):
        assert int((data.test.labels == label).sum()) == int((whole.test.labels == label).sum())
        assert int((trained == label).sum()) == int((whole.source.y[whole.train.rows] == label).sum())
    assert not whole.unseen_classes
    one = fewer.data.load("glyphs", partition="natural", data_options={"unseen_classes": 3})
    assert len(one) == 120 and one.unseen_classes == {3} and int((one.test.labels == 3).sum()) == 480
    assert int((one.client(7).test.labels == 3).sum()) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unseen_classes": "x"}, "must be class labels and ranges like 0-9,20, got x"),
        ({"unseen_classes": "3-12"}, "has no samples of class 10"),
        ({"unseen_classes": "0-9999999999"}, "has no samples of class 10"),
        ({"unseen_classes": "9-3"}, "names no class"),
        ({"classes": "0-5", "unseen_classes": "5-6"}, "class 5 of data 'digits' is in both classes and unseen_classes"),
        ({"unseen_classes": "0-9"}, "leaves no class of data 'digits' to train on"),
        ({"unsen": "1"}, "allowed: classes, unseen"),
    ],
)
def test_wrong_classes_name_what_is_allowed(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.data.load("digits", data_options=options)
