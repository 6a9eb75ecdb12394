"""Canaries in shadow runs: the run is trained again, several times, with mislabeled samples that half of the runs see.

- Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From First Principles, S&P 2022 (LiRA).
- Aerni, Zhang, Tramèr: Evaluations of Machine Learning Privacy Defenses are Misleading, CCS 2024. A training sample
  with a wrong label is a canary: a model predicts that label only if it has memorized the sample.

Each canary is in the training data of half of the runs, drawn at random. Each run in turn is the target, and the others
are its shadow models. So R runs with C canaries give R · C / 2 members, and equally many nonmembers.

Departures:

- R is small, so the variance of LiRA's Gaussians is pooled over all canaries, as the authors do for few models.
- Without the target, one side has one run more than the other. Its mean is from one run less, so that the numbers of
  runs say nothing about the target.
- Targets are not the run itself but runs with its settings, each with its own seed: the test is one of the algorithm.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fewer.audit.membership import CHUNK
from fewer.data import ArrayData
from fewer.errors import SettingError
from fewer.runs.engine import run_experiment
from fewer.runs.experiment import Experiment
from fewer.runs.progress import show_progress
from fewer.runs.result import Result
from fewer.runtime.streams import seed_of, stream

MAX_CANARIES = 500
CANARY_SHARE = 0.1
"""Largest share of the attacked clients' training samples that become canaries."""


class Canaries(NamedTuple):
    """Rows of the training data, and a wrong label for each."""

    rows: Tensor
    labels: Tensor


def attack_canaries(result: Result, clients: list[int], shadows: int) -> tuple[Tensor, Tensor]:
    """Trains `shadows` runs with canaries in the data of these clients. Returns scores of members and nonmembers."""
    if shadows < 4 or shadows % 2:
        raise SettingError(f"shadows must be an even number >= 4, got {shadows}")
    if not isinstance(result.data, ArrayData):
        raise SettingError(f"shadows needs data in arrays, but data '{result.data.name}' is not")
    seed = result.settings.seed
    canaries = draw_canaries(result.data, clients, stream(seed, "audit", "canaries"))
    inside = assign_runs(len(canaries.rows), shadows, stream(seed, "audit", "shadow runs"))
    logits = []
    for run in range(shadows):
        settings = {"seed": seed_of(seed, "audit", "shadow", run), "runtime": "inline"}
        settings["evaluate_every"] = result.method.rounds
        data = insert_canaries(result.data, canaries, inside[run])
        parts = result.method, result.task, data, result.settings.model_copy(update=settings), result.objects
        with show_progress(None) as callbacks:
            shadow = run_experiment(Experiment(*parts), callbacks=callbacks)
        x, labels = data.source.select(canaries.rows).all()
        logits.append(confidence_logits(shadow.trained_net, x, labels).cpu())
    return lira_scores(torch.stack(logits), inside)


def draw_canaries(data: ArrayData, clients: list[int], draw: torch.Generator) -> Canaries:
    """Draws training samples of the clients, and a wrong label for each."""
    rows = torch.cat([torch.from_numpy(data.train.rows_of(client)) for client in clients])
    count = min(MAX_CANARIES, int(CANARY_SHARE * len(rows)))
    if count < 2:
        raise SettingError(f"shadows needs at least {2 / CANARY_SHARE:.0f} training samples, got {len(rows)}")
    rows = rows[torch.randperm(len(rows), generator=draw)[:count]]
    labels = data.source.y[rows.to(data.source.y.device)].cpu()
    return Canaries(rows, (labels + torch.randint(1, data.classes, (count,), generator=draw)) % data.classes)


def assign_runs(canaries: int, runs: int, draw: torch.Generator) -> Tensor:
    """True where a run trains on a canary (runs × canaries): each canary is in half of the runs."""
    order = torch.rand(runs, canaries, generator=draw).argsort(0)
    return order < runs // 2


def insert_canaries(data: ArrayData, canaries: Canaries, inside: Tensor) -> ArrayData:
    """The data with wrong labels for all canaries, and without the canaries of other runs."""
    y = data.source.y.clone()
    y[canaries.rows.to(y.device)] = canaries.labels.to(y)
    train = data.train.where(~np.isin(data.train.rows, canaries.rows[~inside].numpy()))
    return replace(data, source=replace(data.source, y=y), train=train)


@torch.no_grad()
def confidence_logits(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """log p_y − log(1 − p_y) of each sample, with the net in evaluation mode: LiRA's statistic φ."""
    net.eval()
    scores = []
    for inputs, labels in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
        outputs = net(inputs).double()
        true = outputs.gather(1, labels[:, None])
        others = outputs.scatter(1, labels[:, None], -math.inf)
        scores.append(true.squeeze(1) - others.logsumexp(1))
    return torch.cat(scores)


def lira_scores(logits: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Likelihood ratios log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²) of members and of nonmembers.

    `logits` and `inside` are runs × canaries. For each target run, the Gaussians come from all other runs: a mean for
    each canary, from equally many runs inside and outside, and one variance for all canaries. The run that a mean
    leaves out is drawn for each canary: a fixed choice would let runs with unusual scores look like members.
    """
    ratios, draw = torch.empty_like(logits), torch.Generator().manual_seed(0)
    for target in range(len(logits)):
        others = torch.arange(len(logits)) != target
        opposite = inside[others] != inside[target]  # the side with one run more
        order = torch.rand(opposite.shape, generator=draw).masked_fill(~opposite, -1.0)
        spare = torch.zeros_like(opposite).scatter(0, order.argmax(0, keepdim=True), True)
        density = [
            _log_density(logits[target], logits[others], chosen, chosen & ~spare)
            for chosen in (inside[others], ~inside[others])
        ]
        ratios[target] = density[0] - density[1]
    return ratios[inside], ratios[~inside]


def _log_density(values: Tensor, samples: Tensor, chosen: Tensor, for_mean: Tensor) -> Tensor:
    """log N(value; μ, σ²) of each column, without constants: σ² by the chosen samples, μ by those `for_mean`."""

    def mean(mask: Tensor) -> Tensor:
        return samples.where(mask, 0.0).sum(0) / mask.sum(0)

    squares = (samples - mean(chosen)).square().where(chosen, 0.0).sum()
    variance = (squares / (chosen.sum(0) - 1).sum().clamp(min=1)).clamp(min=1e-12)
    return -(values - mean(for_mean)).square() / (2 * variance) - variance.log() / 2
