"""FL-MAML: MAML at each party, averaged. F2L's baseline.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning (F2L), KDD 2023, Section 4.2 and Appendix C.2: parties take
meta-steps of MAML (Finn, Abbeel, Levine, ICML 2017) on tasks of base classes, the coordinator averages their models; a
task of novel classes is answered by the model after fine-tuning on its support. Departures: meta-steps are Adam's,
which begins anew in each round; the head begins at zero. `local-maml` averages nothing: each party has its own model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from fewer.data.episodes import Episode
from fewer.learning.adam import adam
from fewer.learning.adapt import adapted, learnable, meta_gradient
from fewer.methods.base import Party
from fewer.methods.fewshot import FewShot, Unshared, small_net, small_start
from fewer.models import Split, Task, Weights, load_weights, weights_of


class FLMaml(FewShot):
    """MAML at each party; the coordinator averages where they fine-tune from."""

    name: ClassVar[str] = "fl-maml"
    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "rate": (0.001, 0.003, 0.01),
        "fine_rate": (0.03, 0.1, 0.3),
    }

    fine_rate: PositiveFloat = 0.01
    """Step size of fine-tuning on a support."""
    steps: PositiveInt = 1
    """Steps of fine-tuning in training."""
    adapt_steps: PositiveInt | None = None
    """Steps of fine-tuning on a task of novel classes; by default as many as in training."""
    order: Literal["exact", "first"] = "exact"
    """Whether meta-steps have second derivatives."""

    def begin(self, task: Task, seed: int) -> Weights:
        """An encoder and a head for N classes."""
        return small_start(task, seed, self.way)

    def learn(self, me: Party, model: Weights) -> Weights:
        """A step of Adam for each task."""
        net = small_net(me, model, self.way).train()
        theta = {name: tensor.clone() for name, tensor in learnable(net).items()}
        first = second = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        draw = me.stream("tasks")
        for step in range(1, self.tasks + 1):
            slopes = self.slopes(net, theta, model, self.task(me.train, draw))
            slopes = {name: slope + self.decay * theta[name] for name, slope in slopes.items()}
            theta, first, second = adam(theta, slopes, first, second, step, self.rate)
        return weights_of(net) | theta

    def slopes(self, net: Split, theta: Weights, received: Weights, task: Episode) -> Weights:
        """The gradient of the query loss after fine-tuning: what relatives change."""
        support, query = (task.support_x, task.support_y), (task.query_x, task.query_y)
        return meta_gradient(net, theta, [support] * self.steps, query, self.fine_rate, self.order == "exact").weights

    def prepare(self, me: Party, model: Weights, kept: bool) -> Split:
        """The model as it was sent."""
        return small_net(me, model, self.way).eval()

    def answer(self, ready: Split, task: Episode) -> dict[str, Tensor]:
        """Fine-tune on the support, classify the queries."""
        before = weights_of(ready)
        batches = [(task.support_x, task.support_y)] * (self.adapt_steps or self.steps)
        tuned = adapted(ready, learnable(ready), batches, self.fine_rate)
        load_weights(ready, {**before, **tuned})
        with torch.no_grad():
            classes = ready(task.query_x).argmax(1)
        load_weights(ready, before)
        return {"accuracy": classes}


class LocalMaml(Unshared, FLMaml):
    """MAML at each party alone; nothing is shared."""

    name: ClassVar[str] = "local-maml"
