"""Allowed values of settings. This module imports nothing heavy, so that `--help` is fast."""

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from fewer.errors import unknown_name
from fewer.registry import CODECS


def _check_codec(name: str) -> str:
    if name not in CODECS:
        raise PydanticCustomError("unknown_codec", "{reason}", {"reason": str(unknown_name("codec", name, CODECS))})
    return name


Partition = Literal["iid", "dirichlet", "dirichlet-pairs", "pathological", "shards", "quantity", "natural"]
Norm = Literal["batch", "group", "none"]
Codec = Annotated[str, AfterValidator(_check_codec)]
"""The name of a registered codec."""
Aggregate = Literal[
    "mean",
    "median",
    "trimmed-mean",
    "multi-krum",
    "bulyan",
    "geometric-median",
    "norm-bound",
    "centered-clip",
]
LieKind = Literal["sign-flip", "scale", "noise", "label-flip", "ipm", "alie"]
RuntimeName = Literal["inline", "pool", "flower"]
