"""FedDM against its equations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer import FedDM
from fewer.errors import SettingError
from fewer.methods import feddm
from fewer.methods.condensed import draw_gaussian
from fewer.methods.feddm import feature_reader, limit_distance, matching_loss, perturb_weights
from fewer.models import Task, get_weights, split_net
from fewer.wire import decode
from tests.helpers import data_bytes
from tests.methods.class_harness import CLASSES, FEATURES, PAIRS, encoder_head_net, make_harness
from tests.methods.fedmk_harness import make_client

SMALL: dict[str, Any] = {"per_class": 2, "matching_steps": 2, "real_per_class": 3, "server_steps": 3}


def test_the_matching_loss_sums_distances_of_class_means_in_features_and_logits() -> None:
    labels, real_labels = torch.tensor([0, 0, 2]), torch.tensor([2, 0])
    features, logits = torch.tensor([[1.0, 3], [3, 5], [0, 1]]), torch.tensor([[1.0], [2], [7]])
    real_features, real_logits = torch.tensor([[1.0, 1], [2, 2]]), torch.tensor([[5.0], [2.0]])
    # features: class 0 has means (2, 4) and (2, 2), class 2 (0, 1) and (1, 1); logits: 1.5 and 2, 7 and 5
    loss = matching_loss((features, logits), labels, (real_features, real_logits), real_labels)
    assert float(loss) == pytest.approx((0 + 4) + (1 + 0) + 0.25 + 4)


def test_nets_have_the_distance_rho_from_the_global_model() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weights = get_weights(net)
    first, second = (perturb_weights(net, weights, 2.5, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    parameters = [name for name, _ in net.named_parameters()]
    distance = sum(float((first[name] - weights[name]).square().sum()) for name in parameters)
    assert distance == pytest.approx(2.5**2, rel=1e-5)
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert all(torch.equal(first[name], weights[name]) for name in weights.keys() - {*parameters})
    draw = torch.Generator().manual_seed(0)
    noise = [torch.randn(weights[name].shape, generator=draw) for name in parameters]
    norm = torch.cat([part.flatten() for part in noise]).norm()
    assert torch.allclose(first["0.weight"], weights["0.weight"] + 2.5 * noise[0] / norm, atol=1e-6)


@pytest.mark.parametrize(("radius", "moved"), [(10.0, [3.0, 4.0]), (2.5, [1.5, 2.0])])
def test_the_server_stays_within_rho(radius: float, moved: list[float]) -> None:
    net = nn.Linear(2, 1, bias=False)
    center = {"weight": torch.tensor([[1.0, 1.0]])}
    net.load_state_dict({"weight": torch.tensor([[4.0, 5.0]])})  # at a distance of 5
    expected = [1 + part for part in moved]
    assert limit_distance(net, center, radius)["weight"].flatten().tolist() == pytest.approx(expected)
    net.load_state_dict(center)
    assert torch.equal(limit_distance(net, center, radius)["weight"], center["weight"])


def test_features_are_the_inputs_of_the_head() -> None:
    net = encoder_head_net()
    x = torch.randn(5, FEATURES)
    with feature_reader(Task((FEATURES,), CLASSES, encoder_head_net), net) as read:
        features, logits = read(x)
    assert torch.equal(features, net.encoder(x)) and torch.equal(logits, net.head(features))


def test_condense_is_sgd_with_momentum_on_the_matching_loss(tmp_path: Path) -> None:
    method = FedDM(**{**SMALL, "matching_steps": 3}, matching_lr=0.7, matching_momentum=0.5, radius=0.8)
    client = make_client(tmp_path, 0)
    weights = client.initial_weights()
    sent = method.condense(client, weights)["knowledge"]
    net, draw, y = client.task.net(), client.stream("matching"), client.train.labels
    encoder, head = split_net(net)
    images = 2 * torch.rand(4, 1, 8, 8, generator=client.stream("images")) - 1
    labels, velocity = torch.tensor([0, 0, 2, 2]), torch.zeros_like(images)
    for _ in range(3):
        net.load_state_dict(perturb_weights(net, weights, 0.8, draw))
        held = [torch.nonzero(y == label).squeeze(1) for label in (0, 2)]
        real = [client.train.pick(rows[torch.randint(len(rows), (3,), generator=draw)])[0] for rows in held]
        images.requires_grad_()
        loss = torch.zeros(())
        for x, own in zip(real, (images[:2], images[2:]), strict=True):
            h_x, h_s = encoder(x), encoder(own)
            loss = loss + (h_x.mean(0) - h_s.mean(0)).square().sum()
            loss = loss + (head(h_x).mean(0) - head(h_s).mean(0)).square().sum()
        (gradient,) = torch.autograd.grad(loss, images)
        velocity = 0.5 * velocity + gradient
        images = (images - 0.7 * velocity).detach()
    assert {label: len(part) for label, part in sent.items()} == {"0": 2, "1": 0, "2": 2}
    assert torch.allclose(torch.cat([sent["0"], sent["2"]]), images, atol=1e-5)
    assert labels.tolist() == [0, 0, 2, 2]


def test_samples_start_from_class_statistics_where_a_class_has_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feddm, "MIN_SAMPLES", 6)  # client 0 has 7 samples of class 0 and 5 of class 2
    client = make_client(tmp_path, 0)
    method = FedDM(**{**SMALL, "matching_steps": 1}, matching_lr=1e-30, start="class")
    sent = method.condense(client, client.initial_weights())["knowledge"]
    draw = client.stream("images")
    uniform = 2 * torch.rand(4, 1, 8, 8, generator=draw) - 1
    x, _ = client.train.pick(torch.nonzero(client.train.labels == 0).squeeze(1))
    gaussian = draw_gaussian(x, 2, draw)
    assert torch.allclose(sent["0"], gaussian, atol=1e-5) and torch.equal(sent["2"], uniform[2:])


def test_the_server_trains_on_the_samples_of_this_round(tmp_path: Path) -> None:
    method = FedDM(**SMALL, server_lr=0.3, server_batch_size=4, momentum=0.5, weight_decay=0.1, cohort=2)
    harness = make_harness(method, encoder_head_net(), tmp_path)
    for round in (1, 2):
        before = harness.state
        state = harness.rounds(1)
        answers = [
            (call.client, decode(blob)[1]["knowledge"])
            for call, blob in harness.clients.up
            if call.round == round and not call.on_server
        ]
        assert len(answers) == 2 and all(state.knowledge[client].keys() == sent.keys() for client, sent in answers)
        images = torch.cat([part for _, sent in answers for part in sent.values()])
        labels = torch.cat(
            [torch.full((len(part),), int(label)) for _, sent in answers for label, part in sent.items()]
        )
        net = encoder_head_net()
        net.load_state_dict(before.model)
        optimizer = torch.optim.SGD(net.parameters(), 0.3, momentum=0.5, weight_decay=0.1)
        server = harness.contexts.server(0, round)
        for batch in torch.randint(len(images), (3, 4), generator=server.stream("learning")):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert all(torch.allclose(state.model[name], tensor, atol=1e-6) for name, tensor in get_weights(net).items())


def test_a_client_sends_images_of_the_classes_that_it_holds(tmp_path: Path) -> None:
    harness = make_harness(FedDM(**SMALL), encoder_head_net(), tmp_path)
    state = harness.rounds(1)
    held = {client: sorted(set(y.tolist())) for client, (_, y) in enumerate(PAIRS)}
    for call, blob in harness.clients.up:
        if not call.on_server:
            assert data_bytes(blob) == 4 * 2 * FEATURES * len(held[call.client])
    images, labels = harness.method.synthetic_data(state)[1]  # type: ignore[attr-defined]
    assert images.shape == (6, FEATURES) and labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_divergence_keeps_the_model_or_the_client_out(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    harness = make_harness(FedDM(**SMALL, server_lr=1e30), encoder_head_net(), tmp_path)
    before = harness.state.model
    assert all(torch.equal(harness.rounds(1).model[name], tensor) for name, tensor in before.items())
    assert "lower -o server_lr" in caplog.text
    method = FedDM(**{**SMALL, "matching_steps": 20}, matching_lr=1e4, rounds=1)
    with pytest.raises(fewer.errors.QuorumLost, match="the synthetic samples diverged; lower matching_lr"):
        fewer.run(method, "digits", clients=2)


def test_a_net_without_a_head_is_refused() -> None:
    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes), nn.Softplus())

    with pytest.raises(SettingError, match="has no encoder and no head"):
        fewer.run(FedDM(rounds=1), "digits", model=build, clients=2)
