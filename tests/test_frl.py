"""FRL: prototypes and losses against formulas, an episode against explicit loops, edge cases, deployment."""

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


def test_prototypes_are_differentiable_means_by_class() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    prototypes = class_prototypes(features, torch.tensor([7, 2, 7]))
    assert prototypes.classes.tolist() == [2, 7] and prototypes.counts.tolist() == [1, 2]
    assert prototypes.means.tolist() == [[3.0, 6.0], [3.0, 3.5]]
    (gradient,) = torch.autograd.grad(prototypes.means[1, 0], features)
    assert gradient.tolist() == [[0.5, 0.0], [0.0, 0.0], [0.5, 0.0]]


def test_global_prototypes_are_means_over_the_holders_of_a_class() -> None:
    first = class_prototypes(torch.tensor([[1.0], [3.0], [10.0]]), torch.tensor([0, 0, 4]))
    second = class_prototypes(torch.tensor([[8.0], [5.0]]), torch.tensor([0, 1]))
    merged = merge_prototypes([first, second])
    assert merged.classes.tolist() == [0, 1, 4] and merged.counts.tolist() == [3, 1, 1]
    assert merged.means[:, 0].tolist() == [4.0, 5.0, 10.0]  # (1 + 3 + 8) / 3; clients without a class do not count


def eq2_loss(features: Tensor, labels: Tensor, classes: Sequence[int], means: Tensor) -> Tensor:
    """Eq 2 sample by sample, with the true class in the sum."""
    total = torch.zeros((), dtype=features.dtype)
    for x, label in zip(features, labels.tolist(), strict=True):
        distances = torch.stack([(x - mean).square().sum() for mean in means])
        total = total + distances[list(classes).index(label)] + torch.logsumexp(-distances, 0)
    return total / len(labels)


def test_the_distance_loss_is_eq_2_with_the_true_class_in_the_sum() -> None:
    draw = torch.Generator().manual_seed(0)
    features, means = (torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (9, 4))
    classes = torch.tensor([1, 3, 5, 8])
    labels = classes[torch.randint(4, (9,), generator=draw)]
    assert torch.allclose(
        distance_loss(features, labels, classes, means), eq2_loss(features, labels, [1, 3, 5, 8], means)
    )
    scores = prototype_logits(features, means)
    exact = -(features[:, None] - means).square().sum(2)
    assert torch.allclose(scores - scores[:, :1], exact - exact[:, :1])


def test_one_class_or_no_prototype_gives_zero_loss() -> None:
    features = torch.tensor([[1.0], [2.0]], requires_grad=True)
    one_class = distance_loss(features, torch.tensor([3, 3]), torch.tensor([3]), torch.tensor([[0.5]]))
    assert float(one_class.detach()) == 0
    no_prototype = distance_loss(features, torch.tensor([3, 3]), torch.tensor([1, 2]), torch.tensor([[0.5], [0.7]]))
    assert float(no_prototype.detach()) == 0 and torch.autograd.grad(no_prototype, features)[0].abs().sum() == 0
    half_known = distance_loss(features, torch.tensor([3, 1]), torch.tensor([1, 2]), torch.tensor([[0.5], [0.7]]))
    assert torch.allclose(
        half_known, eq2_loss(features[1:], torch.tensor([1]), [1, 2], torch.tensor([[0.5], [0.7]])) / 2
    )
    assert not class_positions(torch.zeros(0, dtype=torch.int64), torch.tensor([2]))[1].any()


class Small(EncoderHead):
    """Two inputs and three features, small enough for explicit loops."""

    def __init__(self, shape: tuple[int, ...] = (2,), classes: int = 6) -> None:
        super().__init__(nn.Sequential(nn.Linear(shape[0], 3), nn.Tanh()), 3, classes)


def moved_loss(
    method: FRL, net: nn.Module, batch: tuple[Tensor, Tensor], global_prototypes: Any, direction: Weights, step: float
) -> float:
    moved = {name: tensor + step * direction[name] for name, tensor in net.state_dict().items()}
    moved_net = Small().double()
    load_weights(moved_net, moved)
    return float(method.loss(moved_net, *batch, global_prototypes)[0].detach())


