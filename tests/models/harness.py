"""Small inputs for every model."""

from typing import Any

import torch
from torch import nn

from fewer.models import net_factory
from fewer.registry import MODELS

TASK_INFO: dict[str, dict[str, Any]] = {
    "cnn": {"shape": (1, 28, 28), "classes": 10},
    "lenet5": {"shape": (1, 28, 28), "classes": 10},
    "conv4": {"shape": (1, 28, 28), "classes": 5},
    "resnet12": {"shape": (3, 32, 32), "classes": 60},
    "femnist-cnn": {"shape": (1, 28, 28), "classes": 62},
    "alexnet": {"shape": (3, 64, 64), "classes": 1000},
    "sensor-cnn": {"shape": (6, 128), "classes": 6},
    "char-lstm": {"shape": (80,), "classes": 80, "vocabulary": 80},
    "embedding-bag": {"shape": (30,), "classes": 20, "vocabulary": 1000},
    "text-bilstm": {"shape": (30,), "classes": 20, "vocabulary": 1000},
    "sentiment-lstm": {"shape": (25,), "classes": 2, "vocabulary": 1000},
    "mlp": {"shape": (103,), "classes": 40},
    "logistic": {"shape": (103,), "classes": 40},
}


def build_net(name: str, **options: Any) -> nn.Module:
    task_info = {"norm": options.pop("norm", None), **TASK_INFO[name]}
    torch.manual_seed(0)
    return net_factory(MODELS.find(name), task_info, options)()
