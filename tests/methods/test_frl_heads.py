"""FRL's heads from class means, FedNCM and FedCOF, against explicit formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fewer
from fewer.errors import SettingError
from fewer.experiments.tune import find_search_space
from fewer.learning.group_model import compute_prototypes
from fewer.methods.frl import FRL
from fewer.methods.frl_baselines import FRLFineTuning, FRLScratch
from fewer.runs.inference import deploy
from fewer.runtime import stream
from tests.methods.frl_harness import GROUPS, PAIRS, SMALL, Small, federation, initial_net, load_digits

Array = np.ndarray[Any, Any]
SHRINKAGE = 0.7


def encode(net: torch.nn.Module, x: Any) -> Array:
    with torch.no_grad():
        return net.encoder(torch.as_tensor(x)).double().numpy()  # type: ignore[operator, no-any-return]


def lda(rows: list[tuple[int, Array, int]]) -> tuple[list[int], Array]:
    """The classes and the head of FedCOF, from the class, the mean and the number of samples of each row."""
    classes = sorted({label for label, *_ in rows})
    scatter, sums = np.zeros((3, 3)), []
    for label in classes:
        means, counts = zip(*[(mean, count) for held, mean, count in rows if held == label], strict=True)
        total = sum(counts)
        mu = sum(count * mean for mean, count in zip(means, counts, strict=True)) / total
        sums.append(total * mu)
        if len(means) > 1:
            outer = [n * np.outer(mean - mu, mean - mu) for mean, n in zip(means, counts, strict=True)]
            scatter += (total - 1) / (len(means) - 1) * sum(outer)
    whole = sum(count for *_, count in rows)
    mean = sum(sums) / whole
    second_moment = scatter + SHRINKAGE * np.trace(scatter) / 3 * np.eye(3) + whole * np.outer(mean, mean)
    inverse = np.linalg.inv(second_moment)
    weights = np.stack([inverse @ class_sum for class_sum in sums])
    return classes, weights / np.linalg.norm(weights, axis=1, keepdims=True)


@pytest.mark.parametrize("head", ["fedncm", "fedcof"])
def test_a_group_classifies_by_the_head_of_its_last_class_means(head: Any, tmp_path: Path) -> None:
    prepared = FRLScratch(head=head, shrinkage=SHRINKAGE, gamma=1.0, lr=1e-9, **SMALL)  # the model stays the same
    fewer.run(prepared, federation(), model=initial_net(), out=tmp_path / "run")
    group = deploy(tmp_path / "run", federation(), model=Small, out=tmp_path / "group")
    net = initial_net()
    rows = [
        (int(label), encode(net, x[y == label]).mean(0), int((y == label).sum()))
        for x, y in PAIRS
        for label in np.unique(y)
    ]
    classes, weights = lda(rows)
    if head == "fedncm":
        totals = [[(mean * count, count) for held, mean, count in rows if held == label] for label in classes]
        means = np.stack([sum(m for m, _ in parts) / sum(n for _, n in parts) for parts in totals])
        weights = means / np.linalg.norm(means, axis=1, keepdims=True)
    x = np.concatenate([x for x, _ in PAIRS])
    reopened = fewer.open_run(tmp_path / "group", data=federation(), model=Small)
    for model in (group.model, reopened.model):
        with torch.no_grad():
            scores = model(torch.from_numpy(x)).double().numpy()
        assert np.allclose(scores[:, classes], encode(net, x) @ weights.T, atol=1e-4)
        assert np.isinf(scores[:, 5]).all()


def test_these_heads_train_as_gpal_does() -> None:
    states = {}
    for head in ("gpal", "fedncm", "fedcof"):
        options: dict[str, Any] = {"rounds": 4, "cohort": 5, "batch_size": None, "lr": 0.2, "gamma": 0.3, **SMALL}
        states[head] = fewer.run(FRL(head=head, **options), federation(), model=initial_net()).state
    for head in ("fedncm", "fedcof"):
        for name, tensor in states["gpal"].initial.items():
            assert torch.equal(tensor, states[head].initial[name])
        assert torch.equal(states[head].means, states["gpal"].means)


@pytest.mark.parametrize("prototypes_from", ["before", "after"])
def test_subsets_upload_several_means_of_a_class_with_the_same_total(prototypes_from: Any) -> None:
    samples, net = federation().client(1).train, initial_net()
    method = FRLScratch(head="fedcof", subsets=4, prototypes_from=prototypes_from, lr=0.1)
    update = method.fit_support(net, samples, None, True, stream(0))
    whole = compute_prototypes(initial_net() if prototypes_from == "before" else net, samples)
    assert update["classes"].tolist() == [1] * 4 + [2] * 4 and update["counts"].tolist() == [2, 2, 1, 1] * 2
    for label, mean in zip(whole.classes, whole.means, strict=True):
        rows = update["classes"] == label
        merged = (update["means"][rows] * update["counts"][rows][:, None]).sum(0) / 6
        assert torch.allclose(merged, mean, atol=1e-6)
    assert not torch.allclose(update["means"][0], update["means"][1], atol=1e-3)
    options: dict[str, Any] = {"rounds": 4, "cohort": 5, "batch_size": None, "query_prototypes": "support", **SMALL}
    one, two = (
        fewer.run(FRL(head="fedcof", subsets=number, **options), federation(), model=initial_net()).state
        for number in (1, 2)
    )
    assert torch.allclose(one.means, two.means, atol=1e-6)  # Γ is the mean over all samples
    for name, tensor in one.initial.items():
        assert torch.allclose(tensor, two.initial[name], atol=1e-6), name  # and so are stored prototypes


def test_every_method_that_prepares_takes_these_heads() -> None:
    for method_class in (FRLFineTuning, FRL):
        for head, tuned in (("fedncm", {"gamma"}), ("fedcof", {"gamma", "shrinkage"})):
            method = method_class(head=head, rounds=4, subsets=2, **GROUPS)
            assert tuned <= find_search_space(method).keys() and "temperature" not in find_search_space(method)
            assert fewer.run(method, load_digits()).metrics["groups"]
    assert "shrinkage" not in find_search_space(FRL(head="gpal"))


def test_fedcof_needs_the_class_means_of_each_client() -> None:
    settings: dict[str, Any] = {"model": initial_net(), "dp": "user:clip=1.0,noise=1.0"}
    method = FRL(head="fedcof", rounds=4, cohort=5, **SMALL)
    with pytest.raises(SettingError, match="head = fedcof needs the class means of each client"):
        fewer.run(method, federation(), **settings)


def test_subsets_change_the_covariance_of_fedcof(tmp_path: Path) -> None:
    scores = []
    for subsets in (1, 2):
        run = tmp_path / str(subsets)
        fewer.run(FRLScratch(head="fedcof", subsets=subsets, **SMALL), federation(), model=initial_net(), out=run)
        group = deploy(run, federation(), model=Small, out=tmp_path / f"group{subsets}")
        scores.append(group.state.unused_head["head.weight"][:5])
    assert not torch.allclose(scores[0], scores[1], atol=1e-3)
