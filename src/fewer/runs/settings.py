"""All settings of a run. The command line, TOML files and Python use the same names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from fewer.choices import Aggregate, Codec, Norm, Partition, RuntimeName

Probability = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda names: names.split(",") if isinstance(names, str) else names)]
"""Names, separated by commas in a text."""

RUNTIME_SETTINGS = ("runtime", "workers", "device", "data_dir", "debug", "count_flops")
"""Settings that do not affect results."""
FAULT_SETTINGS = ("quorum", "deadline", "drop", "slow", "corrupt")
"""Settings that may also change on resume, so that a run that lost its quorum can continue. The change is logged."""
NEUTRAL: dict[str, Any] = {"neutral": True}
"""Marks a field that the hash leaves out at its default, so that new fields keep the hashes of published results."""
METHOD_SETTINGS = ("rounds", "cohort", "codec")
"""Settings that are options of every method."""


class Settings(BaseModel):
    """The settings of a run. The title of a field is its group."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    method: str = Field(default="fedavg", title="Method")
    """A method's name (see `fewer methods`) or FILE.py:Name."""
    rounds: PositiveInt | None = Field(default=None, title="Method")
    """Number of rounds. [default: the method's, usually 10]"""
    cohort: PositiveInt | None = Field(default=None, title="Method")
    """Clients asked in each round. [default: the method's, usually 10 or all]"""
    codec: Codec | None = Field(default=None, title="Method")
    """Encoding of tensors in messages: float32, float16, bfloat16, int8 or uint8. [default: the method's]"""
    method_options: dict[str, Any] = Field(default={}, title="Method")
    """An option of the method, as name=value; may be repeated. `fewer methods NAME` lists them."""
    model: str | None = Field(default=None, title="Method")
    """The net: cnn, lenet5, mlp, …, FILE.py:Name, hf:NAME_OR_DIR or timm:NAME. [default: one that fits the data]"""
    norm: Norm | None = Field(default=None, title="Method")
    """Normalization layers of the net. [default: the net's; cnn has group]"""
    model_options: dict[str, Any] = Field(default={}, title="Method")
    """An option of the net, as name=value (resnet12: width=0.25); may be repeated."""
    freeze: Literal["none", "encoder"] = Field(default="none", title="Method", json_schema_extra=NEUTRAL)
    """`encoder` keeps the encoder as it is: its features are cached, and only the head is trained and sent."""
    train: str | None = Field(default=None, title="Method", json_schema_extra=NEUTRAL)
    """Parameters to train and send: lora:rank=8, bias, norm, head, or a regular expression. [default: all]"""
    loss: str | None = Field(default=None, title="Method", json_schema_extra=NEUTRAL)
    """The loss: cross-entropy, bce (sets of labels), mse, mae, huber, or FILE.py:name. [default: cross-entropy]"""
    metrics: Names = Field(default=(), title="Method", json_schema_extra=NEUTRAL)
    """Metrics, separated by commas: mae, mse, rmse, r2, f1, exact-match, or FILE.py:name. [default: the loss's]"""

    data: str = Field(default="fashion-mini", title="Data")
    """A dataset (see `fewer data list`), or FORMAT:PATH: npz:FILE, csv:FILE, jsonl:FILE, folder:DIR, idx:DIR, …"""
    data_dir: Path | None = Field(default=None, title="Data")
    """Directory of the data files. [default: $FEWER_DATA]"""
    clients: PositiveInt = Field(default=20, title="Data")
    """Number of clients."""
    partition: Partition = Field(default="dirichlet", title="Data")
    """How samples are assigned to clients; natural uses the client ids in the data."""
    alpha: PositiveFloat = Field(default=0.5, title="Data")
    """Concentration of the dirichlet and quantity partitions; smaller is more skewed."""
    min_samples_per_client: NonNegativeInt = Field(default=10, title="Data")
    """Minimum samples per client, before any are held out (dirichlet, quantity)."""
    classes_per_client: PositiveInt = Field(default=2, title="Data")
    """Classes per client (pathological)."""
    shards: PositiveInt = Field(default=2, title="Data")
    """Shards per client (shards)."""
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, title="Data")
    """Fraction of the training samples to use."""
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, title="Data")
    """Fraction of each client's training samples to hold out for validation."""
    vocab_size: Annotated[int, Field(ge=3)] = Field(default=20_000, title="Data")
    """Largest vocabulary of a text; it is built from training text only."""
    max_length: PositiveInt = Field(default=30, title="Data")
    """Number of words read from each text."""
    standardize: bool = Field(default=False, title="Data", json_schema_extra=NEUTRAL)
    """Bring each column of a table to mean 0 and standard deviation 1, by sums that clients send before round 1."""
    unseen_clients: NonNegativeInt = Field(default=0, title="Data", json_schema_extra=NEUTRAL)
    """Clients that never train, the last ones. After the last round, each joins with a fifth of its samples."""
    data_options: dict[str, Any] = Field(default={}, title="Data")
    """An option of the data, as name=value (csv: label=y; glyphs: size=32); may be repeated."""
    data_seed: NonNegativeInt | None = Field(default=None, title="Data")
    """Seed of the partition. [default: the seed of the run]"""

    seed: NonNegativeInt = Field(default=0, title="Run")
    """Seed of all randomness; the same seed gives the same results."""
    evaluate_every: PositiveInt = Field(default=1, title="Run")
    """Evaluate after every N rounds, and after the last."""
    join_rounds: PositiveInt = Field(default=1, title="Run", json_schema_extra=NEUTRAL)
    """Rounds of local training that a new client takes when it joins. What it sends is discarded."""
    runtime: RuntimeName = Field(default="inline", title="Run")
    """One process, or a pool of worker processes; the results are the same."""
    workers: PositiveInt = Field(default=2, title="Run")
    """Worker processes of the pool."""
    device: str = Field(default="cpu", title="Run")
    """Any torch device: cpu, cuda, cuda:1, mps."""
    debug: bool = Field(default=False, title="Run", exclude=True)
    """Run inline, and stop with the traceback if a client fails."""
    count_flops: bool = Field(default=False, title="Run")
    """Count the floating-point operations of simulated clients. It slows small nets down by a factor of up to 2."""

    dp: str | None = Field(default=None, title="Run", json_schema_extra=NEUTRAL)
    """Differential privacy of clients or records: user:clip=1.0,noise=0.8 or record:epsilon=8, and more options."""

    secure_sum: bool = Field(default=False, title="Run", json_schema_extra=NEUTRAL)
    """Between machines: clients mask what they send, and the server learns only sums of it."""

    quorum: Probability = Field(default=0.0, title="Faults")
    """Fraction of the asked clients that must answer, or the run stops."""
    deadline: PositiveFloat | None = Field(default=None, title="Faults")
    """Seconds that a client may take; later answers are discarded. [default: none]"""
    drop: Probability = Field(default=0.0, title="Faults")
    """Injected fault: probability that a client does not answer."""
    slow: Probability = Field(default=0.0, title="Faults")
    """Injected fault: probability that an answer arrives too late."""
    corrupt: Probability = Field(default=0.0, title="Faults")
    """Injected fault: probability that an answer is damaged in transit."""
    lie: str | None = Field(default=None, title="Faults", json_schema_extra=NEUTRAL)
    """Injected fault, as KIND:SHARE of all clients that lie: sign-flip, scale, noise, label-flip, ipm or alie."""
    aggregate: Aggregate = Field(default="mean", title="Faults", json_schema_extra=NEUTRAL)
    """How the server combines what clients send: their mean, or a rule that bears some lies."""
    liars: Annotated[float, Field(ge=0, lt=0.5)] = Field(default=0.2, title="Faults", json_schema_extra=NEUTRAL)
    """Share of clients that may lie, as trimmed-mean, multi-krum and bulyan assume."""


