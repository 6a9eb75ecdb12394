"""Prototypes under differential privacy: from noisy class sums of records, or from noisy sums over clients.

- Record level: each client sends `release_class_sums` of its features (`fewer.learning.protect`): one Gaussian release.
- User level: a client's contribution is its prototype and a 1 for each class that it holds, zeros for other classes.
  The server clips it to length C, sums over clients and adds noise. The quotient of both sums is the mean prototype.

A class whose noisy count is not above two standard deviations of its noise has no prototype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fewer.errors import SettingError
from fewer.learning.aggregate import private_mean
from fewer.learning.protect import COUNT_WEIGHT, SENSITIVITY, ClassSums, ProtectedSamples, add_noise, clipped_class_sums
from fewer.learning.prototypes import Prototypes, reject_prototypes
from fewer.methods.context import Client
from fewer.privacy import NotCovered
from fewer.runtime import Aggregation, Answers
from fewer.runtime.clients import PrivateSum, reveal
from fewer.runtime.secure_sum import SecureSum
from fewer.wire import Number, Schema, Shaped

DEVIATIONS = 2.0
"""A noisy count must be above this many standard deviations of its noise."""


def class_sums_schema(classes: int, width: int) -> Schema:
    """The form of a client's noisy class sums."""
    return {"sums": Shaped((classes, width)), "counts": Shaped((classes,)), "deviation": Number(float, 0)}


def send_class_sums(client: Client, encode: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Class sums of encode(x) over a client's training samples; exact ones if records are not protected.

    `encode` must not depend on these samples, other than through what is protected.
    """
    classes = client.task.classes
    with torch.no_grad():
        if client.protects_records:
            return cast(ProtectedSamples, client.train).release_class_sums(encode, classes)._asdict()
        sums = clipped_class_sums(client.train, encode, classes, 1.0).float()
    return ClassSums(sums[:, :-1], sums[:, -1] / COUNT_WEIGHT, 0.0)._asdict()


def add_class_sums(answers: Answers) -> ClassSums:
    """The noisy class sums of all clients together. If noise is distributed, the server adds absent clients' shares."""
    if answers.private and answers.private.ledger.settings.level == "user":
        raise NotCovered("dp = user does not cover this method: its class sums protect records; use dp = record")
    if answers.secure and answers.private:
        return add_secretly(answers.secure, answers.private)
    parts = [ClassSums(*(reveal(answer, name) for name in ClassSums._fields)) for answer in answers]
    if answers.aggregation.rule != "mean":
        if answers.private and answers.private.ledger.settings.distributed:
            raise SettingError(
                "dp with distributed noise needs aggregate = mean: a single client's sums are only noise"
            )
        parts = reject_class_sums(parts, answers.aggregation)
    sums = torch.stack([part.sums for part in parts]).double().sum(0)
    counts = torch.stack([part.counts for part in parts]).double().sum(0)
    deviation = math.sqrt(sum(part.deviation**2 for part in parts))
    if (private := answers.private) and (missing := private.asked - len(parts)):
        stream, share = (
            private.noise_stream([part._asdict() for part in parts]),
            parts[0].deviation * math.sqrt(missing),
        )
        sums = add_noise(sums, share * COUNT_WEIGHT * private.ledger.clip, stream)
        counts = add_noise(counts, share, stream)
        deviation = math.hypot(deviation, share)
    return ClassSums(sums, counts, deviation)


def add_secretly(secure: SecureSum, private: PrivateSum) -> ClassSums:
    """The noisy class sums of all clients in a secure sum. The server adds no noise that it knows."""
    (sums, summed), (counts, counted) = secure.mean_and_weight("sums"), secure.mean_and_weight("counts")
    assert private.ledger.protection
    share = private.ledger.protection.choose_noise(1.0, 1) * SENSITIVITY / COUNT_WEIGHT / math.sqrt(private.shares)
    return ClassSums(summed * sums[""].double(), counted * counts[""].double(), share * math.sqrt(counted))


def reject_class_sums(parts: Sequence[ClassSums], aggregation: Aggregation) -> list[ClassSums]:
    """Class sums without the classes whose mean is an outlier among all clients, or that have too few samples."""
    prototypes = [to_prototypes(part) for part in parts]
    kept = reject_prototypes(prototypes, aggregation)
    masks = [torch.isin(torch.arange(len(part.counts)), rows.classes) for part, rows in zip(parts, kept, strict=True)]
    return [
        part._replace(sums=part.sums * mask[:, None], counts=part.counts * mask)
        for part, mask in zip(parts, masks, strict=True)
    ]


def to_prototypes(released: ClassSums, least: float = 0.5) -> Prototypes:
    """The quotients of noisy sums and counts, for classes with more samples than `least` and than the noise."""
    sums, counts, deviation = released
    classes = torch.nonzero(counts > max(DEVIATIONS * deviation, least)).squeeze(1)
    held = counts[classes].double()
    return Prototypes(classes, (sums[classes].double() / held[:, None]).float(), held.round().long().clamp_min(1))


def private_prototypes(answers: Answers, num_classes: int, width: int) -> Prototypes:
    """The mean prototype of each class over the clients that hold it, at user level."""
    private = answers.private
    assert private
    if private.ledger.settings.distributed:
        raise NotCovered("dp does not cover this method with distributed noise: the server must clip prototypes")
    updates = []
    for answer in answers:
        classes, means = reveal(answer, "classes"), reveal(answer, "means")
        dense = torch.zeros(num_classes, width + 1)
        if len(classes) == len(means) and bool(((classes >= 0) & (classes < num_classes)).all()):
            dense[classes] = torch.cat([means, torch.ones(len(means), 1)], dim=1)
        updates.append({"rows": dense})
    deviation = private.ledger.noise_of_sum(private.asked)
    stream = private.noise_stream(updates)
    private.ledger.record(private.asked, private.drawn_from, private.round)
    mean = private_mean(updates, None, updates[0], private.ledger, private.asked, stream)
    total = private.asked * mean["rows"].double()
    # Clipping shrinks a client's 1 for a class as much as its prototype.
    return to_prototypes(ClassSums(total[:, :-1], total[:, -1], deviation), least=0.0)
