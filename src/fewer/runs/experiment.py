"""An experiment: the method, task and data that settings name, built and validated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from fewer.data import ArrayData, Data, load
from fewer.data.absent import AbsentData
from fewer.data.raw_dataset import RawDataset
from fewer.data.remote import RemoteData, read_undivided
from fewer.data.sources import find_word_vectors, read_training_data
from fewer.data.text import compute_word_vectors, load_word_vectors
from fewer.errors import DataError, RunError, SettingError, setting_error
from fewer.learning.evaluate import measure_outputs
from fewer.methods import Method, find, names
from fewer.methods.capabilities import PreparesData
from fewer.methods.method import DEFAULT_COHORT
from fewer.models import Task, get_weights, net_factory
from fewer.models.adapters import train_only
from fewer.models.frozen import freeze_encoder, has_random_encoder
from fewer.models.nets import copy_net, default_model, is_lazy, materialize
from fewer.models.objective import LOSSES, Loss, Objective, build_objective, predicted_kind
from fewer.models.preprocess import PIXEL_SCALE, PIXEL_SHIFT, takes_pixels
from fewer.privacy import PrivacyLedger, PrivacySettings
from fewer.registry import MODEL_SOURCES, find_model
from fewer.runs.metric import PrimaryMetric
from fewer.runs.settings import METHOD_SETTINGS, Settings, neutral_options, settings_hash, settings_in_group
from fewer.runtime import Lies
from fewer.runtime.clients import check_cohort
from fewer.runtime.streams import global_streams, one_thread

CLASS_KINDS = ("classification", "next-token")
"""Kinds of tasks whose targets are classes."""
_LOG = logging.getLogger("fewer")
Model = str | nn.Module | Callable[..., nn.Module]
Metrics = Sequence[str | Callable[[torch.Tensor, torch.Tensor], Any]]
"""Names of metrics, and functions of outputs and targets."""


@dataclass
class Experiment:
    """Everything that a run needs."""

    method: Method
    task: Task
    data: Data
    settings: Settings
    objects: tuple[str, ...] = ()
    """Parts given as Python objects, which must be given again on resume."""

    @property
    def hash(self) -> str:
        """The hash of all settings that affect results."""
        return settings_hash(self.settings, self.method)

    def open_privacy(self) -> PrivacyLedger | None:
        """The privacy ledger before the first round, if the run has differential privacy."""
        if self.settings.dp is None:
            return None
        clients = self.population
        once = self.method.answers_once
        default = clients if once else min(DEFAULT_COHORT, clients)
        cohort = default if self.method.cohort is None else self.method.cohort
        rounds = 1 if once else self.method.rounds
        privacy = PrivacySettings.parse(self.settings.dp)
        if self.settings.secure_sum and privacy.level == "user":
            clients = cohort  # the server, which must not learn more than a sum, knows the cohort
        return PrivacyLedger.open(privacy, rounds, cohort, clients)

    @property
    def population(self) -> int:
        """The number of clients that take part in training."""
        return len(self.data) - self.data.unseen_clients

    @property
    def lies(self) -> Lies | None:
        """The injected lies, if any."""
        return None if self.settings.lie is None else Lies.parse(self.settings.lie)

    @property
    def metric(self) -> PrimaryMetric:
        """The metric that ranks runs: accuracy, or the first of the task's metrics."""
        first = self.task.metrics[0]
        return PrimaryMetric(first.name, first.higher_is_better, first.percent)

    def initial_state(self) -> Any:
        """Returns the state before the first round."""
        with one_thread(), global_streams(self.settings.seed, "start"):
            return self.method.init(self.task, self.settings.seed)


def restore_state(initial: Any, content: Mapping[str, Any], path: Path) -> Any:
    """Rebuilds a state, with the type of the initial one, from the content of a checkpoint."""
    if {field.name for field in fields(initial)} != content.keys():
        raise RunError(f"{path} was written by another version of this method: its state has other fields")
    return type(initial)(**content)


