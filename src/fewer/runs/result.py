"""The result of a run: metrics and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.absent import AbsentData
from fewer.data.federated import convert_inputs, convert_labels, convert_targets, encode_samples
from fewer.data.frames import check_index, encode_frame
from fewer.data.raw_dataset import Inputs, encode_inputs
from fewer.data.schema import Schema
from fewer.errors import DataError, FewerError, RunError, SettingError
from fewer.methods import ContextFactory, Method
from fewer.methods.capabilities import AdaptsToNewClients
from fewer.methods.registry import names_with
from fewer.models import load_weights
from fewer.models.frozen import FrozenEncoder
from fewer.runs.artifacts import resolve_start_model
from fewer.runs.experiment import (
    Experiment,
    build_experiment,
    hide_clients,
    load_data,
    parse_settings,
    restore_state,
)
from fewer.runs.figures import class_rows, client_rows
from fewer.runs.predictions import Predictions, predict_samples
from fewer.runs.reader import CLIENTS, RunReader
from fewer.runs.settings import Settings
from fewer.runs.views import Viewable, to_data_frame
from fewer.runtime.streams import one_thread
from fewer.statistics import format_duration, format_megabytes

_NEEDS = {
    "classes": "it needs a task with at most 100 classes, evaluated by the server or in a simulation",
    "client_metrics": "it needs a method that is evaluated at its clients",
}
"""What a run needs so that the last round records a part."""


@dataclass(repr=False, kw_only=True)
class Result(Experiment, Viewable):
    """A run, finished or not. It displays itself in a notebook; see also `plot`, `to_pandas` and `report`."""

    view: ClassVar[str] = "run"

    state: Any
    folder: Path | None = None
    """The clients' private state, if it was kept."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The metrics of each round: those of the task, loss, and the bytes (up, down) and seconds so far."""
    seconds: float = 0.0
    stopped: str = ""
    """Why a callback ended the run before its last round; empty otherwise."""

    def __repr__(self) -> str:
        metric = self.metric
        evaluated = next((entry for entry in reversed(self.history) if metric.name in entry), None)
        value = f": {metric.name} {metric.format(evaluated[metric.name])}" if evaluated else ""
        value += _describe_majority(evaluated or {}) if metric.name == "accuracy" else ""
        last = {"up": 0, "down": 0, "seconds": 0.0, **self.metrics}
        up, down, seconds = format_megabytes(last["up"]), format_megabytes(last["down"]), last["seconds"]
        return (
            f"Result of {self.method.name} with {self._model_name} on {self.data.name}, {len(self.data)} clients\n"
            f"  {len(self.history)} of {self.method.rounds} rounds{value}\n"
            f"  {up} up, {down} down, {format_duration(seconds)}"
        )

    @property
    def _model_name(self) -> str:
        return Path(self.settings.model or "").name.strip("()")

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics after the last round."""
        return self.history[-1] if self.history else {}

    def records(self) -> list[dict[str, Any]]:
        """The metrics of each round, without per-client metrics."""
        return [{"round": metrics["round"], **scalars(metrics)} for metrics in self.history]

    @property
    def accuracy(self) -> float:
        """Accuracy after the last round, if the task has classes."""
        if not self.task.has_classes:
            raise SettingError(f"this {self.task.kind} task has no accuracy: use metrics['{self.metric.name}']")
        return float(self.metrics["accuracy"])

    @property
    def value(self) -> float:
        """The primary metric after the last round."""
        return float(self.metrics[self.metric.name])

    def per_class(self) -> Any:
        """Support, recall, precision and F1 of each class after the last round, as a pandas DataFrame."""
        return to_data_frame(class_rows(self._last_evaluation("classes")))

    def per_client(self) -> Any:
        """Test samples and all metrics of each client after the last round, as a pandas DataFrame."""
        return to_data_frame(client_rows(self._last_evaluation("client_metrics")))

    def confusion(self) -> Any:
        """Number of test samples by label (rows) and predicted class (columns), as a pandas DataFrame."""
        classes = self._last_evaluation("classes")["classes"]
        frame = to_data_frame([{str(x): count for x, count in enumerate(row)} for row in classes["confusion"]])
        frame = frame.set_axis(classes["names"]).set_axis(classes["names"], axis=1)  # names may repeat
        return frame.rename_axis(index="label", columns="predicted")

    def _last_evaluation(self, part: str) -> dict[str, Any]:
        """The metrics after the last round; SettingError if they do not have this part."""
        if part in self.metrics:
            return self.metrics
        if len(self.history) < self.method.rounds and not self.stopped:
            raise SettingError(f"the last round records '{part}', and this run has not finished")
        raise SettingError(f"{self.method.name} on {self.data.name} has no '{part}': {_NEEDS[part]}")

    @property
    def model(self) -> nn.Module:
        """The trained global model, in evaluation mode; with a frozen encoder, both parts."""
        return self._with_encoder(self.trained_net)

    def _with_encoder(self, net: nn.Module) -> nn.Module:
        """The net after the frozen encoder, if there is one."""
        return net if self.task.encoder is None else nn.Sequential(self.task.encoder, net).eval()

    @property
    def trained_net(self) -> nn.Module:
        """The global model on the task's inputs, in evaluation mode. These are features if the encoder is frozen."""
        return self.method.build_predictor(self.state.shared, self.contexts().server(0, len(self.history))).eval()

    def contexts(self) -> ContextFactory:
        """Makes the contexts of handlers, as in the run."""
        return ContextFactory(self.data, self.task, self.settings.seed, self.folder or Path())

    def personal_model(self, client: int) -> nn.Module:
        """The model of one client, in evaluation mode."""
        if not 0 <= client < len(self.data):
            raise SettingError(f"client = {client} (allowed: 0 … {len(self.data) - 1})")
        if self.settings.runtime == "flower":
            raise RunError(f"the model of client {client} exists only on that client's machine")
        if self.folder is None:
            raise RunError("clients' models are kept only in a run directory: run with out=DIR")
        with one_thread():
            net = self.method.client_model(self.state.shared, self.contexts()(client, len(self.history))).eval()
        return self._with_encoder(net)

    @property
    def raw_data(self) -> Data:
        """The data, before a frozen encoder computed features of it."""
        return self.data.raw or self.data

    @property
    def schema(self) -> Schema:
        """What inputs and labels mean: shape, columns, classes, vocabulary, normalization."""
        return self.data.schema

    def to_samples(self, x: Inputs | ArrayLike, name: str) -> Samples:
        """Converts raw inputs to samples for the model: arrays, texts, or a DataFrame, whose columns go by name.

        They are normalized like the training data. Categories and missing values are encoded as in the training data.
        """
        inputs = encode_inputs(encode_frame(x, self.schema.columns, name), self.schema, name)
        tensor = convert_inputs(inputs, name, bool(self.schema.tokens))
        if tensor.ndim == 4 and tuple(tensor.shape[1:]) != self.raw_data.shape == (tensor.shape[3], *tensor.shape[1:3]):
            tensor = tensor.movedim(-1, 1).contiguous()  # height × width × channels
        if (shape := tuple(tensor.shape[1:])) != self.raw_data.shape:
            raise DataError(f"data '{name}' has inputs of shape {shape}; the model takes {self.raw_data.shape}")
        if tensor.dtype != self.raw_data.test.x.dtype:
            trained = self.raw_data.test.x.dtype
            raise DataError(f"data '{name}' has {tensor.dtype} inputs; the model was trained on {trained}")
        return replace(self.raw_data.test, x=tensor, y=torch.zeros(len(tensor), dtype=torch.int64), rows=None)

    def to_targets(self, y: ArrayLike | Tensor, name: str, class_names: Sequence[str] = ()) -> Tensor:
        """Converts class labels or names, or numbers and sets of labels, to targets of the task.

        `class_names` are the names of labels; labels are mapped by name. Without it, `y` may also be names.
        """
        if self.task.has_classes:
            array = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
            if array.dtype.kind in "UO" or (array.dtype.kind == "i" and (array < 0).any()):
                named, array = np.unique(array.astype(str), return_inverse=True)
                class_names = named.tolist()
            labels, unknown = self.schema.map_labels(convert_labels(array, name), class_names)
            if unknown:
                raise self.schema.unknown_class(name, unknown)
            return torch.from_numpy(labels)
        targets = torch.from_numpy(convert_targets(y, name)).float()
        targets = targets.reshape(len(targets), -1)
        if targets.shape[1] != self.data.classes:
            raise DataError(f"data '{name}' has {targets.shape[1]} targets per sample, expected {self.data.classes}")
        return targets

    def predict(self, x: Inputs | ArrayLike, client: int | None = None) -> Predictions:
        """Predicts new inputs: an array, texts, or a DataFrame, whose columns go by name.

            result.predict(x).to_pandas()  # class, confidence, and the probability of each class

        `client` uses the personal model of this client.
        """
        net = self.model if client is None else self.personal_model(client)
        return predict_samples(net, self.to_samples(x, "x"), self.task, self.schema)

    def adapt(self, x: Samples | ArrayLike | Tensor, y: ArrayLike | Tensor) -> nn.Module:
        """The model of a new client, adapted to its inputs and labels, in evaluation mode.

        Arrays are normalized like the training data. The method must be one that learns to adapt.
        """
        if not isinstance(self.method, AdaptsToNewClients):
            allowed = ", ".join(names_with(AdaptsToNewClients))
            raise SettingError(f"{self.method.name} does not adapt to new data (allowed: {allowed})")
        check_index(x, y, "x")
        samples = x if isinstance(x, Samples) else self.to_samples(x, "x")
        targets = self.to_targets(y, "y")
        if not len(targets) or len(targets) != len(samples.x):
            counts = f"{len(samples.x)} inputs and {len(targets)} labels"
            raise DataError(f"adapt needs one label per input, at least 1; got {counts}")
        shared = self.state.shared
        net = self.task.net()
        load_weights(net, self.method.initialization(shared))
        support = replace(samples, y=targets).to(self.task.device)
        with one_thread():
            if self.task.encoder is not None:
                support = encode_samples(support, FrozenEncoder(self.task.encoder, self.task.device).encode)
            self.method.adapt(net, support, shared, self.task)
        return self._with_encoder(net.eval())


