"""FedROD: one encoder with two heads, for everyone and for the client.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022, Algorithm 1
(linear personalized head). Encoder and generic head minimize the balanced risk, here with balanced softmax:

    ℓ_BSM = −log( n_y exp(g_y) / Σ_c n_c exp(g_c) ),        n_c the client's number of samples of class c

and the server averages them. The personalized head h stays on the client. It minimizes the cross-entropy of g + h, with
features and generic logits g as constants. A client predicts with g + h; the global model predicts with g alone.

Departures:

- Those of FedAvg. The personalized head starts at zero, so that a personal model starts as the generic one.
- A class that the client does not hold has n_c = 0, so it is not in the client's denominator.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.methods import Client, ModelState, Needs, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.methods.fedavg_calibrated import count_classes
from fewer.models import Task, Weights, get_weights, load_weights
from fewer.models.split import split_net
from fewer.registry import METHODS
from fewer.runtime import on_client


@METHODS.register("fedrod")
class FedROD(PersonalMethod[ModelState], FedAvg):
    """FedAvg with balanced softmax for a generic model, and a personal head on top of it."""

    has_global_model: ClassVar[bool] = True

    needs: ClassVar[Needs] = "classes"

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial generic model. The net must have an encoder and a head."""
        split_net(task.net())
        return super().init(task, seed)

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains the generic model with ℓ_BSM, and the personalized head on its constants."""
        net = client.net(model)
        both = TwoHeads(*split_net(net), self._personal_head(net, client))
        classes = client.task.classes
        log_counts = count_classes(client).float().log()  # −∞ for n_c = 0

        def loss(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = both.encoder(x)
            generic = both.head(z)
            personal = generic.detach() + both.personal(z.detach())
            return F.cross_entropy(generic[:, :classes] + log_counts, y) + F.cross_entropy(personal, y)

        self.train_net(both, client, loss=loss)
        client.store.put("head", get_weights(both.personal))
        return {"model": get_weights(net), "size": len(client.train)}

    def _personal_head(self, net: nn.Module, client: Client) -> nn.Module:
        """The client's personalized head; zero before its first round."""
        head = copy.deepcopy(split_net(net)[1])
        stored = client.store.get("head")
        load_weights(head, stored or {name: torch.zeros_like(tensor) for name, tensor in head.state_dict().items()})
        return head

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """g + h"""
        net = client.net(shared)
        return TwoHeads(*split_net(net), self._personal_head(net, client))


class TwoHeads(nn.Module):
    """Adds the scores of two heads on one encoder."""

    def __init__(self, encoder: nn.Module, head: nn.Module, personal: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head, self.personal = encoder, head, personal

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        z = self.encoder(x)
        scores: Tensor = self.head(z) + self.personal(z)
        return scores