def parse_settings(settings: Mapping[str, Any]) -> Settings:
    """Parses plain values; SettingError for the first invalid one. Paths become absolute."""
    resolved = {name: resolve_path(name, value) for name, value in settings.items()}
    try:
        return Settings(**resolved)
    except ValidationError as error:
        raise setting_error(error, "", list(Settings.model_fields)) from error


def resolve_path(name: str, value: Any) -> Any:
    """Makes the path in FILE.py:Name, FORMAT:PATH or hf:PATH absolute if it exists, so that runs resume anywhere."""
    if name == "metrics" and value:
        return [resolve_path("metric", part) for part in (value.split(",") if isinstance(value, str) else value)]
    if name not in ("method", "model", "data", "loss", "metric") or not isinstance(value, str) or ":" not in value:
        return value
    path_is_last = name == "data" or (name == "model" and value.partition(":")[0] in MODEL_SOURCES)
    first, last = value.split(":", 1) if path_is_last else value.rsplit(":", 1)
    path = Path(last if path_is_last else first)
    if not path.exists():
        return value
    return f"{first}:{path.resolve()}" if path_is_last else f"{path.resolve()}:{last}"


def build_experiment(
    settings: Settings,
    method: Method | None = None,
    data: Data | None = None,
    model: Model | None = None,
    loss: Loss | str | None = None,
    metrics: Metrics | None = None,
    feature_folder: Path | None = None,
) -> Experiment:
    """Builds the experiment that the settings name. Objects passed here replace what the settings name.

    `feature_folder` keeps the features of a frozen encoder; by default, the cache of all runs does.
    """
    if method is None:
        method = make_method(find(settings.method), settings)
    given = {"data": data, "model": model, "loss": loss, "metrics": metrics}
    objects = tuple(name for name, value in given.items() if value is not None)
    if data is None:
        data = load_data(settings)
    elif data.origin is not None:
        objects = tuple(name for name in objects if name != "data")
    data = data.raw or data
    loss = settings.loss if loss is None else loss
    if predicted_kind(loss) == "regression":
        data = data.as_numbers()
    next_token = bool(data.tokens) and data.class_names == data.tokens
    metrics = settings.metrics if metrics is None else metrics
    objective = build_objective(loss, metrics, data.targets, data.name, next_token)
    if method.needs:
        _check_classes(method, settings, objective)
    if not isinstance(data, AbsentData):
        data = hide_clients(_prepare_data(method, data), settings)
    if settings.lie is not None and Lies.parse(settings.lie).kind == "label-flip" and objective.kind not in CLASS_KINDS:
        raise SettingError(f"lie = {settings.lie} needs classes, but this is a {objective.kind} task")
    if settings.dp is not None:
        _check_privacy(settings, data)
    if settings.secure_sum:
        _check_secure_sum(method, settings)
    if settings.aggregate != "mean" and not method.takes_rules():
        raise SettingError(
            f"aggregate = {settings.aggregate}, but {method.name} averages nothing that clients send "
            f"(allowed: {', '.join(name for name in names() if find(name).takes_rules())})"
        )
    if method.cohort is not None:
        check_cohort(method.cohort, len(data) - data.unseen_clients)
    if settings.unseen_clients:
        _check_unseen_clients(method, settings)
    device = make_device(settings.device)
    if model is None and settings.model is None:
        name = default_model(data.shape, data.vocab_size, objective.kind == "next-token")
        settings = settings.model_copy(update={"model": name})
    task = make_task(model or settings.model or "", settings, data, objective, device)
    if not isinstance(data, AbsentData):
        data = _try_model(task, data, settings)
    if settings.train is not None:
        if settings.freeze == "encoder":
            raise SettingError("freeze = encoder trains the head only: leave out train")
        task = train_only(task, settings.train, settings.seed)
    if settings.freeze == "encoder":
        task, data = _freeze(task, data, settings, feature_folder)
    return Experiment(method, task, data.to(device), settings, objects)


