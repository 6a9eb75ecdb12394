"""Local: every party learns alone. The baseline that says what federation is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fewer.methods.base import Party, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, weights_of
from fewer.runtime import Parties, on_party


@dataclass(frozen=True)
class Nothing:
    """The coordinator of Local knows nothing."""


class Local(PersonalMethod, FedAvg):
    """Parties train their own models on their own data, as often as they would be asked; nothing is shared."""

    name: ClassVar[str] = "local"

    def start(self, task: Task, seed: int) -> Any:
        """There is no global model."""
        return Nothing()

    def round(self, state: Any, parties: Parties) -> Any:
        """The active parties train. What is sent is the order to do so, and that it was done."""
        parties.ask(self.choose(parties), self.practise, returns={})
        return state

    @on_party
    def practise(self, me: Party) -> dict[str, Any]:
        """Go on with the party's own model."""
        net = self.personal(me, {})
        self.descend(net, me)
        me.store.put("model", weights_of(net))
        return {}

    def shared(self, state: Any) -> Weights:
        """Nothing."""
        return {}

    def personal(self, me: Party, model: Weights) -> nn.Module:
        """The party's own model; before its first round, the initial one."""
        return me.net(me.store.get("model") or me.initial())
