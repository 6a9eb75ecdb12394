"""All settings of a run, with the names that the command line, a TOML file and Python share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from fewer.choices import Norm, Partition, RuntimeName

Chance = Annotated[float, Field(ge=0, le=1)]

# What a run is carried out with, but does not depend on: the numbers are the same without it.
OUTSIDE = ("runtime", "workers", "device", "data_dir")
# What may be changed besides when a run goes on, so that one that lost its quorum can; the change is written down.
MENDABLE = ("quorum", "deadline", "drop", "slow", "corrupt")


class Settings(BaseModel):
    """What to run, on what, how. Each field's title says which group of settings it belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    method: str = Field("fedavg", title="Method")
    """A method's name (`fewer methods` lists them) or FILE.py:Name."""
    rounds: PositiveInt | None = Field(None, title="Method")
    """Rounds to run. [default: the method's own, usually 10]"""
    cohort: PositiveInt | None = Field(None, title="Method")
    """Clients asked in a round. [default: the method's own, usually 10 or all]"""
    method_options: dict[str, Any] = Field({}, title="Method")
    """A setting of the method's own, as name=value; may be given several times."""
    model: str = Field("cnn", title="Method")
    """The net: cnn, lenet5, conv4, resnet12, … or FILE.py:Name for your own."""
    norm: Norm | None = Field(None, title="Method")
    """Its normalization layers. [default: the net's own; cnn has group]"""
    model_options: dict[str, Any] = Field({}, title="Method")
    """An option of the net's own, as name=value (resnet12: width=0.25); may be given several times."""

    data: str = Field("fashion-mini", title="Data")
    """A set (`fewer data list` shows them), or FORMAT:PATH: npz:FILE, csv:FILE, jsonl:FILE, folder:DIR, idx:DIR …"""
    data_dir: Path | None = Field(None, title="Data")
    """Where data files lie. [default: $FEWER_DATA]"""
    clients: PositiveInt = Field(20, title="Data")
    """How many clients the data is divided among."""
    partition: Partition = Field("dirichlet", title="Data")
    """How it is divided: natural is by the data's own clients."""
    alpha: PositiveFloat = Field(0.5, title="Data")
    """Skew of the dirichlet and quantity partitions: small is skewed."""
    min_samples_per_client: NonNegativeInt = Field(10, title="Data")
    """Samples that each client gets at least, before any are held out (dirichlet, quantity)."""
    classes_per_client: PositiveInt = Field(2, title="Data")
    """Classes that each client holds (pathological)."""
    shards: PositiveInt = Field(2, title="Data")
    """Shards that each client gets (shards)."""
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(1.0, title="Data")
    """Share of the training samples that is used at all."""
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, title="Data")
    """Share of each client's training samples that is held out for validation."""
    vocab_size: Annotated[int, Field(ge=3)] = Field(20_000, title="Data")
    """Words of a text that are known at most; the vocabulary comes from training text only."""
    max_length: PositiveInt = Field(30, title="Data")
    """Words that are read of a text."""
    data_options: dict[str, Any] = Field({}, title="Data")
    """An option of the data's own, as name=value (csv: label=y; glyphs: size=32); may be given several times."""
    data_seed: NonNegativeInt | None = Field(None, title="Data")
    """Seed of the division alone. [default: the seed of the run]"""

    seed: NonNegativeInt = Field(0, title="Run")
    """Seed of everything random: the same seed gives the same numbers."""
    evaluate_every: PositiveInt = Field(1, title="Run")
    """Evaluate after every so many rounds, and after the last."""
    runtime: RuntimeName = Field("inline", title="Run")
    """One process, or a pool of worker processes: the numbers are the same."""
    workers: PositiveInt = Field(2, title="Run")
    """Worker processes of the pool."""
    device: str = Field("cpu", title="Run")
    """Any torch device: cpu, cuda, cuda:1, mps."""

    quorum: Chance = Field(0.0, title="Faults")
    """Share of the asked clients that must answer for a round to count."""
    deadline: PositiveFloat | None = Field(None, title="Faults")
    """Seconds a client may take; a later answer is not used. [default: none]"""
    drop: Chance = Field(0.0, title="Faults")
    """Injected fault: chance that a client gives no answer."""
    slow: Chance = Field(0.0, title="Faults")
    """Injected fault: chance that an answer comes too late."""
    corrupt: Chance = Field(0.0, title="Faults")
    """Injected fault: chance that an answer is damaged on its way."""


def _without_folder(name: str) -> str:
    """FILE.py:Name or FORMAT:PATH without the folder, which says nothing about what is in it."""
    kind, colon, rest = name.partition(":")
    return f"{Path(kind).name}:{Path(rest).name}" if colon else name


def settings_hash(settings: Settings, method: BaseModel) -> str:
    """Changes with every setting on which the numbers depend, and with no other, however it was given."""
    inside = settings.model_dump(mode="json", exclude={*OUTSIDE, "rounds", "cohort", "method_options"})
    inside |= {name: _without_folder(inside[name]) for name in ("method", "model", "data")}
    inside["method_settings"] = method.model_dump(mode="json")
    return hashlib.sha256(json.dumps(inside, sort_keys=True).encode()).hexdigest()[:12]
