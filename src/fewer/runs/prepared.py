"""What a run leaves that prepared a model for groups: one file, which is all that a group needs."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch

from fewer.methods import Method
from fewer.methods.frl import HEAD, FewRounds, Prepared
from fewer.methods.frl_deploy import FILE
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
        "set": own,
        "model": {"model": settings.model, "norm": settings.norm, "model_set": settings.model_set},
        "input": list(result.task.shape),
    }
    weights = {name: tensor.cpu().contiguous() for name, tensor in method.shared(result.state).items()}
    encoder = {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD)}
    write_durably(where / FILE, safetensors.torch.save(encoder, {"fewer": json.dumps(facts)}))
    return where / FILE
