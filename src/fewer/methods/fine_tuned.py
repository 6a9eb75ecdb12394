"""Few-shot methods that fine-tune a meta-learned initialization on the support of each task, and their N-way nets."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError
from torch import nn
from torch.nn import functional as F

from fewer.learning.adam import adam_step
from fewer.methods import Client, SearchSpace
from fewer.methods.fewshot import FewShot
from fewer.models import EncoderHead, Task, Weights, load_weights, split_net
from fewer.models.split import feature_width


class FineTuned(FewShot):
    """A method that meta-learns an initialization and fine-tunes it on the support of each task."""

    tunable: ClassVar[SearchSpace] = {**FewShot.tunable, "fine_tune_lr": (0.03, 0.1, 0.3, 1.0, 3.0)}

    fine_tune_lr: PositiveFloat = 0.01
    """Learning rate of fine-tuning on a support (α_ft)."""
    fine_tune_steps: PositiveInt = 1
    """Fine-tuning steps in training."""
    adapt_steps: PositiveInt | None = None
    """Fine-tuning steps on a task of novel classes. [default: fine_tune_steps]"""
    first_order: bool = False
    """Drop second derivatives from the meta-gradient."""
    zero_head: bool = False
    """Start each task with a zero N-way head. Otherwise meta-steps train the head too, although their mean over all
    class orders is 0."""

    @model_validator(mode="after")
    def _check_train_way(self) -> Self:
        if self.train_way and self.train_way < self.way and not self.zero_head:
            problem = f"a learned head has train_way = {self.train_way} classes, and a novel task way = {self.way}"
            raise PydanticCustomError("train_way", f"{problem}; raise train_way or set zero_head = true")
        return self

    def meta_step(
        self, weights: Weights, gradients: Weights, first: Weights, second: Weights, step: int, lr: float
    ) -> tuple[Weights, Weights, Weights]:
        """One Adam step with weight decay on the meta-learned weights. Returns the weights and both moments.

        With `zero_head`, the head stays at zero (as in Kao, Chiu, Chen, ICLR 2022). If all rows of the head are equal,
        permuting the classes of a task permutes the rows of the head's meta-gradient and changes nothing else. The mean
        over all permutations is the mean row in every row. It is 0, because adding the same vector to all rows changes
        no probability.
        """
        gradients = {
            name: gradient + self.weight_decay * weights[name]
            for name, gradient in gradients.items()
            if not (self.zero_head and name.startswith("head."))
        }
        return adam_step(weights, gradients, first, second, step, lr)


def n_way_net(task: Task, net: nn.Module, way: int) -> EncoderHead:
    """The encoder of `net` with a new N-way head."""
    return EncoderHead(split_net(net)[0], feature_width(task, net), way).to(task.device)


def load_n_way_net(client: Client, model: Weights, way: int) -> EncoderHead:
    """An N-way net with these weights."""
    net = n_way_net(client.task, client.net(client.initial_weights()), way)
    load_weights(net, model)
    return net


def resize_head(weights: Weights, way: int) -> Weights:
    """The weights of an N-way net with the first `way` rows of its head; missing rows are 0.

    Classes come in random order, so no row belongs to a class, and the first rows are as good as any others.
    """
    return {
        name: F.pad(tensor[:way], (0, 0) * (tensor.ndim - 1) + (0, way - len(tensor[:way])))
        if name.startswith("head.")
        else tensor
        for name, tensor in weights.items()
    }


def zero_head(net: EncoderHead) -> EncoderHead:
    """Sets the head to zero, so that one fine-tuning step moves each class's row towards its mean feature."""
    with torch.no_grad():
        for parameter in net.head.parameters():
            parameter.zero_()
    return net
