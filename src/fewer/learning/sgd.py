"""Local training: gradient steps on batches, by default plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.learning.protect import ProtectedBatches
from fewer.models import Task
from fewer.runtime import Unable

GradientHook = Callable[[list[Tensor], tuple[Tensor, ...]], None]
"""Takes parameters and gradients, and changes the gradients in place."""
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Maps a net, inputs and targets to a loss."""
Step = Callable[[tuple[Tensor, ...]], None]
"""Changes parameters in place, given their gradients."""


def _neutral(default: Any) -> Any:
    """The default of an option that is not part of a run's hash as long as it is not set."""
    return Field(default, json_schema_extra={"neutral": True})


class LocalOptimizer(BaseModel):
    """Options of the optimizer of local training. Its state and its schedule start fresh in every round."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    optimizer: Literal["sgd", "adam", "adamw"] = _neutral("sgd")
    """Optimizer of local training. It starts fresh in each round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = _neutral(0.0)
    """Momentum of local training with sgd."""
    weight_decay: NonNegativeFloat = _neutral(0.0)
    """Weight decay of local training: an L2 penalty for sgd and adam, decoupled for adamw."""
    lr_schedule: Literal["constant", "cosine", "linear"] = _neutral("constant")
    """Learning rate over the local steps of a round: constant, or down to 0 along a cosine or a line."""
    clip_norm: PositiveFloat | None = _neutral(None)
    """Largest norm of the gradient in local training; null means no limit."""

    @field_validator("momentum")
    @classmethod
    def _check_momentum(cls, momentum: float, info: ValidationInfo) -> float:
        if momentum and (optimizer := info.data.get("optimizer", "sgd")) != "sgd":
            raise PydanticCustomError("momentum", f"{optimizer} has no momentum; use optimizer = sgd")
        return momentum

    def make_step(self, parameters: list[Tensor], lr: float, steps: int) -> Step:
        """Returns the function that takes one of `steps` steps."""
        take_step = self._make_unclipped_step(parameters, lr, steps)
        if (limit := self.clip_norm) is None:
            return take_step

        def clipped_step(gradients: tuple[Tensor, ...]) -> None:
            clip_gradients(limit, gradients)
            take_step(gradients)

        return clipped_step

    def _make_unclipped_step(self, parameters: list[Tensor], lr: float, steps: int) -> Step:
        if (self.optimizer, self.momentum, self.weight_decay, self.lr_schedule) == ("sgd", 0, 0, "constant"):
            return lambda gradients: torch._foreach_add_(parameters, gradients, alpha=-lr)
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(parameters, lr, momentum=self.momentum, weight_decay=self.weight_decay)
        else:
            make_optimizer = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
            optimizer = make_optimizer(parameters, lr, weight_decay=self.weight_decay)
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None
        if self.lr_schedule == "cosine":
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        elif self.lr_schedule == "linear":
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)

        def step(gradients: tuple[Tensor, ...]) -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            if schedule:
                schedule.step()

        return step


PLAIN_SGD = LocalOptimizer()


def clip_gradients(limit: float, gradients: tuple[Tensor, ...]) -> None:
    """Scales the gradients in place, so that the norm of all together is at most `limit`."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (limit / norm.clamp_min(limit)))


def draw_batches(num_samples: int, steps: int, batch_size: int, stream: torch.Generator) -> Tensor:
    """Draws sample indices for all batches (steps × batch size), uniformly with replacement."""
    return torch.randint(num_samples, (steps, batch_size), generator=stream)


def draw_subset(samples: Samples, count: int | None, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """One batch of `count` different samples; of all, if `count` is None or there are not more."""
    if count is None or count >= len(samples):
        return samples.all()
    return samples.pick(torch.randperm(len(samples), generator=stream)[:count])


def epoch_batches(
    samples: Samples, epochs: int, batch_size: int | None, stream: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of all samples, in a new order each epoch. If `batch_size` is None, an epoch is one batch.

    A single sample left at the end joins the batch before it, because batch norm cannot train on one sample.
    """
    for _ in range(epochs):
        parts = list(torch.split(torch.randperm(len(samples), generator=stream), batch_size or len(samples)))
        if len(parts) > 1 and len(parts[-1]) == 1 < len(parts[-2]):
            parts[-2:] = [torch.cat(parts[-2:])]
        yield from map(samples.pick, parts)


def cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of a batch."""
    return F.cross_entropy(net(x), y)


def task_loss(task: Task) -> Loss:
    """The loss of the task, as a function of a net and a batch."""
    return lambda net, x, y: task.loss(net(x), y)


def _compute_gradients(value: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a loss; 0 for parameters that it does not depend on."""
    if not value.requires_grad:
        raise Unable("nothing to train: the loss depends on frozen parameters only")
    return torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)


def sgd(
    net: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]] | ProtectedBatches,
    lr: float,
    modify_gradients: GradientHook | None = None,
    loss: Loss = cross_entropy,
    optimizer: LocalOptimizer = PLAIN_SGD,
    steps: int | None = None,
) -> None:
    """Trains the net in place, with one step per batch: w ← w − lr · ∇loss, or that of another optimizer.

    `modify_gradients(parameters, gradients)` may change the gradients before each step. A schedule needs the number of
    `steps`; by default, it draws all batches first to count them. Protected batches give noisy gradients. Raises
    `Unable` if no trained parameter changes the loss.
    """
    net.train()
    parameters: list[Tensor] = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if isinstance(batches, ProtectedBatches):
        if optimizer.clip_norm is not None:
            raise Unable("record-level privacy clips the gradient of each sample; leave out clip_norm")
        steps, all_gradients = batches.steps, batches.noisy_gradients(net, loss)
    else:
        if optimizer.lr_schedule != "constant" and steps is None:
            batches = list(batches)
            steps = len(batches)
        all_gradients = (_compute_gradients(loss(net, x, y), parameters) for x, y in batches)
    step = optimizer.make_step(parameters, lr, steps or 0)
    for gradients in all_gradients:
        with torch.no_grad():
            if modify_gradients is not None:
                modify_gradients(parameters, gradients)
            step(gradients)
