"""FedMedian: FedAvg with the median of what clients send, coordinate by coordinate, so that a few liars do no harm.

Yin, Chen, Kannan, Bartlett: Byzantine-Robust Distributed Learning, ICML 2018, Algorithm 1 (option I).
"""

from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt

from fewer import Client, Clients, Method, on_client
from fewer.learning import draw_batches, sgd
from fewer.methods import ModelState
from fewer.models import Task, Weights, weights_of


class FedMedian(Method):
    """The coordinate-wise median of locally trained models."""

    lr: PositiveFloat = 0.1
    """Step size of local training (η)."""
    steps: PositiveInt = 20
    """Local steps in a round."""
    tunable = {"rate": (0.01, 0.03, 0.1, 0.3)}

    def init(self, task: Task, seed: int) -> ModelState:
        return ModelState(task.initial(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        answers = clients.ask(
            self.sample_cohort(clients), self.train, model=state.model, returns={"model": state.model}
        )  # answers.absent tells who is missing, and why
        return ModelState(
            {name: torch.stack([answer["model"][name] for answer in answers]).median(0).values for name in state.model}
        )

    @on_client
    def train(self, client: Client, model: Weights) -> dict[str, Any]:
        net = client.net(model)
        sgd(
            net,
            client.train.batches(draw_batches(len(client.train), self.steps, 32, client.stream("batches"))),
            self.lr,
        )
        return {"model": weights_of(net)}
