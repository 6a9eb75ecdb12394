"""Methods that misbehave on purpose, and a progress callback that stops a run."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewer.methods import Client, ModelState
from fewer.methods.fedavg import FedAvg
from fewer.methods.local import Local
from fewer.models import Weights
from fewer.runtime import Answers, Clients, on_client
from fewer.wire import Number


class Deadly(FedAvg):
    """Kills the process in which one client trains, once."""

    victim: int = 0
    mark: str = ""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == self.victim and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_train(client, model)


class Sleepy(FedAvg):
    """One client is slow."""

    sleeper: int = 0
    nap: float = 0.6

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == self.sleeper:
            time.sleep(self.nap)
        return super().local_train(client, model)


class Buggy(FedAvg):
    """One client crashes, another reports a wrong size, a third sends NaN."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == 0:
            raise ZeroDivisionError("by design")
        answer = super().local_train(client, model)
        if client.id == 1:
            answer["size"] = -5
        if client.id == 2:
            answer["model"]["head.bias"][0] = torch.nan
        return answer


class Gambler(FedAvg):
    """Draws from every global generator, on clients and on the server."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        before = self._draw()
        answers = clients.ask(
            self.sample_cohort(clients), self.gamble, returns={"luck": state.model["head.bias"], "size": Number(int, 1)}
        )
        total = torch.stack([answer["luck"] for answer in answers]).sum(0)
        return ModelState({**state.model, "head.bias": total + before + self._draw()})

    @on_client
    def gamble(self, client: Client) -> dict[str, Any]:
        return {"luck": torch.rand(10) + self._draw(), "size": len(client.train)}

    def _draw(self) -> float:
        return float(np.random.rand()) + random.random() + float(torch.rand(()))


class Witness(FedAvg):
    """Collects all answers in SEEN_ANSWERS."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        answers = clients.ask(
            self.sample_cohort(clients),
            self.local_train,
            model=state.model,
            returns={"model": state.model, "size": Number(int, 1)},
        )
        SEEN_ANSWERS.append(answers)
        return state


SEEN_ANSWERS: list[Answers] = []


class SlowToScore(Local):
    """Trains quickly, but is slow to evaluate."""

    @on_client
    def score(self, client: Client, model: Weights, use_global_test: bool) -> dict[str, float]:
        time.sleep(2.2 if client.id == 0 else 0)
        return super().score(client, model, use_global_test)


class Stop(Exception):
    """Stops a run."""


class Stopping:
    """Stops a run after its second round."""

    def on_run_start(self, *_: Any) -> None: ...
    def on_answer(self, *_: Any) -> None: ...
    def on_round_end(self, metrics: Any) -> None:
        if metrics["round"] == 2:
            raise Stop