def open_run(
    path: str | Path,
    *,
    method: Method | None = None,
    data: Data | None = None,
    model: Any = None,
    loss: Any = None,
    metrics: Any = None,
) -> Result:
    """Opens the run in a directory, finished or not: its history, its model and its clients' models.

    Pass `method`, `model`, `loss` and `metrics` again if they were Python objects. The model can be used without the
    training data: if it is gone, `result.data` has its schema and no samples.
    """
    run = RunReader(Path(path))
    run.check_objects(model=model, loss=loss, metrics=metrics)
    if run.schema is None:
        run.check_objects(data=data)
    checkpoint = run.read_checkpoint()
    if checkpoint is None:
        raise RunError(f"{path} has no checkpoint yet: its first round has not finished")
    settings = parse_settings(resolve_start_model(run.settings, run.path))
    build = partial(build_experiment, settings, method, model=model, loss=loss, metrics=metrics)
    if data is not None or run.schema is None:
        experiment = build(data=data)
    else:
        experiment = _build_with_or_without_data(build, run, settings)
    if experiment.data.standardize and run.schema is not None:
        experiment.data = experiment.data.rescale(Schema.from_dict(run.schema))
    return Result(
        **vars(experiment),
        state=restore_state(experiment.initial_state(), checkpoint["state"], run.path),
        folder=run.path / CLIENTS,
        history=run.history[: checkpoint["round"]],
        seconds=checkpoint["seconds"],
        stopped=checkpoint.get("stopped", ""),
    )


