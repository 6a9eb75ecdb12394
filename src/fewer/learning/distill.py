"""Distillation of features: a net learns from labels, and to see as a teacher sees.

Hinton, Vinyals, Dean 2015; Romero et al., FitNets, 2014: where the features of both nets differ in number, those of the
student are compared through a linear map that is learned with it, from a least-squares fit (with a little ridge) on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.sgd import Loss, sgd
from fewer.models import parts_of

RIDGE = 0.01
"""Of the mean square of a feature: what keeps the first map small where features are nearly the same, or never seen."""


def feature_loss(net: nn.Module, teacher: nn.Module, weight: float, link: nn.Module) -> Loss:
    """Cross-entropy + weight · the mean squared difference of features; the teacher is in evaluation mode."""
    (encoder, head), guide = parts_of(net), parts_of(teacher.eval())[0]

    def loss(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen = encoder(x)
        with torch.no_grad():
            shown = guide(x)
        return F.cross_entropy(head(seen), y) + weight * F.mse_loss(link(seen), shown)

    return loss


@torch.no_grad()
def fit_feature_map(net: nn.Module, teacher: nn.Module, x: Tensor) -> nn.Linear:
    """The linear map from the features of one net to those of another that fits best on these inputs."""
    seen, shown = (parts_of(each.eval())[0](x).flatten(1).double().cpu() for each in (net, teacher))
    inner = seen.T @ seen
    ridge = RIDGE * inner.trace() / len(inner) + 1e-12
    best = torch.linalg.solve(inner + ridge * torch.eye(len(inner), dtype=torch.float64), seen.T @ shown)
    link = nn.Linear(seen.shape[1], shown.shape[1], bias=False)
    link.weight.copy_(best.T)
    return link.to(x.device)


def distill(
    net: nn.Module,
    teacher: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    weight: float,
    link: nn.Module | None = None,
) -> None:
    """Steps of SGD on `feature_loss`, in place; with a `link` (of the student's features), it learns too."""
    link = link or nn.Identity()
    sgd(nn.ModuleList([net, link]), batches, lr, loss=feature_loss(net, teacher, weight, link))
