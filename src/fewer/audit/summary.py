"""The metrics of an audit as a short table, with explanations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fewer.audit.attacks import Audit

HEADS = ("metric", "value", "reference")
ATTACKS = {
    "loss": "membership by loss, AUC",
    "variants": "membership by loss against transformed images, AUC",
    "distance": "membership by distance to D̂, AUC",
}
MEANING = (
    "D̂ is the synthetic data. Its distance to the nearest real image of the same class and client is divided by the "
    "median distance between a real image and its nearest neighbor. The nearest neighbor is searched among training "
    "images and as many unseen images of the class: if more than half are training images, D̂ memorizes them. Restored "
    "images are compared with the real ones (PSNR: higher is more similar); a look-alike is the nearest other real "
    "image of the class. AUC is the probability that a training sample scores higher than a test sample of the same "
    "class and client, with its 95 % confidence interval (DeLong)."
)
LIMITS = (
    "The audit tries these attacks only. An AUC near 0.5 or an unrecognizable image means that they failed on these "
    "samples. This does not prove privacy, and gives no formal guarantee such as differential privacy."
)


def summary_rows(audit: Audit) -> list[Sequence[str]]:
    """The main metrics: name, value, and a reference to compare with."""
    metrics = audit.metrics
    return [
        *_copy_rows(metrics.get("copies", {})),
        *_leakage_rows(metrics.get("leakage", {})),
        *_membership_rows(metrics["membership"]),
    ]


def _copy_rows(metrics: dict[str, Any]) -> Iterator[Sequence[str]]:
    if "median" in metrics:
        yield "D̂ to nearest real, median", f"{metrics['median']:.2f}", "1: real images of a class"
        reference = f"0: a copy; a class of {metrics['closest']['samples']:,} samples"
        yield "D̂ to nearest real, minimum", f"{metrics['min']:.2f}", reference
        yield "near-copies (below 0.5)", f"{100 * metrics['near_copies']:.1f} %", f"of {metrics['images']:,} images"
    if member := metrics.get("nearest_is_member"):
        value = f"{100 * member['fraction']:.1f} % ({100 * member['low']:.1f} … {100 * member['high']:.1f})"
        yield "D̂ nearest to a training image", value, "50 %: training and unseen images are equally near"


def _leakage_rows(metrics: dict[str, Any]) -> Iterator[Sequence[str]]:
    for attack in metrics.get("attacks", ()):
        name = f"restored, {attack['model']} model"
        if attack["batch_size"] > 1:
            name += f", {attack['batch_size']} at once"
        reference = f"{metrics['psnr_of_lookalike']:.1f} dB: a look-alike"
        if "psnr_to_synthetic" in attack:
            reference += f"; {attack['psnr_to_synthetic']:.1f} dB to D̂"
        yield name, f"{attack['psnr']:.1f} dB", reference


def _membership_rows(metrics: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, attack in metrics.items():
        value = f"{attack['auc']:.3f} ({attack['low']:.3f} … {attack['high']:.3f})"
        reference = f"0.5: guessing; finds {100 * attack['true_positive_rate']:.1f} % at 1 % false positives"
        yield ATTACKS[name], value, reference
