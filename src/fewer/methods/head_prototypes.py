"""The heads of FedNCM and FedCOF as prototypes, for methods that predict the class of the nearest prototype.

Their rows w_c have norm 1 and no bias. So the nearest w_c to features f is the one with the largest product w_c · f.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fewer.learning.prototypes import Prototypes, discriminant_weights, merge_prototypes
from fewer.methods.fedcof import SHRINKAGE
from fewer.methods.head_only import merge_rows


def head_prototypes(head: str, parts: Sequence[Prototypes]) -> Tensor:
    """The rows w_c of the head of `fedncm` or `fedcof`, for the classes of all parts in ascending order."""
    classes, means, _ = merge_prototypes(parts)
    if head == "fedncm":
        return F.normalize(means)
    rows = merge_rows([part._asdict() for part in parts])
    positions = torch.searchsorted(classes, rows["classes"])
    return discriminant_weights(positions, rows["means"], rows["counts"], len(classes), SHRINKAGE).to(means)
