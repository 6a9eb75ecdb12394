"""FRL: losses against finite differences, and episodes against explicit loops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fewer
from fewer.data import from_clients
from fewer.data.episodes import split_support_query
from fewer.errors import SettingError
from fewer.learning.aggregate import combine
from fewer.learning.group_model import compute_features, compute_prototypes
from fewer.learning.sgd import epoch_batches
from fewer.methods import fedavg, few_rounds
from fewer.methods.few_rounds import redraw_head
from fewer.methods.frl import FRL
from fewer.methods.frl_baselines import FRLFineTuning, FRLMetaHead
from fewer.models import EncoderHead, Weights, load_weights
from fewer.models.images import Conv4
from fewer.runtime import stream
from tests.methods.frl_harness import (
    HELD,
    PAIRS,
    SMALL,
    UNSEEN,
    Small,
    episode,
    eq2_loss,
    federation,
    initial_net,
    read_messages,
    to_double,
)

# --- prototypes and losses --------------------------------------------------------------------------------------


def moved_loss(
    method: FRL, net: nn.Module, batch: tuple[Tensor, Tensor], global_prototypes: Any, direction: Weights, step: float
) -> float:
    moved = {name: tensor + step * direction[name] for name, tensor in net.state_dict().items()}
    moved_net = Small().double()
    load_weights(moved_net, moved)
    return float(method.loss(moved_net, *batch, global_prototypes)[0].detach())


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("head", ["linear", "distance", "gpal"])
def test_gradients_of_eq_3_match_finite_differences(head: Any, temperature: float) -> None:
    torch.manual_seed(3)
    net = Small().double()
    batch = torch.randn(8, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 4, 4, 4, 1, 0])
    classes = torch.tensor([0, 1, 2, 4])
    global_prototypes = None if head == "distance" else (classes, torch.randn(4, 3, dtype=torch.float64))
    method = FRL(head=head, gamma=0.3, temperature=temperature)
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
            eq2_loss(features, batch[1], [0, 1, 4], prototypes.means, temperature),
            eq2_loss(features, batch[1], [0, 1, 2, 4], global_prototypes[1], temperature),
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


# --- an episode in explicit loops -------------------------------------------------------------------------------


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
        {"head": "gpal", "local_steps": 3, "temperature": 0.3},
        {"head": "linear", "local_steps": 2, "weight_decay": 0.05},
        {"head": "gpal", "weight_decay": 0.05, "optimizer": "adam", "meta_lr": 0.05},
        {"head": "gpal", "meta_steps": 3, "weight_decay": 0.05},
        {"head": "distance", "meta_steps": 2, "query_prototypes": "support", "optimizer": "adam", "meta_lr": 0.05},
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


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 60}, [12]),  # the support set is smaller than a batch: one step in a round
        ({"batch_size": 60, "epochs": 2}, [12, 12]),
        ({"batch_size": 60, "local_steps": 3}, [12, 12, 12]),
        ({"batch_size": 5, "local_steps": 4, "epochs": 7}, [5, 5, 2, 5]),
        ({"batch_size": 5, "local_steps": 1}, [5]),
        ({"batch_size": None, "local_steps": 2}, [12, 12]),
    ],
)
def test_local_steps_sets_the_steps_of_every_local_training(options: dict[str, Any], sizes: list[int]) -> None:
    seen: list[int] = []

    class Watched(FRL):
        def loss(self, net: Any, x: Any, y: Any, *prototypes: Any) -> Any:
            seen.append(len(y))
            return super().loss(net, x, y, *prototypes)

    data = federation()
    Watched(**options).fit_support(initial_net(), data.client(1).train, None, True, stream(0))
    assert seen == sizes

    def spy(net: nn.Module, batches: Any, lr: float, **options: Any) -> None:
        trained.append([len(y) for _, y in batches])

    trained: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewer.methods.frl_baselines.sgd", spy)
        method = FRLFineTuning(**options, rounds=1, cohort=5, **SMALL)
        fewer.run(method, data, model=initial_net())
    assert sizes in trained


def test_several_meta_steps_send_no_running_statistics_of_batch_norm(tmp_path: Path) -> None:
    net = EncoderHead(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh()), 3, 6)
    method = FRL(rounds=4, cohort=2, meta_steps=2, optimizer="sgd", head="distance", **SMALL)
    fewer.run(method, federation(PAIRS[:2]), model=net, out=tmp_path)
    assert "refused" not in (tmp_path / "events.jsonl").read_text()


def test_meta_steps_use_batches_of_the_queries_and_send_phi(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watched(FRL):
        def loss(self, net: Any, x: Any, y: Any, *prototypes: Any) -> Any:
            seen.append(len(y))
            return super().loss(net, x, y, *prototypes)

    sizes = []
    for meta_steps in (1, 3):
        seen.clear()
        out = tmp_path / str(meta_steps)
        options = {"batch_size": 4, "meta_steps": meta_steps, "optimizer": "sgd", "head": "distance"}
        fewer.run(Watched(rounds=4, cohort=1, **options, **SMALL), federation(PAIRS[1:2]), model=initial_net(), out=out)
        assert seen[6 : 6 + meta_steps] == ([6] if meta_steps == 1 else [4, 2, 4])  # after 3 rounds of two steps
        sizes.append([size for round, _, direction, _, size in read_messages(out) if (round, direction) == (4, "down")])
    assert 4 * (2 * 3 + 3) <= sizes[1][0] - sizes[0][0] < 4 * (2 * 3 + 3) + 200  # φ: the encoder
    with pytest.raises(SettingError, match="meta_steps = 2 needs head = distance or gpal, got linear"):
        fewer.run(FRL(meta_steps=2, head="linear", **SMALL), federation(), model=initial_net())


def test_crops_are_for_training_only() -> None:
    x, y = np.full((6, 8, 8), 200, np.uint8), np.arange(6) % 2
    data = from_clients([(x, y)], test=(x, y))
    samples, method = data.client(0).train, FRL(crop=3)
    ((crops, _),) = method.training_batches(samples, stream(0))
    white, black = ((value - samples.shift) * samples.scale for value in (200, 0))
    assert crops.shape == (len(samples), 1, 8, 8)
    assert torch.allclose(torch.unique(crops), torch.tensor([black, white]))  # a border of black pixels
    net = Conv4((1, 8, 8), 2, width=4, pools=2)
    expected = compute_prototypes(net, samples)
    sent = method.fit_support(net, samples, None, True, stream(0))
    assert torch.allclose(sent["means"], expected.means)  # prototypes of the images themselves
    for kind in (FRL, FRLFineTuning):
        with pytest.raises(SettingError, match="crop = 3 needs images, but inputs have shape"):
            fewer.run(kind(crop=3, **SMALL), federation(), model=initial_net())


def test_a_single_leftover_sample_joins_the_previous_batch() -> None:
    samples = federation().client(1).train
    assert [len(y) for _, y in epoch_batches(samples, 2, 11, stream(1))] == [12, 12]
    assert [len(y) for _, y in epoch_batches(samples, 1, 1, stream(1))] == [1] * 12
    assert [len(y) for _, y in epoch_batches(samples.select(torch.tensor([3])), 1, 5, stream(1))] == [1]


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

    def spy(models: Any, shares: Any, *options: Any) -> Any:
        weights.append(list(shares))
        return combine(models, shares, *options)

    for module in (fedavg, few_rounds):
        monkeypatch.setattr(module, "combine", spy)
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
