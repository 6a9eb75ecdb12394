"""FedAvg with fine-tuning: each client trains the global model a little on its own samples before using it.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage: Federated Evaluation of On-device Personalization, 2019. The rounds
are those of FedAvg. A client's personal model is the global model after local steps. No message carries it.

Departures: those of FedAvg. A client takes a fixed number of steps with the learning rate of local training.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt
from torch import nn

from fewer.learning import draw_batches, sgd, task_loss
from fewer.methods import Client, ModelState, PersonalMethod
from fewer.methods.fedavg import FedAvg, LocalTraining
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime.streams import global_streams


@METHODS.register("fedavg-ft")
class FedAvgFT(PersonalMethod[ModelState], FedAvg):
    """FedAvg whose clients fine-tune the global model on their own data before they use it."""

    has_global_model: ClassVar[bool] = True
    joins_by_training: ClassVar[bool] = False

    ft_steps: PositiveInt | None = None
    """Fine-tuning steps of a client. [default: local_steps]"""

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The global model after `ft_steps` steps on the client's samples. A client without samples takes none."""
        net = client.net(shared)
        fine_tune(net, client, self, self.ft_steps or self.local_steps, self.lr)
        return net


def fine_tune(net: nn.Module, client: Client, method: LocalTraining, steps: int, lr: float) -> None:
    """Takes `steps` steps on the client's samples, if it has any, in place, as the method's local training does."""
    samples = client.data.train
    if len(samples):
        indices = draw_batches(len(samples), steps, method.batch_size, client.stream("fine-tune"))
        with global_streams(client.seed, client.round, client.id, "fine-tune"):  # of dropout
            sgd(net, samples.batches(indices), lr, loss=task_loss(client.task), optimizer=method)
