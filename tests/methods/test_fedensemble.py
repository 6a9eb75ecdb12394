"""FedEnsemble: training like FedAvg, prediction by mean logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import fewer
from fewer import FedAvg, FedEnsemble
from fewer.learning import weighted_mean
from fewer.methods.fedensemble import Ensemble
from fewer.models import load_weights
from fewer.wire import decode
from tests.helpers import call
from tests.methods.class_harness import EMPTY, PAIRS, encoder_head_net, make_harness, softmax


def test_fedensemble_trains_like_fedavg_and_keeps_the_local_models(tmp_path: Path) -> None:
    method = FedEnsemble(local_steps=3, batch_size=4, lr=0.5)
    harness, fedavg = (
        make_harness(method, encoder_head_net(), tmp_path),
        make_harness(FedAvg(local_steps=3, batch_size=4, lr=0.5), encoder_head_net(), tmp_path),
    )
    for _ in range(2):
        state, mean = harness.rounds(1), fedavg.rounds(1).model
        assert all(torch.equal(state.model[name], tensor) for name, tensor in mean.items())
        for member, (_, blob) in enumerate(harness.clients.up[-3:]):
            sent = decode(blob)[1]["model"]
            assert all(torch.equal(state.members[name][member], tensor) for name, tensor in sent.items())
    assert [len(blob) for _, blob in harness.clients.up] == [len(blob) for _, blob in fedavg.clients.up]


def test_fedensemble_predicts_by_mean_logits(tmp_path: Path) -> None:
    result = fewer.run("fedensemble", "digits", clients=6, cohort=3, rounds=2, out=tmp_path / "run", seed=1)
    x, y = result.data.test.slice(0, len(result.data.test))
    logits = []
    for member in range(3):
        net = result.task.net().eval()
        load_weights(net, {name: tensor[member] for name, tensor in result.state.members.items()})
        logits.append(net(x).detach().double().numpy())
    total = sum(logits[1:], logits[0])
    probabilities = np.array([softmax(row / 3)[label] for row, label in zip(total, y.tolist(), strict=True)])
    assert result.accuracy == pytest.approx((total.argmax(1) == y.numpy()).mean())
    assert result.metrics["loss"] == pytest.approx(-np.log(probabilities).mean(), rel=1e-4)
    mean = result.task.net().eval()
    load_weights(mean, result.state.model)
    assert (mean(x).argmax(1).numpy() != total.argmax(1)).any()  # the mean model predicts differently

    for net in (result.model, result.personal_model(2), fewer.open_run(tmp_path / "run").model):
        assert isinstance(net, Ensemble) and len(net.members) == 3 and not net.members[0].training
        assert np.abs(net(x).detach().numpy() - total / 3).max() < 1e-4
    stderr = call("predict", tmp_path / "run", "--data", "digits", "--out", tmp_path / "predictions.csv").stderr
    assert f"accuracy {result.accuracy:.2%}" in stderr
    call("export", tmp_path / "run", "--out", tmp_path / "export")
    program = torch.export.load(tmp_path / "export/model.pt2").module()
    assert np.abs(program(x).detach().numpy() - total / 3).max() < 1e-4
    exported = safetensors.torch.load_file(tmp_path / "export/model.safetensors")
    for name, tensor in result.state.members.items():
        assert torch.equal(exported[f"members.2.{name}"], tensor[2])


def test_fedensemble_has_one_member_per_answer(tmp_path: Path) -> None:
    harness = make_harness(
        FedEnsemble(local_steps=2, batch_size=4), encoder_head_net(), tmp_path, [PAIRS[0], EMPTY, PAIRS[2]]
    )
    assert len(harness.state.members["head.bias"]) == 1  # before the first round, the initial model
    state = harness.rounds(1)
    members = [{name: tensor[number] for name, tensor in state.members.items()} for number in range(2)]
    sizes = [decode(blob)[1]["size"] for _, blob in harness.clients.up if blob]
    assert sorted(sizes) == [4, 6] and len(state.members["head.bias"]) == 2
    for name, tensor in weighted_mean(members, sizes).items():
        assert torch.equal(tensor, state.model[name])
