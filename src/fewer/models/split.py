"""A net in two parts: an encoder to a feature vector, and a head from features to class scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.models.task import Task


class Split(nn.Module):
    """`head(encoder(x))`. Methods that work on features use the parts."""

    def __init__(self, encoder: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        scores: Tensor = self.head(self.encoder(x))
        return scores


def parts_of(net: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Encoder and head of a net; SettingError that says what is missing where it has no such parts."""
    missing = [name for name in ("encoder", "head") if not isinstance(getattr(net, name, None), nn.Module)]
    if missing:
        raise SettingError(
            f"this method works on features, and the model {type(net).__name__} has no {' and no '.join(missing)} "
            "(allowed: an nn.Module with attributes encoder and head, as head(encoder(x)))"
        )
    return net.encoder, net.head  # type: ignore[return-value]


def feature_width(task: Task, net: nn.Module | None = None) -> int:
    """How many features the encoder of the task's net gives."""
    encoder, _ = parts_of(net or task.net())
    training = encoder.training
    blank = torch.zeros(1, *task.shape, device=task.device)
    with torch.no_grad():
        try:
            shape = encoder.eval()(blank).shape
        except (RuntimeError, IndexError):  # an embedding or a table of vectors, which take tokens
            shape = encoder(blank.long()).shape
    encoder.train(training)
    if len(shape) != 2:
        raise SettingError(f"this method needs an encoder that gives vectors, not the shape {[*shape[1:]]}")
    return int(shape[1])
