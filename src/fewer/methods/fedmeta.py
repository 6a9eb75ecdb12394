"""FedMeta: MAML, FOMAML and Meta-SGD over clients.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Algorithm 1
and Eqs 2 and 3. What is learned is an algorithm φ: an initialization θ (MAML), or θ and a step size α for each weight
(Meta-SGD). A client takes inner steps θ_u = θ − α ∘ ∇L_S(θ) on its support and sends g_u, the gradient of its query
loss L_Q(θ_u) by φ; the server takes one step of Adam with the mean of them. A new client adapts in the same way.

Departures: the text says that a client sends its "test loss", which can only mean g_u; Adam is the server's and
keeps its moments from round to round, inner steps are plain gradient descent (Appendix A.2 has Adam as "local
optimizer"); clients count by size (Appendix A.2) or, with `weights = uniform`, alike (Algorithm 1, line 9); there may
be more than one inner step, and all of them are differentiated; α begins at the same `inner_rate` everywhere; running
statistics of batch norm, which have no gradient, are averaged.

Beyond the paper: with `local_steps` a client takes so many steps of gradient descent on its query loss by itself, each
on a new division of its samples, and θ moves by the mean way they went: to FedMeta what FedAvg is to FedSGD. α, whose
gradient is far smaller, is still the server's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn

from fewer.data import Samples
from fewer.learning import draw_batches, weighted_mean
from fewer.learning.adam import adam
from fewer.learning.adapt import Batch, LearningRate, learnable, meta_gradient
from fewer.learning.flops import MAX_FLOPS
from fewer.methods.base import MAX_SIZE, Client
from fewer.methods.new_clients import NewClients, descend, everything
from fewer.models import Task, Weights, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Codec, Coded, Number

ALPHA = "α "
"""Before the name of a weight: its step size."""


@dataclass(frozen=True)
class FedMetaState:
    """The algorithm φ, and what Adam remembers."""

    algorithm: Weights
    """θ by name and, for Meta-SGD, α as 'α name'."""
    first: Weights
    """Adam's first moment, of all that learns."""
    second: Weights
    step: int
    flops: int


