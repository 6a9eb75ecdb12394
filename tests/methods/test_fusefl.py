"""FuseFL, written out block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer import FuseFL
from fewer.data import Data
from fewer.errors import SettingError
from fewer.methods.fusefl import FusedNet, NetBlock, fuse, mean_adaptor
from fewer.models import SmallCNN, get_weights
from fewer.wire import decode
from tests.helpers import data_bytes
from tests.methods.class_harness import CLASSES, FEATURES, PAIRS, SEED, encoder_head_net, make_harness, sample_indices

HIDDEN = 4


def test_a_fused_net_maps_all_features_by_each_adaptor_and_averages_logits() -> None:
    first = [NetBlock([nn.Linear(2, 2, bias=False)]) for _ in range(2)]
    second = [NetBlock([nn.Linear(2, 1, bias=False)]) for _ in range(2)]
    weights = [[1.0, 0], [0, 1]], [[2.0, 0], [0, 2]], [[1.0, 1]], [[3.0, 0]]
    for block, weight in zip([*first, *second], weights, strict=True):
        block.load({"layers.0.weight": torch.tensor(weight)})
    adaptors = [torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]]), torch.tensor([[0.0, 1, 1, 0], [0, 0, 0, 0]])]
    for block, adaptor in zip(second, adaptors, strict=True):
        block.load({"adaptor": adaptor, **get_weights(block)})
    # x = (5, 7): features (5, 7) and (10, 14); adapted to (5, 14) and (7 + 10, 0); logits 19 and 51
    assert FusedNet([first, second])(torch.tensor([[5.0, 7.0]])).tolist() == [[35.0]]


def test_the_first_adaptor_is_the_mean_of_channels() -> None:
    features = [torch.randn(3, 2, 4, 4) for _ in range(3)]
    assert torch.allclose(fuse(features, mean_adaptor(2, 3)), torch.stack(features).mean(0), atol=1e-6)
    flat = [part.flatten(1)[:, :5] for part in features]
    assert torch.allclose(fuse(flat, mean_adaptor(5, 3)), torch.stack(flat).mean(0), atol=1e-6)


def test_blocks_have_equal_numbers_of_layers_and_keep_channels() -> None:
    first, second = FuseFL().cut_net(SmallCNN((1, 8, 8), 3))
    assert [type(layer).__name__ for layer in second.layers] == ["Flatten", "Linear", "ReLU", "Linear"]
    assert len(first.layers) == 6  # convolution, norm and ReLU, twice
    sizes = [len(block.layers) for block in FuseFL(rounds=4, blocks=4).cut_net(SmallCNN((1, 8, 8), 3))]
    assert sizes == [3, 3, 3, 1]


def train(parameters: list[Tensor], forward: Any, client: int, round: int, method: FuseFL) -> None:
    """SGD on the batches of a client, in place."""
    x, y = torch.from_numpy(PAIRS[client][0]), torch.from_numpy(PAIRS[client][1])
    for row in sample_indices(method, client, round):
        gradients = torch.autograd.grad(F.cross_entropy(forward(x[row]), y[row]), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= method.lr * gradient


@pytest.mark.parametrize("adaptor", ["linear", "mean"])
def test_two_rounds_train_two_blocks(adaptor: Any, tmp_path: Path) -> None:
    method = FuseFL(local_steps=3, batch_size=4, lr=0.3, adaptor=adaptor)
    harness = make_harness(method, encoder_head_net(), tmp_path)
    first_sent = harness.rounds(1).blocks[0]
    cohort = harness.state.cohort
    start = get_weights(encoder_head_net())
    names = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")
    own: dict[int, list[Tensor]] = {}
    for position, client in enumerate(cohort):  # round 1: each trains the whole net alone
        w, b, v, c = own[client] = [start[name].clone().requires_grad_() for name in names]

        def alone(x: Tensor, w: Tensor = w, b: Tensor = b, v: Tensor = v, c: Tensor = c) -> Tensor:
            return torch.tanh(x @ w.T + b) @ v.T + c

        train(own[client], alone, client, 1, method)
        assert torch.allclose(first_sent["layers.0.weight"][position], w, atol=1e-6)
        assert torch.allclose(first_sent["layers.0.bias"][position], b, atol=1e-6)
    state = harness.rounds(1)
    assert state.cohort == cohort
    for position, client in enumerate(cohort):  # round 2: its head, on the features of all
        _, _, v, c = own[client]
        adapt = mean_adaptor(HIDDEN, 3).requires_grad_()

        def fused(x: Tensor, v: Tensor = v, c: Tensor = c, adapt: Tensor = adapt) -> Tensor:
            features = [torch.tanh(x @ own[m][0].T + own[m][1]).detach() for m in cohort]
            joined = torch.cat(features, 1) @ adapt.T if adaptor == "linear" else torch.stack(features).mean(0)
            return joined @ v.T + c

        train([v, c, adapt] if adaptor == "linear" else [v, c], fused, client, 2, method)
        sent = {name: tensor[position] for name, tensor in state.blocks[1].items()}
        assert torch.allclose(sent["layers.0.weight"], v, atol=1e-6)
        assert torch.allclose(sent["layers.0.bias"], c, atol=1e-6)
        assert ("adaptor" in sent) == (adaptor == "linear")
        if adaptor == "linear":
            assert torch.allclose(sent["adaptor"], adapt, atol=1e-6)
    assert torch.equal(state.blocks[0]["layers.0.weight"], first_sent["layers.0.weight"])  # frozen
    after = harness.rounds(1)
    assert after is state  # nothing more to train


def test_bytes_are_those_of_one_model_and_the_adaptors(tmp_path: Path) -> None:
    harness = make_harness(FuseFL(local_steps=1, batch_size=2), encoder_head_net(), tmp_path)
    harness.rounds(3)
    encoder, head, adaptor = 4 * (FEATURES + 1) * HIDDEN, 4 * (HIDDEN + 1) * CLASSES, 4 * HIDDEN * 3 * HIDDEN
    assert [data_bytes(blob) for _, blob in harness.clients.up] == [encoder] * 3 + [head + adaptor] * 3
    assert [data_bytes(blob) for _, blob in harness.clients.down] == [0] * 3 + [3 * encoder] * 3
    assert decode(harness.clients.up[0][1])[1]["size"] in (4, 6, 9)


def test_frozen_blocks_keep_their_batch_statistics() -> None:
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    net = FusedNet([[NetBlock([first])], [NetBlock([second])]], frozen=1).train()
    net(torch.randn(8, 2) + 5)
    statistics = [get_weights(norm)["running_mean"] for norm in (first, second)]
    assert statistics[0].tolist() == [0, 0] and statistics[1].abs().min() > 0
    assert not first.weight.requires_grad and second.weight.requires_grad


def test_it_predicts_after_the_last_block(tmp_path: Path, digits: Data) -> None:
    result = fewer.run(FuseFL(local_steps=40), digits, model="cnn", seed=SEED, out=tmp_path / "run")
    assert "accuracy" not in result.history[0] and result.accuracy > 0.5
    x, _ = result.data.test.slice(0, 5)
    reloaded = fewer.open_run(tmp_path / "run").model
    assert isinstance(reloaded, FusedNet) and torch.equal(reloaded(x), result.model(x))


def test_settings_that_do_not_fit_are_refused(digits: Data) -> None:
    with pytest.raises(SettingError, match="rounds must be >= blocks = 2"):
        fewer.run(FuseFL(rounds=1), digits)
    with pytest.raises(SettingError, match="blocks = 5, but the net has 4 linear and convolutional layers"):
        fewer.run(FuseFL(rounds=5, blocks=5), digits, model="cnn")

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.ModuleList([nn.Flatten()]), nn.Linear(64, 10)

    with pytest.raises(SettingError, match="needs an encoder of layers in sequence, got ModuleList"):
        FuseFL().cut_net(Own())