def _freeze(task: Task, data: Data, settings: Settings, feature_folder: Path | None) -> tuple[Task, Data]:
    """The task of training the head, and the data with features as inputs."""
    if data.standardize:
        raise SettingError("freeze = encoder does not work with standardize: its features would change with the scale")
    if has_random_encoder(task, settings.seed):
        warn_once(
            f"freeze = encoder, but model '{settings.model or 'given'}' starts from random weights, which no client "
            "will train; use a pretrained encoder (timm:NAME, hf:NAME, or FILE.py:Name that loads weights)"
        )
    task, encoder = freeze_encoder(task, settings.seed, feature_folder)
    with one_thread():
        return task, data if isinstance(data, AbsentData) else data.encode(encoder)


def _prepare_data(method: Method, data: Data) -> Data:
    """The data as the method trains on it. Raises SettingError if the method cannot use it."""
    if isinstance(method, PreparesData):
        data = method.prepare_data(data)
    if method.keep == "best":
        _check_keep(method, data)
    if method.needs == "novel classes" and not data.novel:
        raise SettingError(
            f"{method.name} is evaluated on novel classes, but data '{data.name}' does not split its classes: "
            "pass --data-option split=BASE/VALIDATION/NOVEL, such as 20/5/16"
        )
    if data.novel and method.needs != "novel classes":
        allowed = [name for name in names() if find(name).needs == "novel classes"]
        raise SettingError(
            f"the test samples of data '{data.name}' are of novel classes, which {method.name} cannot predict "
            f"(allowed: {', '.join(allowed)})"
        )
    return data


def _check_unseen_clients(method: Method, settings: Settings) -> None:
    """Raises SettingError if clients cannot join after training."""
    if settings.runtime == "flower":
        raise SettingError("unseen_clients is for simulations: between machines, all clients take part")
    if not (method.evaluates_clients and method.accepts_unseen_clients):
        reason = "no client can join" if method.evaluates_clients else "it does not evaluate one model per client"
        raise SettingError(f"unseen_clients does not work with {method.name}: {reason}")


def make_method(method_class: type[Method], settings: Settings) -> Method:
    """The method with its options from the settings."""
    chosen = {name: value for name in METHOD_SETTINGS if (value := getattr(settings, name)) is not None}
    return method_class(**chosen | settings.method_options)


def read_stored_data(settings: Settings) -> RawDataset:
    """The data that the settings name, before it is partitioned."""
    data_options = {**regression_option(settings.data, settings), **settings.data_options}
    return read_training_data(settings.data, settings.data_dir, data_options)


def load_data(settings: Settings) -> Data:
    """The data that the settings name, partitioned among clients."""
    data_options = {**regression_option(settings.data, settings), **settings.data_options}
    seed = settings.seed if settings.data_seed is None else settings.data_seed
    names = settings_in_group("Data") - {"data", "data_options", "data_seed"}
    data: Data
    if _is_servers_file(settings):
        chosen = settings.model_dump(include={"vocab_size", "max_length", "standardize"})
        data = read_undivided(settings.data, settings.data_dir, data_options, **chosen)
    else:
        data = load(settings.data, data_options=data_options, seed=seed, **settings.model_dump(include=names))
    return data.as_numbers() if predicted_kind(settings.loss) == "regression" else data


def regression_option(data: str, settings: Settings) -> dict[str, Any]:
    """The option that makes numbers of the labels in a CSV file, if the loss needs numbers."""
    is_regression = data.startswith("csv:") and predicted_kind(settings.loss) == "regression"
    return {"regression": True} if is_regression else {}


def hide_clients(data: Data, settings: Settings) -> Data:
    """The same data; without clients' samples if clients are on other machines, where only they know them."""
    if settings.runtime != "flower" or not isinstance(data, ArrayData):
        return data
    return RemoteData.of(data, settings.clients if _is_servers_file(settings) else len(data))


def _is_servers_file(settings: Settings) -> bool:
    """True if only the server has the data: clients on other machines take no file from it, and have their own."""
    return settings.runtime == "flower" and ":" in settings.data


def _check_privacy(settings: Settings, data: Data) -> None:
    """Raises SettingError if the settings contradict differential privacy."""
    privacy = PrivacySettings.parse(settings.dp or "")
    if settings.aggregate != "mean" and privacy.level == "user":
        raise SettingError(f"dp needs aggregate = mean, whose sensitivity is known, got {settings.aggregate}")
    if data.standardize:
        raise SettingError("dp does not cover the sums of columns that standardize asks for: leave out standardize")
    if settings.runtime == "flower":
        check_remote_privacy(settings)


