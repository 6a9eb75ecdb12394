"""MetaFed: a ring of federations without a server.

Chen, Lu, Qin, Wang, Xie: MetaFed: Federated Learning among Federations with Cyclic Knowledge Distillation for
Personalized Healthcare, 2022, Algorithms 1 and 2, Eqs 2 to 4. Every federation ends with a model of
its own. A message goes round the ring: the model of the one before is the teacher of the next.

Stage I, common knowledge (Algorithm 1): a federation whose own model does well on its validation samples distills the
teacher into it (Eq 3 with λ₀), one whose model does not takes the teacher's weights over, but for its normalization
layers, and trains them. Stage II, personalization (Algorithm 2): the last model f goes round once more, unchanged,
and each federation distills it into its own with a λ of its own (Eq 4), or none if f is worth nothing there.

The last of `rounds` is Stage II, the others are Stage I. Departures: Eq 2's square is the mean over features, not the
sum, so that λ means the same for all nets; a federation takes a fixed number of steps, not epochs; what it keeps is
the best of all its models on its validation samples (Section 4.1: they "select the best model"), the later one where
they are equally often right and its loss is smaller; l_t1 is 1 where nothing else is set, so that Stage I always takes
over and Stage II distills: better than the paper's 0.6 in first runs (docs/metafed.md); in the ablation without
Stage I, where there is no f, the first federation's own model takes its place, and Stage II is repeated for as many
rounds.

Beyond the paper, its future work: a federation can be a group of clients with a star method of its own inside
(`federations`, `inside`); federations can have different nets (`nets`), whose features are compared through a learned
linear map, and which are never taken over; messages are sealed for the next federation, one that does not answer is
passed over, and a model that is damaged is refused, so that the one before it goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from torch import nn

from fewer.data import Data
from fewer.data.federations import federations
from fewer.errors import SettingError
from fewer.learning import Counts
from fewer.methods.base import Client, Method, PersonalMethod, Scores
from fewer.methods.federation import BEGIN, ClientGroup, Federation, Single, Teacher, Work, with_model, with_net
from fewer.methods.registry import find
from fewer.models import Task, Weights, finite, is_norm, parts_of
from fewer.registry import METHODS
from fewer.runtime import Clients, Unable, on_client, on_ring
from fewer.wire import Codec, Coded, Number, Refused

Share = Annotated[float, Field(ge=0, le=1)]
OWN = "own"
"""Under this name a federation's store has its model, the best one, and how they came about."""
ABSURD = 1e4
"""Mean loss of a model that is broken: none that has learned anything is as bad, whatever it is judged on."""
STARS = ("fedavg", "fedprox", "fedbn", "local", "fedmk", "fedgen", "feddistill")
"""Methods that train a model of the federation's own net, from one that is given: these can work inside."""


@dataclass(frozen=True)
class HoldersState:
    """All that the carrier knows: who holds a model that can be passed on, the last one last."""

    holders: list[int]


