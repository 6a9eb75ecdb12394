"""Deployment of FRL: the few rounds of a group, from a prepared model.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Section 2.3: R rounds of lines 5 to
15 of Algorithm 1, with all data of each client as its support set. The group's model then predicts by distance to the
global prototypes. `fewer prepare` writes the prepared model, and `fewer deploy` runs the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import nn

from fewer.data import Data
from fewer.errors import SettingError
from fewer.methods import Context, SearchSpace, Server
from fewer.methods.capabilities import Embedding
from fewer.methods.few_rounds import HEAD, LRS, AnyGroup, FewRounds, GroupState
from fewer.models import Task, Weights, split_net
from fewer.models.artifact import load_artifact, vocabulary_checksum
from fewer.registry import METHODS
from fewer.runtime import Clients, stream

CLASSES, MEANS, NUM_CLASSES = "Γ classes", "Γ", "Γ total"
"""Names of the prototypes next to θ in the weights of a group's model."""


@dataclass(frozen=True)
class DeployState(GroupState):
    """The state of a deployed group."""

    unused_head: Weights = field(default_factory=dict)
    """The head of the net where the group predicts by distance, or FedCOF's head; empty with a linear head."""

    @property
    def shared(self) -> Weights:
        """θ and Γ."""
        prototypes = {CLASSES: self.classes, MEANS: self.means, NUM_CLASSES: torch.tensor(self.num_classes)}
        return {**self.unused_head, **self.model, **prototypes}


@METHODS.register("frl-deploy")
class FRLDeploy(FewRounds[DeployState]):
    """A group trains its own global model from a prepared one, in a few rounds."""

    tunable: ClassVar[SearchSpace] = {"lr": LRS}
    file_options: ClassVar[tuple[str, ...]] = ("prepared",)

    rounds: PositiveInt = 3
    """Rounds of the group (R)."""
    prepared: str
    """The prepared model: the file that `fewer prepare` wrote, or its run directory."""

    def prepare_data(self, data: Data) -> Data:
        """Checks on the server that the group's text uses the vocabulary of the prepared model."""
        checksum = vocabulary_checksum(data.tokens)
        if self.prepared and load_artifact(Path(self.prepared))[1]["facts"]["vocabulary"] != checksum:
            raise SettingError(
                f"{self.prepared} was prepared with another vocabulary: its token numbers mean other words"
            )
        return data

    def init(self, task: Task, seed: int) -> DeployState:
        """θ⁰ ← φ, with a new linear head if there is one."""
        prepared, _ = load_artifact(Path(self.prepared))
        model = task.initial_weights(seed)
        expected = {name: tensor.shape for name, tensor in model.items() if not name.startswith(HEAD)}
        if expected != {name: tensor.shape for name, tensor in prepared.items()}:
            raise SettingError(f"{self.prepared} was prepared for another net or another input shape")
        model |= {name: tensor.to(task.device) for name, tensor in prepared.items()}
        group = self.start_group(self.empty_group(task), model, stream(seed, "head"))
        unused_head = {name: model[name] for name in model if name not in group.model}
        return DeployState(**vars(group), unused_head=unused_head)

    def round(self, state: DeployState, clients: Clients) -> DeployState:
        """One of the R rounds. An evaluation after it needs prototypes to predict with."""
        return self.group_round(state, self.sample_cohort(clients), clients, last=clients.will_evaluate)

    def aggregate(self, group: AnyGroup, updates: Sequence[Mapping[str, Any]], *aggregation: Any) -> AnyGroup:
        """Lines 13 and 14, and FedCOF's head."""
        group = super().aggregate(group, updates, *aggregation)
        if self.head == "fedcof" and isinstance(group, DeployState):
            return replace(group, unused_head=self.fit_head(group.unused_head, updates, group.num_classes))
        return group

    def sample_cohort(self, clients: Clients) -> list[int]:
        """All clients of the group, or `cohort` of them."""
        return list(range(len(clients))) if self.cohort is None else super().sample_cohort(clients)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The group's model, which predicts by Γ or by its linear head."""
        theta = {name: tensor for name, tensor in shared.items() if name not in (CLASSES, MEANS, NUM_CLASSES)}
        return self.group_predictor(context.net(theta), shared[CLASSES], shared[MEANS], int(shared[NUM_CLASSES]))

    def embedding(
        self, server: Server, state: DeployState, data: Data, group: int = 0, member: int = 0
    ) -> Embedding | None:
        """The features of the test samples."""
        if self.head == "linear":
            return None
        net = self.build_predictor(state.shared, server).eval().get_submodule("net")
        x, y = data.test.all()
        with torch.no_grad():
            features = split_net(net)[0](x)
        return Embedding(features, y, features[:0], y[:0], state.means, state.classes)