def check_remote_privacy(settings: Settings) -> None:
    """Raises SettingError if the noise would not protect clients on other machines."""
    privacy = PrivacySettings.parse(settings.dp or "")
    if privacy.public_noise:
        raise SettingError("dp with public_noise needs simulated clients: all machines know the seed")
    if privacy.distributed and not settings.secure_sum:
        raise SettingError(
            "dp with distributed noise needs secure_sum between machines: one message has only a share of the noise"
        )


def _check_secure_sum(method: Method, settings: Settings) -> None:
    """Raises SettingError if the server needs more than sums of what clients send."""
    privacy = None if settings.dp is None else PrivacySettings.parse(settings.dp)
    if privacy and privacy.level == "user" and not privacy.distributed:
        raise SettingError(
            "secure_sum with dp = user needs distributed noise: a server that sees sums cannot clip single changes"
        )
    class_sums = privacy is not None and privacy.distributed and method.adds_class_sums()
    if not method.averages() and not class_sums:
        raise SettingError(f"secure_sum does not cover {method.name}: it averages nothing that clients send")
    if settings.aggregate != "mean":
        raise SettingError(
            f"secure_sum needs aggregate = mean: a server that sees sums cannot compute the {settings.aggregate}"
        )
    if settings.lie is not None:
        raise SettingError("secure_sum does not work with lie, which needs the answers of single clients")


def _check_keep(method: Method, data: Data) -> None:
    """Raises SettingError if clients cannot choose a model, unless the method does so by default."""
    if not method.evaluates_clients:
        raise SettingError(f"keep = best does not work with {method.name}: it does not evaluate one model per client")
    chosen = "keep" not in neutral_options(method)
    if chosen and isinstance(data, ArrayData) and not len(data.validation.rows):
        raise SettingError("keep = best needs validation samples, and there are none; set validation, such as 0.2")


def _check_classes(method: Method, settings: Settings, objective: Objective) -> None:
    """Raises SettingError if the method needs classes, and the objective is another one than predicting them."""
    if objective.loss is LOSSES["cross-entropy"][0]:
        return
    if objective.kind in CLASS_KINDS:
        problem = f"has its own loss; loss = {settings.loss} does not apply"
    else:
        problem = f"needs classes, but this is a {objective.kind} task"
    allowed = ", ".join(name for name in names() if not find(name).needs)
    raise SettingError(f"{method.name} {problem} (allowed: {allowed})")


