"""Private tensors of a client that must agree with the server's sum of them.

SCAFFOLD and FedDyn keep a tensor on each client, and the server keeps the mean of all of them. A client changes its
tensor and sends the change. If that answer is lost, the server's mean no longer belongs to the clients' tensors, and
training drifts or diverges. So a client keeps both versions until the server asks again and says which one it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fewer.methods.context import Client
from fewer.models import Weights, split_buffers
from fewer.runtime import Answers, Each

OLD, NEW = "confirmed", "unconfirmed"


def zeros_like_parameters(net: nn.Module, weights: Weights) -> Weights:
    """Zeros for all parameters of a net; buffers have none."""
    return {name: torch.zeros_like(tensor) for name, tensor in split_buffers(net, weights)[0].items()}


def last_counted(counted: dict[str, int], cohort: Sequence[int]) -> Each:
    """The field of a question that tells each client the last round in which the server counted its answer."""
    return Each({client: counted.get(str(client), 0) for client in cohort})


def count_answers(counted: dict[str, int], answers: Answers, round: int) -> dict[str, int]:
    """Returns the rounds of the last counted answers after this round."""
    return {**counted, **{str(answer.client): round for answer in answers}}


def load_confirmed(client: Client, last_round: int, like: Iterable[tuple[str, torch.Tensor]]) -> Weights:
    """Returns the client's tensors as the server counted them in `last_round`; zeros before that."""
    new = client.store.get(NEW)
    if new is not None and new["round"] == last_round:
        return dict(new["tensors"])
    return client.store.get(OLD) or {name: torch.zeros_like(tensor) for name, tensor in like}


def store_unconfirmed(client: Client, confirmed: Weights, changed: Weights) -> None:
    """Keeps the old tensors and the new ones, until the server says whether it counted this round's answer."""
    client.store.put(OLD, confirmed)
    client.store.put(NEW, {"round": client.round, "tensors": changed})