def settings_in_group(title: str) -> set[str]:
    """The names of the settings with this title: Method, Data, Run or Faults."""
    return {name for name, field in Settings.model_fields.items() if field.title == title}


def settings_hash(settings: Settings, method: BaseModel) -> str:
    """Returns a hash of all settings that affect results."""
    left_out = {*RUNTIME_SETTINGS, *METHOD_SETTINGS, "method_options", *neutral_options(settings)}
    content = settings.model_dump(mode="json", exclude=left_out)
    content |= {
        name: _remove_folder(content[name]) for name in ("method", "model", "data", "loss") if content.get(name)
    }
    content |= {"metrics": list(map(_remove_folder, settings.metrics))} if settings.metrics else {}
    content["method_settings"] = method.model_dump(mode="json", exclude=neutral_options(method))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def neutral_options(options: BaseModel) -> set[str]:
    """Returns the neutral options of a method, or the neutral settings, at their default, where they change nothing.

    `Field(DEFAULT, json_schema_extra={"neutral": True})` declares one. The hash leaves it out and runs recorded without
    it resume, so new options do not change the hashes of published results.
    """
    return {
        name
        for name, field in type(options).model_fields.items()
        if field.json_schema_extra == NEUTRAL and getattr(options, name) == field.get_default()
    }


def _remove_folder(name: str) -> str:
    """Removes the folder from FILE.py:Name or FORMAT:PATH; it does not affect the content."""
    first, colon, rest = name.partition(":")
    return f"{Path(first).name}:{Path(rest).name}" if colon else name
