"""FedAvg with fine-tuning: each client trains the global model a little on its own samples before using it.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage: Federated Evaluation of On-device Personalization, 2019. The rounds
are those of FedAvg. A client's personal model is the global model after local steps. No message carries it.

Departures: those of FedAvg. A client takes a fixed number of steps with the learning rate of local training.
"""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from fewer.learning import draw_batches
from fewer.methods import Client, Context, ModelState, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime.streams import global_streams


@METHODS.register("fedavg-ft")
class FedAvgFT(PersonalMethod[ModelState], FedAvg):
    """FedAvg whose clients fine-tune the global model on their own data before they use it."""

    ft_steps: PositiveInt | None = None
    """Fine-tuning steps of a client. [default: local_steps]"""

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The fine-tuned model of a client; on the server, the global model."""
        return self.personal_model(shared, context) if isinstance(context, Client) else context.net(shared)

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The global model after `ft_steps` steps on the client's samples. A client without samples takes none."""
        net = client.net(shared)
        samples, steps = client.data.train, self.ft_steps or self.local_steps
        if len(samples):
            indices = draw_batches(len(samples), steps, self.batch_size, client.stream("fine-tune"))
            with global_streams(client.seed, client.round, client.id, "fine-tune"):  # of dropout
                self.train_net(net, client, samples.batches(indices))
        return net
