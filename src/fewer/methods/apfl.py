"""APFL: a personal mixture of a local and the global model.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020, Algorithm 1. Client i predicts
with v̄ = α v + (1 − α) w, where w is its copy of the global model and v stays on the client. In every local step

    w ← w − η ∇f_i(w)          v ← v − η ∇_v f_i(v̄)          (∇_v f_i(v̄) = α ∇f_i(v̄))
    α ← α − η_α ⟨v − w, ∇f_i(v̄)⟩, kept in 0 … 1

and the server averages the w.

Departures:

- Those of FedAvg. α starts at 0.5 and has its own learning rate; the paper's theory fixes one α for all steps.
- Buffers of v̄ come from its own training.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fewer.methods import Client, ModelState, PersonalMethod, SearchSpace
from fewer.methods.fedavg import FedAvg
from fewer.models import Weights, get_weights, load_weights
from fewer.registry import METHODS
from fewer.runtime import on_client


@METHODS.register("apfl")
class APFL(PersonalMethod[ModelState], FedAvg):
    """FedAvg in which each client mixes the global model with its private model, and learns the mixture."""

    has_global_model: ClassVar[bool] = True

    tunable: ClassVar[SearchSpace] = {**FedAvg.tunable, "alpha_lr": (0.01, 0.1, 1.0)}

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Initial share of the client's own model (α)."""
    alpha_lr: NonNegativeFloat = 0.1
    """Learning rate of the share (η_α)."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains w, v and α together; returns w."""
        net, mixed = client.net(model), client.net(model)
        own = client.store.get("own") or {"model": client.initial_weights(), "alpha": self.alpha}
        alpha, buffers = float(own["alpha"]), dict(own["model"])
        names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        v: list[Tensor] = [buffers[name].clone() for name in names]
        w, bars = ([dict(part.named_parameters())[name] for name in names] for part in (net, mixed))
        step_w, step_v = (self.make_step(list(weights), self.lr, self.local_steps) for weights in (w, v))
        load_weights(mixed, {**model, **buffers})
        for x, y in self.augmented(self.training_samples(client).batches(self.batch_indices(client)), client):
            with torch.no_grad():
                for bar, own_weight, global_weight in zip(bars, v, w, strict=True):
                    bar.copy_(alpha * own_weight + (1 - alpha) * global_weight)
            of_w = torch.autograd.grad(client.task.loss(net(x), y), w)
            of_bar = torch.autograd.grad(client.task.loss(mixed(x), y), bars)
            with torch.no_grad():
                slope = sum(float(((a - b) * g).sum()) for a, b, g in zip(v, w, of_bar, strict=True))  # ⟨v − w, ∇f(v̄)⟩
                step_w(of_w)
                step_v(tuple(alpha * gradient for gradient in of_bar))
            alpha = min(1.0, max(0.0, alpha - self.alpha_lr * slope))
        personal = {**get_weights(mixed), **dict(zip(names, v, strict=True))}
        client.store.put("own", {"model": personal, "alpha": alpha})
        return {"model": get_weights(net), "size": len(client.train)}

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """v̄ = α v + (1 − α) w; before the client's first round, w."""
        own = client.store.get("own")
        net = client.net(shared if own is None else own["model"])
        if own is not None:
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter.copy_(own["alpha"] * parameter + (1 - own["alpha"]) * shared[name])
        return net
