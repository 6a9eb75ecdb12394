"""What a run leaves that prepared a model for groups: one file, all that a group needs; it keeps a copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch

from fewer.methods import Method
from fewer.methods.frl import HEAD, FewRounds, Prepared
from fewer.methods.frl_deploy import FILE, FRLDeploy, file_of, vocabulary
from fewer.runs.result import Result
from fewer.runtime.store import write_durably


def write_prepared(result: Result, where: Path) -> Path | None:
    """The prepared model in the directory of its run, with net and settings; None where a run prepared none."""
    method, settings = result.method, result.settings
    if not isinstance(method, Prepared):
        return None
    own = {name: getattr(method, name) for name in FewRounds.model_fields if name not in Method.model_fields}
    facts = {
        "method": method.name,
        "rounds": method.deploy_rounds or method.group_rounds,
        "method_options": own,
        "model": {"model": settings.model, "norm": settings.norm, "model_options": settings.model_options},
        "input": list(result.task.shape),
        "vocabulary": vocabulary(result.data),
    }
    weights = {name: tensor.cpu().contiguous() for name, tensor in method.broadcast(result.state).items()}
    encoder = {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD)}
    write_durably(where / FILE, safetensors.torch.save(encoder, {"fewer": json.dumps(facts)}))
    return where / FILE


START = "start.safetensors"
"""A group's own copy, in the directory of its run, of the prepared model that it began from."""


def keep_start(method: Method, where: Path) -> None:
    """Copy what a group begins from, so that its run can go on and be used wherever that file goes."""
    if isinstance(method, FRLDeploy):
        write_durably(where / START, file_of(Path(method.prepared)).read_bytes())


def settled(settings: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The settings of the run in a directory, with its own copy of what it began from, if it has one."""
    if not (where / START).exists():
        return dict(settings)
    return {**settings, "method_options": {**settings["method_options"], "prepared": str((where / START).resolve())}}
