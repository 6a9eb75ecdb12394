"""Using what a run leaves: predictions, and files for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import nn

from fewer.data import Data, Samples, text
from fewer.data.federated import inputs_of, labels_of
from fewer.data.raw_dataset import Inputs
from fewer.data.sources import inputs
from fewer.errors import DataError, FewerError, SettingError
from fewer.methods import Method, find, names
from fewer.methods.frl import Prepared
from fewer.methods.frl_deploy import FRLDeploy, read_prepared
from fewer.models import Weights, load_weights
from fewer.runs.engine import Progress, run
from fewer.runs.experiment import Model
from fewer.runs.result import Result, open_result


def predictions(
    path: Path,
    name: str,
    directory: Path | None = None,
    client: int | None = None,
    options: Mapping[str, Any] | None = None,
    weights: Path | None = None,
) -> tuple[list[str], float | None]:
    """Lines of CSV (a header first), and the accuracy where the data has labels.

    With `weights`, the run's net is used with those of a file that `adapt` or `export` wrote.

    Options of the data are by default those of the run, if it read the same format. Of the set that the run learned
    from, the test samples are taken.
    """
    result = open_result(path)
    net = result.model if client is None else result.personal_model(client)
    if weights is not None:
        load_weights(net, _weights_in(weights))
    labels: NDArray[np.int64] | None
    if name == result.settings.data and not options:
        samples, labels = result.data.test, result.data.test.slice(0, len(result.data.test))[1].cpu().numpy()
    else:
        samples, labels = _read(result, name, directory, options)
    lines, right = ["sample,class,confidence"], 0
    with torch.no_grad():
        for start in range(0, len(samples), 1000):
            chunk = samples.slice(start, start + 1000)[0].to(result.task.device)
            confidence, chosen = net(chunk).softmax(1).max(1)
            for place, (label, sure) in enumerate(zip(chosen.tolist(), confidence.tolist(), strict=True), start):
                lines.append(f"{place},{label},{sure:.6f}")
                right += labels is not None and int(labels[place]) == label
    return lines, None if labels is None else right / len(labels)


def adapt(
    path: Path,
    name: str,
    out: Path,
    directory: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[list[Path], int]:
    """A new client's own model: what a run has learned, adapted to all samples of this data; the same files as `export`.

    How many samples there were comes second.
    """
    result = open_result(path)
    samples, labels = _read(result, name, directory, options)
    if labels is None:
        raise DataError(f"data '{name}' has no labels to adapt to (npz: an array y)")
    net = result.adapt(samples, torch.from_numpy(labels))
    return _write(result, net, out), len(labels)


def _read(
    result: Result, name: str, directory: Path | None, options: Mapping[str, Any] | None
) -> tuple[Samples, NDArray[np.int64] | None]:
    """Samples in the form that the model takes, and their labels if there are any."""
    same = name.partition(":")[0] == result.settings.data.partition(":")[0]
    x, y = inputs(name, directory, options or (result.settings.data_options if same else {}))
    return _like(result, x, name), None if y is None else labels_of(y, name)


def _weights_in(path: Path) -> Weights:
    try:
        found: Weights = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path} is not a file of weights (expected: model.safetensors): {error}") from error
    return found


def _like(result: Result, x: Inputs, name: str) -> Samples:
    """Inputs in the form of those that the model was trained on: normalized alike, or with the same vocabulary."""
    if isinstance(x, list):
        if not result.data.tokens:
            raise DataError(f"data '{name}' is text; the model was trained on inputs of shape {result.data.shape}")
        x = text.encode(x, result.data.tokens, result.settings.max_length)
    return result.like(inputs_of(x, name), name)


# --- models for groups ------------------------------------------------------------------------------------------


def preparing(kind: type[Method]) -> None:
    """SettingError where a method prepares nothing."""
    if not issubclass(kind, Prepared):
        known = [name for name in names() if issubclass(find(name), Prepared)]
        raise SettingError(f"{kind.name} prepares no model for groups (allowed: {', '.join(known)})")


def deploying(prepared: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group's run from a prepared model: those of its preparation, and what is given."""
    facts = read_prepared(prepared)[1]
    own = {**facts["method_options"], **given.get("method_options", {}), "prepared": str(prepared.resolve())}
    return {"rounds": facts["rounds"], **facts["model"], **given, "method": FRLDeploy.name, "method_options": own}


def deploy(
    prepared: str | Path,
    data: Data | str,
    *,
    model: Model | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Let the clients of `data` make their own model from a prepared one: `fewer.deploy("runs/…", mine).model`.

    `prepared` is the file that `fewer prepare` wrote, or the directory of a run that prepared a model. A model of your
    own must be given again. Settings are those of `fewer.run`.
    """
    chosen = deploying(Path(prepared), settings)
    named = chosen.pop("model")
    return run(chosen.pop("method"), data, model=model or named, out=out, progress=progress, **chosen)


def export(path: Path, out: Path, client: int | None = None) -> list[Path]:
    """Weights as safetensors, a torch.export program with a free batch size, and a note on inputs and classes."""
    result = open_result(path)
    return _write(result, result.model if client is None else result.personal_model(client), out)


def _write(result: Result, net: nn.Module, out: Path) -> list[Path]:
    net = net.cpu()
    sample = result.data.test.slice(0, 2)[0].cpu()
    try:
        out.mkdir(parents=True, exist_ok=True)
        weights, program, note = out / "model.safetensors", out / "model.pt2", out / "model.json"
        state = net.state_dict()  # cloned: weights may be shared between layers, which safetensors does not write
        safetensors.torch.save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, weights)
        test = result.data.test
        facts = {
            "method": result.method.name,
            "rounds": len(result.history),
            "input": ["batch", *result.data.shape],
            "normalize": {"subtract": test.shift, "multiply": test.scale},
            "classes": result.data.classes,
            "names": list(getattr(result.data, "names", ())),
            "tokens": list(result.data.tokens),
        }
        note.write_text(json.dumps(facts, indent=2) + "\n")
        batch = torch.export.Dim("batch")
        torch.export.save(torch.export.export(net, (sample,), dynamic_shapes=({0: batch},)), program)
    except OSError as error:
        raise FewerError(f"{out} cannot be written: {error.strerror}") from error
    except Exception as error:  # torch.export follows most nets, but not all
        reason = str(error).partition("\n")[0]
        raise FewerError(f"{weights} is written, but torch.export cannot follow this model: {reason}") from error
    return [weights, program, note]
