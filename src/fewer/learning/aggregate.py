"""Aggregation: how the server combines what clients send.

`weighted_mean` believes every client. The other rules bear some clients that lie:

- `median`, `trimmed-mean`: Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning, ICML 2018.
- `multi-krum`: Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries, NeurIPS 2017. It averages
  m = n − f − 2 updates.
- `bulyan`: El Mhamdi, Guerraoui, Rouault: The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018.
- `geometric-median`: Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE TSP 2022 (Weiszfeld).
- `norm-bound`: Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019.
- `centered-clip`: Karimireddy, He, Jaggi: Learning from History for Byzantine Robust Optimization, ICML 2021.

Prototypes and condensed images are no changes of one model. There, a rule finds outliers instead (`reject_outliers`).

Departures:

- The bounds of `norm-bound` and `centered-clip` are the cohort's median norm and median distance, not constants.
- `centered-clip` starts from the model that the clients received, and takes five steps.
- These rules give all clients the same weight, because a client that lies may also lie about its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fewer.models import Weights
from fewer.privacy import PrivacyLedger
from fewer.runtime import Aggregation
from fewer.runtime.noise import NoiseStream

MAX_NORM_RATIO = 100.0
"""A change that is longer than this many times the cohort's median is scaled down to the longest that is not.

Gradients of honest clients exceed 10 where most clients have learned their samples.
"""
MAX_SIZE_RATIO = 100.0
"""A client that claims more samples than this many times the cohort's median weighs as the largest that does not.

