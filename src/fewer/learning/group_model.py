"""A net that predicts by distance to class prototypes, and the features that it compares."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.errors import DataError
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.learning.prototypes import Prototypes, class_prototypes, prototype_logits
from fewer.models import split_net


def compute_features(net: nn.Module, x: Tensor) -> Tensor:
    """g(x). Images are in channels-last format, which halves the time of pooling and batch norm."""
    features: Tensor = split_net(net)[0](x.to(memory_format=torch.channels_last) if x.ndim == 4 else x)
    return features


def use_batch_statistics(net: nn.Module) -> None:
    """Sets evaluation mode, except that batch norm uses the statistics of the batch."""
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()


@torch.no_grad()
def compute_prototypes(net: nn.Module, samples: Samples, labels: Tensor | None = None) -> Prototypes:
    """Line 9: the prototypes of samples, without gradient. `labels` replaces the labels of the samples."""
    use_batch_statistics(net)
    chunks = [(compute_features(net, x), y) for x, y in samples.chunks(EVAL_BATCH_SIZE)]
    features, own = (torch.cat(part) for part in zip(*chunks, strict=True))
    return class_prototypes(features, own if labels is None else labels)


class GroupModel(nn.Module):
    """A group's model (Section 2.3): it predicts by distance to Γ, or by the linear head if Γ has width 0.

    Classes that no client of the group holds get the score −∞. `temperature` divides squared distances. With `cosine`,
    the score is the product of the features and the normalized Γ instead.
    """

    def __init__(
        self,
        net: nn.Module,
        classes: Tensor,
        means: Tensor,
        num_classes: int,
        temperature: float = 1.0,
        cosine: bool = False,
    ) -> None:
        super().__init__()
        self.net, self.num_classes, self.temperature, self.cosine = net, num_classes, temperature, cosine
        self.register_buffer("classes", classes)
        self.register_buffer("means", means)

    def train(self, mode: bool = True) -> GroupModel:
        """Sets the mode; batch norm uses the statistics of the batch in evaluation too."""
        super().train(mode)
        if not mode:
            use_batch_statistics(self.net)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The scores of all classes."""
        classes, means = self.get_buffer("classes"), self.get_buffer("means")
        try:
            features = compute_features(self.net, x)
        except ValueError as error:  # from batch norm without height and width
            if len(x) > 1:
                raise
            raise DataError("batch norm needs at least two samples to predict; prepare with --norm group") from error
        if means.shape[1] and self.cosine:
            logits = features @ F.normalize(means).T
        elif means.shape[1]:
            logits = prototype_logits(features, means) / self.temperature
        else:
            logits = split_net(self.net)[1](features)[:, classes]
        return logits.new_full((x.shape[0], self.num_classes), -torch.inf).index_copy(1, classes, logits)
