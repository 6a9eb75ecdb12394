"""Prepared models on disk: weights in a safetensors file, with what later runs need to know as JSON."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open

from fewer.errors import DataError
from fewer.models.weights import Weights

ARTIFACT_FILE = "prepared.safetensors"
"""The file that a run writes into its directory if its method prepares a model."""


def find_artifact(path: Path) -> Path:
    """The file of a prepared model, given the file or its run directory."""
    return path / ARTIFACT_FILE if path.is_dir() else path


def pack_artifact(weights: Weights, metadata: Mapping[str, Any]) -> bytes:
    """The content of the file."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    return safetensors.torch.save(tensors, {"fewer": json.dumps(metadata)})


def load_artifact(path: Path) -> tuple[Weights, dict[str, Any]]:
    """Reads the weights and the metadata of a prepared model."""
    file = find_artifact(path)
    try:
        weights: Weights = safetensors.torch.load_file(file)
        with safe_open(file, "pt") as content:
            metadata: dict[str, Any] = json.loads((content.metadata() or {})["fewer"])
    except FileNotFoundError:
        raise DataError(f"no prepared model at {file}; `fewer prepare` writes one") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{file} is not a prepared model as `fewer prepare` writes it: {error}") from error
    return weights, metadata


def vocabulary_checksum(tokens: Sequence[str]) -> int | None:
    """A checksum of a vocabulary; None if it is empty."""
    return zlib.crc32("\n".join(tokens).encode()) if tokens else None
