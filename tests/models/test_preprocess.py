"""Preprocessing that belongs to a model: its nets get pixels on a scale of 0 … 1, whatever the data's normalization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer.data import ArrayData
from fewer.errors import SettingError
from fewer.models import EncoderHead, Preprocess
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.runs.machines import SingleClientData


def make_data() -> ArrayData:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4), dtype=np.uint8)
    return fewer.data.from_arrays(pixels, np.arange(40) % 2, clients=2, partition="iid", normalization=(0.3, 0.2))


def make_net() -> EncoderHead:
    torch.manual_seed(0)
    return EncoderHead(nn.Sequential(Preprocess(2, [0.5, 0.25, 0.0], [0.5, 0.25, 1.0]), nn.Flatten()), 12, 2)


def test_images_are_resized_and_each_channel_is_normalized() -> None:
    x = torch.tensor([[0.0, 1.0], [0.5, 0.5]]).repeat_interleave(2, 0).repeat_interleave(2, 1)[None, None]
    y = Preprocess(2, [0.5, 0.25], [0.5, 0.25])(x)  # from one channel to two
    assert torch.allclose(y[0, 0], torch.tensor([[-1.0, 1.0], [0.0, 0.0]]))
    assert torch.allclose(y[0, 1], torch.tensor([[-1.0, 3.0], [1.0, 1.0]]))
    assert Preprocess(None, [0.0], [1.0])(x).shape == (1, 1, 4, 4)


def test_a_net_with_its_own_preprocessing_gets_pixels_from_0_to_1(tmp_path: Path) -> None:
    data, net = make_data(), make_net()
    raw = data.test.x[data.test.rows]
    pixels = raw.float() / 255
    experiment = build_experiment(parse_settings({}), None, data, net)
    assert torch.allclose(experiment.data.test.all()[0], pixels) and (data.test.all()[0] < 0).any()
    result = fewer.run("fedavg", data, model=net, freeze="encoder", rounds=1, out=tmp_path / "run")
    head = result.state.model
    with torch.no_grad():
        expected = net.encoder(pixels) @ head["head.weight"].T + head["head.bias"]
    assert torch.allclose(result.predict(raw.numpy()).outputs, expected, atol=1e-5)  # raw bytes
    assert build_experiment(parse_settings({}), None, data, "cnn").data.test.scale == data.test.scale


def test_a_client_on_its_own_machine_gets_pixels_too() -> None:
    data = make_data()
    client = build_experiment(parse_settings({}), None, SingleClientData(data, 3, 2), make_net()).data.client(1)
    rows = data.client(0).train.rows
    assert rows is not None and torch.allclose(client.train.all()[0], data.source.x[rows].float() / 255)


def test_normalization_is_declared_once() -> None:
    settings = {"data": "fashion-mini", "data_options": {"normalization": [0.5, 0.5]}}
    net = EncoderHead(nn.Sequential(Preprocess(2, [0.5], [0.5]), nn.Flatten()), 4, 10)
    with pytest.raises(SettingError, match="leave out the data option normalization"):
        build_experiment(parse_settings(settings), model=net)
