"""FL-MAML: MAML at each client, averaged. F2L's baseline.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning (F2L), KDD 2023, Section 4.2 and Appendix C.2: clients take
meta-steps of MAML (Finn, Abbeel, Levine, ICML 2017) on tasks of base classes, the server averages their models; a
task of novel classes is answered by the model after fine-tuning on its support. Departures: meta-steps are Adam's,
which begins anew in each round; the head begins at zero (`zero_head`: it stays there, as F2L's does). The model is
F2L's server encoder with a head, without its Transformer. `local-maml` averages nothing: each client has its own model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewer.data.episodes import Episode
from fewer.learning.adapt import adapted, learnable, meta_gradient
from fewer.methods.base import Client
from fewer.methods.fewshot import FineTuned, Unshared, small_net, small_start
from fewer.models import Split, Task, Weights, load_weights, weights_of
from fewer.registry import METHODS


@METHODS.register("fl-maml")
class FLMAML(FineTuned):
    """MAML at each client; the server averages where they fine-tune from."""

    def begin(self, task: Task, seed: int) -> Weights:
        """An encoder and a head for N classes."""
        return small_start(task, seed, self.way)

    def learn(self, client: Client, model: Weights) -> Weights:
        """A step of Adam for each task."""
        net = small_net(client, model, self.way).train()
        theta = {name: tensor.clone() for name, tensor in learnable(net).items()}
        first = second = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        draw = client.stream("tasks")
        for step in range(1, self.tasks + 1):
            slopes = self.slopes(net, theta, model, self.task(client.train, draw))
            theta, first, second = self.meta_step(theta, slopes, first, second, step, self.lr)
        return weights_of(net) | theta

    def slopes(self, net: Split, theta: Weights, received: Weights, task: Episode) -> Weights:
        """The gradient of the query loss after fine-tuning: what relatives change."""
        support, query = (task.support_x, task.support_y), (task.query_x, task.query_y)
        return meta_gradient(
            net, theta, [support] * self.fine_tune_steps, query, self.fine_tune_lr, self.first_order
        ).weights

    def prepare(self, client: Client, model: Weights, kept: bool) -> Split:
        """The model as it was sent."""
        return small_net(client, model, self.way).eval()

    def answer(self, ready: Split, task: Episode) -> dict[str, Tensor]:
        """Fine-tune on the support, classify the queries."""
        before = weights_of(ready)
        batches = [(task.support_x, task.support_y)] * (self.adapt_steps or self.fine_tune_steps)
        tuned = adapted(ready, learnable(ready), batches, self.fine_tune_lr)
        load_weights(ready, {**before, **tuned})
        with torch.no_grad():
            classes = ready(task.query_x).argmax(1)
        load_weights(ready, before)
        return {"accuracy": classes}


@METHODS.register("local-maml")
class LocalMAML(Unshared, FLMAML):
    """MAML at each client alone; nothing is shared."""
