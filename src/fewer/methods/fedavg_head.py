"""FedAvg from a head that follows from statistics: one round of another method, then rounds of FedAvg.

Legate et al. (NeurIPS 2023) start fine-tuning from the head of FedNCM, Fanì et al. (ICML 2024) from that of Fed3R, and
Goswami et al. (2025) from that of FedCOF. In round 1 clients send the statistics of features of the initial encoder.
From round 2 on, FedAvg trains the whole model; with a frozen encoder, the head.

The head's rows have norm 1. Fanì et al. calibrate the temperature of the softmax for them; `temperature` does this.

Departures: those of FedAvg and of the method in `head`. Classes that no client of round 1 holds keep their initial
weights.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, PositiveFloat, field_validator
from pydantic_core import PydanticCustomError

from fewer.errors import QuorumLost, SettingError
from fewer.methods import Client, ModelState, Needs, find
from fewer.methods.fedavg import FedAvg
from fewer.methods.head_only import HeadOnly, encode_samples, head_of, initial_head, write_head
from fewer.methods.registry import names_with
from fewer.models import Task
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client


@METHODS.register("fedavg-head")
class FedAvgHead(FedAvg):
    """FedAvg from the head of FedNCM, FedCOF, Fed3R or FedPFT, which round 1 computes."""

    needs: ClassVar[Needs] = "classes"

    head: str = "fedcof"
    """The method of round 1: fedncm, fedcof, fed3r or fedpft."""
    head_options: dict[str, Any] = Field(default_factory=dict)
    """Options of this method."""
    temperature: PositiveFloat = Field(default=1.0, json_schema_extra={"neutral": True})
    """Divides the head of round 1, whose rows have norm 1. With a frozen encoder, 0.1 keeps clients from unlearning it;
    if the encoder is trained, its gradients grow."""

    @field_validator("head")
    @classmethod
    def _check_head(cls, head: str) -> str:
        allowed = names_with(HeadOnly)
        if head not in allowed:
            raise PydanticCustomError("head", f"it computes no head (allowed: {', '.join(allowed)})")
        return head

    def head_method(self) -> HeadOnly:
        """The method of round 1."""
        method = find(self.head)(**{"cohort": self.cohort, **self.head_options})
        if not isinstance(method, HeadOnly):
            raise SettingError(f"head = {self.head} does not compute a head")
        return method

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial model."""
        initial_head(task, seed)
        self.head_method()
        return super().init(task, seed)

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        """Round 1 computes the head; the others are those of FedAvg."""
        if clients.round > 1:
            return super().round(state, clients)
        method, head = self.head_method(), head_of(state.model)
        cohort = list(range(len(clients))) if self.cohort is None else self.sample_cohort(clients)
        answers = method.ask_statistics(clients, cohort, self.send_statistics, head)
        if not answers:
            raise QuorumLost(f"round {clients.round}: no client sent valid statistics")
        statistics = method.merge(list(answers.values()))
        fitted = method.fit_head(statistics, head, clients)
        scaled = fitted._replace(weight=fitted.weight / self.temperature, bias=fitted.bias / self.temperature)
        return ModelState(write_head(state.model, scaled))

    @on_client
    def send_statistics(self, client: Client) -> dict[str, Any]:
        """The statistics of the client's training samples."""
        return self.head_method().summarize(*encode_samples(client), client)
