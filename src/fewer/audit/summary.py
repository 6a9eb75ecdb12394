"""The figures of a privacy look in words: a small table, and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fewer.audit.attacks import Audit

HEADS = ("figure", "value", "to compare")
ATTACKS = {
    "loss": "members by loss, AUC",
    "variants": "members by loss against moved images, AUC",
    "distance": "members by distance to D̂, AUC",
}
MEANING = (
    "D̂ is synthetic data; its distance to the nearest real image of its class and client is divided by the median "
    "distance between a real image and the nearest other. The nearest is a training image or one of as many unseen "
    "ones of the class: more than half is memory. Restored images are held against the real ones (PSNR: high "
    "is alike); a look-alike is the nearest other real image of the class. AUC: the chance that a training sample "
    "scores higher than a test sample of the same class and client, with its 95 % confidence interval by DeLong."
)
LIMITS = (
    "These are attacks that were tried, not all there are. An AUC near 0.5 or a picture that shows nothing means that "
    "these attacks failed on these samples; it proves no privacy, and no formal guarantee such as differential privacy "
    "is given."
)


def figure_rows(found: Audit) -> list[Sequence[str]]:
    """The main figures: what, how much, and what to hold against it."""
    return [*_copies(found.figures.get("copies", {})), *_leakage(found.figures.get("leakage", {})), *_members(found)]


def _copies(figures: dict[str, Any]) -> Iterator[Sequence[str]]:
    if "median" in figures:
        yield "D̂ to nearest real, median", f"{figures['median']:.2f}", "1: as real images of a class"
        yield (
            "D̂ to nearest real, least",
            f"{figures['least']:.2f}",
            f"0: a copy; a class of {figures['closest']['samples']:,} samples",
        )
        yield "near-copies (below 0.5)", f"{100 * figures['near_copies']:.1f} %", f"of {figures['images']:,} images"
    if member := figures.get("nearest_is_member"):
        value = f"{100 * member['share']:.1f} % ({100 * member['low']:.1f} … {100 * member['high']:.1f})"
        yield "D̂ whose nearest is a training image", value, "50 %: training and unseen images are as near"


def _leakage(figures: dict[str, Any]) -> Iterator[Sequence[str]]:
    for attack in figures.get("attacks", ()):
        what = f"restored, {attack['model']} model"
        if attack["at_once"] > 1:
            what += f", {attack['at_once']} at once"
        against = f"{figures['psnr_of_lookalike']:.1f} dB: a look-alike"
        if "psnr_to_synthetic" in attack:
            against += f"; {attack['psnr_to_synthetic']:.1f} dB to D̂"
        yield what, f"{attack['psnr']:.1f} dB", against


def _members(found: Audit) -> Iterator[Sequence[str]]:
    for name, figures in found.figures["membership"].items():
        value = f"{figures['auc']:.3f} ({figures['low']:.3f} … {figures['high']:.3f})"
        yield ATTACKS[name], value, f"0.5: guessing; finds {100 * figures['hits']:.1f} % at 1 % false alarms"
