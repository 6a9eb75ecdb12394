"""Prepared models: the file that a preparation writes, and the copy that each deployment keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch

from fewer.methods import Method
from fewer.methods.frl import HEAD, FewRounds, PreparingMethod
from fewer.methods.frl_deploy import PREPARED_FILE, FRLDeploy, find_prepared_file, vocabulary_checksum
from fewer.runs.result import Result
from fewer.runtime.store import write_durably

START = "start.safetensors"
"""A deployment's own copy of the prepared model, in its run directory."""


def write_prepared(result: Result, folder: Path) -> Path | None:
    """Writes the prepared model with its net and options to `folder`; None if the method does not prepare a model."""
    method, settings = result.method, result.settings
    if not isinstance(method, PreparingMethod):
        return None
    options = {name: getattr(method, name) for name in FewRounds.model_fields if name not in ("rounds", "cohort")}
    metadata = {
        "method": method.name,
        "rounds": method.deploy_rounds or method.group_rounds,
        "method_options": options,
        "model": {"model": settings.model, "norm": settings.norm, "model_options": settings.model_options},
        "input": list(result.task.shape),
        "vocabulary": vocabulary_checksum(result.data),
    }
    weights = {name: tensor.cpu().contiguous() for name, tensor in method.broadcast(result.state).items()}
    encoder = {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD)}
    write_durably(folder / PREPARED_FILE, safetensors.torch.save(encoder, {"fewer": json.dumps(metadata)}))
    return folder / PREPARED_FILE


def copy_start_model(method: Method, folder: Path) -> None:
    """Copies the prepared model of a deployment to its run directory, so that the run does not need the original."""
    if isinstance(method, FRLDeploy):
        write_durably(folder / START, find_prepared_file(Path(method.prepared)).read_bytes())


def resolve_start_model(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a run, with the path of the prepared model in the run directory, if it has one."""
    if not (folder / START).exists():
        return dict(settings)
    options = {**settings["method_options"], "prepared": str((folder / START).resolve())}
    return {**settings, "method_options": options}