@METHODS.register("fedmeta")
class FedMeta(NewClients):
    """Clients send the gradient of how well they do after adapting; what is learned is where to adapt from, and how."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "meta_lr": (0.001, 0.003, 0.01, 0.03),
        "inner_lr": (0.03, 0.1, 0.3),
    }

    algorithm: Literal["maml", "fomaml", "meta-sgd"] = "maml"
    """What is learned, and how: MAML, MAML without second derivatives, or MAML with learned step sizes."""
    inner_lr: PositiveFloat = 0.1
    """Step size of the inner steps (α); of meta-sgd, the one to begin with."""
    inner_steps: PositiveInt = 1
    """Inner steps in training."""
    adapt_steps: NonNegativeInt | None = None
    """Inner steps of a new client; by default as many as in training."""
    meta_lr: PositiveFloat = 0.003
    """Step size of the server's Adam (β)."""
    local_steps: PositiveInt | None = None
    """Steps of meta-learning of a client before it answers; by default it sends one gradient, as in the paper."""
    local_lr: PositiveFloat = 0.3
    """Their step size."""
    clip_norm: PositiveFloat | None = None
    """Longest gradient of θ that a client uses; a longer one is shortened. Many local steps need it. [default: none]"""
    weighting: Literal["size", "uniform"] = "size"
    """Whether clients count by their number of samples or alike."""
    batch_size: PositiveInt | None = None
    """Samples drawn from the support for each inner step of training; by default all."""
    queries: PositiveInt | None = None
    """Samples drawn from the queries in a round; by default all."""
    codec: Codec = "float32"
    """How the algorithm and its gradient are written on the wire."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """With local steps, it is their step size that counts."""
        search_space = {"local_lr": (0.1, 0.3, 1.0), **self.tunable}
        return {
            name: grid for name, grid in search_space.items() if name != ("meta_lr" if self.local_steps else "local_lr")
        }

    def init(self, task: Task, seed: int) -> FedMetaState:
        """Line 3: θ, and for Meta-SGD α; Adam remembers nothing yet."""
        theta = task.initial(seed)
        learns = {name: theta[name] for name in learnable(task.net())}
        if self.algorithm == "meta-sgd":
            learns |= {ALPHA + name: torch.full_like(tensor, self.inner_lr) for name, tensor in learns.items()}
        nothing = {name: torch.zeros_like(tensor) for name, tensor in learns.items()}
        return FedMetaState({**theta, **learns}, nothing, nothing, 0, 0)

    def round(self, state: FedMetaState, clients: Clients) -> FedMetaState:
        """Lines 5 to 9: distribute φ, collect g_u, φ ← Adam(φ, Σ (n_u / n) g_u)."""
        fixed = {name: tensor for name, tensor in state.algorithm.items() if name not in state.first}
        answers = clients.ask(
            self.sample_cohort(clients),
            self.local_train,
            algorithm=Coded(state.algorithm, self.codec),
            returns={
                "gradient": state.first,
                "buffers": fixed,
                "size": Number(int, 1, MAX_SIZE),
                "flops": Number(int, 0, MAX_FLOPS),
            },
        )
        shares = [answer["size"] if self.weighting == "size" else 1 for answer in answers]
        found = weighted_mean([answer["gradient"] for answer in answers], shares)
        flops = state.flops + sum(answer["flops"] for answer in answers)
        buffers = weighted_mean([answer["buffers"] for answer in answers], shares)
        step = state.step + 1
        algorithm, first, second = adam(state.algorithm, found, state.first, state.second, step, self.meta_lr)
        if self.local_steps:
            algorithm |= {name: state.algorithm[name] - way for name, way in found.items() if ALPHA not in name}
        return FedMetaState({**algorithm, **buffers}, first, second, step, flops)

    @on_client(stream="train")
    def local_train(self, client: Client, algorithm: Weights) -> dict[str, Any]:
        """Lines 11 to 18, and what an answer needs besides."""
        net = client.net(self.initialization(algorithm)).train()
        draw = client.stream("samples")
        with self.tally(client) as tally:
            found = (self.way if self.local_steps else self.gradient)(client, net, algorithm, draw)
        return {
            "gradient": Coded(found, self.codec),
            "buffers": {name: tensor for name, tensor in weights_of(net).items() if name not in found},
            "size": len(self.samples(client)),
            "flops": tally.flops,
        }

    def gradient(self, client: Client, net: nn.Module, algorithm: Weights, draw: torch.Generator) -> Weights:
        """Lines 13 to 17: adapt on the support; the gradient of the query loss by φ."""
        support, queries = self.halves(client, draw)
        theta = {name: algorithm[name] for name in learnable(net)}
        inner, outer = self.inner_batches(support, draw), self.query_batch(queries, draw)
        found = meta_gradient(net, theta, inner, outer, self.rates(algorithm), first_order=self.algorithm == "fomaml")
        theta = found.weights
        if self.clip_norm is not None:
            length = torch.stack([slope.norm() for slope in theta.values()]).norm()
            theta = {name: slope * (self.clip_norm / length).clamp(max=1) for name, slope in theta.items()}
        if self.algorithm != "meta-sgd":
            return theta
        return theta | {ALPHA + name: tensor for name, tensor in found.rates.items()}

    def way(self, client: Client, net: nn.Module, algorithm: Weights, draw: torch.Generator) -> Weights:
        """θ − θ_u, with θ_u after some steps of descent on the query loss; of α the mean gradient on the way."""
        assert self.local_steps
        phi = algorithm
        passed = []
        for _ in range(self.local_steps):
            slopes = self.gradient(client, net, phi, draw)
            passed.append({name: slope for name, slope in slopes.items() if ALPHA in name})
            phi = phi | {name: phi[name] - self.local_lr * slopes[name] for name in slopes if ALPHA not in name}
        went = {name: algorithm[name] - phi[name] for name in learnable(net)}
        return went | weighted_mean(passed, [1] * len(passed))

    def inner_batches(self, support: Samples, draw: torch.Generator) -> list[Batch]:
        """What each inner step uses."""
        if self.batch_size is None:
            return everything(support, self.inner_steps)
        return list(support.batches(draw_batches(len(support), self.inner_steps, self.batch_size, draw)))

    def query_batch(self, queries: Samples, draw: torch.Generator) -> Batch:
        """What the adapted model is tried on."""
        if self.queries is None or self.queries >= len(queries):
            return queries.slice(0, len(queries))
        return queries.pick(torch.randperm(len(queries), generator=draw)[: self.queries])

    # A new client.

    def broadcast(self, state: FedMetaState) -> Weights:
        """All of φ."""
        return state.algorithm

    def global_weights(self, state: FedMetaState) -> Weights:
        """θ, which is a model of its own before anyone adapts it."""
        return self.initialization(state.algorithm)

    def initialization(self, shared: Weights) -> Weights:
        """θ"""
        return {name: tensor for name, tensor in shared.items() if not name.startswith(ALPHA)}

    def rates(self, shared: Weights) -> LearningRate:
        """α"""
        if self.algorithm != "meta-sgd":
            return self.inner_lr
        return {name.removeprefix(ALPHA): tensor for name, tensor in shared.items() if name.startswith(ALPHA)}

    def adapt(self, net: nn.Module, support: Samples, shared: Weights) -> None:
        """θ_u = θ − α ∘ ∇L_S(θ), as often as is set."""
        steps = self.inner_steps if self.adapt_steps is None else self.adapt_steps
        descend(net, everything(support, steps), self.rates(shared))
