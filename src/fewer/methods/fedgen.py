"""FedGen: a generator of features carries what all clients know to each of them.

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, Algorithm 1. A model
is a head h on an encoder; p̂(y) is the share of class y in the label counts that clients send.

- Server (Eq 4): the generator G learns to make features that the ensemble of the clients' heads h_k recognizes,
  CE(Σ_k s_k(y) h_k(G(noise, y)), y) + diversity, for y from p̂. Where Eq 4 has 1/K, s_k(y) is client k's share of all
  samples of class y, as in the released form: a client that never saw a class has no say in it.
- Client (Eq 5): CE(f(x), y) + α CE(h(G(noise, ŷ)), ŷ) + β KL(h(G(noise, y)) ‖ f(x)), with ŷ from p̂ and (x, y) its own
  samples. The KL term, whose left side is held fixed, and the fading of α = β by 0.98 a round are the released form's.

Departures:

- The released form's term that sets the generator against the averaged model is left out; its weight there is 0.
- The defaults suit a local rate of 0.1, at which the model does not learn with the paper's α = β = 10. At 0.01 it does.
- In the first round there is no generator that has learned anything, so that clients train as in FedAvg.
- Adam starts anew in each round: the state holds weights, no moments.
- As FedAvg otherwise.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning import sgd, weighted_mean
from fewer.learning.generator import generator_for, train_generator
from fewer.methods.base import MAX_SIZE, Client, ModelState, Server
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, finite, load_weights, parts_of, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client, on_server
from fewer.runtime.streams import global_streams
from fewer.wire import Coded, Number, Shaped

_LOG = logging.getLogger("fewer")
HEAD = "head."


@dataclass(frozen=True)
class Generating(ModelState):
    """The model, the generator, and how often each class is to be generated."""

    generator: Weights
    chances: Tensor
    """p̂ (classes); all 0 before anything is known."""


@METHODS.register("fedgen")
class FedGen(FedAvg):
    """FedAvg whose clients also learn from features that a generator, trained on all their heads, makes up."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {**FedAvg.tunable, "generator_weight": (0.1, 0.3, 1.0, 10.0)}

    generator_weight: NonNegativeFloat = 0.3
    """Strength of both terms of the generator at the clients (α = β)."""
    generator_decay: float = Field(default=0.98, ge=0, le=1)
    """What that strength is multiplied by in each round."""
    generator_lr: PositiveFloat = 0.003
    """Step size of Adam on the generator."""
    generator_steps: PositiveInt = 50
    """Steps of the generator in a round."""
    generator_batch_size: int = Field(default=128, ge=2)
    """Features in such a step."""

    def init(self, task: Task, seed: int) -> Generating:
        """The initial model and an untrained generator."""
        with global_streams(seed, "generator"):
            generator = generator_for(task, task.net())
        return Generating(task.initial(seed), weights_of(generator), torch.zeros(task.classes))

    def round(self, state: Any, clients: Clients) -> Generating:
        """Clients train with the generator's help; models are averaged, and the generator learns from their heads."""
        answers = clients.ask(
            self.sample_cohort(clients),
            self.learn,
            model=Coded(state.model, self.codec),
            generator=Coded(state.generator, self.codec),
            chances=state.chances,
            returns={
                "model": state.model,
                "size": Number(int, 1, MAX_SIZE),
                "counts": Shaped((len(state.chances),), torch.int64),
            },
        )
        models = [answer["model"] for answer in answers]
        counts = torch.stack([answer["counts"] for answer in answers]).clamp(0, MAX_SIZE).double()
        model = weighted_mean(models, [answer["size"] for answer in answers])
        chances = (counts.sum(0) / counts.sum().clamp(min=1)).float()
        if not chances.any():  # no count that came can be true
            return Generating(model, state.generator, chances)
        heads = {name: torch.stack([one[name] for one in models]) for name in model if name.startswith(HEAD)}
        shares = (counts / counts.sum(0).clamp(min=1)).float()
        (learned,) = clients.map_on_server(
            self.generate, [{}], generator=state.generator, heads=heads, shares=shares, chances=chances
        )
        if not learned["sound"]:
            _LOG.warning(
                f"{self.name}, round {clients.round}: its generator ran off to infinity and stays as it was "
                "(smaller steps: -o generator_rate)"
            )
        return Generating(model, learned["generator"], chances)

    @on_server
    def generate(
        self, server: Server, generator: Weights, heads: Weights, shares: Tensor, chances: Tensor
    ) -> dict[str, Any]:
        """Train the generator to be understood by the clients' heads."""
        net = server.task.net()
        head = parts_of(net)[1].eval().requires_grad_(False)
        maker = generator_for(server.task, net, generator)
        ensemble = [copy.deepcopy(head) for _ in shares]
        for number, member in enumerate(ensemble):
            load_weights(member, {name.removeprefix(HEAD): tensor[number] for name, tensor in heads.items()})
        stream = server.stream("generator")

        def says(features: Tensor, y: Tensor) -> Tensor:
            members = zip(shares, ensemble, strict=True)
            return torch.stack([share[y, None] * member(features) for share, member in members]).sum(0)

        train_generator(
            maker,
            says,
            chances,
            stream,
            steps=self.generator_steps,
            lr=self.generator_lr,
            batch=self.generator_batch_size,
        )
        learned = weights_of(maker)
        sound = finite(learned)
        return {"generator": learned if sound else generator, "sound": sound}

    @on_client
    def learn(self, client: Client, model: Weights, generator: Weights, chances: Tensor) -> dict[str, Any]:
        """Train on the client's own samples and on features from the generator."""
        net = client.net(model)
        if chances.any():
            head = parts_of(net)[1]
            maker = generator_for(client.task, net, generator).eval().requires_grad_(False)
            stream = client.stream("generator")
            weight = self.generator_weight * self.generator_decay ** (client.round - 1)

            def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                scores = net(x)
                noise, other = maker.draw(len(y), stream, chances)
                made_up = F.cross_entropy(head(maker(noise, other)), other)
                with torch.no_grad():
                    teacher = head(maker(maker.draw(len(y), stream)[0], y)).log_softmax(1)
                apart = F.kl_div(scores.log_softmax(1), teacher, reduction="batchmean", log_target=True)
                return F.cross_entropy(scores, y) + weight * (made_up + apart)

            sgd(net, client.train.batches(self.batch_indices(client)), self.lr, loss=loss)
        else:
            self.fit(net, client)
        counts = torch.bincount(client.train.labels, minlength=len(chances))
        return {"model": Coded(weights_of(net), self.codec), "size": len(client.train), "counts": counts}
