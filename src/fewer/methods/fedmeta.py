"""FedMeta: federated meta-learning with MAML, FOMAML and Meta-SGD.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Algorithm 1
and Eqs 2 and 3. Docstrings quote its lines. The server learns the parameters φ of an algorithm: an initialization θ
(MAML), or θ and one learning rate α per weight (Meta-SGD). On client u, with support set S and query set Q,

    θ_u ← θ − α ∘ ∇L_S(θ)        (line 15; for MAML, α is a number)
    g_u ← ∇_φ L_Q(θ_u)           (line 17; FOMAML drops the second derivatives)

The server updates φ with the mean of g_u (line 9). A new client adapts by line 15.

Departures:
- A client sends the gradient g_u. The text calls it "test loss", but line 17 computes a gradient.
- Line 9 takes a step of Adam, not of plain gradient descent. Its moments last from round to round. Inner steps are
  plain gradient descent (Appendix A.2 has Adam as "local optimizer").
- Clients are weighted by size (Appendix A.2), or equally with `weighting = uniform` (line 9).
- `inner_steps` may exceed 1; the gradient goes through all inner steps.
- α starts at `inner_lr` for every weight. The paper does not give a start for Meta-SGD.
- Running statistics of batch norm have no gradient; they are averaged.

Beyond the paper: with `local_steps`, a client takes several meta-steps, each on a new support/query split, and θ moves
by the mean of the clients' changes. This is to FedMeta what FedAvg is to FedSGD. The server still updates α, whose
gradient is far smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn

from fewer.data import Samples
from fewer.learning import draw_batches, weighted_mean
from fewer.learning.adam import adam_step
from fewer.learning.adapt import Batch, LearningRate, meta_gradient, trainable_weights
from fewer.learning.sgd import clip_gradients, draw_subset
from fewer.methods import MAX_SAMPLES, Client, SearchSpace
from fewer.methods.fedavg import average_field
from fewer.methods.new_clients import CountingState, NewClients, adapt_in_place, full_batches
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.runtime.flops import MAX_FLOPS
from fewer.wire import Number

ALPHA = "α "
"""Prefix of a weight's name: its inner learning rate."""


@dataclass(frozen=True)
class FedMetaState(CountingState):
    """The algorithm's parameters φ and the moments of Adam."""

    algorithm: Weights
    """φ: θ by name, and for Meta-SGD α as 'α name'."""
    first_moment: Weights
    """Adam's first moment of every learned tensor in φ."""
    second_moment: Weights
    step: int
    """Steps of Adam so far."""
    flops: int
    """Operations of the training clients so far, if they are counted."""

    @property
    def shared(self) -> Weights:
        """All of φ."""
        return self.algorithm


