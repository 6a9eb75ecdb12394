"""FL-Base: training on base classes, and both classifiers of novel classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fewer.data import ArrayData
from fewer.learning import draw_batches
from fewer.methods.fl_base import BaseEncoder, FLBase, whiten
from fewer.models import get_weights
from tests.methods.f2l_harness import BASE, FAST, FEATURES, draw_task, make_client, net, run


def test_a_round_is_adam_on_batches_of_base_classes(data: ArrayData, tmp_path: Path) -> None:
    method, client = FLBase(**FAST, lr=0.02), make_client(data, tmp_path)
    model = client.task.initial_weights(0)
    expected = client.net(model).train()
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.02, weight_decay=1e-4)
    batches = draw_batches(len(client.train), 2, 3 * (2 + 2), client.stream("batches"))  # as large as a task
    for x, y in client.train.batches(batches):
        assert len(y) == 12 and int(y.max()) < BASE
        optimizer.zero_grad()
        F.cross_entropy(expected(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    trained = method.fit(make_client(data, tmp_path), model)
    assert all(torch.allclose(tensor, trained[name]) for name, tensor in get_weights(expected).items())
    large = FLBase(**FAST, lr=0.02, batch_size=40).fit(make_client(data, tmp_path), model)
    assert not torch.allclose(large["head.weight"], trained["head.weight"])


def test_lda_uses_the_covariance_within_base_classes(data: ArrayData, tmp_path: Path) -> None:
    client = make_client(data, tmp_path)
    encoder = net().encoder.eval()
    with torch.no_grad():
        features, y = encoder(client.train.all()[0]).double().numpy(), client.train.labels.numpy()
    pooled = sum(
        (features[y == c] - features[y == c].mean(0)).T @ (features[y == c] - features[y == c].mean(0))
        for c in range(BASE)
    )
    covariance = pooled / (len(y) - BASE)
    covariance = covariance + 0.3 * np.trace(covariance) / FEATURES * np.eye(FEATURES)
    whitening = whiten(encoder, client.train, 0.3)
    assert np.allclose((whitening @ whitening.T).numpy(), np.linalg.inv(covariance), rtol=1e-4)
    for seed in range(5):
        task = draw_task(data, seed)
        with torch.no_grad():
            support, queries = (encoder(x).double().numpy() for x in (task.support_x, task.query_x))
        means = np.stack([support[task.support_y.numpy() == c].mean(0) for c in range(3)])
        inverse = np.linalg.inv(covariance)
        scores = queries @ inverse @ means.T - np.einsum("cf,fg,cg->c", means, inverse, means) / 2
        unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in (support, queries)]
        centroids = np.stack([unit[0][task.support_y.numpy() == c].mean(0) for c in range(3)])
        distances = ((unit[1][:, None] - centroids) ** 2).sum(2)
        predicted = FLBase().predict(BaseEncoder(encoder, whitening), task)
        assert predicted["lda"].tolist() == scores.argmax(1).tolist()
        assert predicted["centroid"].tolist() == distances.argmin(1).tolist()


def test_the_chosen_predictor_gives_the_accuracy_and_both_learn(data: ArrayData) -> None:
    settings: dict[str, Any] = {**FAST, "rounds": 6, "tasks": 8, "lr": 0.01, "test_tasks": 40}
    by_centroid, by_lda = (run(FLBase(**settings, predictor=name), data).metrics for name in ("centroid", "lda"))
    assert by_centroid["accuracy"] == by_centroid["centroid"] > 0.55  # chance is a third
    assert by_lda["accuracy"] == by_lda["lda"] > 0.55


def test_on_the_server_it_classifies_base_classes(data: ArrayData) -> None:
    result = run(FLBase(**FAST, rounds=2), data)
    assert result.model(torch.zeros(1, 8)).shape == (1, BASE)


@pytest.fixture
def one_sample_per_class(data: ArrayData) -> Any:
    rows = torch.stack([torch.nonzero(data.client(0).train.labels == label)[0, 0] for label in range(BASE)])
    return data.client(0).train.select(rows)


def test_without_any_variance_distances_are_plain(one_sample_per_class: Any) -> None:
    assert torch.equal(whiten(net().encoder.eval(), one_sample_per_class, 0.1), torch.eye(FEATURES).double())
