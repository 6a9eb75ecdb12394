"""FedAvg with calibrated scores: a model does not unlearn the classes that its client lacks.

Zhang et al.: Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022. n_kc of the n_k samples
of client k are of class c, and f(x) are the scores of its model. The local loss is the cross-entropy of

    f(x)_c + log((n_kc + 1) / (n_k + C))

Departures:

- Those of FedAvg.
- The shift is that of Menon et al.: Long-Tail Learning via Logit Adjustment, ICLR 2021 (Eq 10, τ = 1), which makes f
  the scores for equally frequent classes. Zhang et al. subtract τ n_kc^(−1/4), with τ tuned, and leave the label's own
  score out of the denominator.
- One is added to each count, so that a class without samples has a finite shift.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fewer.learning.sgd import Loss
from fewer.methods import Client, Group, Needs
from fewer.methods.fedavg import FedAvg
from fewer.registry import METHODS


@METHODS.register("fedavg-calibrated")
class FedAvgCalibrated(FedAvg):
    """FedAvg whose clients add the log of their class frequencies to the scores in training."""

    group: ClassVar[Group] = "drift correction"
    needs: ClassVar[Needs] = "classes"

    def fit(self, net: nn.Module, client: Client) -> None:
        """w ← w − η ∇ℓ(w; b) for each batch b, in place, where ℓ sees calibrated scores."""
        self.train_net(net, client, loss=calibrated_loss(client, class_frequencies(client)))


def calibrated_loss(client: Client, frequencies: Tensor) -> Loss:
    """The loss of the scores plus the log of these class frequencies. Outputs beyond the classes are left out."""
    shift = frequencies.log()
    return lambda net, x, y: client.task.loss(net(x)[:, : len(shift)] + shift, y)


def class_frequencies(client: Client) -> Tensor:
    """(n_kc + 1) / (n_k + C)"""
    counts = count_classes(client) + 1
    return counts / counts.sum()


def count_classes(client: Client) -> Tensor:
    """The number of the client's samples of each class (n_kc)."""
    return torch.bincount(client.train.labels, minlength=client.task.classes)
