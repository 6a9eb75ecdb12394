"""FedBABU: the federation trains the encoder only, and clients fine-tune.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022, Algorithm 1. The
head keeps its initial random weights in all rounds, on all clients, and is never sent. A client's personal model is the
net after fine-tuning on its samples.

Departures: those of FedAvg. Fine-tuning takes a fixed number of steps on the whole net (`fine_tune=net`, the paper's
default) or on the head alone, with its own learning rate.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat
from torch import nn

from fewer.methods import Client, ModelState, PersonalMethod, SearchSpace
from fewer.methods.fedavg import FedAvg
from fewer.methods.fedavg_ft import fine_tune
from fewer.methods.personal_parts import frozen, part_names
from fewer.models import Task, Weights, get_weights
from fewer.models.split import split_net
from fewer.registry import METHODS
from fewer.runtime import on_client


@METHODS.register("fedbabu")
class FedBABU(PersonalMethod[ModelState], FedAvg):
    """FedAvg on the encoder with a fixed random head; clients fine-tune the result."""

    joins_by_training: ClassVar[bool] = False
    tunable: ClassVar[SearchSpace] = {**FedAvg.tunable, "ft_lr": (0.003, 0.01, 0.03, 0.1)}

    ft_steps: NonNegativeInt = 20
    """Fine-tuning steps of a client."""
    ft_lr: PositiveFloat = 0.03
    """Learning rate of fine-tuning."""
    fine_tune: Literal["net", "head"] = "net"
    """What a client fine-tunes: the whole net, or the head alone."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial encoder. Clients know the initial head from the seed."""
        net = task.net()
        split_net(net)
        weights = task.initial_weights(seed)
        return ModelState({name: weights[name] for name in weights if name in part_names(net, "encoder")})

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains the encoder under the initial head; returns the encoder."""
        net = client.net({**client.initial_weights(), **model})
        with frozen(split_net(net)[1]):
            self.fit(net, client)
        weights = get_weights(net)
        return {"model": {name: weights[name] for name in model}, "size": len(client.train)}

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The encoder and the initial head, after fine-tuning on the client's samples, if it has any."""
        net = client.net({**client.initial_weights(), **shared})
        with frozen(split_net(net)[0]) if self.fine_tune == "head" else nullcontext():
            fine_tune(net, client, self, self.ft_steps, self.ft_lr)
        return net
