"""Federations of several clients in a ring."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer import FedAvg, MetaFed
from fewer.data import ArrayData
from fewer.data.federated import from_arrays
from fewer.data.federations import group_clients
from fewer.errors import SettingError
from fewer.learning import weighted_mean
from fewer.learning.distill import distill
from fewer.methods import Client, find
from fewer.methods.context import ContextFactory
from fewer.methods.federation import SingleClient, Teacher
from fewer.models import Task, get_weights, load_weights
from fewer.runtime import HandlerRunner, Inline, seed_of
from tests.helpers import Interrupt
from tests.methods.metafed_harness import (
    CLASSES,
    FEATURES,
    SEED,
    SMALL,
    X,
    Y,
    comparable_parts,
    linear,
    make_harness,
    normed,
    ring_data,
)

INNER_OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.5},
    "fedbn": {},
    "fedmk": {
        "min_samples": 2,
        "per_class": 2,
        "outer_steps": 1,
        "inner_steps": 1,
        "matching_steps": 4,
        "server_steps": 3,
    },
}


def test_a_federation_has_the_samples_of_its_members() -> None:
    data = ring_data(7)
    federated = group_clients(data, 3)
    assert len(federated) == 3 and [len(federated.members_of(n)) for n in range(3)] == [2, 2, 3]
    for number, members in enumerate(([0, 1], [2, 3], [4, 5, 6])):
        members_data = federated.members_of(number)
        for part in ("train", "validation", "test"):
            labels = getattr(federated.client(number), part).labels
            member_samples = [getattr(data.client(member), part) for member in members]
            assert torch.equal(labels, torch.cat([samples.labels for samples in member_samples]))
            for position, samples in enumerate(member_samples):
                assert torch.equal(getattr(members_data.client(position), part).rows, samples.rows)
    trial = federated.hold_out(0.2, 0)
    assert isinstance(trial, type(federated)) and len(trial.members_of(2)) == 3 and trial.size(0) < federated.size(0)
    assert federated.fingerprint() != data.fingerprint()
    for wrong in (0, 8):
        with pytest.raises(SettingError, match=rf"federations must be 1 to 7 \(the number of clients\), got {wrong}"):
            group_clients(data, wrong)
    with pytest.raises(SettingError, match="has no federations"):
        data.members_of(0)


def make_group_method(inner: str, **options: Any) -> MetaFed:
    return MetaFed(
        **SMALL, federations=2, inner_method=inner, inner_rounds=2, inner_options=INNER_OPTIONS[inner], **options
    )


@pytest.mark.parametrize("inner", ["fedavg", "fedprox"])
def test_a_group_trains_with_the_inner_method_and_distills(inner: str, tmp_path: Path) -> None:
    data = ring_data(6)
    method = make_group_method(inner, distill_threshold=0.0)
    harness = make_harness(method, linear(), tmp_path, data)
    harness.rounds(1)
    federated = group_clients(data, 2)

    def run_inner(number: int, kind: type[FedAvg], **options: Any) -> Any:
        """Runs the inner method among the members of one federation."""
        seed = seed_of(SEED, number, "members")
        inner_method = kind(rounds=2, lr=0.3, local_steps=2, batch_size=4, **options)
        return fewer.run(inner_method, federated.members_of(number), model=linear(), seed=seed).state.model

    kind = find(inner)
    assert issubclass(kind, FedAvg)
    first_model = run_inner(0, kind, **INNER_OPTIONS[inner])
    assert all(torch.equal(tensor, harness.federation_state(0)["model"][name]) for name, tensor in first_model.items())

    class Distilling(FedAvg):
        """Members distill the previous federation's model into their own."""

        def fit(self, net: nn.Module, client: Client) -> None:
            numbers = torch.randint(len(client.train), (2, 4), generator=client.stream("study"))
            teacher = linear()
            load_weights(teacher, first_model)
            distill(net, teacher, client.train.batches(numbers), self.lr, 1.0)

    second_model = run_inner(1, kind, **INNER_OPTIONS[inner])
    inner_method, seed = Distilling(rounds=2, lr=0.3), seed_of(SEED, 1, "members")
    members_data = federated.members_of(1)
    task = Task((FEATURES,), CLASSES, lambda: linear(), pretrained=second_model)
    contexts = ContextFactory(members_data, task, seed, tmp_path / "taught")
    members = Inline(len(members_data), seed, handlers=HandlerRunner(inner_method, contexts, seed, torch.device("cpu")))
    state = inner_method.init(task, seed)
    for members.round in (3, 4):
        state = inner_method.round(state, members)
    assert all(torch.equal(tensor, harness.federation_state(1)["model"][name]) for name, tensor in state.model.items())


