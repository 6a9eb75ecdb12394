"""FedMedian: FedAvg with the coordinate-wise median instead of the mean, so that a few corrupt clients do no harm.

Yin, Chen, Kannan, Bartlett: Byzantine-Robust Distributed Learning, ICML 2018, Algorithm 1 (option I).
"""

from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt

from fewer import Client, Clients, Method, on_client
from fewer.learning import draw_batches, sgd
from fewer.methods import ModelState
from fewer.models import Task, Weights, get_weights


class FedMedian(Method[ModelState]):
    """The coordinate-wise median of locally trained models."""

    lr: PositiveFloat = 0.1
    """Learning rate of local training (η)."""
    local_steps: PositiveInt = 20
    """SGD steps per client and round."""
    batch_size: PositiveInt = 32
    """Samples in a step."""
    tunable = {"lr": (0.01, 0.03, 0.1, 0.3)}

    def init(self, task: Task, seed: int) -> ModelState:
        return ModelState(task.initial_weights(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        cohort = self.sample_cohort(clients)
        answers = clients.ask(cohort, self.local_train, model=state.model, returns={"model": state.model})
        # answers.absent lists the missing clients and why
        models = [answer["model"] for answer in answers]
        return ModelState(
            {name: torch.stack([model[name] for model in models]).median(0).values for name in state.model}
        )

    @on_client
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        net = client.net(model)
        indices = draw_batches(len(client.train), self.local_steps, self.batch_size, client.stream("batches"))
        sgd(net, client.train.batches(indices), self.lr)
        return {"model": get_weights(net)}
