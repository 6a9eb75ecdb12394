"""Methods that share some weights of the net and keep the others on each client: FedBN, FedPer, LG-FedAvg, FedRep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fewer.methods.context import Client
from fewer.methods.fedavg import FedAvg
from fewer.methods.method import ModelState, PersonalMethod
from fewer.models import Task, Weights, get_weights
from fewer.runtime import on_client


class PersonalParts(PersonalMethod[ModelState], FedAvg):
    """FedAvg on the shared weights. Each client keeps the others, and so has a personal model."""

    @abstractmethod
    def shared_names(self, net: nn.Module) -> set[str]:
        """The names of the shared weights."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial values of the shared weights."""
        shared = self.shared_names(task.net())
        return ModelState({name: tensor for name, tensor in task.initial_weights(seed).items() if name in shared})

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains the shared weights with the client's own ones; stores the latter and returns the former."""
        net = self.personal_model(model, client)
        self.fit(net, client)
        weights = get_weights(net)
        client.store.put("own", {name: tensor for name, tensor in weights.items() if name not in model})
        return {"model": {name: weights[name] for name in model}, "size": len(client.train)}

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The shared weights with the client's own ones; before its first round, with the initial ones."""
        return client.net({**client.initial_weights(), **(client.store.get("own") or {}), **shared})


def part_names(net: nn.Module, part: str) -> set[str]:
    """The names of all weights in the `encoder` or the `head` of a net."""
    return {name for name in net.state_dict() if name.startswith(f"{part}.")}


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Keeps the parameters and the running statistics of a module constant in the block."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for name, tensor in module.named_buffers():
            tensor.copy_(buffers[name])
