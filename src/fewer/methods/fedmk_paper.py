"""FedMK as in the paper, without the additions of fedmk.py."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from fewer.methods import SearchSpace
from fewer.methods.fedmk import FedMK
from fewer.registry import METHODS
from fewer.wire import Codec


@METHODS.register("fedmk-paper")
class FedMKPaper(FedMK):
    """FedMK as in the paper: no matching, no augmentation, one inner step on all of D̂, this round's D̂ only.

    Two departures remain. The outer optimizer is Adam instead of plain gradient descent, and an outer step uses 256
    real samples instead of all. The paper does not give the number of steps or the server's training; we chose both.
    """

    tunable: ClassVar[SearchSpace] = {"server_lr": (0.03, 0.1, 0.3), "outer_lr": (0.03, 0.1, 0.3)}

    min_samples: PositiveInt = 1
    codec: Codec = "float32"
    init_from: Literal["noise", "shared", "own"] = "shared"
    augment: bool = False
    matching_steps: NonNegativeInt = 0
    refine_from: PositiveInt = 1
    outer_steps: NonNegativeInt = 60
    outer_lr: PositiveFloat = 0.1
    inner_steps: PositiveInt = 1
    inner_batch_size: PositiveInt | None = None
    keep_images: Literal["latest", "round"] = "round"
    server_steps: PositiveInt = 80
    server_lr: PositiveFloat = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr_decay: bool = False