def make_device(name: str) -> torch.device:
    """The named device; SettingError if it is not available."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingError(f"device = '{name}' is not available: {_describe_error(error)}") from error
    return device


def make_task(model: Model, settings: Settings, data: Data, objective: Objective, device: torch.device) -> Task:
    """Builds the task of training this model on this data."""
    initial = None
    if isinstance(model, nn.Module):
        make: Callable[[], nn.Module] = partial(copy_net, model)
        initial = None if is_lazy(model) else get_weights(model)
    else:
        factory = model if not isinstance(model, str) else find_model(model)
        facts = {"shape": data.shape, "classes": data.classes, "norm": settings.norm, "vocabulary": data.vocab_size}
        facts |= {"tokens": data.tokens}
        make = net_factory(factory, facts, _model_options(settings, data))
    zeros = torch.zeros(1, *data.shape, dtype=torch.int64 if data.tokens else torch.float32)
    return Task(data.shape, data.classes, partial(materialize, make, zeros), device, initial, *objective)


def _model_options(settings: Settings, data: Data) -> dict[str, Any]:
    """The options of the net, with word vectors for the name or file in `vectors`."""
    options = dict(settings.model_options)
    if isinstance(name := options.get("vectors"), str):
        if not data.tokens:
            raise SettingError(f"vectors = {name}, but data '{data.name}' is not text")
        width = options.pop("width", None)
        options["vectors"] = vectors = _word_vectors(name, settings, data, width)
        if width not in (None, vectors.shape[1]):
            raise SettingError(f"width = {width}, but vectors = {name} has {vectors.shape[1]} values per word")
    return options


def _word_vectors(name: str, settings: Settings, data: Data, width: int | None) -> torch.Tensor:
    """The vectors of the vocabulary: from a file, or (`own`) computed from the training text of all clients."""
    if name != "own":
        file = find_word_vectors(name, settings.data_dir)
        vectors, found = load_word_vectors(file, data.tokens)
        if not found:
            raise DataError(f"{file} has none of the words of data '{data.name}'")
        words = len(data.tokens)
        warn_once(f"word vectors: {file.name} has {found:,} of {words:,} words of the vocabulary ({found / words:.0%})")
        return vectors
    if isinstance(data, AbsentData):
        raise DataError(f"vectors = own needs the training text: {data.reason}")
    if not isinstance(data, ArrayData):
        problem = f"vectors = own needs data in arrays; data '{data.name}' is not"
        raise SettingError(f"{problem}: pass a file of word vectors")
    warn_once(
        "vectors = own computes word vectors from the raw training text of all clients, which a real federation never "
        "has in one place; prefer public vectors: vectors = glove"
    )
    order = torch.from_numpy(data.train.rows).sort().values  # independent of the partition
    return compute_word_vectors(data.source.x[order].numpy(), len(data.tokens), int(width or 100))


@cache
def warn_once(message: str) -> None:
    """Logs a message or a warning, once per process."""
    _LOG.warning(message)


def _try_model(task: Task, data: Data, settings: Settings) -> Data:
    """Runs the model on one sample, so that mistakes show before training.

    Returns the data as the model takes it: with pixels on a scale of 0 … 1 if the model normalizes them.
    """
    if not len(data.test):
        raise DataError(f"data '{data.name}' has no test samples")
    try:
        with global_streams("net"):
            net = task.build_net()
    except SettingError:
        raise
    except Exception as error:  # a user's own model may raise anything
        passed = "Fewer passes `shape` and `classes` if it takes them; --model-option NAME=VALUE sets others"
        raise SettingError(f"the model cannot be built: {_describe_error(error)} ({passed})") from error
    if not isinstance(net, nn.Module):
        allowed = "a torch.nn.Module, or a function that returns one"
        raise SettingError(f"the model is of type {type(net).__name__} (allowed: {allowed})")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise SettingError("the model has no trainable parameters (requires_grad)")
    if takes_pixels(net) and data.test.x.dtype == torch.uint8:
        if "normalization" in settings.data_options:
            raise SettingError("the model normalizes pixels itself: leave out the data option normalization")
        data = data.rescale(replace(data.schema, shift=(PIXEL_SHIFT,), scale=(PIXEL_SCALE,)))
    try:
        with torch.no_grad():
            x, y = (tensor.to(task.device) for tensor in data.test.slice(0, 1))
            outputs = net.to(task.device).eval()(x)
    except Exception as error:
        raise SettingError(f"the model rejects inputs of shape {data.shape}: {_describe_error(error)}") from error
    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    columns = outputs.shape[1] if isinstance(outputs, torch.Tensor) and outputs.ndim == 2 else 0
    if columns < data.classes or (columns > data.classes and not task.has_classes):
        expected = f"scores of at least {data.classes} classes" if task.has_classes else f"{data.classes} outputs"
        raise SettingError(f"the model returns {shape} for one sample, expected {expected}")
    if not data.novel:
        _try_objective(task, outputs, y)
    return data


def _try_objective(task: Task, outputs: torch.Tensor, y: torch.Tensor) -> None:
    """Computes the loss and the metrics of one sample. A user's function may raise anything."""
    try:
        loss = task.loss(outputs, y)
    except Exception as error:
        raise SettingError(f"the loss cannot be computed: {_describe_error(error)}") from error
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        shape = getattr(loss, "shape", type(loss).__name__)
        raise SettingError(f"the loss must be a tensor with one number, got {shape}")
    try:
        measure_outputs(outputs, y, task)
    except Exception as error:
        raise SettingError(f"a metric cannot be computed: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
