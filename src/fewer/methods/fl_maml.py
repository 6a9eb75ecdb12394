"""FL-MAML: MAML on each client, averaged on the server. A baseline of F2L.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning (F2L), KDD 2023, Section 4.2 and Appendix C.2. Clients take
meta-steps of MAML (Finn, Abbeel, Levine, ICML 2017) on tasks of base classes; the server averages their models. A task
of novel classes is solved by the model after fine-tuning on its support. `local-maml` averages nothing: each client
trains its own model.

Departures:

- Meta-steps use Adam, which restarts in every round.
- The head starts at zero. With `zero_head` it stays there, like F2L's.
- The net is F2L's server encoder with an N-way head, without the Transformer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from fewer.data.episodes import Episode
from fewer.learning.adapt import adapt_weights, meta_gradient, trainable_weights
from fewer.methods.context import Client
from fewer.methods.fewshot import LocalOnly, select_encoder
from fewer.methods.fine_tuned import FineTuned, load_n_way_net, n_way_net, resize_head, zero_head
from fewer.models import EncoderHead, Task, Weights, get_weights
from fewer.registry import METHODS


@METHODS.register("fl-maml")
class FLMAML(FineTuned):
    """MAML on each client; the server averages the initializations."""

    def initial_weights(self, task: Task, seed: int) -> Weights:
        """The task's initial encoder and a zero N-way head."""
        weights = get_weights(zero_head(n_way_net(task, task.net(), self.task_size(training=True)[0])))
        return weights | select_encoder(task.initial_weights(seed))

    def fit(self, client: Client, model: Weights) -> Weights:
        """Takes one meta-step per task, by Adam, and returns the new initialization."""
        net = load_n_way_net(client, model, self.task_size(training=True)[0]).train()
        theta = {name: tensor.clone() for name, tensor in trainable_weights(net).items()}
        first = second = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        generator = client.stream("tasks")
        for step in range(1, self.tasks + 1):
            gradients = self.task_gradient(net, theta, model, self.draw_task(client.train, generator))
            theta, first, second = self.meta_step(theta, gradients, first, second, step, self.lr)
        return get_weights(net) | theta

    def task_gradient(self, net: EncoderHead, theta: Weights, received: Weights, task: Episode) -> Weights:
        """The gradient of the query loss after fine-tuning. Override this to change the loss."""
        support, query = (task.support_x, task.support_y), (task.query_x, task.query_y)
        return meta_gradient(
            net, theta, [support] * self.fine_tune_steps, query, self.fine_tune_lr, self.first_order
        ).weights

    def task_solver(self, client: Client, model: Weights, best: bool) -> EncoderHead:
        """The model as received, with a head for the classes of a novel task."""
        return load_n_way_net(client, resize_head(model, self.way), self.way).eval()

    def predict(self, solver: EncoderHead, task: Episode) -> dict[str, Tensor]:
        """Fine-tunes on the support and classifies the queries."""
        batches = [(task.support_x, task.support_y)] * (self.adapt_steps or self.fine_tune_steps)
        tuned = adapt_weights(solver, trainable_weights(solver), batches, self.fine_tune_lr)
        with torch.no_grad():
            return {"accuracy": functional_call(solver, tuned, (task.query_x,)).argmax(1)}


@METHODS.register("local-maml")
class LocalMAML(LocalOnly, FLMAML):
    """MAML on each client alone; nothing is shared."""
