"""Prepared models: the file that a preparation writes, and the copy that each run that starts from it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewer.methods import Method, find
from fewer.methods.capabilities import WritesArtifact
from fewer.models.artifact import ARTIFACT_FILE, find_artifact, load_artifact, pack_artifact
from fewer.runs.settings import METHOD_SETTINGS
from fewer.runtime.store import write_durably

if TYPE_CHECKING:
    from fewer.runs.result import Result

START = "start.safetensors"
"""A run's own copy of the prepared model that it started from."""


def write_artifact(result: Result, folder: Path) -> None:
    """Writes the prepared model to `folder`, if the method prepares one."""
    if isinstance(result.method, WritesArtifact):
        metadata = asdict(result.method.artifact(result.state, result.task, result.data))
        model = result.settings.model_dump(include={"model", "norm", "model_options"})
        write_durably(folder / ARTIFACT_FILE, pack_artifact(metadata.pop("weights"), {**metadata, "model": model}))


def deploy_settings(prepared: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run that starts from a prepared model: the recorded ones, overridden by `given`."""
    metadata = load_artifact(prepared)[1]
    (option,) = find(metadata["method"]).file_options
    flags = {name: given[name] for name in METHOD_SETTINGS if name in given}
    given_options = {**flags, **given.get("method_options", {})}
    options = {**metadata["options"], **given_options, option: str(prepared.resolve())}
    deployment = {"method": metadata["method"], "method_options": options}
    return {"rounds": metadata["rounds"], **metadata["model"], **given, **deployment}


def copy_start_model(method: Method, folder: Path) -> None:
    """Copies the prepared model that a run starts from to its directory, so that it does not need the original."""
    for option in method.file_options:
        write_durably(folder / START, find_artifact(Path(getattr(method, option))).read_bytes())


def resolve_start_model(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings of a run, with the path of the prepared model in the run directory, if it has one."""
    if not (folder / START).exists():
        return dict(settings)
    copied = dict.fromkeys(find(settings["method"]).file_options, str((folder / START).resolve()))
    return {**settings, "method_options": {**settings["method_options"], **copied}}
