"""MetaFed: a ring of federations without a server.

Chen, Lu, Qin, Wang, Xie: MetaFed: Federated Learning among Federations with Cyclic Knowledge Distillation for
Personalized Healthcare, 2022, Algorithms 1 and 2, Eqs 2 to 4. Federation i ends with its own model f_i. The models
travel around the ring: f_i is the teacher of federation i + 1.

- Stage I, common knowledge accumulation (Algorithm 1). A federation whose own model does well on its validation samples
  distills the received model into it (Eq 3 with λ₀). Otherwise it adopts the received weights, except for its
  normalization layers, and trains them.
- Stage II, personalization (Algorithm 2). The last model is the common model f. It travels around the ring once more,
  unchanged. Each federation distills f into its own model with its own λ (Eq 4), which is 0 if f is poor there.

Departures:

- Stage I takes a fixed number of rounds instead of "until convergence": the last of `rounds` is Stage II, all others
  are Stage I.
- The square in Eq 2 is a mean over features, not a sum, so that λ means the same for all nets.
- A federation trains for a fixed number of steps, not epochs.
- A federation without validation samples uses its training samples for validation.
- A federation keeps its best model on validation samples (Section 4.1: "select the best model"; `keep=last` turns this
  off). Ties in accuracy go to the lower loss, and then to the later model.
- l_t1 is 1 by default, so that Stage I always adopts and Stage II distills. In first runs this was better than the
  paper's 0.6 (docs/methods/metafed.md).
- Without Stage I there is no f. Then the first federation's own model takes its role, and Stage II runs in all rounds.
- A client that joins after training (`unseen_clients`) learns from f alone: first by Stage I, and then by Stage II.

Beyond the paper, which names these as future work:

- A federation can be a group of clients with its own inner method (`federations`, `inner_method`).
- Federations can have different nets (`nets`). A learned linear map compares their features, and models of another net
  are never adopted.
- Messages are sealed for the next federation. The ring skips a federation that does not answer. If a federation refuses
  a damaged model, it gets the model before that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import nn

from fewer.data import Data
from fewer.data.federations import group_clients
from fewer.errors import SettingError
from fewer.learning import LocalOptimizer
from fewer.methods import Client, Group, Method, Needs, PersonalMethod, Scores, SearchSpace, State
from fewer.methods.fedavg import LocalTraining
from fewer.methods.federation import (
    WARM_UP,
    ClientGroup,
    Federation,
    GroupHandlers,
    SingleClient,
    Teacher,
    replace_client_net,
    replace_task_net,
)
from fewer.methods.registry import find
from fewer.models import Task, Weights, all_finite, norm_weight_names, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, Unable, on_client, on_ring, stream
from fewer.wire import Number, Refused

Fraction = Annotated[float, Field(ge=0, le=1)]
FEDERATION = "federation"
"""Store key of a federation's record: its current model, its best model, and statistics."""
NEW_RECORD: Mapping[str, Any] = {
    "best_correct": -1,
    "best_loss": 0.0,
    "distill_weight": 0.0,
    "adopted": 0,
    "inner_bytes": {},
}
"""The record of a federation without a model."""
DIVERGED_LOSS = 1e4
"""Mean loss above which training counts as diverged."""
INNER_METHODS = ("fedavg", "fedprox", "fedbn", "local", "fedmk", "fedgen", "feddistill")
"""Methods that can run inside a federation: they train the federation's own net from a given model."""


@dataclass(frozen=True)
class RingState(State):
    """What the relay knows about the ring."""

    holders: list[int]
    """The federations that hold a model to pass on, the latest last."""


