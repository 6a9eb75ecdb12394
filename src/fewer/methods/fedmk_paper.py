"""FedMK as in the paper: Algorithm 1 read literally, without the additions of fedmk.py.

- Line 5 sets w^c ← W_G once. Each outer step continues from the w* of the step before (`restart_every = null`).
- The argmin of Eq 4 is `inner_steps` steps of Eq 5 on all of D̂. The outer gradient goes through all of them.
- The server trains with the learning rate of the inner loop (`server_lr = null`): D̂ is made for steps of this size.
- D̂ has images of all classes, as the paper's byte count implies (`labels = all`).

The authors' net, pixels and samples are settings, because all methods share them. The recipe fedmk/paper has them:
`norm = "batch"`, `model_options = { feature_relu = false }`, and `data_options = { normalization = [0.5, 0.5],
max_per_class = 1500 }`. The paper does not state them. They are those of FedGen's released code, whose other settings
the paper shares.

Departures that remain:

- The outer optimizer is Adam; the paper uses plain gradient descent (`optimizer = sgd`).
- The outer loss is over 256 real samples per step; Eq 8 uses all of them (`outer_batch_size = null`).
- Eq 4 has an argmin, here a few steps; the paper's Eq 3 has one.
- φ (Eq 7) and the loss of Eq 8 are taken at w*, as in Eq 6.
- t counts communication rounds, and "t == 1" in line 8 means t ≥ 1: from round 2 on, D̂ starts from another client's.
- The server takes mini-batches of D̂; Eq 9 is the loss over all of D̂.
- The generator has FedGen's diversity term, and β is a constant.

The paper states neither the learning rates nor the numbers of steps. `tunable` has the grids of a search.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from fewer.methods import SearchSpace
from fewer.methods.fedmk import FedMK
from fewer.registry import METHODS
from fewer.wire import Codec


@METHODS.register("fedmk-paper")
class FedMKPaper(FedMK):
    """FedMK as in the paper: bi-level steps only, with a model that is carried along, on this round's D̂ only."""

    tunable: ClassVar[SearchSpace] = {
        "inner_lr": (0.03, 0.1, 0.3),
        "server_steps": (80, 200, 500),
        "inner_steps": (1, 5, 10),
        "outer_steps": (30, 60, 120),
    }

    labels: Literal["held", "all"] = "all"
    min_samples: PositiveInt = 1
    codec: Codec = "float32"
    init_from: Literal["noise", "shared", "own"] = "shared"
    augment: bool = False
    matching_steps: NonNegativeInt = 0
    refine_from: PositiveInt = 1
    outer_steps: NonNegativeInt = 60
    outer_lr: PositiveFloat = 0.1
    inner_steps: PositiveInt = 5
    inner_batch_size: PositiveInt | None = None
    restart_every: PositiveInt | None = None
    keep_images: Literal["latest", "round"] = "round"
    server_steps: PositiveInt = 200
    server_lr: PositiveFloat | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr_decay: bool = False
