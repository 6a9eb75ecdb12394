"""FedProto, FedROD, DBE and kNN-Per: losses by formula, and what predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer.errors import SettingError
from fewer.methods.dbe import DBE
from fewer.methods.fedproto import FedProto, NearestPrototype
from fewer.methods.fedrod import FedROD
from fewer.methods.knn_per import KNNPer, NearestNeighbors
from fewer.models.split import EncoderHead
from fewer.runtime import stream
from tests.methods.linear_harness import PAIRS, SEED, SIZES, federation, make_harness

LOCAL: dict[str, Any] = {"local_steps": 2, "batch_size": 2, "lr": 0.3}


def make_net() -> EncoderHead:
    torch.manual_seed(1)
    return EncoderHead(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, 2)


def batches(client: int, round: int, purpose: str = "batches") -> list[tuple[Tensor, Tensor]]:
    x, y = (torch.as_tensor(part) for part in PAIRS[client])
    rows = torch.randint(len(y), (2, 2), generator=stream(SEED, round, client, purpose))
    return [(x[row], y[row]) for row in rows]


def step(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(0.3 * gradient)


def means_by_class(net: EncoderHead, client: int) -> dict[int, tuple[Tensor, int]]:
    x, y = (torch.as_tensor(part) for part in PAIRS[client])
    with torch.no_grad():
        z = net.encoder(x)
    return {int(c): (z[y == c].mean(0), int((y == c).sum())) for c in y.unique()}  # type: ignore[no-untyped-call]


# --- FedProto ---------------------------------------------------------------------------------------------------


def test_fedproto_trains_near_the_mean_prototypes_and_predicts_by_them(tmp_path: Path) -> None:
    method = FedProto(rounds=2, lam=1.5, **LOCAL)
    result = fewer.run(method, federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    nets, prototypes = [make_net() for _ in range(3)], dict[int, Tensor]()
    for round in (1, 2):
        for client, net in enumerate(nets):
            for x, y in batches(client, round):
                z = net.encoder(x)
                loss = F.cross_entropy(net.head(z), y)
                for row, label in zip(z, y.tolist(), strict=True):
                    if label in prototypes:
                        loss = loss + 1.5 * (row - prototypes[label]).square().mean() / len(y)
                step(loss, list(net.parameters()))
        sent = [means_by_class(net, client) for client, net in enumerate(nets)]
        for label in {label for part in sent for label in part}:
            parts = [part[label] for part in sent if label in part]
            prototypes[label] = sum(mean * count for mean, count in parts) / sum(count for _, count in parts)  # type: ignore[assignment]
    expected = torch.stack([prototypes[label] for label in sorted(prototypes)])
    assert torch.allclose(result.state.means, expected, atol=1e-5)
    x = torch.as_tensor(PAIRS[1][0])
    with torch.no_grad():
        nearest = torch.cdist(nets[1].encoder(x), expected).argmin(1)
        assert torch.equal(result.personal_model(1)(x).argmax(1), torch.tensor(sorted(prototypes))[nearest])
        assert not isinstance(result.personal_model(1), EncoderHead)  # not by its head


def test_a_class_keeps_its_prototype_while_nobody_with_it_answers(tmp_path: Path) -> None:
    pairs = [(x, np.full(len(y), label)) for label, (x, y) in enumerate(PAIRS[:2])]  # each client has its own class
    method = FedProto(rounds=6, cohort=1, **LOCAL)
    harness = make_harness(method, make_net(), tmp_path, pairs)
    state, cohorts = harness.state, []
    for number in range(1, 7):
        with harness.clients.training_round(number):
            cohorts += method.sample_cohort(harness.clients)
            before, state = state, method.round(state, harness.clients)
        assert state.classes.tolist() == sorted({*cohorts})
        changed = {
            label: not torch.equal(state.means[state.classes == label], before.means[before.classes == label])
            for label in before.classes.tolist()
        }
        assert changed == {label: label == cohorts[-1] for label in before.classes.tolist()}
    assert {*cohorts} == {0, 1}


def test_a_class_without_prototype_is_never_predicted_and_bytes_are_few() -> None:
    encoder = nn.Identity()
    net = NearestPrototype(encoder, torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [5.0, 5.0]]), 4)
    scores = net(torch.tensor([[1.0, 0.0], [4.0, 4.0]]))
    assert scores.shape == (2, 4) and scores.argmax(1).tolist() == [0, 2] and scores.isfinite().all()
    up = fewer.run(FedProto(rounds=1, **LOCAL), federation(), model=make_net(), seed=SEED).metrics["up"]
    held = sum(len(set(labels.tolist())) for _, labels in PAIRS)
    assert (
        up > 4 * 4 * held
        and up < fewer.run(fewer.FedAvg(rounds=1, **LOCAL), federation(), model=make_net()).metrics["up"] + 3 * 200
    )


# --- FedROD -----------------------------------------------------------------------------------------------------


def test_fedrod_balances_the_generic_head_and_adds_a_personal_one(tmp_path: Path) -> None:
    method = FedROD(rounds=2, **LOCAL)
    result = fewer.run(method, federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    shared = {name: tensor.clone() for name, tensor in make_net().state_dict().items()}
    heads = [(torch.zeros(2, 4, requires_grad=True), torch.zeros(2, requires_grad=True)) for _ in range(3)]
    for round in (1, 2):
        trained = []
        for client in range(3):
            net = make_net()
            net.load_state_dict(shared)
            counts = np.bincount(PAIRS[client][1], minlength=2)
            weight, bias = heads[client]
            for x, y in batches(client, round):
                z = net.encoder(x)
                g = net.head(z)
                weighted = g.exp() * torch.tensor(counts)
                generic = -(weighted[range(len(y)), y] / weighted.sum(1)).log().mean()
                personal = F.cross_entropy(g.detach() + F.linear(z.detach(), weight, bias), y)
                of_head = torch.autograd.grad(personal, (weight, bias))
                step(generic, list(net.parameters()))
                with torch.no_grad():
                    weight -= 0.3 * of_head[0]
                    bias -= 0.3 * of_head[1]
            trained.append({name: tensor.clone() for name, tensor in net.state_dict().items()})
        shared = {
            name: sum(n * model[name] for n, model in zip(SIZES, trained, strict=True)) / sum(SIZES) for name in shared
        }
    assert all(torch.allclose(result.state.model[name], shared[name], atol=1e-5) for name in shared)
    net, x = make_net(), torch.as_tensor(PAIRS[2][0])
    net.load_state_dict(shared)
    with torch.no_grad():
        z = net.encoder(x)
        assert torch.allclose(result.personal_model(2)(x), net.head(z) + F.linear(z, *heads[2]), atol=1e-5)
        assert torch.allclose(result.model(x), net.head(z), atol=1e-5)


# --- DBE --------------------------------------------------------------------------------------------------------


def test_the_published_settings_of_dbe_are_among_those_tried() -> None:
    assert 50 in DBE.tunable["kappa"] and DBE().mu == 1


@pytest.mark.parametrize("mu", [1.0, 0.4])
def test_dbe_shifts_features_and_regularizes_their_mean(mu: float, tmp_path: Path) -> None:
    method = DBE(rounds=2, kappa=0.8, mu=mu, **LOCAL)
    result = fewer.run(method, federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    # The initialization period: training without the shift and without the regularization.
    common = torch.zeros(4)
    for client in range(3):
        net, running = make_net(), torch.zeros(4)
        for x, y in batches(client, 1, purpose="initial batches"):
            z = net.encoder(x)
            running = (1 - mu) * running + mu * z.mean(0).detach()
            step(F.cross_entropy(net.head(z), y), list(net.parameters()))
        common = common + SIZES[client] * running / sum(SIZES)
    assert torch.allclose(result.state.mean, common, atol=1e-6)
    shared = {name: tensor.clone() for name, tensor in make_net().state_dict().items()}
    shifts = [torch.zeros(4) for _ in range(3)]
    for round in (1, 2):
        trained = []
        for client in range(3):
            net, running = make_net(), torch.zeros(4)
            net.load_state_dict(shared)
            shift = shifts[client].requires_grad_()
            for x, y in batches(client, round):
                z = net.encoder(x)
                running = (1 - mu) * running.detach() + mu * z.mean(0)
                loss = F.cross_entropy(net.head(z + shift), y) + 0.8 * 0.5 * (running - common).square().mean()
                parameters = list(net.parameters())
                *gradients, of_shift = torch.autograd.grad(loss, [*parameters, shift])
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.sub_(0.3 * gradient)
                    shift.sub_(0.3 * of_shift)
            shifts[client] = shift.detach()
            trained.append({name: tensor.clone() for name, tensor in net.state_dict().items()})
        shared = {
            name: sum(n * model[name] for n, model in zip(SIZES, trained, strict=True)) / sum(SIZES) for name in shared
        }
    assert all(torch.allclose(result.state.model[name], shared[name], atol=1e-5) for name in shared)
    net, x = make_net(), torch.as_tensor(PAIRS[0][0])
    net.load_state_dict(result.state.model)
    with torch.no_grad():
        z = net.encoder(x)
        shift = result.personal_model(0).get_parameter("shift")
        assert torch.allclose(result.personal_model(0)(x), net.head(z + shift), atol=1e-6) and bool(shift.any())
        assert torch.allclose(result.model(x), net.head(z), atol=1e-6)
    assert torch.allclose(shift, shifts[0], atol=1e-5)


# --- kNN-Per ----------------------------------------------------------------------------------------------------


def test_neighbors_vote_by_distance() -> None:
    head = nn.Linear(1, 2)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, np.log(3.0)]))  # the net says 1/4 and 3/4
    features, labels = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 1])
    net = NearestNeighbors(nn.Identity(), head, features, labels, weight=0.4, neighbors=2)
    near, far = np.exp(-0.5), np.exp(-0.5)
    by_neighbors = np.array([near, far]) / (near + far)
    expected = 0.4 * by_neighbors + 0.6 * np.array([0.25, 0.75])
    assert np.allclose(net(torch.tensor([[0.5]])).exp().detach().numpy()[0], expected, atol=1e-6)
    closer = net(torch.tensor([[0.1]])).exp().detach().numpy()[0]
    weights = np.exp([-0.1, -0.9]) / np.exp([-0.1, -0.9]).sum()
    assert np.allclose(closer, 0.4 * weights + 0.6 * np.array([0.25, 0.75]), atol=1e-6)
    # Distances are relative to the square root of the number of features.
    wide_head = nn.Linear(4, 2)
    with torch.no_grad():
        wide_head.weight.zero_()
        wide_head.bias.copy_(head.bias)
    wide = NearestNeighbors(nn.Identity(), wide_head, features.repeat(1, 4), labels, weight=0.4, neighbors=2)
    assert np.allclose(wide(torch.full((1, 4), 0.1)).exp().detach().numpy()[0], closer, atol=1e-6)


def test_knn_per_sends_what_fedavg_sends(tmp_path: Path) -> None:
    method = KNNPer(rounds=2, weight=0.9, neighbors=1, **LOCAL)
    result = fewer.run(method, federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    fedavg = fewer.run(fewer.FedAvg(rounds=2, **LOCAL), federation(), model=make_net(), seed=SEED)
    assert all(torch.equal(result.state.model[name], fedavg.state.model[name]) for name in fedavg.state.model)
    assert result.metrics["up"] == fedavg.metrics["up"]
    x, y = (torch.as_tensor(part) for part in PAIRS[1])
    with torch.no_grad():
        assert torch.equal(result.personal_model(1)(x).argmax(1), y)  # each sample is its own neighbor


@pytest.mark.parametrize("method", [FedProto(), FedROD(), DBE(), KNNPer()])
def test_a_net_without_encoder_is_refused(method: FedROD) -> None:
    with pytest.raises(SettingError, match="has no encoder and no head"):
        fewer.run(method, federation(), model=nn.Linear(3, 2))
