"""A run of FedAvg on cached features: `python -m benchmarks.features CLIENTS CACHE`."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from torch import nn

import fewer
from fewer.methods.fedavg import FedAvg
from fewer.models import EncoderHead

SAMPLES, WIDTH, CLASSES = 20_000, 1280, 10
"""As many as of CIFAR-10 and EfficientNet-Lite0 in the recipe `pretrained/cifar10`."""


def main() -> None:
    """Trains the head of 10 rounds with a cohort of 10, on synthetic images."""
    clients, os.environ["FEWER_CACHE"] = int(sys.argv[1]), sys.argv[2]
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (SAMPLES, 1, 8, 8), dtype=np.uint8)
    labels = draw.integers(0, CLASSES, SAMPLES)
    data = fewer.data.from_arrays(images, labels, clients=clients, partition="iid")
    torch.manual_seed(0)
    net = EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU()), WIDTH, CLASSES)
    fewer.run(FedAvg(rounds=10, cohort=10), data, model=net, freeze="encoder", progress=False)


if __name__ == "__main__":
    main()
