"""Figures by class: confusion matrix, recall, precision, F1, calibration and the majority-class baseline.

All of them follow from counts that are made in the same pass as the accuracy, and that can be added. The counts reveal
how many samples of each class a client has. So they are `Unsent`: in a simulation the server sees them, but no message
contains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fewer.runtime.handlers import Unsent

BINS = 15
"""Number of bins of equal width for the calibration error."""
MAX_CLASSES = 100
"""With more classes, there is neither a confusion matrix nor a table by class."""


def count_classes(scores: Tensor, y: Tensor, classes: int) -> Unsent:
    """Counts a batch, given scores (samples × classes) and labels. The prediction is the first highest score.

    - `support`, `predicted`, `correct`: samples by label, by predicted class, and where both agree.
    - `bins`: samples, correct predictions and summed confidence, by confidence.
    - `confusion`: samples by label (row) and predicted class (column).
    """
    classes = max(classes, scores.shape[1])  # a net may have more outputs than there are classes
    y, prediction = y.cpu(), scores.argmax(1).cpu()
    is_correct = prediction == y
    confidence = scores.softmax(1).amax(1).cpu().double().nan_to_num(0.0)
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)  # (0, 1/15], (1/15, 2/15], …
    rows = torch.stack([torch.ones_like(confidence), is_correct.double(), confidence])
    counts = {
        "support": torch.bincount(y, minlength=classes),
        "predicted": torch.bincount(prediction, minlength=classes),
        "correct": torch.bincount(y[is_correct], minlength=classes),
        "bins": torch.stack([torch.bincount(bins, row, BINS) for row in rows]),
    }
    if classes <= MAX_CLASSES:
        counts["confusion"] = torch.bincount(y * classes + prediction, minlength=classes**2).view(classes, classes)
    return Unsent(counts)


def add_counts(parts: Sequence[Unsent]) -> Unsent:
    """Adds the counts of disjoint samples; empty if a part is, or if parts have different numbers of classes."""
    shapes = [{name: tensor.shape for name, tensor in part.tensors.items()} for part in parts]
    if not shapes or any(shape != shapes[0] for shape in shapes):
        return Unsent()
    return Unsent({name: torch.stack([part.tensors[name] for part in parts]).sum(0) for name in parts[0].tensors})


def count_majority(counts: Unsent, top_k: int = 1) -> int:
    """The number of correct predictions if the most frequent class, or the `top_k` most frequent, is predicted."""
    support = counts.tensors["support"]
    return int(support.topk(min(top_k, len(support))).values.sum())


def summarize_classes(counts: Unsent) -> dict[str, float]:
    """The macro F1 and the expected calibration error (ECE)."""
    support, predicted, correct = (counts.tensors[name] for name in ("support", "predicted", "correct"))
    occurs = support + predicted > 0  # the mean is over classes that are a label or a prediction
    f1 = 2 * correct[occurs].double() / (support + predicted)[occurs]
    samples, hits, confidence = counts.tensors["bins"]
    return {"macro_f1": float(f1.mean()), "ece": float((hits - confidence).abs().sum() / samples.sum())}


def tabulate_classes(counts: Unsent) -> dict[str, Any]:
    """All figures by class and by confidence as plain values; empty with more than 100 classes."""
    if "confusion" not in counts.tensors:
        return {}
    support, predicted, correct = (counts.tensors[name] for name in ("support", "predicted", "correct"))
    samples, hits, confidence = counts.tensors["bins"]
    return {
        "support": support.tolist(),
        "recall": _divide(correct, support),
        "precision": _divide(correct, predicted),
        "f1": _divide(2 * correct, support + predicted),
        "confusion": counts.tensors["confusion"].tolist(),
        "reliability": {
            "samples": samples.long().tolist(),
            "accuracy": _divide(hits, samples),
            "confidence": _divide(confidence, samples),
        },
    }


def _divide(parts: Tensor, totals: Tensor) -> list[float | None]:
    """The quotients; None where the total is 0."""
    pairs = zip(parts.tolist(), totals.tolist(), strict=True)
    return [part / total if total else None for part, total in pairs]