@METHODS.register("metafed")
class MetaFed(PersonalMethod[RingState], LocalTraining[RingState]):
    """Federations in a ring teach each other, one model per hop. Each ends with its own model; there is no server."""

    group: ClassVar[Group] = "sequential"

    needs: ClassVar[Needs] = "classes"

    tunable: ClassVar[SearchSpace] = {"lr": (0.01, 0.03, 0.1, 0.3), "distill_threshold": (0.6, 0.9, 1.0)}

    cohort: PositiveInt | None = None
    """Federations in the ring of each round, drawn anew every time. [default: all]"""
    local_steps: PositiveInt = 20
    """Training steps of a federation in a round; in a group, of each member in each inner round."""
    distill_weight: NonNegativeFloat = 1.0
    """Weight of the feature loss (λ₀)."""
    distill_threshold: NonNegativeFloat = 1.0
    """A federation whose own model has a higher validation accuracy distills in Stage I; others adopt (l_t1)."""
    ignore_threshold: Fraction = 0.5
    """Validation accuracy below which Stage II ignores a common model no better than the federation's own (l_t2)."""
    warmup_steps: NonNegativeInt | None = None
    """Training steps of each federation alone, before the first round. [default: local_steps]"""
    stages: Literal["both", "accumulate", "personalize"] = "both"
    """Stages I and II, or one of them in all rounds."""
    transfer: Literal["distill", "fine-tune"] = "distill"
    """Learn from the received model by distillation, or always adopt it and fine-tune."""
    keep_norms: bool = True
    """Keep the federation's normalization layers when it adopts a model."""
    nets: Annotated[tuple[str, ...], BeforeValidator(lambda x: x.split(",") if isinstance(x, str) else x)] = ()
    """Nets of the federations in ring order, repeated as needed (cnn,lenet5). [default: the experiment's model]"""
    federations: PositiveInt | None = None
    """Number of federations to group the clients into. [default: each client is a federation]"""
    inner_method: str = "fedavg"
    """The method inside a federation of several clients."""
    inner_rounds: PositiveInt = 1
    """Inner rounds each time a federation trains."""
    inner_options: dict[str, Any] = Field(default={})
    """Options of the inner method, in addition to those it shares with this one."""
    keep: Literal["last", "best"] = Field(default="best", json_schema_extra={"neutral": True})
    """The model that a federation uses: its last one, or its best one on its validation samples after any training."""
    ring_seed: NonNegativeInt | None = Field(default=None, json_schema_extra={"neutral": True})
    """Shuffles the order of the federations in the ring. [default: by number]"""
    sealed: bool = True
    """Encrypt models for the next federation, so that the relay cannot read them."""

    def search_space(self) -> SearchSpace:
        """Omits the distillation threshold if it has no effect."""
        uses_threshold = self.transfer == "distill" and self.stages != "personalize"
        return {name: grid for name, grid in self.tunable.items() if uses_threshold or name != "distill_threshold"}

    # --- the ring ---------------------------------------------------------------------------------------------

    def prepare_data(self, data: Data) -> Data:
        """Groups the clients into federations, if `federations` is set."""
        return data if self.federations is None else group_clients(data, self.federations)

    def init(self, task: Task, seed: int) -> RingState:
        """Checks the nets and the inner method, and returns a ring in which no federation holds a model."""
        split_net(task.net())
        for name in self.nets:
            net = replace_task_net(task, name).net().eval()
            try:
                net(torch.zeros(1, *task.shape, device=task.device))
            except RuntimeError as error:
                raise SettingError(f"nets: {name} does not take inputs of shape {task.shape}") from error
        self.build_inner_method()
        return RingState([])

    def round(self, state: RingState, clients: Clients) -> RingState:
        """One pass around the ring: Algorithm 1, lines 3 to 10, or in the last round Algorithm 2."""
        ring = self.sample_cohort(clients)
        if clients.round == 1:
            clients.ask(ring, self.warm_up, returns={})  # Algorithm 1, line 2
        stage_two = self.stages == "personalize" or (self.stages == "both" and clients.round == self.rounds)
        handler = self.personalize if stage_two else self.accumulate
        return RingState(clients.relay(ring, handler, state.holders, self.sealed))

    def train_unseen_clients(self, state: RingState, clients: Clients, number: int) -> None:
        """Each new client joins on its own: it receives the common model f of the ring, never that of a new client.

        Its first round is Stage I, and all others are Stage II, unless `stages` has only one of them.
        """
        stage_two = self.stages == "personalize" or (self.stages == "both" and number > 1)
        for client in clients.joining:
            clients.relay([client], self.personalize if stage_two else self.accumulate, state.holders, self.sealed)

    def why_not_extend(self, done: int, planned: int, unscheduled: bool) -> str:
        """A run can be extended until its last round, which is Stage II."""
        return f"round {done} was Stage II, the last one" if self.stages == "both" and done == planned else ""

    def sample_cohort(self, clients: Clients) -> list[int]:
        """All federations, or `cohort` of them, in ring order: the same in all rounds."""
        ring = sorted(clients.sample(len(clients) if self.cohort is None else self.cohort))
        if self.ring_seed is None:
            return ring
        order = torch.randperm(len(clients), generator=stream(self.ring_seed, "ring")).tolist()
        return sorted(ring, key=order.__getitem__)

    # --- federation i + 1 -------------------------------------------------------------------------------------

    @on_client(stream="begin")
    def warm_up(self, client: Client) -> dict[str, Any]:
        """Algorithm 1, line 2: trains f_{i+1} with ℓ_cls. An absent federation does so when it first gets a model."""
        self.load_or_train_record(client)
        return {}

    @on_ring
    def accumulate(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        """Algorithm 1, lines 3 to 10: distills or adopts the received model f_i, and sends the new f_{i+1} on."""
        if model is not None:
            self.check_received(client, model, net)
        record = self.load_or_train_record(client)
        if model is None:  # the first federation has no teacher yet
            return self.outgoing_message(client, record["model"])
        federation, own_net = self.build_federation(client), self.net_name(client)
        own_accuracy = federation.evaluate(record["model"], own_net).accuracy  # line 4: acc_{i+1}
        if net != own_net or (own_accuracy > self.distill_threshold and self.transfer == "distill"):  # line 5
            # Line 6: train f_{i+1} with Eq 3.
            trained = federation.distill(record["model"], Teacher(model, net, self.distill_weight))
            self.save_record(client, federation, record, trained, distill_weight=self.distill_weight)
        else:
            # Lines 8 and 9: initialize f_{i+1} with f_i, and train it with ℓ_cls.
            trained = federation.local_train(self.merge_keeping_norms(client, model, record["model"]), "taken")
            self.save_record(client, federation, record, trained, adopted=record["adopted"] + 1)
        return self.outgoing_message(client, trained)  # line 3 of the next federation

    @on_ring(stream="personalise")
    def personalize(self, client: Client, model: Weights | None = None, net: str = "") -> dict[str, Any]:
        """Algorithm 2, lines 1 to 9: distills the common model f with an adapted λ, and sends f on unchanged."""
        if model is not None:
            self.check_received(client, model, net)
        record = self.load_or_train_record(client)
        federation, own_net = self.build_federation(client), self.net_name(client)
        if model is None:  # without Stage I, the first federation's own model is f
            model, net = record["model"], own_net
        common_accuracy = federation.evaluate(model, net).accuracy  # line 2: acc_{i,i+1}
        own_accuracy = federation.evaluate(record["model"], own_net).accuracy  # line 3: acc_{i+1,i+1}
        distill_weight = adaptive_distill_weight(  # lines 4 to 8: λ
            self.distill_weight, common_accuracy, own_accuracy, self.ignore_threshold
        )
        adopted = record["adopted"]
        if net != own_net or self.transfer == "distill":
            # Line 9: train f_{i+1} with Eq 3.
            trained = federation.distill(record["model"], Teacher(model, net, distill_weight))
        else:
            # The ablation "Finetune": adopt f and train it with ℓ_cls.
            trained = federation.local_train(self.merge_keeping_norms(client, model, record["model"]), "taken")
            adopted += 1
        self.save_record(client, federation, record, trained, distill_weight=distill_weight, adopted=adopted)
        return {"model": model, "net": net}  # line 1 of the next federation

    # --- building blocks --------------------------------------------------------------------------------------

    def load_or_train_record(self, client: Client) -> dict[str, Any]:
        """The federation's record. Before there is one, trains the first model (Algorithm 1, line 2)."""
        record: dict[str, Any] | None = client.store.get(FEDERATION)
        if record is not None:
            return record
        warmup = {"local_steps": self.warmup_steps or self.local_steps}
        federation = self.model_copy(update=warmup).build_federation(client)
        model = replace_client_net(client, self.net_name(client)).initial_weights()
        if self.warmup_steps != 0:
            model = federation.local_train(model, WARM_UP)
        return self.save_record(client, federation, NEW_RECORD, model)

    def save_record(
        self, client: Client, federation: Federation, record: Mapping[str, Any], model: Weights, **statistics: Any
    ) -> dict[str, Any]:
        """Saves the new model, also as the best one if it is. Returns the updated record.

        Raises `Unable` if the model diverged, because of the learning rate or of the received model. The relay finds
        out which.
        """
        counts = federation.evaluate(model, self.net_name(client))
        if counts.loss > DIVERGED_LOSS * counts.total or not all_finite(model):
            raise Unable(f"training diverged; lower lr (now {self.lr:g})")
        is_best = (counts.correct, -counts.loss) >= (record["best_correct"], -record["best_loss"])
        best = {"best_model": model, "best_correct": counts.correct, "best_loss": counts.loss} if is_best else {}
        inner_bytes = Counter(record["inner_bytes"])
        if isinstance(federation, ClientGroup):
            inner_bytes += federation.inner_bytes
        updated = {**record, **statistics, "model": model, **best, "inner_bytes": dict(inner_bytes)}
        client.store.put(FEDERATION, updated)
        return updated

    def outgoing_message(self, client: Client, model: Weights) -> dict[str, Any]:
        """The message to the next federation: a model and the name of its net."""
        return {"model": model, "net": self.net_name(client)}

    def check_received(self, client: Client, model: Weights, net: str) -> None:
        """Raises `Refused` if this is not a model of a net in the ring."""
        if net not in (self.nets or ("",)):
            raise Refused(f"the received model has a net that is not in this ring: {str(net)[:50]!r}")
        if not isinstance(model, dict):
            raise Refused("the received model is not a dict of tensors")
        for name, tensor in replace_client_net(client, net).net(model).state_dict().items():
            if model[name].dtype != tensor.dtype:
                raise Refused(f"the received model has {name} in {model[name].dtype}, expected {tensor.dtype}")

    def merge_keeping_norms(self, client: Client, received: Weights, own_model: Weights) -> Weights:
        """The received model, with the federation's own normalization layers if `keep_norms` is set."""
        if not self.keep_norms:
            return received
        norms = norm_weight_names(replace_task_net(client.task, self.net_name(client)).net())
        return {name: own_model[name] if name in norms else tensor for name, tensor in received.items()}

    def net_name(self, client: Client) -> str:
        """The name of this federation's net; '' is the task's net."""
        return self.nets[client.id % len(self.nets)] if self.nets else ""

    def build_federation(self, client: Client) -> Federation:
        """A single client, or a group of clients with an inner method."""
        net = self.net_name(client)
        if self.federations is None:
            return SingleClient(client, net, self)
        return ClientGroup(client, net, GroupHandlers(self.build_inner_method(), self), self.inner_rounds)

    def build_inner_method(self) -> Method:
        """The inner method, with the options that it shares with this one."""
        method = find(self.inner_method)
        if method.name not in INNER_METHODS:
            raise SettingError(
                f"inner_method = {self.inner_method} does not work inside a federation "
                f"(allowed: {', '.join(INNER_METHODS)})"
            )
        training = ("lr", "local_steps", "batch_size", "augment", *LocalOptimizer.model_fields)
        names = ("codec", *training) if issubclass(method, LocalTraining) else ("codec",)
        shared = {name: getattr(self, name) for name in names}
        try:
            return method(**{**shared, "rounds": self.inner_rounds, **self.inner_options})
        except SettingError as error:
            raise SettingError(f"inner_options: {error}") from error

    # --- results ----------------------------------------------------------------------------------------------

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The federation's best or last model; before its first round, the initial one."""
        client = replace_client_net(client, self.net_name(client))
        record = client.store.get(FEDERATION)
        kept = "best_model" if self.keep == "best" else "model"
        return client.net(record[kept] if record else client.initial_weights())

    def client_model(self, shared: Weights, client: Client, choose: bool = False) -> nn.Module:
        """The model of `personal_model`: a federation chooses after each training, not after evaluated rounds."""
        return self.build_predictor(shared, client)

    def evaluate(self, state: RingState, clients: Clients, data: Data) -> Scores:
        """Evaluates each federation's model; after the last round also returns each federation's ring statistics."""
        scores = super().evaluate(state, clients, data)
        if not clients.is_last:
            return scores
        returns = {"distill_weight": Number(float, 0), **dict.fromkeys(("adopted", "up", "down"), Number(int, 0))}
        answers = clients.ask(clients.eval_cohort(), self.ring_statistics, returns=returns)
        ring = {str(answer.client): dict(answer.fields) for answer in answers}
        return replace(scores, metrics={**scores.metrics, "ring": ring})

    @on_client(stream="tell")
    def ring_statistics(self, client: Client) -> dict[str, Any]:
        """The federation's last λ, how often it adopted a model, and the bytes sent inside it."""
        record = client.store.get(FEDERATION) or NEW_RECORD
        return {
            "distill_weight": float(record["distill_weight"]),
            "adopted": record["adopted"],
            "up": record["inner_bytes"].get("up", 0),
            "down": record["inner_bytes"].get("down", 0),
        }


def adaptive_distill_weight(
    distill_weight: float, common_accuracy: float, own_accuracy: float, ignore_threshold: float
) -> float:
    """Algorithm 2, lines 4 to 8: λ from λ₀, the validation accuracies of f and of f_{i+1}, and l_t2."""
    if common_accuracy <= own_accuracy and common_accuracy < ignore_threshold:
        return 0.0
    # Eq 4: λ = λ₀ × 10^(min(1, (acc_{i,i+1} − acc_{i+1,i+1}) · 5) − 1)
    return float(distill_weight * 10 ** (min(1.0, 5 * (common_accuracy - own_accuracy)) - 1))
