"""Centralized: one net trains on the samples of all clients together. The ceiling of a federated comparison.

It is no federated method: it needs all samples in one place. So it runs in simulation only, and `fewer server` refuses
it. Client 0 holds the training samples of all clients and trains alone. The bytes of a run are those of the model that
it receives and returns, not those of the samples that clients would have to send.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

from fewer.data import ArrayData, Data
from fewer.data.partition import Parts
from fewer.errors import SettingError
from fewer.methods import ModelState
from fewer.methods.fedavg import FedAvg, train_models
from fewer.registry import METHODS
from fewer.runtime import Clients


@METHODS.register("centralized")
class Centralized(FedAvg):
    """Trains one net on the samples of all clients together, as a ceiling. In simulation only."""

    simulation_only: ClassVar[bool] = True

    local_steps: PositiveInt = 400
    """Steps per round."""
    cohort: PositiveInt | None = None
    """Without effect: the samples of all clients are used."""

    def prepare_data(self, data: Data) -> Data:
        """Moves the training samples of all clients to client 0. Every client keeps its test samples."""
        if not isinstance(data, ArrayData):
            raise SettingError(f"{self.name} needs data in arrays, and '{data.name}' loads each client on demand")
        offsets = np.full(len(data) + 1, len(data.train.rows))
        offsets[0] = 0
        return replace(data, train=Parts(data.train.rows, offsets))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """Continues training on all samples."""
        (answer,) = train_models(clients, [0], self.local_train, state.model)
        return ModelState(answer["model"])
