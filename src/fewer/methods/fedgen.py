"""FedGen: FedAvg in which a generator of features passes the knowledge of all clients on to each of them.

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, Algorithm 1. A model
f is a head h on an encoder. p̂(y) is the fraction of class y in the label counts that clients send.

- Server (Eq 4): the generator G learns features that the ensemble of client heads h_k recognizes, for y from p̂:

      CE(Σ_k s_k(y) h_k(G(noise, y)), y) + diversity

  Eq 4 has 1/K for s_k(y). Here s_k(y) is client k's share of all samples of class y, as in the released code: a client
  that never saw a class has no vote on it.
- Client (Eq 5): for its own samples (x, y), and ŷ from p̂:

      CE(f(x), y) + α CE(h(G(noise, ŷ)), ŷ) + β KL(h(G(noise, y)) ‖ f(x))

  The KL term (its left side is a constant) and the decay of α = β by 0.98 per round come from the released code.

Departures:

- The released code has another term, generator against averaged model, with weight 0. It is left out.
- The defaults suit lr = 0.1, where the model does not train with the paper's α = β = 10. With lr = 0.01 it does.
- The generator is untrained in the first round, so clients train as in FedAvg.
- Adam restarts in each round: the state holds weights, not moments.
- Otherwise those of FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewer.learning.generator import GeneratorOutput, build_generator, train_generator
from fewer.methods import MAX_SAMPLES, Client, ModelState, Needs, SearchSpace, Server
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.models import Task, Weights, all_finite, get_weights, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client, on_server
from fewer.runtime.streams import global_streams
from fewer.wire import Shaped

HEAD = "head."


@dataclass(frozen=True)
class FedGenState(ModelState):
    """The model, the generator and the label distribution."""

    generator: Weights
    class_weights: Tensor
    """p̂: the fraction of each class (classes); all 0 as long as it is unknown."""


@METHODS.register("fedgen")
class FedGen(LocalTraining[FedGenState]):
    """FedAvg whose clients also learn from generated features; the generator is trained on all clients' heads."""

    needs: ClassVar[Needs] = "classes"

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "generator_weight": (0.1, 0.3, 1.0, 10.0)}

    generator_weight: NonNegativeFloat = 0.3
    """Weight of both generator terms in the clients' loss (α = β)."""
    generator_decay: float = Field(default=0.98, ge=0, le=1)
    """Factor on that weight per round."""
    generator_lr: PositiveFloat = 0.003
    """Learning rate of the generator (Adam)."""
    generator_steps: PositiveInt = 50
    """Generator steps per round."""
    generator_batch_size: int = Field(default=128, ge=2)
    """Features per generator step."""
    generator_output: GeneratorOutput = "encoder"
    """Range of generated features: that of the encoder (≥ 0 if it ends with ReLU), or all numbers."""

    def init(self, task: Task, seed: int) -> FedGenState:
        """The initial model and an untrained generator."""
        with global_streams(seed, "generator"):
            net = task.net()
            split_net(net)  # fails early if the net has no encoder and head
            generator = build_generator(task, net, self.generator_output)
        return FedGenState(task.initial_weights(seed), get_weights(generator), torch.zeros(task.classes))

    def round(self, state: FedGenState, clients: Clients) -> FedGenState:
        """Clients train with the generator; the server averages models and trains the generator on their heads."""
        answers = train_models(
            clients,
            self.sample_cohort(clients),
            self.train_with_generator,
            state.model,
            {"counts": Shaped((len(state.class_weights),), torch.int64)},
            generator=state.generator,
            class_weights=state.class_weights,
        )
        models = [answer["model"] for answer in answers]
        counts = torch.stack([answer["counts"] for answer in answers]).clamp(0, MAX_SAMPLES).double()
        model = average_by_size(answers)
        class_weights = (counts.sum(0) / counts.sum().clamp(min=1)).float()
        if not class_weights.any():  # no client sent a plausible count
            return FedGenState(model, state.generator, class_weights)
        heads = {name: torch.stack([w_k[name] for w_k in models]) for name in model if name.startswith(HEAD)}
        shares = (counts / counts.sum(0).clamp(min=1)).float()
        (result,) = clients.map_on_server(
            self.update_generator,
            [{}],
            generator=state.generator,
            heads=heads,
            shares=shares,
            class_weights=class_weights,
        )
        if not result["finite"]:
            self.warn(clients, "the generator diverged, so the last one is kept; lower -o generator_lr")
        return FedGenState(model, result["generator"], class_weights)

    @on_client(stream="learn", exact=("class_weights",))
    def train_with_generator(
        self, client: Client, model: Weights, generator: Weights, class_weights: Tensor
    ) -> dict[str, Any]:
        """Trains on the client's samples and on generated features (Eq 5)."""
        net = client.net(model)
        if class_weights.any():
            head = split_net(net)[1]
            generator_net = (
                build_generator(client.task, net, self.generator_output, generator).eval().requires_grad_(False)
            )
            stream = client.stream("generator")
            weight = self.generator_weight * self.generator_decay ** (client.round - 1)

            def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                scores = net(x)
                noise, sampled_y = generator_net.draw(len(y), stream, class_weights)
                generated_loss = F.cross_entropy(head(generator_net(noise, sampled_y)), sampled_y)
                with torch.no_grad():
                    teacher = head(generator_net(generator_net.draw(len(y), stream)[0], y)).log_softmax(1)
                kl = F.kl_div(scores.log_softmax(1), teacher, reduction="batchmean", log_target=True)
                return F.cross_entropy(scores, y) + weight * (generated_loss + kl)  # Eq 5

            self.train_net(net, client, loss=loss)
        else:
            self.fit(net, client)
        counts = torch.bincount(client.train.labels, minlength=len(class_weights))
        return {"model": get_weights(net), "size": len(client.train), "counts": counts}

    @on_server(stream="generate")
    def update_generator(
        self, server: Server, generator: Weights, heads: Weights, shares: Tensor, class_weights: Tensor
    ) -> dict[str, Any]:
        """Trains the generator on the ensemble of client heads (Eq 4)."""
        net = server.task.net()
        head = split_net(net)[1].eval().requires_grad_(False)
        generator_net = build_generator(server.task, net, self.generator_output, generator)
        weights_by_client = [
            {name.removeprefix(HEAD): tensor[index] for name, tensor in heads.items()} for index in range(len(shares))
        ]
        stream = server.stream("generator")

        def classify(features: Tensor, y: Tensor) -> Tensor:
            """Σ_k s_k(y) h_k(features)"""
            logits = [functional_call(head, weights, (features,)) for weights in weights_by_client]
            return torch.stack([share[y, None] * h_k for share, h_k in zip(shares, logits, strict=True)]).sum(0)

        train_generator(
            generator_net,
            classify,
            class_weights,
            stream,
            steps=self.generator_steps,
            lr=self.generator_lr,
            batch_size=self.generator_batch_size,
        )
        weights = get_weights(generator_net)
        finite = all_finite(weights)
        return {"generator": weights if finite else generator, "finite": finite}
