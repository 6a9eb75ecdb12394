"""Uses a trained run: predictions, adaptation, deployment, export."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import nn

from fewer.data import Data, RawDataset
from fewer.data.schema import quote_names
from fewer.data.sources import read_inputs
from fewer.errors import DataError, FewerError, SettingError
from fewer.methods import Method
from fewer.methods.capabilities import WritesArtifact
from fewer.methods.registry import names_with
from fewer.models import load_weights
from fewer.runs.artifacts import deploy_settings
from fewer.runs.callbacks import Callback
from fewer.runs.engine import run
from fewer.runs.experiment import Model, regression_option, resolve_path
from fewer.runs.predictions import Predictions, predict_samples
from fewer.runs.result import Result, open_run


class Forecast(NamedTuple):
    """Predictions for a data set."""

    predictions: Predictions
    metrics: str | None
    """The metrics as text, if the data has targets that the model knows."""
    notes: tuple[str, ...]
    """What the user should know about how the data was read."""


def predict(
    path: Path,
    name: str,
    directory: Path | None = None,
    client: int | None = None,
    options: Mapping[str, Any] | None = None,
    weights: Path | None = None,
) -> Forecast:
    """Predicts a data set with the model of a run, and measures the predictions if the data has targets.

    `weights` is a file written by `adapt` or `export`; it replaces the run's weights. `options` override the options
    in the run's schema. For the dataset of the run, the test samples are used.
    """
    result = open_run(path)
    net = result.model if client is None else result.personal_model(client)
    if weights is not None:
        try:
            load_weights(net, safetensors.torch.load_file(weights))
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(f"{weights} is not a file of weights (expected: model.safetensors): {error}") from error
    if resolve_path("data", name) == result.settings.data and not options and len(result.raw_data.test):
        samples = result.raw_data.test
        predictions = predict_samples(net, samples, result.task, result.schema)
        note = "this is the data of the run: only its test samples are predicted"
        return Forecast(predictions, predictions.measure(samples.labels.cpu()), (note,))
    raw = _read_inputs(result, name, directory, options)
    predictions = predict_samples(net, result.to_samples(raw.x, name), result.task, result.schema)
    predictions = replace(predictions, numbers=() if raw.rows is None else raw.rows.tolist())
    if not len(raw.y):
        return Forecast(predictions, None, raw.notes)
    if result.task.has_classes and raw.y.dtype.kind != "f":
        unknown = result.schema.map_labels(raw.y, raw.class_names)[1]
        if unknown:
            labels = "label" if len(unknown) == 1 else "labels"
            note = f"{labels} {quote_names(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown to the model"
            return Forecast(predictions, None, (*raw.notes, f"{note}: no accuracy"))
    return Forecast(predictions, predictions.measure(result.to_targets(raw.y, name, raw.class_names)), raw.notes)


def adapt(
    path: Path, name: str, out: Path, directory: Path | None = None, options: Mapping[str, Any] | None = None
) -> tuple[list[Path], int]:
    """Adapts the model of a run to this data and writes the files of `export`. Also returns the number of samples."""
    result = open_run(path)
    raw = _read_inputs(result, name, directory, options, keep_unlabeled=False)
    if not len(raw.y):
        raise DataError(f"data '{name}' has no labels to adapt to (npz: an array y)")
    targets = result.to_targets(raw.y, name, raw.class_names)
    net = result.adapt(result.to_samples(raw.x, name), targets)
    return _write_model(result, net, out), len(targets)


def _read_inputs(
    result: Result, name: str, directory: Path | None, options: Mapping[str, Any] | None, keep_unlabeled: bool = True
) -> RawDataset:
    """Reads samples for the model: columns by name, with the options of the schema."""
    chosen = {**regression_option(name, result.settings), **(options or {})}
    return read_inputs(name, directory, result.schema, keep_unlabeled=keep_unlabeled, **chosen)


# --- prepared models ---------------------------------------------------------------------------------------------


def check_prepares(method: type[Method]) -> None:
    """Raises SettingError if the method does not prepare a model for later runs."""
    if not issubclass(method, WritesArtifact):
        raise SettingError(f"{method.name} does not prepare a model (allowed: {', '.join(names_with(WritesArtifact))})")


def deploy(
    prepared: str | Path,
    data: Data | str,
    *,
    model: Model | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Trains a model for the clients of `data` from a prepared one: `fewer.deploy("runs/…", data).model`.

    `prepared` is the file that `fewer prepare` wrote, or its run directory. Pass `model` again if it is your own. All
    other settings are those of `fewer.run`.
    """
    resolved = deploy_settings(Path(prepared), settings)
    arguments: dict[str, Any] = {"out": out, "callbacks": callbacks, "progress": progress, **resolved}
    named_model = arguments.pop("model")
    return run(arguments.pop("method"), data, model=model or named_model, **arguments)


def export(path: Path, out: Path, client: int | None = None) -> list[Path]:
    """Writes the weights as safetensors, a torch.export program with dynamic batch size, and a JSON description."""
    result = open_run(path)
    return _write_model(result, result.model if client is None else result.personal_model(client), out)


def _write_model(result: Result, net: nn.Module, out: Path) -> list[Path]:
    net = net.cpu()
    schema = result.schema
    sample = torch.ones(2, *schema.shape, dtype=torch.int64 if schema.tokens else torch.float32)
    try:
        out.mkdir(parents=True, exist_ok=True)
        weights, program, description = out / "model.safetensors", out / "model.pt2", out / "model.json"
        state = net.state_dict()  # cloned, since safetensors rejects tensors that layers share
        safetensors.torch.save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, weights)
        content = {
            "method": result.method.name,
            "rounds": len(result.history),
            "predicts": result.task.kind,
            "input": ["batch", *schema.shape],
            **schema.to_dict(),
        }
        description.write_text(json.dumps(content, indent=2, default=str) + "\n")
        batch = torch.export.Dim("batch")
        torch.export.save(torch.export.export(net, (sample,), dynamic_shapes=({0: batch},)), program)
    except OSError as error:
        raise FewerError(f"{out} cannot be written: {error.strerror}") from error
    except Exception as error:  # torch.export cannot trace every net
        reason = str(error).partition("\n")[0]
        raise FewerError(f"{weights} was written, but torch.export cannot trace this model: {reason}") from error
    return [weights, program, description]
