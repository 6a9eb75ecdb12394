"""CoPreFL: a meta-step against explicit loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fewer
from fewer.errors import SettingError
from fewer.methods.coprefl import CoPreFL
from fewer.models import Weights
from fewer.runs.inference import deploy
from tests.helpers import Stop, Stopping
from tests.methods.frl_harness import (
    PAIRS,
    SMALL,
    Small,
    compute_gradients,
    descend,
    federation,
    initial_net,
    load_net,
    read_messages,
    support_and_query,
    to_double,
)

OPTIONS: dict[str, Any] = {"cohort": 5, "batch_size": None, "pretrain_lr": 0.2, "meta_lr": 0.5, **SMALL}


def meta_step(phi: Weights, balance: float) -> tuple[Weights, Weights]:
    """Φ̄, and Φ after the meta-step."""
    models = []
    for client in range(5):
        x, y = support_and_query(client)[0]
        net = load_net(phi)
        models.append(descend(phi, compute_gradients(F.cross_entropy(net(x), y), net), 0.2, 0.0))
    sizes = np.array([len(y) for _, y in PAIRS]) / sum(len(y) for _, y in PAIRS)
    mean = {name: sum(share * model[name] for share, model in zip(sizes, models, strict=True)) for name in phi}
    net = load_net(mean)
    losses = torch.stack([F.cross_entropy(net(x), y) for x, y in (support_and_query(client)[1] for client in range(5))])
    objective = balance * losses.mean() + (1 - balance) * (losses - losses.mean()).square().mean()
    return mean, descend(mean, compute_gradients(objective, net), 0.5, 0.0)


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_two_meta_steps_lower_the_mean_and_the_variance_of_query_losses(balance: float) -> None:
    phi = to_double(initial_net().state_dict())
    mean, first = meta_step(phi, balance)
    states: list[Any] = []

    class Watched(CoPreFL):
        def round(self, state: Any, clients: Any) -> Any:
            states.append(super().round(state, clients))
            return states[-1]

    fewer.run(Watched(rounds=4, balance=balance, **OPTIONS), federation(), model=initial_net())
    expected = [mean, first, *meta_step(first, balance)]
    for state, weights, cohort in zip(states, expected, (5, 0, 5, 0), strict=True):
        assert len(state.cohort) == cohort
        for name, tensor in state.model.items():
            assert torch.allclose(tensor.double(), weights[name], atol=2e-5), name


def test_the_clients_that_trained_answer_with_a_loss_and_a_gradient(tmp_path: Path) -> None:
    options = {**OPTIONS, "cohort": 3}
    fewer.run(CoPreFL(rounds=4, **options), federation(), model=initial_net(), out=tmp_path / "run")
    asked = {(round, kind): set[int]() for round, _, _, kind, _ in read_messages(tmp_path / "run")}
    for round, client, _, kind, _ in read_messages(tmp_path / "run"):
        asked[round, kind].add(client)
    assert asked[1, "local_pretrain"] == asked[2, "answer_queries"] and len(asked[1, "local_pretrain"]) == 3
    assert asked.keys() == {(r, "local_pretrain" if r % 2 else "answer_queries") for r in (1, 2, 3, 4)}


def test_support_and_query_sets_are_new_in_each_meta_step_only() -> None:
    from types import SimpleNamespace

    samples = federation().client(1).train
    rows = []
    for round in (1, 2, 3):
        client: Any = SimpleNamespace(train=samples, time_ordered=False, seed=0, id=1, round=round)
        support, queries = CoPreFL().support_and_query(client)
        rows.append(support.rows.tolist())  # type: ignore[union-attr]
        assert len(support) == len(queries) == 6 and not {*rows[-1]} & {*queries.rows.tolist()}  # type: ignore[union-attr]
    assert rows[0] == rows[1] != rows[2]


def test_it_resumes_between_the_two_rounds_and_its_model_is_deployed(tmp_path: Path) -> None:
    method = CoPreFL(rounds=4, **OPTIONS)
    whole = fewer.run(method, federation(), model=initial_net(), out=tmp_path / "whole")
    with pytest.raises(Stop):
        fewer.run(method, federation(), model=initial_net(), out=tmp_path / "broken", callbacks=[Stopping()])
    resumed = fewer.resume(tmp_path / "broken", data=federation(), model=initial_net())
    assert all(torch.equal(tensor, whole.state.model[name]) for name, tensor in resumed.state.model.items())
    group = deploy(tmp_path / "whole", federation(), model=Small)
    assert group.method.rounds == 3 and 0 <= group.accuracy <= 1


def test_wrong_numbers_of_rounds_and_private_losses_are_refused() -> None:
    with pytest.raises(SettingError, match=r"rounds must be a multiple of 2 \(a meta-step\), got 3"):
        fewer.run(CoPreFL(rounds=3, **OPTIONS), federation(), model=initial_net())
    with pytest.raises(SettingError, match="loss"):
        fewer.run(CoPreFL(rounds=2, **OPTIONS), federation(), model=initial_net(), dp="user:clip=1.0,noise=1.0")
