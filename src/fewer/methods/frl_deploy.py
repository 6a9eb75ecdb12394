"""Deployment: a group's few rounds from a prepared model.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Section 2.3: R rounds of lines 5 to
15 of Algorithm 1 with the whole data of each client as its support; then a sample is answered by its distance to the
global prototypes. `fewer prepare` writes the file that it begins from, `fewer deploy` runs it.
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
from fewer.methods.frl import HEAD, LRS, Answering, FewRounds, GroupState
from fewer.models import Task, Weights
from fewer.registry import METHODS
from fewer.runtime import Clients, stream

FILE = "prepared.safetensors"
"""What `fewer prepare` writes into its run directory."""
CLASSES, MEANS, TOTAL = "Γ classes", "Γ", "Γ total"
"""What goes with θ into a group's model."""


@dataclass(frozen=True)
class Deployed(GroupState):
    """A group and, where it has no head of its own, the one that its net has for nothing."""

    rest: Weights = field(default_factory=dict)


@METHODS.register("frl-deploy")
class FRLDeploy(FewRounds):
    """A group makes its own global model from a prepared one, in a few rounds."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"lr": LRS}
    files: ClassVar[tuple[str, ...]] = ("prepared",)

    rounds: PositiveInt = 3
    """Rounds of the group (R)."""
    prepared: str
    """The prepared model: the file that `fewer prepare` wrote, or its run directory."""

    def prepare_data(self, data: Data) -> Data:
        """The group's text must be in the tokens that the model was prepared with; the server sees to that."""
        if self.prepared and read_prepared(Path(self.prepared))[1].get("vocabulary") != vocabulary(data):
            raise SettingError(
                f"{self.prepared} was prepared with another vocabulary: its token numbers mean other words"
            )
        return data

    def init(self, task: Task, seed: int) -> Deployed:
        """θ⁰ = φ, with the group's own head where it has one."""
        weights, _ = read_prepared(Path(self.prepared))
        first = task.initial(seed)
        own = {name: tensor.shape for name, tensor in first.items() if not name.startswith(HEAD)}
        if own != {name: tensor.shape for name, tensor in weights.items()}:
            raise SettingError(f"{self.prepared} was prepared for another net or for inputs of another shape")
        first |= {name: tensor.to(task.device) for name, tensor in weights.items()}
        group = self.begin(self.nobody(task), first, stream(seed, "head"))
        return Deployed(**vars(group), rest={name: first[name] for name in first if name not in group.model})

    def round(self, state: Deployed, clients: Clients) -> Deployed:
        """One of the R rounds. Prototypes to answer with are needed where the model is judged."""
        return self.play(state, self.sample_cohort(clients), clients, last=clients.judged)

    def sample_cohort(self, clients: Clients) -> list[int]:
        """The whole group, unless `active` says less."""
        return list(range(len(clients))) if self.cohort is None else super().sample_cohort(clients)

    def broadcast(self, state: Deployed) -> Weights:
        """θ and Γ."""
        total = torch.tensor(state.total)
        return {**state.rest, **state.model, CLASSES: state.classes, MEANS: state.means, TOTAL: total}

    def build_model(self, net: Callable[[Weights], nn.Module], weights: Weights) -> nn.Module:
        """The net, answering by Γ."""
        theta = {name: tensor for name, tensor in weights.items() if name not in (CLASSES, MEANS, TOTAL)}
        return Answering(net(theta), weights[CLASSES], weights[MEANS], int(weights[TOTAL]))


def vocabulary(data: Data) -> int | None:
    """What tells one vocabulary from another; None where inputs are no text."""
    return zlib.crc32("\n".join(data.tokens).encode()) if data.tokens else None


def file_of(path: Path) -> Path:
    """The prepared model itself, where its run directory may be named instead."""
    return path / FILE if path.is_dir() else path


def read_prepared(path: Path) -> tuple[Weights, dict[str, Any]]:
    """Weights and settings of a prepared model."""
    file = file_of(path)
    try:
        weights: Weights = safetensors.torch.load_file(file)
        with safe_open(file, "pt") as content:
            facts: dict[str, Any] = json.loads((content.metadata() or {})["fewer"])
    except FileNotFoundError:
        raise DataError(f"no prepared model {file} (fewer prepare writes one)") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{file} is not a prepared model (expected: {FILE} of fewer prepare): {error}") from error
    return weights, facts