@METHODS.register("metafed")
class MetaFed(PersonalMethod):
    """Federations in a ring teach each other, one model a hop; each ends with its own, and there is no server."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "lr": (0.01, 0.03, 0.1, 0.3),
        "distill_threshold": (0.6, 0.9, 1.0),
    }

    cohort: PositiveInt | None = None
    """How many federations are part of a round, drawn anew each time; by default all."""
    lr: PositiveFloat = 0.1
    """Step size of training."""
    local_steps: PositiveInt = 20
    """Steps of a federation in a round; of a group of clients, of each member in each round inside."""
    batch_size: PositiveInt = 32
    """Samples in a step."""
    distill_weight: NonNegativeFloat = 1.0
    """How strongly a teacher's features are followed (λ₀)."""
    distill_threshold: NonNegativeFloat = 1.0
    """Own validation accuracy above which Stage I distills a teacher; up to it the teacher is taken over (l_t1)."""
    ignore_threshold: Share = 0.5
    """Validation accuracy below which a common model that is no better than the own one is not followed (l_t2)."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of a federation by itself before the first round; by default as many as in a round."""
    stages: Literal["both", "accumulate", "personalize"] = "both"
    """Stage I and II, or one of them in all rounds."""
    transfer: Literal["distill", "fine-tune"] = "distill"
    """Whether to learn from a teacher by distillation or, always, by taking it over."""
    keep_norms: bool = True
    """Whether a federation keeps its normalization layers when it takes a model over."""
    nets: Annotated[tuple[str, ...], BeforeValidator(lambda x: x.split(",") if isinstance(x, str) else x)] = ()
    """Nets of the federations along the ring, over and over (cnn,lenet5); by default the model for all."""
    federations: PositiveInt | None = None
    """In how many federations the clients stand; by default each is one by itself."""
    inner_method: str = "fedavg"
    """The star method inside a federation of clients."""
    inner_rounds: PositiveInt = 1
    """Rounds inside for each time a federation trains."""
    inner_options: dict[str, Any] = Field({})
    """Settings of the star method, besides those it shares with this one."""
    sealed: bool = True
    """Whether models are sealed for the next federation, so that who carries them cannot read them."""
    codec: Codec = "float32"
    """How models are written on the wire."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """The threshold counts only where there is a choice between distilling and taking over."""
        chooses = self.transfer == "distill" and self.stages != "personalize"
        return {name: grid for name, grid in self.tunable.items() if chooses or name != "distill_threshold"}

    # --- the ring ---------------------------------------------------------------------------------------------

    def prepare_data(self, data: Data) -> Data:
        """Clients in federations, if so set."""
        return data if self.federations is None else federations(data, self.federations)

    def init(self, task: Task, seed: int) -> HoldersState:
        """Nobody holds anything yet."""
        parts_of(task.net())
        for net in self.nets:
            made = with_net(task, net).net().eval()
            try:
                made(torch.zeros(1, *task.shape, device=task.device))
            except RuntimeError as error:
                raise SettingError(f"nets: {net} does not take inputs of shape {task.shape}") from error
        self.star()
        return HoldersState([])

    def round(self, state: HoldersState, clients: Clients) -> HoldersState:
        """Once round the ring."""
        ring = self.sample_cohort(clients)
        if clients.round == 1:
            clients.ask(ring, self.begin, returns={})
        personal = self.stages == "personalize" or (self.stages == "both" and clients.round == self.rounds)
        return HoldersState(
            clients.relay(ring, self.personalize if personal else self.accumulate, state.holders, self.sealed)
        )

    def sample_cohort(self, clients: Clients) -> list[int]:
        """All federations, or some, in the order of the ring."""
        return sorted(clients.sample(len(clients) if self.cohort is None else self.cohort))

    # --- a federation -----------------------------------------------------------------------------------------

    @on_client
    def begin(self, client: Client) -> dict[str, Any]:
        """Algorithm 1, line 2: a model of its own. One that is not there now does so when it first takes a model."""
        self.own(client)
        return {}

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        """Algorithm 1, lines 4 to 10: distill the model that came, or take it over; pass on what comes of it."""
        if model is not None:
            self.fits(client, model, net)
        own = self.own(client)
        if model is None:  # the first of the ring: there is nothing to learn from yet
            return self.letter(client, own["model"])
        federation = self.federation(client)
        able = accuracy(federation.judge(own["model"], self.net(client))) > self.distill_threshold
        if net != self.net(client) or (able and self.transfer == "distill"):
            found = federation.study(own["model"], Teacher(model, net, self.distill_weight))
            self.keep(client, federation, own, found, weight=self.distill_weight)
        else:
            found = federation.local_train(self.mixed(client, model, own["model"]), "taken")
            self.keep(client, federation, own, found, taken=own["taken"] + 1)
        return self.letter(client, found)

    @on_ring(stream="personalise")
    def personalize(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        """Algorithm 2: learn from the common model as much as it is worth here; pass it on as it came."""
        if model is not None:
            self.fits(client, model, net)
        own = self.own(client)
        federation = self.federation(client)
        if model is None:
            model, net = own["model"], self.net(client)
        common, mine = (
            accuracy(federation.judge(model, net)),
            accuracy(federation.judge(own["model"], self.net(client))),
        )
        weight = adapted(self.distill_weight, common, mine, self.ignore_threshold)
        taken = own["taken"]
        if net != self.net(client) or self.transfer == "distill":
            found = federation.study(own["model"], Teacher(model, net, weight))
        else:
            found = federation.local_train(self.mixed(client, model, own["model"]), "taken")
            taken += 1
        self.keep(client, federation, own, found, weight=weight, taken=taken)
        return {"model": Coded(model, self.codec), "net": net}

    # --- its pieces -------------------------------------------------------------------------------------------

    def own(self, client: Client) -> dict[str, Any]:
        """What the federation has; if that is nothing yet, a model trained on its own samples."""
        kept: dict[str, Any] | None = client.store.get(OWN)
        if kept is not None:
            return kept
        steps = self.local_steps if self.warmup_steps is None else self.warmup_steps
        federation = self.federation(client, steps)
        model = with_model(client, self.net(client)).initial()
        if steps:
            model = federation.local_train(model, BEGIN)
        nothing = {"correct": -1, "loss": 0.0, "weight": 0.0, "taken": 0, "bytes": {}}
        return self.keep(client, federation, nothing, model)

    def keep(
        self, client: Client, federation: Federation, own: Mapping[str, Any], model: Weights, **facts: Any
    ) -> dict[str, Any]:
        """Remember a new model, and of all models the best on validation samples.

        Unable where it is broken: by the rate, or by the model that came. The ring finds out which.
        """
        count = federation.judge(model, self.net(client))
        if count.loss > ABSURD * count.total or not finite(model):
            raise Unable(f"its training diverged (rate {self.lr:g})")
        better = (count.correct, -count.loss) >= (own["correct"], -own["loss"])
        best = {"best": model, "correct": count.correct, "loss": count.loss} if better else {}
        bytes_inside = Counter(own["bytes"]) + (federation.bytes if isinstance(federation, ClientGroup) else Counter())
        kept = {**own, **facts, "model": model, **best, "bytes": dict(bytes_inside)}
        client.store.put(OWN, kept)
        return kept

    def letter(self, client: Client, model: Weights) -> dict[str, Any]:
        """What goes to the next federation."""
        return {"model": Coded(model, self.codec), "net": self.net(client)}

    def fits(self, client: Client, model: Weights, net: str) -> None:
        """Refused where this is no model of a net of the ring."""
        if net not in (self.nets or ("",)):
            raise Refused(f"a model of a net that is not of this ring: {str(net)[:50]!r}")
        if not isinstance(model, dict):
            raise Refused("a model that is none")
        for name, tensor in with_model(client, net).net(model).state_dict().items():
            if model[name].dtype != tensor.dtype:
                raise Refused(f"weights do not fit the model: {name} is of {model[name].dtype}")

    def mixed(self, client: Client, model: Weights, own: Weights) -> Weights:
        """The model that came, with the federation's own normalization layers."""
        norms = is_norm(with_net(client.task, self.net(client)).net()) if self.keep_norms else set()
        return {name: own[name] if name in norms else tensor for name, tensor in model.items()}

    def net(self, client: Client) -> str:
        """The net of this federation; '' is the task's."""
        return self.nets[client.id % len(self.nets)] if self.nets else ""

    def federation(self, client: Client, steps: int | None = None) -> Federation:
        """One client, or a group with a star method inside."""
        work = Work(self.lr, steps or self.local_steps, self.batch_size, self.codec)
        if self.federations is None:
            return Single(client, self.net(client), work)
        return ClientGroup(client, self.net(client), work, self.star(steps), self.inner_rounds)

    def star(self, steps: int | None = None) -> Method:
        """The star method inside, with the settings that it shares with this one."""
        kind = find(self.inner_method)
        if kind.name not in STARS:
            raise SettingError(
                f"inner_method = {self.inner_method}: it does not work there (allowed: {', '.join(STARS)})"
            )
        same = {
            "lr": self.lr,
            "local_steps": steps or self.local_steps,
            "batch_size": self.batch_size,
            "codec": self.codec,
        }
        shared = {name: value for name, value in same.items() if name in kind.model_fields}
        try:
            return kind(**{**shared, "rounds": self.inner_rounds, **self.inner_options})
        except ValidationError as error:
            first = error.errors()[0]
            what = ".".join(map(str, first["loc"]))
            raise SettingError(f"inner_options: {kind.name}: {what}: {first['msg'].lower()}") from error

    # --- what comes of it -------------------------------------------------------------------------------------

    def broadcast(self, state: HoldersState) -> Weights:
        """Nothing: models are where they were made."""
        return {}

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The federation's best model; before its first round, the initial one."""
        context = with_model(client, self.net(client))
        kept = client.store.get(OWN)
        return context.net(kept["best"] if kept else context.initial())

    def report(self, state: HoldersState, clients: Clients, data: Data) -> Scores:
        """Once: also what λ each federation came to, how often it took a model over, and the bytes inside it."""
        told = clients.ask(clients.eval_cohort(), self.tell, returns=TOLD)
        ring = {str(answer.client): dict(answer.fields) for answer in told}
        return super().report(state, clients, data) | {"ring": ring}

    @on_client
    def tell(self, client: Client) -> dict[str, Any]:
        """How this federation fared."""
        own = client.store.get(OWN) or {"weight": 0.0, "taken": 0, "bytes": {}}
        bytes_inside = own["bytes"]
        return {
            "weight": float(own["weight"]),
            "taken": own["taken"],
            "up": bytes_inside.get("up", 0),
            "down": bytes_inside.get("down", 0),
        }


TOLD = {"weight": Number(float, 0), "taken": Number(int, 0), "up": Number(int, 0), "down": Number(int, 0)}


def accuracy(counts: Counts) -> float:
    """Share of right answers."""
    return counts.correct / counts.total


def adapted(weight: float, common: float, own: float, poor: float) -> float:
    """λ of a federation (Algorithm 2, lines 4 to 8, and Eq 4), from the validation accuracies of f and of its own."""
    if common <= own and common < poor:
        return 0.0
    return float(weight * 10 ** (min(1.0, 5 * (common - own)) - 1))