@METHODS.register("fedmeta")
class FedMeta(NewClients[FedMetaState]):
    """Clients send the gradient of their query loss after adaptation; the server learns the initialization."""

    tunable: ClassVar[SearchSpace] = {"meta_lr": (0.001, 0.003, 0.01, 0.03), "inner_lr": (0.03, 0.1, 0.3)}

    algorithm: Literal["maml", "fomaml", "meta-sgd"] = "maml"
    """MAML, FOMAML (MAML without second derivatives) or Meta-SGD (MAML with learned inner learning rates)."""
    inner_lr: PositiveFloat = 0.1
    """Learning rate of the inner steps (α). For meta-sgd, its initial value."""
    inner_steps: PositiveInt = 1
    """Inner steps in training."""
    adapt_steps: NonNegativeInt | None = None
    """Inner steps of a new client. [default: inner_steps]"""
    meta_lr: PositiveFloat = 0.003
    """Learning rate of the server's Adam (β)."""
    local_steps: PositiveInt | None = None
    """Meta-steps a client takes before it answers. [default: none; it sends one gradient, as in the paper]"""
    local_lr: PositiveFloat = 0.3
    """Learning rate of the local meta-steps."""
    clip_norm: PositiveFloat | None = None
    """Maximum norm of a client's gradient of θ; many local steps need it. [default: no clipping]"""
    weighting: Literal["size", "uniform"] = "size"
    """Weight clients by their number of samples (`size`) or equally (`uniform`)."""
    batch_size: PositiveInt | None = None
    """Samples drawn from the support set for each inner step of training. [default: all]"""
    queries: PositiveInt | None = None
    """Samples drawn from the query set in a round. [default: all]"""

    def search_space(self) -> SearchSpace:
        """Tunes `local_lr` instead of `meta_lr` if clients take local steps."""
        search_space = {"local_lr": (0.1, 0.3, 1.0), **self.tunable}
        unused = "meta_lr" if self.local_steps else "local_lr"
        return {name: grid for name, grid in search_space.items() if name != unused}

    # Run on the server: AlgorithmUpdate.

    def init(self, task: Task, seed: int) -> FedMetaState:
        """Line 3: initializes θ for MAML, or (θ, α) for Meta-SGD."""
        theta = task.initial_weights(seed)
        learned = {name: theta[name] for name in trainable_weights(task.net())}
        if self.algorithm == "meta-sgd":
            learned |= {ALPHA + name: torch.full_like(tensor, self.inner_lr) for name, tensor in learned.items()}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in learned.items()}
        return FedMetaState({**theta, **learned}, zeros, zeros, 0, 0)

    def round(self, state: FedMetaState, clients: Clients) -> FedMetaState:
        """Lines 5 to 9: distributes φ to a set U_t of clients, gets g_u, and updates φ ← φ − β Σ_u (n_u / n) g_u."""
        buffers = {name: tensor for name, tensor in state.algorithm.items() if name not in state.first_moment}
        answers = clients.ask(  # lines 6 to 8
            self.sample_cohort(clients),  # line 5: U_t
            self.local_train,
            algorithm=state.algorithm,
            returns={
                "gradient": state.first_moment,
                "buffers": buffers,
                "size": Number(int, 1, MAX_SAMPLES),
                "flops": Number(int, 0, MAX_FLOPS),
            },
        )
        client_weights = [answer["size"] if self.weighting == "size" else 1 for answer in answers]
        gradient = average_field(answers, "gradient", client_weights)  # Σ_u (n_u / n) g_u
        flops = state.flops + sum(answer["flops"] for answer in answers)
        buffers = average_field(answers, "buffers", client_weights)
        step = state.step + 1
        phi, first_moment, second_moment = adam_step(  # line 9
            state.algorithm, gradient, state.first_moment, state.second_moment, step, self.meta_lr
        )
        if self.local_steps:  # θ moves by the clients' mean change; only α takes the step of Adam
            phi |= {name: state.algorithm[name] - gradient[name] for name in gradient if ALPHA not in name}
        return FedMetaState({**phi, **buffers}, first_moment, second_moment, step, flops)

    # Run on client u: ModelTrainingMAML(θ) and ModelTrainingMetaSGD(θ, α).

    @on_client(stream="train", exact=("buffers",))
    def local_train(self, client: Client, algorithm: Weights) -> dict[str, Any]:
        """Lines 12 to 18: returns g_u; with local steps, the change of θ in place of its gradient."""
        net = client.net(self.initialization(algorithm)).train()
        generator = client.stream("samples")
        with self.count_flops_of(client) as counter:
            train = self.local_meta_steps if self.local_steps else self.compute_meta_gradient
            gradient = train(client, net, algorithm, generator)
        return {
            "gradient": gradient,
            "buffers": {name: tensor for name, tensor in get_weights(net).items() if name not in gradient},
            "size": len(self.client_samples(client)),
            "flops": counter.flops,
        }

    def compute_meta_gradient(
        self, client: Client, net: nn.Module, algorithm: Weights, generator: torch.Generator
    ) -> Weights:
        """Lines 13 to 17: g_u ← ∇_φ L_Q(θ_u), with θ_u ← θ − α ∘ ∇L_S(θ)."""
        support, queries = self.support_and_query(client, generator)  # line 13
        theta = {name: algorithm[name] for name in trainable_weights(net)}
        g_u = meta_gradient(  # lines 14 to 17
            net,
            theta,
            self.support_batches(support, generator),
            draw_subset(queries, self.queries, generator),
            self.inner_lrs(algorithm),
            first_order=self.algorithm == "fomaml",
            criterion=client.task.loss,
            inner_criterion=client.task.loss,
        )
        gradient = g_u.weights
        if self.clip_norm is not None:
            clip_gradients(self.clip_norm, tuple(gradient.values()))
        if self.algorithm != "meta-sgd":
            return gradient
        return gradient | {ALPHA + name: tensor for name, tensor in g_u.lrs.items()}

    def support_batches(self, support: Samples, generator: torch.Generator) -> list[Batch]:
        """One batch of the support set for each inner step."""
        if self.batch_size is None:
            return full_batches(support, self.inner_steps)
        return list(support.batches(draw_batches(len(support), self.inner_steps, self.batch_size, generator)))

    def local_meta_steps(
        self, client: Client, net: nn.Module, algorithm: Weights, generator: torch.Generator
    ) -> Weights:
        """Beyond the paper: several meta-steps on θ. Returns the change, θ before − θ after, and the mean ∇_α."""
        assert self.local_steps
        phi = algorithm
        alpha_gradients = []
        for _ in range(self.local_steps):
            g_u = self.compute_meta_gradient(client, net, phi, generator)
            alpha_gradients.append({name: tensor for name, tensor in g_u.items() if ALPHA in name})
            phi = phi | {name: phi[name] - self.local_lr * g_u[name] for name in g_u if ALPHA not in name}
        change = {name: algorithm[name] - phi[name] for name in trainable_weights(net)}
        return change | weighted_mean(alpha_gradients, [1] * len(alpha_gradients))

    # Deployment on a new client (Section 3.2).

    def initialization(self, shared: Weights) -> Weights:
        """θ"""
        return {name: tensor for name, tensor in shared.items() if not name.startswith(ALPHA)}

    def inner_lrs(self, shared: Weights) -> LearningRate:
        """α: `inner_lr`, or for Meta-SGD the learned learning rate of each weight."""
        if self.algorithm != "meta-sgd":
            return self.inner_lr
        return {name.removeprefix(ALPHA): tensor for name, tensor in shared.items() if name.startswith(ALPHA)}

    def adapt(self, net: nn.Module, support: Samples, shared: Weights, task: Task) -> None:
        """Line 15: θ_u ← θ_u − α ∘ ∇L_S(θ_u), `adapt_steps` times from θ, in place."""
        steps = self.inner_steps if self.adapt_steps is None else self.adapt_steps
        adapt_in_place(net, full_batches(support, steps), self.inner_lrs(shared), task.loss)