def _build_with_or_without_data(build: Callable[..., Experiment], run: RunReader, settings: Settings) -> Experiment:
    """Builds the experiment of a run with its training data, or with the recorded schema if the data is gone."""
    try:
        run.check_objects(data=None)
        experiment = build(data=load_data(settings))
        reason = "has changed"
        if experiment.data.fingerprint() == run.metadata["data"]["fingerprint"]:
            return experiment
    except FewerError as error:
        reason = f"is not there ({error})"
    assert run.schema is not None
    facts = run.metadata["data"]
    problem = f"the training data of {run.path} {reason}"
    return build(data=AbsentData(facts["name"], facts["clients"], Schema.from_dict(run.schema), problem))


def load_run_data(run: RunReader, data: Data | None = None, data_dir: Path | None = None) -> Data:
    """Loads the data of a run, unless it is given; RunError if it has changed since, or is a Python object."""
    run.check_objects(data=data)
    if data is None:
        settings = parse_settings(run.settings | ({"data_dir": data_dir} if data_dir else {}))
        data = hide_clients(load_data(settings), settings)
    if data.fingerprint() != run.metadata["data"]["fingerprint"]:
        raise RunError(f"{data.name} has changed since {run.path} was run")
    return data


def _describe_majority(metrics: Mapping[str, Any]) -> str:
    """Says that a model is no better than the most frequent class of the test samples; "" if it is."""
    if "classes" not in metrics:
        return ""
    support = [sum(row) for row in metrics["classes"]["confusion"]]
    share = max(support) / max(1, sum(support))
    if metrics["accuracy"] > share + 1e-6:
        return ""
    return f", no better than always '{metrics['classes']['names'][support.index(max(support))]}' ({share:.2%})"


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are numbers, nested ones as `group/name`, without per-client metrics."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, int | float) and name != "round":
            numbers[name] = value if isinstance(value, float) else int(value)
        elif isinstance(value, Mapping) and not any(str(key).isdigit() for key in value):
            numbers |= {f"{name}/{key}": number for key, number in scalars(value).items()}
    return numbers
