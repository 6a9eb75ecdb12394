"""FedPer, LG-FedAvg, FedRep and FedBABU: what is shared, what stays, what is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer.errors import SettingError
from fewer.methods.fedbabu import FedBABU
from fewer.methods.fedper import FedPer
from fewer.methods.fedrep import FedRep
from fewer.methods.lg_fedavg import LGFedAvg
from fewer.models import Weights
from fewer.models.split import EncoderHead
from fewer.runtime import stream
from tests.methods.linear_harness import PAIRS, SEED, SIZES, federation

LOCAL: dict[str, Any] = {"local_steps": 2, "batch_size": 2, "lr": 0.3}


def make_net() -> EncoderHead:
    torch.manual_seed(1)
    return EncoderHead(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, 2)


def train(
    weights: Weights,
    client: int,
    round: int,
    trained: tuple[str, ...],
    purpose: str = "batches",
    steps: int = 2,
    lr: float = 0.3,
) -> Weights:
    """Plain SGD on the client's batches; only weights that start with `trained` change."""
    net = make_net()
    net.load_state_dict(weights)
    x, y = (torch.as_tensor(part) for part in PAIRS[client])
    parameters = [parameter for name, parameter in net.named_parameters() if name.startswith(trained)]
    for row in torch.randint(len(y), (steps, 2), generator=stream(SEED, round, client, purpose)):
        gradients = torch.autograd.grad(F.cross_entropy(net(x[row]), y[row]), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(lr * gradient)
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def average(models: list[Weights], part: str) -> Weights:
    return {
        name: sum(size * model[name] for size, model in zip(SIZES, models, strict=True)) / sum(SIZES)  # type: ignore[misc]
        for name in models[0]
        if name.startswith(part)
    }


def close(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


@pytest.mark.parametrize(("method", "part"), [(FedPer, "encoder"), (LGFedAvg, "head")])
def test_one_part_is_averaged_and_the_other_stays(method: type[FedPer], part: str, tmp_path: Path) -> None:
    result = fewer.run(method(rounds=2, **LOCAL), federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    start = dict(make_net().state_dict())
    models, shared = [start] * 3, {name: start[name] for name in start if name.startswith(part)}
    for round in (1, 2):
        models = [train({**model, **shared}, client, round, ("encoder", "head")) for client, model in enumerate(models)]
        shared = average(models, part)
    assert close(result.state.model, shared)
    for client, model in enumerate(models):
        assert close(dict(result.personal_model(client).state_dict()), {**model, **shared})
    assert (
        result.metrics["up"] < fewer.run(fewer.FedAvg(rounds=2, **LOCAL), federation(), model=make_net()).metrics["up"]
    )


def test_fedrep_trains_the_head_first_and_then_the_encoder(tmp_path: Path) -> None:
    method = FedRep(rounds=2, head_steps=3, **LOCAL)
    result = fewer.run(method, federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    start = dict(make_net().state_dict())
    models, shared = [start] * 3, {name: start[name] for name in start if name.startswith("encoder")}
    for round in (1, 2):
        for client in range(3):
            fitted = train({**models[client], **shared}, client, round, ("head",), "head batches", steps=3)
            models[client] = train(fitted, client, round, ("encoder",))
            models = list(models)
        shared = average(models, "encoder")
    assert close(result.state.model, shared)
    assert close(dict(result.personal_model(1).state_dict()), {**models[1], **shared})


def test_fedbabu_never_trains_the_head_and_fine_tunes_at_the_end(tmp_path: Path) -> None:
    method = FedBABU(rounds=2, ft_steps=3, ft_lr=0.2, **LOCAL)
    result = fewer.run(method, federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    start = dict(make_net().state_dict())
    head, shared = ({name: start[name] for name in start if name.startswith(part)} for part in ("head", "encoder"))
    for round in (1, 2):
        shared = average([train({**head, **shared}, client, round, ("encoder",)) for client in range(3)], "encoder")
    assert close(result.state.model, shared)
    tuned = train({**head, **shared}, 1, 2, ("encoder", "head"), "fine-tune", steps=3, lr=0.2)
    assert close(dict(result.personal_model(1).state_dict()), tuned)
    only_head = fewer.run(
        method.model_copy(update={"fine_tune": "head"}), federation(), model=make_net(), seed=SEED, out=tmp_path / "h"
    )
    tuned = train({**head, **shared}, 1, 2, ("head",), "fine-tune", steps=3, lr=0.2)
    assert close(dict(only_head.personal_model(1).state_dict()), tuned)


@pytest.mark.parametrize("method", [FedPer(), LGFedAvg(), FedRep(), FedBABU()])
def test_a_net_without_encoder_and_head_is_refused(method: FedPer) -> None:
    with pytest.raises(SettingError, match="has no encoder and no head"):
        fewer.run(method, federation(), model=nn.Linear(3, 2))


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    torch.manual_seed(0)
    net = EncoderHead(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 4, 2)
    state = fewer.run(FedBABU(rounds=1, **LOCAL), federation(), model=net, seed=SEED).state.model
    assert not torch.equal(state["encoder.1.running_mean"], torch.zeros(4))
    method = FedRep(rounds=1, head_steps=5, local_steps=1, batch_size=2, lr=0.3)
    one_step: Tensor = fewer.run(method, federation(), model=net, seed=SEED).state.model[
        "encoder.1.num_batches_tracked"
    ]
    assert int(one_step) == 1  # the head's steps leave the encoder alone