@pytest.mark.parametrize("head", ["linear", "distance", "gpal"])
def test_gradients_of_eq_3_match_finite_differences(head: Any) -> None:
    torch.manual_seed(3)
    net = Small().double()
    batch = torch.randn(8, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 4, 4, 4, 1, 0])
    classes = torch.tensor([0, 1, 2, 4])
    global_prototypes = None if head == "distance" else (classes, torch.randn(4, 3, dtype=torch.float64))
    method = FRL(head=head, gamma=0.3)
    loss, prototypes = method.loss(net, *batch, global_prototypes)
    gradients = dict(
        zip(
            dict(net.named_parameters()),
            torch.autograd.grad(loss, list(net.parameters()), allow_unused=True),
            strict=True,
        )
    )
    if head == "gpal":
        assert global_prototypes
        features = net.encoder(batch[0])
        local, aux = (
            eq2_loss(features, batch[1], [0, 1, 4], prototypes.means),
            eq2_loss(features, batch[1], [0, 1, 2, 4], global_prototypes[1]),
        )
        assert torch.allclose(loss, 0.3 * local + 0.7 * aux)
    for _ in range(3):
        direction = {name: torch.randn_like(tensor) for name, tensor in net.state_dict().items()}
        derivative = sum(
            float((gradient * direction[name]).sum()) for name, gradient in gradients.items() if gradient is not None
        )
        losses = [moved_loss(method, net, batch, global_prototypes, direction, step) for step in (1e-6, -1e-6)]
        assert derivative == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_without_global_prototypes_only_the_local_loss_remains() -> None:
    net, batch = Small(), (torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert torch.equal(FRL(gamma=0.1).loss(net, *batch, None)[0], FRL(head="distance").loss(net, *batch, None)[0])


def test_features_are_computed_channels_last_with_the_same_values() -> None:
    channels_last: list[bool] = []
    net = Conv4((1, 8, 8), 3, width=4, pools=2)
    net.encoder.register_forward_pre_hook(lambda _, args: channels_last.append(args[0].stride()[1] == 1))
    x = torch.randn(5, 1, 8, 8)
    assert torch.allclose(compute_features(net, x), net.encoder(x), atol=1e-6) and channels_last == [True, False]
    assert torch.equal(compute_features(initial_net(), x[:, 0, :2, 0]), initial_net().encoder(x[:, 0, :2, 0]))  # type: ignore[operator]


def test_redraw_head_uses_xavier_and_keeps_the_encoder() -> None:
    model = Small(classes=400).state_dict()
    redrawn = redraw_head(model, stream(1))
    bound = (6 / (400 + 3)) ** 0.5
    assert (
        float(redrawn["head.bias"].abs().sum()) == 0
        and 0.9 * bound < float(redrawn["head.weight"].abs().max()) <= bound
    )
    assert all(torch.equal(redrawn[name], model[name]) for name in model if not name.startswith("head."))


# --- an episode in explicit loops ------------------------------------------------------------------------------

DRAW = np.random.default_rng(5)
HELD = [[0, 1], [1, 2], [3], [0, 4], [2, 4]]
"""Classes of each client: the third client holds only class 3, and no other client holds it."""
PAIRS = [
    (
        np.concatenate([DRAW.normal([label, -label], 0.5, (size, 2)) for label in labels]).astype(np.float32),
        np.repeat(labels, size),
    )
    for labels, size in zip(HELD, (4, 6, 8, 4, 2), strict=True)
]
UNSEEN = DRAW.normal(0, 1, (60, 2)).astype(np.float32), DRAW.integers(4, 6, 60)


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    """Clients with time-ordered samples: the first half of each class is the support set."""
    return replace(from_clients(pairs, test=UNSEEN), time_ordered=True)


def initial_net() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def support_and_query(client: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, y = (torch.from_numpy(array) for array in PAIRS[client])
    support = torch.cat([torch.nonzero(y == label)[:, 0][: int((y == label).sum()) // 2] for label in HELD[client]])
    query = torch.tensor([row for row in range(len(y)) if row not in support.tolist()])
    return (x[support].double(), y[support]), (x[query].double(), y[query])


def class_means(features: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {int(label): features[y == label].mean(0) for label in torch.unique(y)}


def episode_loss(
    method: FRL,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    global_means: dict[int, Tensor],
    local_means: dict[int, Tensor] | None,
) -> Tensor:
    features = net.encoder(x)  # type: ignore[operator]
    if method.head == "linear":
        scores = net.head(features)[:, sorted(global_means)]  # type: ignore[operator]
        return F.cross_entropy(scores, torch.tensor([sorted(global_means).index(int(label)) for label in y]))
    prototypes = class_means(features, y) if local_means is None else local_means
    total = eq2_loss(features, y, list(prototypes), torch.stack(list(prototypes.values())))
    if method.head == "gpal" and global_means:
        aux = eq2_loss(features, y, list(global_means), torch.stack(list(global_means.values())))
        total = method.gamma * total + (1 - method.gamma) * aux
    return total


def compute_gradients(loss: Tensor, net: nn.Module) -> Weights:
    gradients = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)
    return dict(zip(dict(net.named_parameters()), gradients, strict=True))


def load_net(weights: Weights) -> nn.Module:
    net = Small().double()
    load_weights(net, weights)
    return net


def episode(
    method: FRL, initial: Weights, cohort: Sequence[int] = range(5)
) -> tuple[Weights, Weights, dict[int, Tensor]]:
    """Algorithm 1, line by line: the meta-gradient, θ^R and Γ."""
    theta = initial
    global_means: dict[int, Tensor] = dict.fromkeys(range(5), torch.zeros(0)) if method.head == "linear" else {}
    last_means: dict[int, dict[int, Tensor]] = {}
    sizes = {client: len(support_and_query(client)[0][1]) for client in cohort}
    for _ in range(method.group_rounds):
        models, local_means = {}, {}
        for client in cohort:
            (x, y), _ = support_and_query(client)
            local_model = theta
            for step in range(method.epochs):
                net = load_net(local_model)
                if step == 0:
                    local_means[client] = class_means(net.encoder(x).detach(), y)  # type: ignore[operator]
                gradients = compute_gradients(episode_loss(method, net, x, y, global_means, None), net)
                local_model = {name: local_model[name] - method.lr * gradients[name] for name in local_model}
            if method.prototypes_from == "after":
                local_means[client] = class_means(load_net(local_model).encoder(x).detach(), y)  # type: ignore[operator]
            models[client] = local_model
        theta = {
            name: sum(sizes[client] * models[client][name] for client in cohort) / sum(sizes.values())  # type: ignore[misc]
            for name in theta
        }
        if method.head != "linear":
            global_means = {}
            for label in range(6):
                holders = {
                    client: int((support_and_query(client)[0][1] == label).sum())
                    for client in cohort
                    if label in local_means[client]
                }
                if holders:
                    global_means[label] = sum(
                        count * local_means[client][label] for client, count in holders.items()
                    ) / sum(holders.values())  # type: ignore[assignment]
        last_means = local_means
    meta_names = [name for name in initial if isinstance(method, FRLMetaHead) or not name.startswith("head.")]
    meta_gradient = {name: torch.zeros_like(initial[name]) for name in meta_names}
    total_size = sum(len(PAIRS[client][1]) for client in cohort)
    for client in cohort:
        x, y = support_and_query(client)[1]
        net = load_net(theta)
        query_means = last_means[client] if method.query_prototypes == "support" else None
        gradients = compute_gradients(
            episode_loss(method, net, x, y, global_means if method.head != "distance" else {}, query_means), net
        )
        meta_gradient = {
            name: gradient + len(PAIRS[client][1]) / total_size * gradients[name]
            for name, gradient in meta_gradient.items()
        }
    return meta_gradient, theta, global_means


def to_double(weights: Weights) -> Weights:
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
def test_two_episodes_match_explicit_loops(settings: dict[str, Any], tmp_path: Path) -> None:
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
    method_class = options.pop("kind", FRL)
    episode_length = settings.get("group_rounds", 3) + 1
    method = method_class(rounds=2 * episode_length, **options)
    runs = [
        fewer.run(
            method.model_copy(update={"rounds": rounds}), federation(), model=initial_net(), out=tmp_path / str(rounds)
        )
        for rounds in (episode_length, 2 * episode_length)
    ]
    phi = {name: tensor.requires_grad_() for name, tensor in to_double(initial_net().state_dict()).items()}
    optimizer_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[method.optimizer]
    optimizer = optimizer_class(list(phi.values()), lr=method.meta_lr)
    for index, run in enumerate(runs):
        start = {name: tensor.detach().clone() for name, tensor in phi.items()}
        if method.head == "linear" and not isinstance(method, FRLMetaHead):
            start = to_double(
                redraw_head(
                    {name: tensor.float() for name, tensor in start.items()},
                    stream(0, index * episode_length + 1, "coordinator", "head"),
                )
            )
        gradients, theta, global_means = episode(method, start)
        for name, gradient in gradients.items():
            phi[name].grad = gradient
        optimizer.step()
        for name, tensor in run.state.initial.items():
            assert torch.allclose(tensor.double(), phi[name], atol=2e-5), name
        for name, tensor in run.state.model.items():
            assert torch.allclose(tensor.double(), theta[name], atol=2e-5), name
        if method.head == "gpal":
            assert run.state.classes.tolist() == sorted(global_means) == [0, 1, 2, 3, 4]
            assert torch.allclose(
                run.state.means.double(), torch.stack([global_means[c] for c in sorted(global_means)]), atol=2e-5
            )
        assert method.optimizer == "adam" or not any(tensor.any() for tensor in run.state.second_moment.values())
    change = max(
        float((phi[name] - tensor).detach().abs().max()) for name, tensor in initial_net().state_dict().items()
    )
    assert change > 0.05


def test_minibatch_steps_send_prototypes_of_the_full_support_set() -> None:
    method, samples = FRL(batch_size=3, lr=0.5), federation().client(1).train
    net = initial_net()
    expected = compute_prototypes(net, samples)
    answer = method.fit_support(net, samples, None, True, stream(0))
    assert torch.allclose(answer["means"], expected.means) and answer["counts"].tolist() == [6, 6]
    assert not torch.allclose(compute_prototypes(net, samples).means, expected.means)
    batches = list(epoch_batches(samples, 2, 5, stream(1)))
    assert [len(y) for _, y in batches] == [5, 5, 2] * 2
    for start in (0, 3):
        seen = torch.cat([x for x, _ in batches[start : start + 3]])
        assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, samples.slice(0, 12)[0].tolist()))


def test_a_single_leftover_sample_joins_the_previous_batch() -> None:
    samples = federation().client(1).train
    assert [len(y) for _, y in epoch_batches(samples, 2, 11, stream(1))] == [12, 12]
    assert [len(y) for _, y in epoch_batches(samples, 1, 1, stream(1))] == [1] * 12
    assert [len(y) for _, y in epoch_batches(samples.select(torch.tensor([3])), 1, 5, stream(1))] == [1]


SMALL: dict[str, Any] = {"way": 2, "group_size": 2, "eval_groups": 1}


def read_messages(path: Path) -> list[tuple[int, int, str, str, int]]:
    lines = [line.split(",") for line in (path / "ledger.csv").read_text().splitlines()[1:]]
    return [(int(round), int(client), direction, kind, int(size)) for round, client, direction, kind, size in lines]


def test_a_cohort_stays_for_an_episode_and_messages_are_minimal(tmp_path: Path) -> None:
    pairs = [PAIRS[number % 5] for number in range(20)]
    for head in ("distance", "gpal", "linear"):
        fewer.run(
            FRL(rounds=8, cohort=4, head=head, way=2, group_size=2, eval_groups=1),
            federation(pairs),
            model=initial_net(),
            out=tmp_path / head,
        )
    sent = read_messages(tmp_path / "gpal")
    groups = [
        {client for round_number, client, direction, _, _ in sent if round_number == number and direction == "down"}
        for number in range(1, 9)
    ]
    assert all(group == groups[0] for group in groups[:4]) and all(group == groups[4] for group in groups[4:])
    assert len(groups[0]) == len(groups[4]) == 4 and groups[0] != groups[4]
    assert {kind for round_number, _, _, kind, _ in sent if round_number in (4, 8)} == {"answer_queries"}
    sizes = {
        head: {
            (round_number, direction): [
                size
                for message_round, _, message_direction, kind, size in read_messages(tmp_path / head)
                if (message_round, message_direction) == (round_number, direction) and kind != "hold_out_classes"
            ]
            for round_number in (1, 2, 4)
            for direction in ("up", "down")
        }
        for head in ("distance", "gpal", "linear")
    }
    assert sizes["gpal"][1, "down"] == sizes["distance"][1, "down"]  # no prototypes in round 1
    head_bytes = 4 * (3 * 6 + 6)
    for round in (2, 4):  # at most six prototypes of three floats, their classes and the field names
        prototype_bytes = sizes["gpal"][round, "down"][0] - sizes["distance"][round, "down"][0]
        assert 2 * (4 * 3 + 8) <= prototype_bytes <= 6 * (4 * 3 + 8) + 300
    assert 0 < sizes["gpal"][1, "up"][0] - sizes["distance"][1, "up"][0] < 2 * (4 * 3 + 8 + 8) + 400
    assert sizes["linear"][1, "up"][0] - sizes["distance"][1, "up"][0] >= head_bytes  # the other heads are not sent
    assert {kind for _, _, _, kind, _ in read_messages(tmp_path / "linear")} == {
        "hold_out_classes",
        "local_train",
        "answer_queries",
    }


def test_each_episode_splits_every_class_into_new_halves() -> None:
    seen: dict[tuple[int, int], set[tuple[int, ...]]] = {}

    class Watched(FRL):
        def support_and_query(self, client: Any) -> Any:
            support, queries = super().support_and_query(client)
            assert support.rows is not None and queries.rows is not None
            seen.setdefault((client.id, (client.round - 1) // 4), set()).add(tuple(sorted(support.rows.tolist())))
            assert not set(support.rows.tolist()) & set(queries.rows.tolist())
            labels = support.labels.tolist()
            assert all(labels.count(label) == queries.labels.tolist().count(label) for label in HELD[client.id])
            return support, queries

    data = from_clients(PAIRS, test=UNSEEN)
    fewer.run(Watched(rounds=12, cohort=5, way=2, group_size=2, eval_groups=1), data, model=initial_net())
    assert len(seen) == 15 and all(len(supports) == 1 for supports in seen.values())
    assert len({supports for key, (supports,) in seen.items() if key[0] == 1}) > 1


def test_queries_limits_the_number_of_query_samples() -> None:
    sizes: list[int] = []

    class Watched(FRL):
        def loss(self, net: Any, x: Any, y: Any, prototypes: Any, query_prototypes: Any = None) -> Any:
            sizes.append(len(y))
            return super().loss(net, x, y, prototypes, query_prototypes)

    fewer.run(Watched(rounds=4, cohort=5, batch_size=None, queries=3, **SMALL), federation(), model=initial_net())
    assert sorted(sizes[15:20]) == [2, 3, 3, 3, 3]  # of 2, 4, 4, 4 and 6 queries


def test_the_meta_update_weights_clients_by_all_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[list[int]] = []

    def spy(models: Any, shares: Any) -> Any:
        weights.append(list(shares))
        return weighted_mean(models, shares)

    monkeypatch.setattr(frl, "weighted_mean", spy)
    pairs = [(x[:count], y[:count]) for (x, y), count in zip(PAIRS, (3, 6, 5, 4, 2), strict=True)]
    fewer.run(FRL(rounds=4, cohort=5, **SMALL), federation(pairs), model=initial_net())
    assert sorted(weights[3]) == sorted(len(y) for _, y in pairs)
    assert sorted(weights[0]) == sorted(
        len(split_support_query(federation(pairs).client(client).train, 0.5, None, True)[0]) for client in range(5)
    )


def test_prototypes_use_batch_statistics() -> None:
    net = EncoderHead(nn.BatchNorm1d(2), 2, 6)
    net.state_dict()["encoder.running_mean"] += 100
    samples = federation().client(0).train
    x, y = samples.slice(0, len(samples))
    normalized = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    assert torch.allclose(compute_prototypes(net, samples).means[0], normalized[y == 0].mean(0), atol=1e-5)


def test_prototypes_of_another_episode_are_not_used() -> None:
    stored = {"episode": 1, "prototypes": [torch.tensor([2]), torch.zeros(1, 3), torch.tensor([4])]}
    method = FRL(query_prototypes="support")

    def load(method: FRL, round: int) -> Any:
        return method.stored_prototypes(SimpleNamespace(round=round, store={"prototypes": stored}))  # type: ignore[arg-type]

    assert load(method, 8).classes.tolist() == [2]  # rounds 5 to 8 are episode 1
    assert load(method, 4) is None and load(method, 12) is None and load(FRL(), 8) is None


def test_prototypes_that_only_the_client_needs_are_not_sent(tmp_path: Path) -> None:
    kinds: list[Any] = ["queries", "support"]
    for kind in kinds:
        method = FRL(rounds=4, cohort=5, head="distance", query_prototypes=kind, **SMALL)
        fewer.run(method, federation(), model=initial_net(), out=tmp_path / kind)
    assert read_messages(tmp_path / "queries") == read_messages(tmp_path / "support")


# --- groups -----------------------------------------------------------------------------------------------------

GROUPS: dict[str, Any] = {"way": 3, "group_size": 4, "eval_groups": 3, "samples_per_class": 8}


def load_digits(**settings: Any) -> ArrayData:
    options = {
        "clients": 12,
        "partition": "shards",
        "data_options": {"unseen_classes": "6-9"},
        "fraction": 0.3,
        **settings,
    }
    return fewer.data.load("digits", **options)


@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_groups_have_the_right_classes_and_partitions(partition: Any) -> None:
    data = load_digits()
    method = FRL(**{**GROUPS, "samples_per_class": 16, "group_size": 6}, partition=partition)
    assert data.unseen_classes == {6, 7, 8, 9}
    groups = [method.draw_group(data.test, [6, 7, 8, 9], 2, 3, number) for number in range(8)]
    for group in groups:
        labels = {int(label) for support in group.supports for label in support.labels}
        assert len(labels) == 3 and len(labels & {6, 7, 8, 9}) == 2
        rows = [row for support in group.supports for row in support.rows.tolist()]  # type: ignore[union-attr]
        queries = group.queries.rows.tolist()  # type: ignore[union-attr]
        assert len(set(rows)) + len(set(queries)) == 3 * 16 and not set(rows) & set(queries)
        assert queries != sorted(queries)
        class_counts = [len(set(support.labels.tolist())) for support in group.supports]
        assert max(class_counts) <= 2 if partition == "shards" else max(class_counts) == 3
        assert len(group.supports) == 6
    assert len({tuple(sorted(set(group.queries.labels.tolist()))) for group in groups}) > 1
    other_method = FRLScratch(**{**GROUPS, "samples_per_class": 16, "group_size": 6}, partition=partition)
    other_rows = other_method.draw_group(data.test, [6, 7, 8, 9], 2, 3, 5).queries.rows
    assert torch.equal(other_rows, groups[5].queries.rows)  # type: ignore[arg-type]


def test_by_default_groups_use_all_unseen_classes() -> None:
    class Watched(FRLScratch):
        def draw_group(self, samples: Any, unseen: Any, num_unseen: int, seed: int, number: int) -> Any:
            assert (sorted(unseen), num_unseen) == ([6, 7, 8, 9], 4)
            return super().draw_group(samples, unseen, num_unseen, seed, number)

    scores = fewer.run(Watched(**{**GROUPS, "way": 5}), load_digits()).metrics
    assert len(scores["groups"]) == 3 and scores["accuracy"] == pytest.approx(np.mean(scores["groups"]))
    for wrong in ({"way": 11}, {"unseen_classes": 5, "way": 5}):
        with pytest.raises(SettingError, match="the test data has 4 and 6"):
            fewer.run(FRLScratch(**{**GROUPS, **wrong}), load_digits())


def test_support_fraction_sets_the_share_of_each_class() -> None:
    data = load_digits()
    options = {**GROUPS, "samples_per_class": 16, "group_size": 1, "partition": "iid", "support_fraction": 0.25}
    for number in range(3):
        group = FRL(**options).draw_group(data.test, [6, 7, 8, 9], 3, 0, number)
        assert sorted(torch.bincount(group.supports[0].labels).tolist())[-3:] == [4, 4, 4]
    client: Any = SimpleNamespace(train=federation().client(2).train, time_ordered=False, seed=0, id=2, round=1)
    support, queries = FRL(support_fraction=0.25).support_and_query(client)
    assert (len(support), len(queries)) == (2, 6)


def test_accuracy_is_the_mean_over_groups() -> None:
    class Watched(FRLScratch):
        def evaluate_groups(self, *_: Any) -> Any:
            return [Counts(1, 2, 3.0), Counts(3, 3, 1.0)]

    scores = Watched().evaluate(None, None, None)  # type: ignore[arg-type]
    assert scores == {"accuracy": 0.75, "loss": 0.8, "groups": [0.5, 1.0]}


def test_deploy_rounds_sets_the_number_of_rounds_in_a_group(tmp_path: Any) -> None:
    seeds, rounds = [], []

    class Watched(FRLScratch):
        def fit_support(self, net: Any, support: Any, prototypes: Any, upload: bool, generator: Any) -> Any:
            seeds.append(generator.initial_seed())
            return super().fit_support(net, support, prototypes, upload, generator)

        def aggregate(self, group: Any, updates: Any) -> Any:
            rounds.append(group.rounds_done)
            return super().aggregate(group, updates)

    fewer.run(
        Watched(deploy_rounds=2, **{**SMALL, "eval_groups": 2}), federation(), model=initial_net(), out=tmp_path / "run"
    )
    assert rounds == [0, 1, 0, 1] and len(set(seeds)) == 8
    fewer.run(FRLScratch(deploy_rounds=2, **SMALL), federation(), model=initial_net(), out=tmp_path / "other")
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
        fewer.run(Never(**{**GROUPS, **wrong}), load_digits())


def test_a_trial_with_impossible_groups_is_reported() -> None:
    experiment = build_experiment(
        parse_settings({"method": "frl-scratch"}), FRLScratch(**{**GROUPS, "unseen_classes": 3}), load_digits()
    )
    with pytest.raises(SettingError, match="a group needs 3 unseen and 0 seen classes, but the test data has 1 and 5"):
        tune_experiment(experiment, 1)


def test_diverged_groups_are_logged_and_count_as_wrong(caplog: pytest.LogCaptureFixture) -> None:
    scores = fewer.run(FRLScratch(lr=1e30, head="linear", **GROUPS), load_digits()).metrics
    assert scores["groups"] == [0, 0, 0]
    assert "frl-scratch: the models of 3 of 3 groups diverged" in caplog.text


def test_a_class_with_probability_0_adds_no_loss() -> None:
    scores = torch.tensor([[1.0, -torch.inf, 2.0], [3.0, -torch.inf, 1.0]])
    second = count_correct(scores[1:], torch.tensor([0]))
    assert count_correct(scores, torch.tensor([1, 0])) == (1, 2, second.loss) and 0 < second.loss < 1
    assert count_correct(scores, torch.tensor([1, 1])) == (0, 2, 0.0)
    assert count_correct(scores * torch.nan, torch.tensor([1, 0])).loss == MAX_LOSS


def test_a_trial_never_sees_the_test_samples() -> None:
    data = load_digits()
    method, trial_data = FRL(**{**GROUPS, "eval_groups": 100}).tuning_split(data, 0.2, 3)
    assert (
        trial_data.unseen_classes
        and not trial_data.unseen_classes & data.unseen_classes
        and not set(trial_data.test.labels.tolist()) & data.unseen_classes
    )
    assert trial_data.test.x is data.source.x and trial_data.test.rows is not None
    assert set(trial_data.test.rows.tolist()) <= set(data.train.rows.tolist())
    assert isinstance(method, FRL) and method.eval_groups == TUNING_GROUPS < 100


def test_trials_are_evaluated_on_held_out_training_classes() -> None:
    data = load_digits()
    trial_data = data.hold_out_classes(0.2, 3)
    assert len(trial_data.unseen_classes) == 1 and trial_data.unseen_classes < set(range(6))
    trained = {int(label) for client in range(12) for label in trial_data.client(client).train.labels}
    assert trained == set(range(6)) - trial_data.unseen_classes and set(trial_data.test.labels.tolist()) == set(
        range(6)
    )
    before, after = (sum(source.size(client) for client in range(12)) for source in (data, trial_data))
    assert after + len(trial_data.test) == before
    assert len(trial_data.client(0).test) == len(data.hold_out(0.2, 3).client(0).test)
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


# --- edge cases -------------------------------------------------------------------------------------------------

EMPTY = np.zeros((0, 2), np.float32), np.zeros(0, np.int64)
EDGE_CASES = {
    "fewer clients than K": PAIRS[:3],
    "one class each": [(x[y == y[0]], y[y == y[0]]) for x, y in PAIRS],
    "all the same class": [(x, np.zeros_like(y)) for x, y in PAIRS],
    "one sample, and nothing": [*PAIRS, (PAIRS[0][0][:1], PAIRS[0][1][:1]), EMPTY],
    "one client": PAIRS[:1],
}


@pytest.mark.parametrize("case", EDGE_CASES)
@pytest.mark.parametrize("head", ["linear", "distance", "gpal"])
def test_a_round_survives_unusual_groups(head: Any, case: str, tmp_path: Path) -> None:
    pairs, options = EDGE_CASES[case], {"way": 2, "group_size": 2, "eval_groups": 1}
    methods = [FRL(rounds=4, head=head, **options), FRLPerFedAvg(rounds=1, head=head, **options)]
    for number, method in enumerate(methods if head == "gpal" else methods[:1]):
        run = tmp_path / str(number)
        result = fewer.run(method, from_clients(pairs, test=UNSEEN), model=initial_net(), out=run)
        assert all(torch.isfinite(tensor).all() for tensor in method.broadcast(result.state).values())
        events = (run / "events.jsonl").read_text()
        assert '"failed"' not in events
        if "nothing" in case:
            assert "no training data" in events and "no class with two samples" in events
        group = deploy(
            run, from_clients(pairs, test=UNSEEN), model=Small, method_options={"keep_best": 1} if number else {}
        )
        classes = sorted({int(label) for _, y in pairs for label in y}) if not number else group.state.classes.tolist()
        assert group.state.classes.tolist() == classes
        scores = group.model(torch.zeros(1, 2))
        assert scores.shape == (1, 6) and torch.isfinite(scores[0, classes]).all()
        assert (scores[0, [label for label in range(6) if label not in classes]] == -torch.inf).all()


def test_invalid_answers_are_refused() -> None:
    class NoClients(Clients):
        def _deliver_calls(self, calls: Any) -> Any:
            return iter(())

    refused: list[Absent] = []
    kinds: set[str] = set()

    def record(absent: Absent, kind: str) -> None:
        refused.append(absent)
        kinds.add(kind)

    clients = NoClients(3, 0, on_absent=record)
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
        [absence.client for absence in refused] == [0, 1, 2, 3, 4, 5]
        and refused[0].reason == "refused"
        and kinds == {"hold_out_classes"}
    )
    with pytest.raises(FewerError, match="no client sent valid classes and prototypes"):
        valid_answers(answers[:2], clients, 5, "hold_out_classes")


# --- baselines --------------------------------------------------------------------------------------------------


def test_keep_best_averages_the_best_models_on_held_out_samples() -> None:
    method = FRLScratch(keep_best=2, head="gpal", way=2, group_size=2)
    group = method.empty_group(build_experiment(parse_settings({}), method, federation(), initial_net()).task)
    updates = [
        {
            "model": {"w": torch.tensor([float(index)])},
            "size": index + 1,
            "score": score,
            "classes": torch.tensor([index]),
            "means": torch.full((1, 3), float(index)),
            "counts": torch.tensor([1]),
        }
        for index, score in enumerate([0.5, 0.9, 0.1, 0.9])
    ]
    merged = method.aggregate(group, updates)
    assert float(merged.model["w"]) == pytest.approx((2 * 1 + 4 * 3) / 6) and merged.classes.tolist() == [1, 3]
    samples = federation().client(1).train
    for head in ("linear", "gpal"):
        prototypes = (torch.tensor([1, 2]), torch.zeros(2, 0)) if head == "linear" else None
        answer = FRLScratch(keep_best=2, head=head).fit_support(initial_net(), samples, prototypes, True, stream(0))
        assert answer["size"] == 10 and answer["score"] in (0.0, 0.5, 1.0)  # two of twelve are held out


def test_fine_tuning_pretrains_with_fedavg_and_per_fedavg_with_first_order_steps() -> None:
    options: dict[str, Any] = {
        "rounds": 1,
        "cohort": 5,
        "batch_size": None,
        "lr": 0.3,
        "pretrain_lr": 0.2,
        "eval_groups": 1,
    }
    options |= {"way": 2, "group_size": 2, "head": "linear"}
    models: dict[str, list[Weights]] = {"fine": [], "per": []}
    for client in range(5):
        x, y = (torch.from_numpy(array) for array in PAIRS[client])
        net = load_net(to_double(initial_net().state_dict()))
        start = get_weights(net)
        gradients = compute_gradients(F.cross_entropy(net(x.double()), y), net)
        models["fine"].append({name: start[name] - 0.2 * gradients[name] for name in start})
        generator = stream(0, 1, client, "batches")
        inner, outer = split_support_query(federation().client(client).train, 0.5, generator, by_class=True)
        gradients = compute_gradients(F.cross_entropy(net(inner.slice(0, 99)[0].double()), inner.labels), net)
        adapted = load_net({name: start[name] - 0.3 * gradients[name] for name in start})
        gradients = compute_gradients(F.cross_entropy(adapted(outer.slice(0, 99)[0].double()), outer.labels), adapted)
        models["per"].append({name: start[name] - 0.2 * gradients[name] for name in start})
    sizes = np.array([len(y) for _, y in PAIRS]) / sum(len(y) for _, y in PAIRS)
    for method_class, kind in ((FRLFineTuning, "fine"), (FRLPerFedAvg, "per")):
        model = fewer.run(method_class(**options), federation(), model=initial_net()).state.model
        for name, tensor in model.items():
            mean = sum(share * model_weights[name] for share, model_weights in zip(sizes, models[kind], strict=True))
            assert torch.allclose(tensor.double(), mean, atol=1e-6), (kind, name)


def test_a_warm_start_is_fedavg_followed_by_frl() -> None:
    options: dict[str, Any] = {"cohort": 5, "batch_size": None, "lr": 0.2, "pretrain_lr": 0.2, "meta_lr": 0.5}
    options |= {"eval_groups": 1, "way": 2, "group_size": 2, "optimizer": "sgd"}
    warm = fewer.run(FRLWarmStart(rounds=8, warmup_rounds=4, **options), federation(), model=initial_net())
    pretrain_options = {name: value for name, value in options.items() if name not in ("meta_lr", "optimizer")}
    pretrained = fewer.run(FRLFineTuning(rounds=4, **pretrain_options), federation(), model=initial_net()).state.model
    gradients, theta, _ = episode(
        FRL(rounds=4, **{name: value for name, value in options.items() if name != "pretrain_lr"}),
        to_double(pretrained),
    )
    for name, tensor in warm.state.model.items():
        assert torch.allclose(tensor.double(), theta[name], atol=2e-5), name
    for name, gradient in gradients.items():
        expected = pretrained[name].double() - 0.5 * gradient
        assert torch.allclose(warm.state.initial[name].double(), expected, atol=2e-5), name
    for wrong in (3, 8):
        with pytest.raises(
            SettingError, match=rf"warmup_rounds must be a multiple of 4 .* below rounds = 8, got {wrong}"
        ):
            fewer.run(FRLWarmStart(rounds=8, warmup_rounds=wrong, **options), federation(), model=initial_net())


def test_with_keep_best_a_client_reports_its_held_out_accuracy() -> None:
    x = np.concatenate([np.tile([-2.0, 2.0], (10, 1)), np.tile([2.0, -2.0], (10, 1))]).astype(np.float32)
    samples = from_clients([(x, np.repeat([0, 1], 10))], test=UNSEEN).client(0).train
    answer = FRLScratch(keep_best=1, head="distance", lr=1e-6).fit_support(
        initial_net(), samples, None, True, stream(0)
    )
    assert answer["score"] == 1


def test_per_fedavg_steps_continue_from_the_last_step() -> None:
    client: Any = SimpleNamespace(train=federation().client(1).train, task=SimpleNamespace(classes=6))
    client.stream = lambda purpose: stream(0, 1, 1, purpose)
    method = FRLPerFedAvg(head="linear", batch_size=3, lr=0.3, pretrain_lr=0.2)
    net, expected, generator = initial_net(), initial_net(), stream(0, 1, 1, "batches")
    method.fit(net, client)
    inner, outer = split_support_query(client.train, 0.5, generator, by_class=True)
    for (x_inner, y_inner), (x_outer, y_outer) in zip(
        epoch_batches(inner, 1, 3, generator), epoch_batches(outer, 1, 3, generator), strict=True
    ):
        start = get_weights(expected)
        gradients = compute_gradients(F.cross_entropy(expected(x_inner), y_inner), expected)
        load_weights(expected, {name: start[name] - 0.3 * gradients[name] for name in start})
        gradients = compute_gradients(F.cross_entropy(expected(x_outer), y_outer), expected)
        load_weights(expected, {name: start[name] - 0.2 * gradients[name] for name in start})
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(net.state_dict().values(), expected.state_dict().values(), strict=True)
    )


# --- deployment -------------------------------------------------------------------------------------------------


def test_all_members_deploy_unless_the_cohort_is_smaller(tmp_path: Any) -> None:
    pairs = [PAIRS[number % 5] for number in range(12)]
    fewer.run(FRLScratch(**SMALL), federation(), model=initial_net(), out=tmp_path / "run")
    for cohort, asked in ((None, 12), (3, 3)):
        settings: dict[str, Any] = {} if cohort is None else {"cohort": cohort}
        deploy(tmp_path / "run", federation(pairs), model=Small, rounds=1, out=tmp_path / str(cohort), **settings)
        sent = read_messages(tmp_path / str(cohort))
        assert (
            len({client for _, client, direction, kind, _ in sent if (direction, kind) == ("down", "local_train")})
            == asked
        )


def test_a_deployed_group_no_longer_needs_the_prepared_model(tmp_path: Path) -> None:
    fewer.run(FRLScratch(**SMALL), federation(), model=initial_net(), out=tmp_path / "run")
    for name, progress in (("uninterrupted", None), ("interrupted", Stopping())):
        deploy_group = partial(
            deploy, tmp_path / "run", federation(), model=Small, out=tmp_path / name, progress=progress
        )
        if progress is None:
            deploy_group()
        else:
            with pytest.raises(Stop):
                deploy_group()
    shutil.rmtree(tmp_path / "run")
    resumed = fewer.resume(tmp_path / "interrupted", data=federation(), model=Small)
    x = torch.from_numpy(UNSEEN[0])
    answers = [
        fewer.open_run(tmp_path / name, data=federation(), model=Small).model(x)
        for name in ("uninterrupted", "interrupted")
    ]
    assert (
        len(resumed.history) == 3 and torch.equal(answers[0], answers[1]) and torch.equal(resumed.model(x), answers[0])
    )


def test_a_group_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    text_data = replace(federation(), tokens=("a", "b"))
    fewer.run(FRLScratch(**SMALL), text_data, model=initial_net(), out=tmp_path / "run")
    deploy(tmp_path / "run", text_data, model=Small, rounds=1)
    for tokens in ((), ("b", "a")):
        with pytest.raises(SettingError, match="was prepared with another vocabulary"):
            deploy(tmp_path / "run", replace(text_data, tokens=tokens), model=Small)


def test_prototypes_for_prediction_are_sent_in_evaluated_rounds_only(tmp_path: Path) -> None:
    fewer.run(FRLScratch(head="distance", **SMALL), federation(), model=initial_net(), out=tmp_path / "run")
    sizes = {}
    for interval in (1, 3):
        out = tmp_path / str(interval)
        deployed = deploy(tmp_path / "run", federation(), model=Small, out=out, evaluate_every=interval)
        sizes[interval] = {
            round: [
                size
                for message_round, _, direction, _, size in read_messages(out)
                if (message_round, direction) == (round, "up")
            ]
            for round in (1, 2, 3)
        }
        assert deployed.state.classes.tolist() == [0, 1, 2, 3, 4]
    assert sizes[1][3] == sizes[3][3] and all(a > b for a, b in zip(sizes[1][2], sizes[3][2], strict=True))


@pytest.mark.parametrize(
    ("kind", "head"), [(FRL, "linear"), (FRLMetaHead, "linear"), (FRL, "distance"), (FRL, "gpal")], ids=str
)
def test_deployment_gives_the_same_model_as_evaluation(kind: type[FRL], head: Any, tmp_path: Path) -> None:
    method = kind(rounds=4, head=head, batch_size=None, lr=0.2, way=2, group_size=2, eval_groups=1)
    prepared = fewer.run(method, federation(), model=initial_net(), out=tmp_path / "prepared")
    group = deploy(tmp_path / "prepared", federation(), model=Small)
    assert group.method.rounds == 3 and (tmp_path / "prepared" / PREPARED_FILE).exists()
    supports = [federation().client(client).train for client in range(5)]

    class Context:  # the deployed group's seed and task, so the same head is drawn
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
    accuracy = float((net(x).argmax(1) == torch.from_numpy(UNSEEN[1])).float().mean())
    assert group.accuracy == pytest.approx(accuracy)


def test_prepare_deploy_and_predict_from_the_command_line(tmp_path: Path) -> None:
    args = ["--data", "digits", "--partition", "shards", "-o", "way=3", "-o", "eval_groups=2", "-o", "group_size=3"]
    run, group = tmp_path / "run", tmp_path / "group"
    prepare_args = [
        "--data-option",
        "unseen_classes=5-9",
        "--clients",
        "12",
        "--rounds",
        "4",
        "-o",
        "lr=0.02",
        "--no-report",
    ]
    output = call("prepare", *args, *prepare_args, "--out", run).stdout
    assert "Mean over 2 groups" in output and f"fewer deploy {run}" in output
    group_args = ["--data", "digits", "--data-option", "classes=5-9", "--clients", "4", "--alpha", "1"]
    call("deploy", run / PREPARED_FILE, *group_args, "--out", group, "--rounds", "2", "--no-report")
    settings = json.loads((group / "settings.json").read_text())
    assert (
        settings["method"]["lr"] == 0.02 and settings["method"]["rounds"] == 2 and settings["method"]["head"] == "gpal"
    )
    members, deployed = (embed_samples(open_run(path), max_samples=40) for path in (run, group))
    assert members and members.own.any() and len(members.points) == 40 + members.own.sum()
    assert deployed and not deployed.own.any() and set(deployed.prototype_labels.tolist()) == set(range(5, 10))
    outputs = [call("report", path, "--out", tmp_path / "page").stdout for path in (run, group)]
    assert len(outputs) == 2 and (tmp_path / "page/pictures/embedding.csv").read_text().count("prototype") == 5
    (run / PREPARED_FILE).rename(tmp_path / PREPARED_FILE)  # a group needs only this file
    repeated = call(
        "deploy", tmp_path / PREPARED_FILE, *group_args, "--out", tmp_path / "again", "--rounds", "2", "--no-report"
    )
    assert repeated.stdout.split("MB")[0] == call("resume", tmp_path / "again", "--no-report").stdout.split("MB")[0]
    lines = call("predict", tmp_path / "again", "--data", "digits", "--data-option", "classes=5-9").stdout.splitlines()
    assert {line.split(",")[1] for line in lines[1:]} <= set("56789") and len(lines) > 150
    assert len(call("export", tmp_path / "again").stdout.splitlines()) == 3
    for wrong, text in (
        (["deploy", run / "events.jsonl", *group_args], "is not a prepared model"),
        (["deploy", tmp_path / "nowhere", *group_args], "no prepared model"),
        (["deploy", tmp_path / "again", *group_args], "no prepared model"),
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


# --- reproducibility --------------------------------------------------------------------------------------------


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
def test_pool_and_resume_within_an_episode_give_the_same_numbers(method: PreparingMethod, tmp_path: Path) -> None:
    data = load_digits()
    expected = fewer.run(method, data, seed=2)
    with pytest.raises(Stop):
        fewer.run(method, data, seed=2, out=tmp_path / "run", progress=Stopping())
    for other in (fewer.run(method, data, seed=2, runtime="pool"), fewer.resume(tmp_path / "run")):
        assert [{**h, "seconds": 0} for h in other.history] == [{**h, "seconds": 0} for h in expected.history]
        weights, expected_weights = method.broadcast(other.state), method.broadcast(expected.state)
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    evaluated = [line["round"] for line in expected.history if "accuracy" in line]
    warmup = range(1, getattr(method, "warmup_rounds", 0) + 1)
    assert evaluated == ([*warmup, *range(len(warmup) + 4, 9, 4)] if isinstance(method, FRL) else [1, 2, 3, 4])


def test_batch_norm_predicts_with_batch_statistics() -> None:
    class Normed(EncoderHead):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), 3, 6)

    torch.manual_seed(0)
    net = Normed()
    group_model = GroupModel(net, torch.tensor([0, 4]), torch.randn(2, 3), 6).eval()
    x = torch.randn(16, 2)
    assert torch.allclose(group_model(x), group_model(3 * x + 5), atol=1e-2)  # running statistics are not used
    assert net.encoder[1].training and not net.encoder[2].training  # type: ignore[index]
    with pytest.raises(DataError, match="batch norm needs at least two samples to predict; prepare with --norm group"):
        group_model(x[:1])
    use_batch_statistics(net.train())
    assert net.encoder[1].training and not net.training  # type: ignore[index]
    state = fewer.run(FRL(rounds=4, cohort=5, way=2, group_size=2, eval_groups=1), federation(), model=Normed).state
    assert int(state.initial["encoder.1.num_batches_tracked"]) > 0  # running statistics are averaged, but not used


# --- Theorem 1 --------------------------------------------------------------------------------------------------

CONSTANTS: dict[str, float] = {"smoothness": 2.0, "sample_variance": 3.0, "client_variance": 5.0}


def test_convergence_bound_matches_theorem_1() -> None:
    assert convergence_error(0.01, 3, 60, 10, **CONSTANTS) == pytest.approx(0.01 * 2 * 32 * (3 / 60 + 5 / 10))
    assert convergence_bound(100, 7.0, 0.01, 0.352) == pytest.approx(28 / (0.01 * 100) + 0.352)
    with pytest.raises(SettingError, match="clients must be >= 1, got batch_size = 60, clients = 0"):
        convergence_error(0.01, 3, 60, 0, **CONSTANTS)
    with pytest.raises(SettingError, match="got episodes = 0, meta_lr = 0.01"):
        convergence_bound(0, 7.0, 0.01, 0.352)
    assert convergence_error(0.01, 4, 60, 10, **CONSTANTS) == pytest.approx(
        2 * convergence_error(0.01, 3, 60, 10, **CONSTANTS)
    )


@pytest.mark.parametrize("start_distance", [8.0, 0.0], ids=["far", "at the optimum"])
@pytest.mark.parametrize(("beta", "rounds", "k"), [(0.05, 1, 2), (0.05, 3, 5), (0.01, 2, 10)])
def test_preparation_on_quadratics_stays_below_the_bound(
    beta: float, rounds: int, k: int, start_distance: float
) -> None:
    """f_k(φ) = L/2 (φ − c_k)²: a group ends at q φ + (1 − q) c̄, q = (1 − αL)^R, so ∇F(φ) = L q² (φ − mean of c).

    A gradient on 5 samples has noise. At the optimum, the bound is ε alone.
    """
    rng, smoothness, alpha, clients, episodes = np.random.default_rng(1), 1.5, 0.2, 40, 400
    centers = rng.normal(0, 2, clients)
    shrinkage = (1 - alpha * smoothness) ** rounds
    phi = initial = centers.mean() + start_distance
    squares = []
    for _ in range(episodes):
        squares.append((smoothness * shrinkage**2 * (phi - centers.mean())) ** 2)
        group = centers[rng.choice(clients, k, replace=False)]
        noise = rng.normal(0, 3 / np.sqrt(5), k)
        phi -= beta * float(np.mean(smoothness * (shrinkage * phi + (1 - shrinkage) * group.mean() - group) + noise))
    gap = smoothness / 2 * shrinkage**2 * (initial - centers.mean()) ** 2
    variance = smoothness**2 * float(centers.var())
    error = convergence_error(beta, rounds, 5, k, smoothness=smoothness, sample_variance=9.0, client_variance=variance)
    assert 0 < np.mean(squares) <= convergence_bound(episodes, gap, beta, error)
    assert not start_distance or abs(phi - centers.mean()) < start_distance


# --- recipes and unseen classes ---------------------------------------------------------------------------------


def test_a_recipe_plots_a_members_embedding_and_has_intervals_over_groups(tmp_path: Path) -> None:
    text = """
title = "Small"
paper = "Example"
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
    results = json.loads((tmp_path / "small.json").read_text())
    assert "95 % CI over 4 groups" in output and "![Embedding of one member of a group](small-embedding.png)" in output
    assert (tmp_path / "small-embedding.png").read_bytes().startswith(b"\x89PNG")
    for row, cell in zip(("distance", "GPAL"), results["cells"], strict=True):
        groups = [
            value
            for seed in (0, 1)
            for value in json.loads(
                (tmp_path / f"runs/digits/{row.lower()}-seed{seed}/metrics.jsonl").read_text().splitlines()[-1]
            )["groups"]
        ]
        assert cell["ours"]["groups"] == 4 and cell["ours"]["ci95"] == half_width(groups)
        assert 0 <= results["study"][f"{row}, digits"]["others"] <= 1


FRL_RECIPES = ("table1", "table2", "table3")


@pytest.mark.parametrize("name", FRL_RECIPES)
def test_every_tuned_row_starts_in_its_grids_and_searches_all_values(name: str) -> None:
    plan = load_recipe(f"frl/{name}")
    rows = zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True)
    experiments = [(row, make_method(find(row.method), parse_settings(settings))) for row, settings in rows]
    for row, method in experiments:
        search_space = method.search_space()
        start = {option: float(getattr(method, option)) for option in search_space}
        assert "paper's settings" in row.name or row.tune
        if not row.tune:
            continue
        assert all(start[option] in grid for option, grid in search_space.items()), row.name
        seen: list[dict[str, float]] = []
        coordinate_search(lambda point, seen=seen: seen.append(point) or 0.0, search_space, start, plan.trials)  # type: ignore[misc]
        assert len(seen) == plan.trials
        assert all({point[option] for point in seen} >= set(grid) for option, grid in search_space.items()), row.name
    assert {"gamma", "meta_lr"} <= {
        option for row, method in experiments if row.tune for option in method.search_space()
    }
    assert not any("gamma" in row.method_options for row in plan.row) and "gamma" not in plan.settings["method_options"]


@pytest.mark.parametrize("name", ["fig2", "fig3"])
def test_figures_use_the_tuned_settings_of_table_2(name: str) -> None:
    table = json.loads((Path(__file__).parents[1] / "docs/results/frl/table2-glyphs.json").read_text())
    chosen = {cell["row"]: cell["ours"]["settings"] for cell in table["cells"]}
    plan = load_recipe(f"frl/{name}")
    for row, settings in zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True):
        options = make_method(find(row.method), parse_settings(settings)).model_dump()
        expected = chosen[f"{row.name}, tuned"]
        assert {option: options[option] for option in ("lr", "gamma")} == {
            option: expected[option] for option in ("lr", "gamma")
        }
        for option in {"meta_lr", "pretrain_lr"} & set(options):
            assert options[option] == expected[option], (row.name, option)


def test_a_finer_search_stays_in_the_allowed_range(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def run_trial(experiment: Any, *_: Any) -> Any:
        tried.append(experiment.method.gamma)
        return SimpleNamespace(accuracy=experiment.method.gamma)

    monkeypatch.setattr(sys.modules[tune_experiment.__module__], "run_experiment", run_trial)
    experiment = build_experiment(
        parse_settings({"method": "frl", "method_options": {**GROUPS, "way": 1}}),
        FRL(**{**GROUPS, "way": 1}),
        load_digits(),
    )
    assert len(tune_experiment(experiment, 30)[1]) == 30 and len(set(tried)) > 2 and 5 / 6 <= max(tried) <= 1


def test_a_members_embedding_is_computed_after_its_training() -> None:
    method = FRL(rounds=4, head="distance", lr=1.0, unseen_classes=1, **{**GROUPS, "samples_per_class": 30})
    result = fewer.run(method, load_digits())
    embedding, accuracy, _ = _embed_member(result, 1, 2, 40)
    server: Any = ContextFactory(result.data, result.task, 0, Path())(-1, 0)
    group = method.draw_group(server.global_test, [6, 7, 8, 9], 1, 0, 1)
    assert set(embedding.labels.tolist()) == set(group.queries.labels.tolist())
    assert len({6, 7, 8, 9} & set(embedding.labels.tolist())) == 1
    group_state = method.simulate_group(server, result.state.initial, group.supports, 1, 3)[1]
    net = method.simulate_group(server, result.state.initial, group.supports, 1, 2)[0]
    accuracies = []
    for trained in (False, True):
        if trained:
            method.fit_support(net, group.supports[2], None, False, stream(0, "embedding"))
        use_batch_statistics(net)
        x, y = group.queries.slice(0, len(group.queries))
        nearest = torch.cdist(compute_features(net, x).detach(), group_state.means).argmin(1)
        accuracies.append(float((group_state.classes[nearest] == y).double().mean()))
    assert accuracy == accuracies[1] != accuracies[0]


def test_unseen_classes_are_used_for_testing_only() -> None:
    full = fewer.data.load("digits", clients=5, partition="iid")
    data = fewer.data.load(
        "digits", clients=5, partition="iid", data_options={"classes": "0-3,5", "unseen_classes": [8, 9]}
    )
    all_labels = torch.cat([full.source.y[full.train.rows], full.global_test.labels])
    trained = torch.cat([data.client(client).train.labels for client in range(5)])
    assert set(trained.tolist()) == {0, 1, 2, 3, 5} and data.unseen_classes == {8, 9} and data.classes == 10
    for label in (8, 9):
        assert int((data.test.labels == label).sum()) == int((all_labels == label).sum())
    for label in (0, 5):
        assert int((data.test.labels == label).sum()) == int((full.test.labels == label).sum())
        assert int((trained == label).sum()) == int((full.source.y[full.train.rows] == label).sum())
    assert not full.unseen_classes
    glyphs = fewer.data.load("glyphs", partition="natural", data_options={"unseen_classes": 3})
    assert len(glyphs) == 120 and glyphs.unseen_classes == {3} and int((glyphs.test.labels == 3).sum()) == 480
    assert int((glyphs.client(7).test.labels == 3).sum()) == 4


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
def test_wrong_classes_are_reported(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.data.load("digits", data_options=options)