@pytest.mark.parametrize("inner", ["fedavg", "fedbn"])
def test_groups_give_the_same_result_in_a_pool_and_after_resuming(inner: str, tmp_path: Path) -> None:
    data, net = ring_data(6), normed()
    method = make_group_method(inner)
    result = fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "uninterrupted")
    fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "pool", runtime="pool")
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, data, model=net, seed=SEED, out=tmp_path / "interrupted", callbacks=[Interrupt(1)])
    fewer.resume(tmp_path / "interrupted", method=method, data=data, model=net)
    members = {
        kind: {
            file.relative_to(tmp_path / kind): file.read_bytes()
            for file in tmp_path.glob(f"{kind}/clients/*/*/members/**/*.s*")
        }
        for kind in ("uninterrupted", "pool", "interrupted")
    }
    assert (
        comparable_parts(tmp_path / "uninterrupted")
        == comparable_parts(tmp_path / "pool")
        == comparable_parts(tmp_path / "interrupted")
    )
    assert members["uninterrupted"] == members["pool"] == members["interrupted"] and bool(members["uninterrupted"]) == (
        inner == "fedbn"
    )
    ring = result.metrics["ring"]
    assert set(ring) == {"0", "1"} and all(record["up"] > 0 and record["down"] > 0 for record in ring.values())


def uneven_groups() -> tuple[ArrayData, MetaFed]:
    data = from_arrays(X, Y, client_ids=np.repeat([0, 1, 2, 3], [8, 32, 20, 20]), validation=0.3)
    return data, MetaFed(**SMALL, federations=2, inner_rounds=1)


def test_a_group_head_averages_by_size_and_evaluates_all_members(tmp_path: Path) -> None:
    data, method = uneven_groups()
    harness = make_harness(method, linear(), tmp_path, data)
    federation_group, initial = method.build_federation(harness.client(0)), get_weights(linear())
    seed, members_data = seed_of(SEED, 0, "members"), group_clients(data, 2).members_of(0)
    task = Task((FEATURES,), CLASSES, linear, pretrained=initial)
    factory = ContextFactory(members_data, task, seed, tmp_path / "by-hand")
    member_contexts = [factory(member, 1) for member in range(2)]
    members = [SingleClient(context, "", MetaFed(lr=0.3, local_steps=2, batch_size=4)) for context in member_contexts]
    counts = [member.evaluate(initial, "") for member in members]
    assert federation_group.evaluate(initial, "") == tuple(map(sum, zip(*counts, strict=True)))
    teacher = Teacher({name: tensor + 1 for name, tensor in initial.items()}, "", 1.0)
    sizes = [len(context.train) for context in member_contexts]
    assert sizes[0] != sizes[1]
    mean = weighted_mean([member.distill(initial, teacher) for member in members], sizes)
    assert all(torch.equal(tensor, mean[name]) for name, tensor in federation_group.distill(initial, teacher).items())


def test_inner_bytes_add_up_over_rounds(tmp_path: Path) -> None:
    data, method = uneven_groups()
    harness = make_harness(method, linear(), tmp_path, data)
    inner_bytes = []
    for _ in range(3):
        harness.rounds(1)
        inner_bytes.append(harness.federation_state(1)["inner_bytes"])
    assert all(
        later[side] > before[side] for before, later in itertools.pairwise(inner_bytes) for side in ("up", "down")
    )
    assert (
        inner_bytes[2]["up"] - inner_bytes[1]["up"] < inner_bytes[1]["up"]
    )  # the bytes of one round, not of all rounds


@pytest.mark.parametrize("inner", ["fedmk", "fedgen", "feddistill", "local"])
def test_other_inner_methods_work(inner: str) -> None:
    data = fewer.data.load("digits", clients=4, alpha=5.0, validation=0.2, fraction=0.2)
    method = MetaFed(
        rounds=1, local_steps=2, federations=2, inner_method=inner, inner_options=INNER_OPTIONS.get(inner, {})
    )
    result = fewer.run(method, data, seed=0)
    assert result.history[-1]["absent"] == 0 and all(record["up"] > 0 for record in result.metrics["ring"].values())
