"""Figures by class: hand-computed values, and the same as scikit-learn's."""

from __future__ import annotations

import math

import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn

from fewer.learning.classes import (
    BINS,
    MAX_CLASSES,
    add_counts,
    count_classes,
    count_majority,
    summarize_classes,
    tabulate_classes,
)
from fewer.learning.evaluate import add_evaluations, empty_evaluation, measure_outputs
from fewer.models import Task
from fewer.runtime.handlers import Unsent

CPU = torch.device("cpu")


def scores_for(predictions: list[int], classes: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(predictions), classes).float()


def test_recall_precision_f1_and_confusion_by_hand() -> None:
    #          label 0: two right, one taken for 1     label 1: one right     label 2: taken for 0
    counts = count_classes(scores_for([0, 0, 1, 1, 0]), torch.tensor([0, 0, 0, 1, 2]), 4)
    table = tabulate_classes(counts)
    assert table["support"] == [3, 1, 1, 0]
    assert table["confusion"] == [[2, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert table["recall"] == [2 / 3, 1.0, 0.0, None]
    assert table["precision"] == [2 / 3, 1 / 2, None, None]
    assert table["f1"] == [2 / 3, 2 / 3, 0.0, None]
    assert summarize_classes(counts)["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)  # class 3 never occurs
    assert count_majority(counts) == 3 and count_majority(counts, top_k=2) == 4 and count_majority(counts, 9) == 5


def test_ece_by_hand() -> None:
    confident, unsure = [math.log(9), 0.0], [math.log(3), 0.0]  # softmax: 0.9 and 0.75
    counts = count_classes(torch.tensor([confident, confident, unsure, unsure]), torch.tensor([0, 0, 0, 1]), 2)
    ece = 2 / 4 * abs(1 - 0.9) + 2 / 4 * abs(0.5 - 0.75)
    assert summarize_classes(counts)["ece"] == pytest.approx(ece, abs=1e-6)
    reliability = tabulate_classes(counts)["reliability"]
    assert [index for index, samples in enumerate(reliability["samples"]) if samples] == [11, 13]  # of 15 bins
    assert reliability["accuracy"][11] == 0.5 and reliability["accuracy"][0] is None
    assert reliability["confidence"][13] == pytest.approx(0.9)


def test_the_edges_of_bins_and_scores_that_are_not_finite() -> None:
    certain = torch.tensor([[1000.0, 0.0]])  # confidence 1 belongs to the last bin
    assert count_classes(certain, torch.tensor([0]), 2).tensors["bins"][0, BINS - 1] == 1
    broken = count_classes(torch.full((3, 2), torch.nan), torch.tensor([0, 1, 1]), 2)
    assert summarize_classes(broken)["ece"] == pytest.approx(1 / 3)  # confidence 0; one of three is right


def test_counts_of_parts_add_up_to_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, y = torch.randn(200, 5, generator=generator), torch.randint(5, (200,), generator=generator)
    counts = add_counts([count_classes(scores[a:b], y[a:b], 5) for a, b in ((0, 1), (1, 60), (60, 200))])
    predicted = scores.argmax(1)
    assert tabulate_classes(counts)["confusion"] == sklearn.metrics.confusion_matrix(y, predicted).tolist()
    expected = sklearn.metrics.f1_score(y, predicted, average="macro")
    assert summarize_classes(counts)["macro_f1"] == pytest.approx(expected)


def test_many_classes_have_summaries_but_no_table() -> None:
    few = count_classes(scores_for([0, 1], MAX_CLASSES), torch.tensor([0, 0]), MAX_CLASSES)
    many = count_classes(scores_for([0, 1], MAX_CLASSES + 1), torch.tensor([0, 0]), MAX_CLASSES + 1)
    assert tabulate_classes(few) and tabulate_classes(many) == {}
    assert summarize_classes(many)["macro_f1"] == summarize_classes(few)["macro_f1"] == pytest.approx(1 / 3)
    assert count_majority(many) == 2


def test_evaluations_carry_their_counts() -> None:
    task = Task((3,), 3, nn.Identity, CPU)
    parts = [measure_outputs(scores_for([0, 1]), torch.tensor([0, 0]), task) for _ in range(2)]
    pooled = add_evaluations([empty_evaluation(task), *parts])
    assert pooled.class_counts.tensors["support"].tolist() == [4, 0, 0]
    remote = parts[1]._replace(class_counts=Unsent())
    assert add_evaluations([parts[0], remote]).class_counts == Unsent()  # unknown for a part: unknown for the sum