Honest cohorts of a skewed partition exceed 10.
"""
MIN_COHORT = 5
"""The smallest cohort whose median says what is plausible."""
WEISZFELD_STEPS = 100
CLIP_STEPS = 5

Tree = Mapping[str, Tensor]


def combine(
    updates: Sequence[Tree],
    shares: Sequence[float],
    aggregation: Aggregation = Aggregation(),  # noqa: B008
    start: Tree | None = None,
) -> Weights:
    """Combines the clients' updates by a rule, after `bound_updates`.

    `start` is what the clients started from: a rule looks at the changes from there. Without it, updates are changes
    themselves, such as gradients.
    """
    updates, shares = bound_updates(updates, shares, start)
    if aggregation.rule == "mean":
        return weighted_mean(updates, shares)
    combined = weighted_mean(updates, [1] * len(updates))  # of the tensors that are no floats
    names = [name for name, tensor in combined.items() if tensor.dtype.is_floating_point]
    if not names:
        return combined
    changes = torch.stack([flat_change(update, start, names) for update in updates])
    result, position = RULES[aggregation.rule](changes, count_liars(aggregation, len(updates))), 0
    for name in names:
        tensor = combined[name]
        change = result[position : position + tensor.numel()].view(tensor.shape)
        combined[name] = (change if start is None else start[name] + change).to(tensor.dtype)
        position += tensor.numel()
    return combined


def weighted_mean(models: Sequence[Tree], shares: Sequence[float]) -> Weights:
    """Σ shareᵢ · modelᵢ / Σ shareᵢ for each tensor.

    Sums are in float64 and in the given order. Integer tensors are rounded.
    """
    total = float(sum(shares))
    if not models or total <= 0:
        raise ValueError(f"a mean needs at least one model and a positive sum of shares, got {len(models)} and {total}")
    mean: Weights = {}
    for name, first in models[0].items():
        weighted_sum = torch.zeros_like(first, dtype=torch.float64)
        for model, share in zip(models, shares, strict=True):
            weighted_sum.add_(model[name], alpha=share / total)
        mean[name] = (weighted_sum if first.dtype.is_floating_point else weighted_sum.round()).to(first.dtype)
    return mean


def private_mean(
    updates: Sequence[Tree],
    start: Tree | None,
    example: Tree,
    privacy: PrivacyLedger,
    asked: int,
    stream: NoiseStream,
) -> Weights:
    """start + (Σ clip(updateᵢ − start) + noise) / asked, and the next clipping norm, if it is adaptive.

    Clients that did not answer count as zero changes, so that one client changes the sum by at most 2 C. Tensors that
    are no floats keep their value in `start`. `example` has the names and shapes. If noise is distributed, the updates
    come from `add_share`, and the server adds only the shares of absent clients.
    """
    names = [name for name, tensor in example.items() if tensor.dtype.is_floating_point]
    length = sum(example[name].numel() for name in names)
    total, unclipped = torch.zeros(length, dtype=torch.float64), 0
    deviation = privacy.noise_of_sum(asked)
    if distributed := privacy.settings.distributed:
        deviation *= math.sqrt((asked - len(updates)) / asked)
    for update in updates:
        change = flat_change(update, start, names).cpu()
        if distributed:
            total += change
            continue
        norm = float(change.norm())
        unclipped += norm <= privacy.clip
        total += change * min(1.0, privacy.clip / max(norm, 1e-30))
    mean = (total + deviation * stream.normal([length])) / asked
    if privacy.settings.quantile is not None:
        count_noise = privacy.noise_of_count(asked) * float(stream.normal([]))
        privacy.move_clip((unclipped + count_noise) / asked)
    return apply_change(mean, start, example, names)


def add_share(update: Tree, start: Tree | None, clip: float, noise: float, stream: NoiseStream) -> Weights:
    """start + clip(update − start) + noise · C · ξ with standard normal ξ: what a client sends if noise is distributed.

    Tensors that are no floats keep their value in `start`, or become 0.
    """
    names = [name for name, tensor in update.items() if tensor.dtype.is_floating_point]
    change = flat_change(update, start, names).cpu()
    change *= min(1.0, clip / max(float(change.norm()), 1e-30))
    change += noise * clip * stream.normal([len(change)])
    return apply_change(change, start, update, names)


def apply_change(change: Tensor, start: Tree | None, example: Tree, names: Sequence[str]) -> Weights:
    """start + change for the named tensors, from one vector; the others keep their value in `start`."""
    result, position = {}, 0
    for name, tensor in example.items():
        center = torch.zeros_like(tensor) if start is None else start[name]
        if name not in names:
            result[name] = center.clone()
            continue
        part = change[position : position + tensor.numel()].view(tensor.shape).to(tensor.device)
        result[name] = (center.double() + part).to(tensor.dtype)
        position += tensor.numel()
    return result


# --- what is plausible ----------------------------------------------------------------------------------------


def bound_updates(
    updates: Sequence[Tree], shares: Sequence[float], start: Tree | None = None
) -> tuple[Sequence[Tree], Sequence[float]]:
    """Bounds implausible changes and sizes by the largest plausible ones of the cohort.

    Nobody gains by an implausible claim: it counts no more than what another client sent. Plausible updates and shares
    are returned as they are.
    """
    if len(updates) < MIN_COHORT:
        return updates, shares
    norms = [change_norm(update, start) for update in updates]
    longest, largest = max_plausible(norms, MAX_NORM_RATIO), max_plausible(shares, MAX_SIZE_RATIO)
    bounded = [
        update if norm <= longest else scale_change(update, start, longest / norm)
        for update, norm in zip(updates, norms, strict=True)
    ]
    return bounded, [min(share, largest) for share in shares]


def max_plausible(values: Sequence[float], ratio: float) -> float:
    """The largest value that is at most `ratio` times the median. If the median is 0, all values are plausible."""
    limit = ratio * median(values) or math.inf
    return max(value for value in values if value <= limit)


def change_norm(update: Tree, start: Tree | None) -> float:
    """‖update − start‖ over all floating-point tensors."""
    squares = 0.0
    for name, tensor in update.items():
        if tensor.dtype.is_floating_point:
            change = tensor.double() if start is None else tensor.double() - start[name]
            squares += float(change.square().sum())
    return math.sqrt(squares)


def scale_change(update: Tree, start: Tree | None, factor: float) -> Weights:
    """start + factor · (update − start) for floating-point tensors; others stay."""
    scaled: Weights = {}
    for name, tensor in update.items():
        if not tensor.dtype.is_floating_point:
            scaled[name] = tensor
            continue
        center = torch.zeros_like(tensor, dtype=torch.float64) if start is None else start[name].double()
        scaled[name] = (center + factor * (tensor.double() - center)).to(tensor.dtype)
    return scaled


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def flat_change(update: Tree, start: Tree | None, names: Sequence[str]) -> Tensor:
    """The named tensors of update − start as one vector in float64."""
    parts = (update[name].double() if start is None else update[name].double() - start[name] for name in names)
    return torch.cat([part.reshape(-1) for part in parts])


# --- robust rules: n changes of length d, f of which may be lies ------------------------------------------------


def coordinate_median(changes: Tensor, liars: int = 0) -> Tensor:
    """The median of each coordinate: the middle value, or the mean of the two middle ones."""
    ordered = changes.sort(0).values
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def trimmed_mean(changes: Tensor, liars: int) -> Tensor:
    """The mean of each coordinate without its f smallest and f largest values."""
    count = len(changes)
    trim = min(liars, (count - 1) // 2)
    return changes.sort(0).values[trim : count - trim].mean(0)


def multi_krum(changes: Tensor, liars: int) -> Tensor:
    """The mean of the n − f − 2 changes that are nearest to their n − f − 2 nearest neighbors."""
    count = len(changes)
    liars = max(0, min(liars, (count - 3) // 2))
    chosen = krum_scores(squared_distances(changes), liars).argsort(stable=True)[: max(1, count - liars - 2)]
    return changes[chosen].mean(0)


def bulyan(changes: Tensor, liars: int) -> Tensor:
    """Chooses n − 2f changes by Krum, one after the other; then averages the values nearest to each median."""
    count = len(changes)
    liars = max(0, min(liars, (count - 3) // 4))
    distances, left = squared_distances(changes), list(range(count))
    chosen: list[int] = []
    while len(chosen) < count - 2 * liars:
        best = int(krum_scores(distances[left][:, left], liars).argmin())
        chosen.append(left.pop(best))
    selected = changes[chosen]
    nearest = (
        (selected - coordinate_median(selected)).abs().argsort(dim=0, stable=True)[: max(1, len(chosen) - 2 * liars)]
    )
    return selected.gather(0, nearest).mean(0)


def squared_distances(changes: Tensor) -> Tensor:
    """‖changeᵢ − changeⱼ‖² (n × n)."""
    return torch.cdist(changes, changes, compute_mode="donot_use_mm_for_euclid_dist").square()


def krum_scores(distances: Tensor, liars: int) -> Tensor:
    """The sum of squared distances to the n − f − 2 nearest others, for each change."""
    neighbors = max(1, len(distances) - liars - 2)
    return distances.sort(1).values[:, 1 : 1 + neighbors].sum(1)  # the nearest one is the change itself


def geometric_median(changes: Tensor, liars: int) -> Tensor:
    """The point with the smallest sum of distances to all changes (Weiszfeld's steps, smoothed)."""
    point = coordinate_median(changes)
    scale = float((changes - point).norm(dim=1).max())
    for _ in range(WEISZFELD_STEPS):
        weights = 1 / (changes - point).norm(dim=1).clamp(min=1e-9 * scale + 1e-30)
        previous, point = point, (weights[:, None] * changes).sum(0) / weights.sum()
        if float((point - previous).norm()) <= 1e-9 * scale:
            break
    return point


def norm_bound(changes: Tensor, liars: int) -> Tensor:
    """The mean of all changes, each scaled down to the median length."""
    return clip_rows(changes).mean(0)


def centered_clip(changes: Tensor, liars: int) -> Tensor:
    """v ← v + mean of (changeᵢ − v), each scaled down to the median length; from v = 0, five times."""
    center = torch.zeros_like(changes[0])
    for _ in range(CLIP_STEPS):
        center = center + clip_rows(changes - center).mean(0)
    return center


def clip_rows(rows: Tensor) -> Tensor:
    """Scales rows that are longer than the median row down to its length."""
    norms = rows.norm(dim=1)
    factors: Tensor = (norms.quantile(0.5) / norms.clamp(min=1e-30)).clamp(max=1)
    return rows * factors[:, None]


RULES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "median": coordinate_median,
    "trimmed-mean": trimmed_mean,
    "multi-krum": multi_krum,
    "bulyan": bulyan,
    "geometric-median": geometric_median,
    "norm-bound": norm_bound,
    "centered-clip": centered_clip,
}


