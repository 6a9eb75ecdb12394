"""Methods that misbehave on purpose, and a run that is stopped."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewer.methods import ModelState, Party
from fewer.methods.fedavg import FedAvg
from fewer.methods.local import Local
from fewer.models import Weights
from fewer.runtime import Answers, Parties, on_party
from fewer.wire import Number


class Deadly(FedAvg):
    """Kills the process in which one party trains, once."""

    victim: int = 0
    mark: str = ""

    @on_party
    def train(self, me: Party, model: Weights) -> dict[str, Any]:
        if me.id == self.victim and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(me, model)


class Sleepy(FedAvg):
    """One party takes its time."""

    sleeper: int = 0
    nap: float = 0.6

    @on_party
    def train(self, me: Party, model: Weights) -> dict[str, Any]:
        if me.id == self.sleeper:
            time.sleep(self.nap)
        return super().train(me, model)


class Buggy(FedAvg):
    """One party's code breaks; another one lies about its size; a third sends NaN."""

    @on_party
    def train(self, me: Party, model: Weights) -> dict[str, Any]:
        if me.id == 0:
            raise ZeroDivisionError("by design")
        answer = super().train(me, model)
        if me.id == 1:
            answer["size"] = -5
        if me.id == 2:
            answer["model"].value["head.bias"][0] = torch.nan
        return answer


class Gambler(FedAvg):
    """Draws from every global generator there is, at parties and at the coordinator."""

    def round(self, state: ModelState, parties: Parties) -> ModelState:
        before = self._draw()
        answers = parties.ask(
            self.choose(parties), self.gamble, returns={"luck": state.model["head.bias"], "size": Number(int, 1)}
        )
        total = torch.stack([answer["luck"] for answer in answers]).sum(0)
        return ModelState({**state.model, "head.bias": total + before + self._draw()})

    @on_party
    def gamble(self, me: Party) -> dict[str, Any]:
        return {"luck": torch.rand(10) + self._draw(), "size": len(me.train)}

    def _draw(self) -> float:
        return float(np.random.rand()) + random.random() + float(torch.rand(()))


class Witness(FedAvg):
    """Remembers what it was given."""

    def round(self, state: ModelState, parties: Parties) -> ModelState:
        answers = parties.ask(
            self.choose(parties),
            self.train,
            model=state.model,
            returns={"model": state.model, "size": Number(int, 1)},
        )
        SEEN.append(answers)
        return state


SEEN: list[Answers] = []


class SlowToScore(Local):
    """Trains in no time, but is slow to be measured."""

    @on_party
    def score(self, me: Party, model: Weights, everywhere: bool) -> dict[str, float]:
        time.sleep(2.2 if me.id == 0 else 0)
        return super().score(me, model, everywhere)


class Stop(Exception):
    """What stops a run."""


class Stopping:
    """Stops a run after its second round."""

    def begin(self, *_: Any) -> None: ...
    def answer(self, *_: Any) -> None: ...
    def round(self, figures: Any) -> None:
        if figures["round"] == 2:
            raise Stop
