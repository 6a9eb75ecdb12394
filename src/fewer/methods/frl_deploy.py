"""Deployment of FRL: the few rounds of a group, from a prepared model.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Section 2.3: R rounds of lines 5 to
15 of Algorithm 1, with all data of each client as its support set. The group's model then predicts by distance to the
global prototypes. `fewer prepare` writes the prepared model, and `fewer deploy` runs the group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from pydantic import PositiveInt
from safetensors import SafetensorError, safe_open
from torch import nn

from fewer.data import Data
from fewer.errors import DataError, SettingError
from fewer.methods.frl import HEAD, LRS, FewRounds, GroupModel, GroupState
from fewer.models import Task, Weights
from fewer.registry import METHODS
from fewer.runtime import Clients, stream

PREPARED_FILE = "prepared.safetensors"
"""The file that `fewer prepare` writes into its run directory."""
CLASSES, MEANS, NUM_CLASSES = "Γ classes", "Γ", "Γ total"
"""Names of the prototypes next to θ in the weights of a group's model."""


@dataclass(frozen=True)
class DeployState(GroupState):
    """The state of a deployed group."""

    unused_head: Weights = field(default_factory=dict)
    """The head of the net where the group predicts by distance; empty with a linear head."""


@METHODS.register("frl-deploy")
class FRLDeploy(FewRounds):
    """A group trains its own global model from a prepared one, in a few rounds."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"lr": LRS}
    file_options: ClassVar[tuple[str, ...]] = ("prepared",)

    rounds: PositiveInt = 3
    """Rounds of the group (R)."""
    prepared: str
    """The prepared model: the file that `fewer prepare` wrote, or its run directory."""

    def prepare_data(self, data: Data) -> Data:
        """Checks on the server that the group's text uses the vocabulary of the prepared model."""
        if self.prepared and load_prepared(Path(self.prepared))[1].get("vocabulary") != vocabulary_checksum(data):
            raise SettingError(
                f"{self.prepared} was prepared with another vocabulary: its token numbers mean other words"
            )
        return data

    def init(self, task: Task, seed: int) -> DeployState:
        """θ⁰ ← φ, with a new linear head if there is one."""
        prepared, _ = load_prepared(Path(self.prepared))
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

    def sample_cohort(self, clients: Clients) -> list[int]:
        """All clients of the group, or `cohort` of them."""
        return list(range(len(clients))) if self.cohort is None else super().sample_cohort(clients)

    def broadcast(self, state: DeployState) -> Weights:
        """θ and Γ."""
        num_classes = torch.tensor(state.num_classes)
        prototypes = {CLASSES: state.classes, MEANS: state.means, NUM_CLASSES: num_classes}
        return {**state.unused_head, **state.model, **prototypes}

    def build_model(self, make_net: Callable[[Weights], nn.Module], weights: Weights) -> nn.Module:
        """The group's model, which predicts by Γ or by its linear head."""
        theta = {name: tensor for name, tensor in weights.items() if name not in (CLASSES, MEANS, NUM_CLASSES)}
        return GroupModel(make_net(theta), weights[CLASSES], weights[MEANS], int(weights[NUM_CLASSES]))


def vocabulary_checksum(data: Data) -> int | None:
    """A checksum of the vocabulary; None if inputs are not text."""
    return zlib.crc32("\n".join(data.tokens).encode()) if data.tokens else None


def find_prepared_file(path: Path) -> Path:
    """The file of a prepared model, given the file or its run directory."""
    return path / PREPARED_FILE if path.is_dir() else path


def load_prepared(path: Path) -> tuple[Weights, dict[str, Any]]:
    """Reads the weights and the metadata of a prepared model."""
    file = find_prepared_file(path)
    try:
        weights: Weights = safetensors.torch.load_file(file)
        with safe_open(file, "pt") as content:
            metadata: dict[str, Any] = json.loads((content.metadata() or {})["fewer"])
    except FileNotFoundError:
        raise DataError(f"no prepared model at {file}; `fewer prepare` writes one") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{file} is not a prepared model as `fewer prepare` writes it: {error}") from error
    return weights, metadata