def reject_outliers(rows: Tensor, labels: Tensor, aggregation: Aggregation) -> Tensor:
    """True for each row to keep: of n rows of a class, all but the f most distant from what the rule combines them to.

    f is the share of clients that may lie, of n, and less than half of n. With the mean, all rows are kept.
    """
    kept = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    if aggregation.rule == "mean":
        return kept
    for label in torch.unique(labels).tolist():
        (positions,) = torch.nonzero(labels == label, as_tuple=True)
        members = rows[positions].double()
        liars = min(count_liars(aggregation, len(members)), (len(members) - 1) // 2)
        distances = (members - RULES[aggregation.rule](members, liars)).norm(dim=1)
        kept[positions[distances.argsort(descending=True, stable=True)[:liars]]] = False
    return kept


def count_liars(aggregation: Aggregation, clients: int) -> int:
    """f: how many of the clients may lie."""
    return math.ceil(aggregation.liars * clients - 1e-9)


def stack_models(models: Sequence[Mapping[str, Tensor]]) -> Weights:
    """One tensor per name, with the models along a new first dimension."""
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}


def unstack_models(stacked: Mapping[str, Tensor]) -> list[Weights]:
    """The models that `stack_models` stacked."""
    count = len(next(iter(stacked.values())))
    return [{name: tensor[index] for name, tensor in stacked.items()} for index in range(count)]
