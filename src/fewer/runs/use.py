"""Using what a run leaves: predictions, and files for elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from fewer.data import Samples
from fewer.data.federated import inputs_of, labels_of
from fewer.data.sources import inputs
from fewer.errors import DataError, FewerError
from fewer.runs.result import Result, open_result


def predictions(
    path: Path, name: str, directory: Path | None = None, party: int | None = None
) -> tuple[list[str], float | None]:
    """Lines of CSV (a header first), and the accuracy where the data has labels."""
    result = open_result(path)
    net = result.model if party is None else result.personal(party)
    x, y = inputs(name, directory)
    samples = _like(result, np.asarray(x), name)
    lines, right = ["sample,class,confidence"], 0
    labels = None if y is None else labels_of(y, name)
    with torch.no_grad():
        for start in range(0, len(samples), 1000):
            chunk = samples.slice(start, start + 1000)[0].to(result.task.device)
            confidence, chosen = net(chunk).softmax(1).max(1)
            for place, (label, sure) in enumerate(zip(chosen.tolist(), confidence.tolist(), strict=True), start):
                lines.append(f"{place},{label},{sure:.6f}")
                right += labels is not None and int(labels[place]) == label
    return lines, None if labels is None else right / len(labels)


def _like(result: Result, x: np.ndarray, name: str) -> Samples:
    """Inputs normalised as those that the model was trained on."""
    tensor = inputs_of(x, name)
    if tuple(tensor.shape[1:]) != result.data.shape:
        raise DataError(
            f"data '{name}' has inputs of shape {tuple(tensor.shape[1:])}; the model takes {result.data.shape}"
        )
    if tensor.dtype != result.data.test.x.dtype:
        raise DataError(f"data '{name}' has {tensor.dtype} inputs; the model was trained on {result.data.test.x.dtype}")
    return replace(result.data.test, x=tensor, y=torch.zeros(len(tensor), dtype=torch.int64), rows=None)


def export(path: Path, out: Path, party: int | None = None) -> list[Path]:
    """Weights as safetensors, a torch.export program with a free batch size, and a note on inputs and classes."""
    result = open_result(path)
    net = (result.model if party is None else result.personal(party)).cpu()
    sample = result.data.test.slice(0, 2)[0].cpu()
    try:
        out.mkdir(parents=True, exist_ok=True)
        weights, program, note = out / "model.safetensors", out / "model.pt2", out / "model.json"
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, weights)
        batch = torch.export.Dim("batch")
        torch.export.save(torch.export.export(net, (sample,), dynamic_shapes=({0: batch},)), program)
        test = result.data.test
        facts = {
            "method": result.method.name,
            "rounds": len(result.history),
            "input": ["batch", *result.data.shape],
            "normalise": {"subtract": test.shift, "multiply": test.scale},
            "classes": result.data.classes,
        }
        note.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise FewerError(f"{out} cannot be written: {error.strerror}") from error
    return [weights, program, note]
