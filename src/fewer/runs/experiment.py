"""A job: what settings name, built and checked, ready to run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from fewer.data import ArrayData, Data, load
from fewer.data.text import own_vectors, word_vectors
from fewer.errors import DataError, SettingError, unknown
from fewer.methods import Method, find, names
from fewer.models import Task, maker, weights_of
from fewer.registry import MODELS
from fewer.runs.settings import Settings, settings_hash
from fewer.runtime.streams import global_streams

Model = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class Experiment:
    """Everything that a run needs, built and checked."""

    method: Method
    task: Task
    data: Data
    settings: Settings
    own: tuple[str, ...] = ()
    """Parts that came as Python objects, which a run directory cannot bring back by itself."""

    @property
    def hash(self) -> str:
        """Of all settings on which the numbers depend."""
        return settings_hash(self.settings, self.method)


def parse_settings(settings: Mapping[str, Any]) -> Settings:
    """Settings from plain values; SettingError for the first that is wrong. Files are named by their whole paths."""
    whole = {name: _whole(name, value) for name, value in settings.items()}
    try:
        return Settings(**whole)
    except ValidationError as error:
        raise setting_error(error, "", list(Settings.model_fields)) from error


def _whole(name: str, value: Any) -> Any:
    """FILE.py:Name and FORMAT:PATH with the whole path, where there is such a file: a run may go on from elsewhere."""
    if name not in ("method", "model", "data") or not isinstance(value, str) or ":" not in value:
        return value
    first, last = value.split(":", 1) if name == "data" else value.rsplit(":", 1)
    path = Path(last if name == "data" else first)
    if not path.exists():
        return value
    return f"{first}:{path.resolve()}" if name == "data" else f"{path.resolve()}:{last}"


def build_experiment(
    settings: Settings, method: Method | None = None, data: Data | None = None, model: Model | None = None
) -> Experiment:
    """Build what the settings name; what is given here as an object takes the place of what they name."""
    if method is None:
        method = make_method(find(settings.method), settings)
    own = tuple(name for name, given in (("data", data), ("model", model)) if given is not None)
    if data is None:
        data = load_data(settings)
    elif data.origin is not None:
        own = tuple(name for name in own if name != "data")
    data = method.prepare_data(data)
    if method.cohort is not None and method.cohort > len(data):
        raise SettingError(f"active = {method.cohort}, but there are {len(data)} clients (allowed: 1 … {len(data)})")
    if method.novel and not data.novel:
        raise SettingError(
            f"{method.name} is judged on novel classes, but data '{data.name}' does not divide its classes "
            "(--data-option split=BASE/VALIDATION/NOVEL, as 20/5/16)"
        )
    if data.novel and not method.novel:
        known = [name for name in names() if find(name).novel]
        raise SettingError(
            f"data '{data.name}' is tested on novel classes, {method.name} on known ones (allowed: {', '.join(known)})"
        )
    device = make_device(settings.device)
    task = make_task(settings.model if model is None else model, settings, data, device)
    return Experiment(method, task, data.to(device), settings, own)


def make_method(kind: type[Method], settings: Settings) -> Method:
    """The method with the settings meant for it."""
    chosen = {name: value for name in ("rounds", "cohort") if (value := getattr(settings, name)) is not None}
    try:
        return kind(**chosen | settings.method_options)
    except ValidationError as error:
        raise setting_error(error, f"{kind.name}: ", list(kind.model_fields)) from error


def setting_error(error: ValidationError, prefix: str, known: list[str]) -> SettingError:
    """The first thing that is wrong, in one line; a name that does not exist before one that is missing."""
    first = min(error.errors(), key=lambda one: one["type"] == "missing")
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown(f"setting of {prefix.rstrip(': ')}" if prefix else "setting", name, known)
    if first["type"] == "missing":
        return SettingError(f"{prefix}{name} is missing")
    return SettingError(f"{prefix}{name} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}")


def load_data(settings: Settings) -> Data:
    """The named data, divided as the settings say."""
    return load(
        settings.data,
        directory=settings.data_dir,
        clients=settings.clients,
        partition=settings.partition,
        alpha=settings.alpha,
        fraction=settings.fraction,
        validation=settings.validation,
        min_samples_per_client=settings.min_samples_per_client,
        classes_per_client=settings.classes_per_client,
        shards=settings.shards,
        vocab_size=settings.vocab_size,
        max_length=settings.max_length,
        data_options=settings.data_options,
        seed=settings.seed if settings.data_seed is None else settings.data_seed,
    )


def make_device(name: str) -> torch.device:
    """The named device, if it is there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingError(f"device = '{name}' cannot be used here: {_reason(error)}") from error
    return device


def make_task(model: Model, settings: Settings, data: Data, device: torch.device) -> Task:
    """What is learned on this data with this model, tried out on one sample."""
    given = None
    if isinstance(model, nn.Module):
        make: Callable[[], nn.Module] = partial(copy.deepcopy, model)
        given = weights_of(model)
    else:
        factory = model if not isinstance(model, str) else MODELS.find(model)
        facts = {"shape": data.shape, "classes": data.classes, "norm": settings.norm, "vocabulary": data.vocabulary}
        make = maker(factory, facts, _options(settings, data))
    task = Task(data.shape, data.classes, make, device, given)
    _try_out(task, data)
    return task


def _options(settings: Settings, data: Data) -> dict[str, Any]:
    """The options of the net; word vectors are named by their file, or `own`: from the training text itself."""
    options = dict(settings.model_options)
    if isinstance(options.get("vectors"), str):
        if not data.tokens:
            raise SettingError(f"vectors = {options['vectors']}, but data '{data.name}' is no text")
        if options["vectors"] == "own":
            if not isinstance(data, ArrayData):
                raise SettingError(f"vectors = own, but data '{data.name}' is not in arrays (allowed: a file)")
            rows = data.source.x[torch.from_numpy(data.train.rows).sort().values].numpy()  # however they are divided
            options["vectors"] = own_vectors(rows, len(data.tokens), int(options.pop("width", 100)))
        else:
            options["vectors"] = word_vectors(Path(options["vectors"]), data.tokens)
    return options


def _try_out(task: Task, data: Data) -> None:
    if not len(data.test):
        raise DataError(f"data '{data.name}' has no test samples")
    try:
        with global_streams("net"):
            made = task.make()
    except Exception as error:  # whatever a user's own model does, its maker is told in one line
        raise SettingError(f"the model cannot be made: {_reason(error)}") from error
    if not isinstance(made, nn.Module):
        raise SettingError(f"the model is {type(made).__name__} (allowed: a torch.nn.Module, or what makes one)")
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise SettingError("the model has no weights to learn (allowed: parameters with requires_grad)")
    try:
        with torch.no_grad():
            scores = made.to(task.device).eval()(data.test.slice(0, 1)[0].to(task.device))
    except Exception as error:
        raise SettingError(f"the model does not take inputs of shape {data.shape}: {_reason(error)}") from error
    if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or scores.shape[1] < data.classes:
        shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise SettingError(f"the model gives {shape} for one sample (allowed: 1 × at least {data.classes} classes)")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
