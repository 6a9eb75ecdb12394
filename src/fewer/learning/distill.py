"""Feature distillation: a student learns from labels and from the features of a teacher.

Hinton, Vinyals, Dean 2015; Romero et al., FitNets, 2014. If the two nets have different numbers of features, a linear
map converts the student's features to the teacher's. It starts from a ridge regression and trains with the student.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.sgd import PLAIN_SGD, LocalOptimizer, Loss, sgd
from fewer.models import split_net

RIDGE = 0.01
"""Ridge penalty, as a fraction of the features' mean square. It keeps the map small if features are collinear or 0."""


def feature_loss(net: nn.Module, teacher: nn.Module, weight: float, feature_map: nn.Module) -> Loss:
    """Cross-entropy + weight · mean squared difference of features. Puts the teacher in evaluation mode."""
    (encoder, head), teacher_encoder = split_net(net), split_net(teacher.eval())[0]

    def loss(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features = encoder(x)
        with torch.no_grad():
            target = teacher_encoder(x)
        return F.cross_entropy(head(features), y) + weight * F.mse_loss(feature_map(features), target)

    return loss


@torch.no_grad()
def fit_feature_map(net: nn.Module, teacher: nn.Module, x: Tensor) -> nn.Linear:
    """Fits the linear map from the student's to the teacher's features on inputs `x`, by ridge regression."""
    features, targets = (split_net(model.eval())[0](x).flatten(1).double().cpu() for model in (net, teacher))
    gram = features.T @ features
    ridge = RIDGE * gram.trace() / len(gram) + 1e-12
    solution = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=torch.float64), features.T @ targets)
    feature_map = nn.Linear(features.shape[1], targets.shape[1], bias=False)
    feature_map.weight.copy_(solution.T)
    return feature_map.to(x.device)


def distill(
    net: nn.Module,
    teacher: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    weight: float,
    feature_map: nn.Module | None = None,
    optimizer: LocalOptimizer = PLAIN_SGD,
) -> None:
    """Trains the net in place on `feature_loss`, together with `feature_map` if there is one."""
    feature_map = feature_map or nn.Identity()
    loss = feature_loss(net, teacher, weight, feature_map)
    sgd(nn.ModuleList([net, feature_map]), batches, lr, loss=loss, optimizer=optimizer)
