"""Uses a trained run: predictions, adaptation, deployment, export."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fewer.data import Data, Samples, text
from fewer.data.federated import convert_inputs
from fewer.data.sources import read_inputs
from fewer.errors import DataError, FewerError, SettingError
from fewer.learning.evaluate import EVAL_BATCH_SIZE, add_evaluations, measure_outputs
from fewer.methods import Method
from fewer.methods.capabilities import WritesArtifact
from fewer.methods.registry import names_with
from fewer.models import Task, load_weights
from fewer.runs.artifacts import deploy_settings
from fewer.runs.callbacks import Callback
from fewer.runs.engine import run
from fewer.runs.experiment import Model
from fewer.runs.metric import PrimaryMetric
from fewer.runs.result import Result, open_run


def predictions(
    path: Path,
    name: str,
    directory: Path | None = None,
    client: int | None = None,
    options: Mapping[str, Any] | None = None,
    weights: Path | None = None,
) -> tuple[list[str], str | None]:
    """Returns predictions as lines of CSV, and the metrics as text if the data has targets.

    `weights` is a file written by `adapt` or `export`; it replaces the run's weights. `options` default to the run's
    data options if the format is the same. For the dataset of the run, the test samples are used.
    """
    result = open_run(path)
    task = result.task
    net = result.model if client is None else result.personal_model(client)
    if weights is not None:
        try:
            load_weights(net, safetensors.torch.load_file(weights))
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(f"{weights} is not a file of weights (expected: model.safetensors): {error}") from error
    targets: Tensor | None
    if name == result.settings.data and not options:
        samples, targets = result.data.test, result.data.test.labels.cpu()
    else:
        samples, targets = _read_samples(result, name, directory, options)
    lines, evaluations = [_prediction_heads(task)], []
    with torch.no_grad():
        for start in range(0, len(samples), EVAL_BATCH_SIZE):
            outputs = net(samples.slice(start, start + EVAL_BATCH_SIZE)[0].to(task.device)).cpu()
            lines += [f"{row},{cells}" for row, cells in enumerate(_format_predictions(outputs, task), start)]
            if targets is not None:
                evaluations.append(measure_outputs(outputs, targets[start : start + EVAL_BATCH_SIZE], task))
    if not evaluations:
        return lines, None
    values = add_evaluations(evaluations).values()
    metrics = (PrimaryMetric(metric.name, percent=metric.percent) for metric in task.metrics)
    return lines, ", ".join(f"{metric.name} {metric.format(values[metric.name])}" for metric in metrics)


def _prediction_heads(task: Task) -> str:
    """The first line of predictions as CSV."""
    if task.has_classes:
        return "sample,class,confidence"
    names = ["labels"] if task.kind == "multi-label" else [f"value_{output}" for output in range(task.classes)]
    return ",".join(["sample", *names])


def _format_predictions(outputs: Tensor, task: Task) -> Iterator[str]:
    """Yields the cells of each sample: its class and confidence, its labels separated by spaces, or its numbers."""
    if task.has_classes:
        confidences, classes = outputs.softmax(1).max(1)
        for label, confidence in zip(classes.tolist(), confidences.tolist(), strict=True):
            yield f"{label},{confidence:.6f}"
    elif task.kind == "multi-label":
        for row in outputs > 0:
            yield " ".join(map(str, row.nonzero()[:, 0].tolist()))
    else:
        for values in outputs.tolist():
            yield ",".join(f"{value:.6g}" for value in values)


def adapt(
    path: Path, name: str, out: Path, directory: Path | None = None, options: Mapping[str, Any] | None = None
) -> tuple[list[Path], int]:
    """Adapts the model of a run to this data and writes the files of `export`. Also returns the number of samples."""
    result = open_run(path)
    samples, targets = _read_samples(result, name, directory, options)
    if targets is None:
        raise DataError(f"data '{name}' has no labels to adapt to (npz: an array y)")
    net = result.adapt(samples, targets)
    return _write_model(result, net, out), len(targets)


def _read_samples(
    result: Result, name: str, directory: Path | None, options: Mapping[str, Any] | None
) -> tuple[Samples, Tensor | None]:
    """Reads samples for the model, and their targets if there are any."""
    same_format = name.partition(":")[0] == result.settings.data.partition(":")[0]
    chosen = dict(options or (result.settings.data_options if same_format else {}))
    if name.startswith("csv:") and result.task.kind == "regression":
        chosen["regression"] = True
    x, y = read_inputs(name, directory, chosen)
    if isinstance(x, list):
        if not result.data.tokens:
            raise DataError(f"data '{name}' is text; the model was trained on inputs of shape {result.data.shape}")
        x = text.encode(x, result.data.tokens, result.settings.max_length)
    samples = result.to_samples(convert_inputs(x, name), name)
    return samples, None if y is None else result.to_targets(y, name)


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
    **settings: Any,
) -> Result:
    """Trains a model for the clients of `data` from a prepared one: `fewer.deploy("runs/…", data).model`.

    `prepared` is the file that `fewer prepare` wrote, or its run directory. Pass `model` again if it is your own. All
    other settings are those of `fewer.run`.
    """
    resolved = deploy_settings(Path(prepared), settings)
    named_model = resolved.pop("model")
    return run(resolved.pop("method"), data, model=model or named_model, out=out, callbacks=callbacks, **resolved)


def export(path: Path, out: Path, client: int | None = None) -> list[Path]:
    """Writes the weights as safetensors, a torch.export program with dynamic batch size, and a JSON description."""
    result = open_run(path)
    return _write_model(result, result.model if client is None else result.personal_model(client), out)


def _write_model(result: Result, net: nn.Module, out: Path) -> list[Path]:
    net = net.cpu()
    sample = result.data.test.slice(0, 2)[0].cpu()
    try:
        out.mkdir(parents=True, exist_ok=True)
        weights, program, description = out / "model.safetensors", out / "model.pt2", out / "model.json"
        state = net.state_dict()  # cloned, since safetensors rejects tensors that layers share
        safetensors.torch.save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, weights)
        data = result.data
        content = {
            "method": result.method.name,
            "rounds": len(result.history),
            "input": ["batch", *data.shape],
            "normalize": {"subtract": data.test.shift, "multiply": data.test.scale},
            "predicts": result.task.kind,
            "classes": data.classes,
            "class_names": list(getattr(data, "class_names", ())),
            "tokens": list(data.tokens),
        }
        description.write_text(json.dumps(content, indent=2) + "\n")
        batch = torch.export.Dim("batch")
        torch.export.save(torch.export.export(net, (sample,), dynamic_shapes=({0: batch},)), program)
    except OSError as error:
        raise FewerError(f"{out} cannot be written: {error.strerror}") from error
    except Exception as error:  # torch.export cannot trace every net
        reason = str(error).partition("\n")[0]
        raise FewerError(f"{weights} was written, but torch.export cannot trace this model: {reason}") from error
    return [weights, program, description]
