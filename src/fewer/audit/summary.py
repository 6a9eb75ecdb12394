"""The metrics of an audit as a short table, with one verdict per attack and explanations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fewer.audit.attacks import Audit
from fewer.audit.membership import MIN_NONMEMBERS, STRICT_RATE

HEADS = ("metric", "value", "reference")
ATTACKS = {
    "loss": "membership by loss, AUC",
    "variants": "membership by loss against transformed images, AUC",
    "distance": "membership by distance to D̂, AUC",
    "canaries": "mislabeled canaries in shadow runs, AUC",
}
SHORT = {"loss": "the loss", "variants": "the loss against transformed images", "distance": "the distance to D̂"}
SHORT["canaries"] = "canaries"
INVERTED = {"prototypes": "class means", "logits": "class logits"}
"""What clients send by class and an attack inverts, by the name of its metrics."""
MEANING = (
    "D̂ is the synthetic data. Its distance to the nearest real image of the same class and client is divided by the "
    "median distance between a real image and its nearest neighbor. The nearest neighbor is searched among training "
    "images and as many unseen images of the class: if more than half are training images, D̂ memorizes them. Restored "
    "images are compared with the real ones (PSNR: higher is more similar); a look-alike is the nearest other real "
    "image of the class. AUC is the probability that a training sample scores higher than a test sample of the same "
    "class and client, with its 95 % confidence interval (DeLong). A canary is a training sample with a wrong label. "
    "A bound on ε says that no guarantee with a smaller ε can hold, with 95 % confidence if samples are independent."
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
        *_inversion_rows(metrics),
        *_membership_rows(metrics["membership"]),
        *_epsilon_rows(metrics),
    ]


def verdicts(audit: Audit) -> list[str]:
    """What each attack shows, in one sentence each."""
    metrics = audit.metrics
    return [
        *_copy_verdicts(metrics.get("copies", {})),
        *_leakage_verdicts(metrics.get("leakage", {})),
        *_inversion_verdicts(metrics),
        *(_membership_verdict(SHORT[name], attack) for name, attack in metrics["membership"].items()),
        *_epsilon_verdicts(metrics),
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


def _inversion_rows(metrics: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, what in INVERTED.items():
        if attack := metrics.get(name):
            other = f"{attack['psnr_of_lookalike']:.1f} dB: a look-alike"
            yield f"restored from {what}", f"{attack['psnr']:.1f} dB", other


def _membership_rows(metrics: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, attack in metrics.items():
        value = f"{attack['auc']:.3f} ({attack['low']:.3f} … {attack['high']:.3f})"
        found = f"finds {100 * attack['true_positive_rate']:.1f} % at 1 % false positives"
        if attack["strict_true_positive_rate"] is None:
            found += f" (0.1 % needs {MIN_NONMEMBERS:,} nonmembers, there are {attack['nonmembers']:,})"
        else:
            found += f", {100 * attack['strict_true_positive_rate']:.1f} % at 0.1 %"
        yield ATTACKS[name], value, f"0.5: guessing; {found}"


def _epsilon_rows(metrics: dict[str, Any]) -> Iterator[Sequence[str]]:
    claimed = metrics.get("claimed")
    reference = f"claimed: {claimed['epsilon']:.2f} at δ = {claimed['delta']:g}" if claimed else "the run claims none"
    for name, attack in metrics["membership"].items():
        yield f"ε is at least, by {SHORT[name]}", f"{attack['epsilon_bound']:.2f}", reference


# --- verdicts ---------------------------------------------------------------------------------------------------


def _copy_verdicts(metrics: dict[str, Any]) -> Iterator[str]:
    if "near_copies" in metrics:
        share = metrics["near_copies"]
        copies = f"{100 * share:.1f} % of the synthetic images are" if share else "No synthetic image is"
        yield f"{copies} a near-copy of a real image."
    if member := metrics.get("nearest_is_member"):
        memorizes = "memorize" if member["low"] > 0.5 else "show no sign of memorizing"
        yield f"Synthetic images {memorizes} training images: {100 * member['fraction']:.1f} % are nearest to one."


def _leakage_verdicts(metrics: dict[str, Any]) -> Iterator[str]:
    if not metrics:
        return
    best, other = max(attack["psnr"] for attack in metrics["attacks"]), metrics["psnr_of_lookalike"]
    what = "synthetic image" if metrics["gradients_of"] == "synthetic" else "training image"
    away = "gives real images away" if best > other else "gives no real image away"
    yield f"The gradient of one {what} {away}: {best:.1f} dB, where a look-alike has {other:.1f} dB."


def _inversion_verdicts(metrics: dict[str, Any]) -> Iterator[str]:
    for name, what in INVERTED.items():
        if attack := metrics.get(name):
            restored, other = attack["psnr"], attack["psnr_of_lookalike"]
            away = "give real images away" if restored > other else "give no real image away"
            yield f"{what.capitalize()} {away}: {restored:.1f} dB, where a look-alike has {other:.1f} dB."


def _membership_verdict(name: str, attack: dict[str, Any]) -> str:
    strict, low = attack["strict_true_positive_rate"], attack["strict_low"]
    certain = strict is not None and low > STRICT_RATE
    found = f"it finds {100 * strict:.1f} % of them at 0.1 % false positives" if certain else ""
    if attack["low"] > 0.5:
        return f"Membership by {name}: members score higher (AUC {attack['auc']:.3f})" + (
            f", and {found}." if found else "."
        )
    if found:
        return f"Membership by {name}: near guessing on average (AUC {attack['auc']:.3f}), but {found}."
    return f"Membership by {name}: no better than guessing on these samples (AUC {attack['auc']:.3f})."


def _epsilon_verdicts(metrics: dict[str, Any]) -> Iterator[str]:
    if not (claimed := metrics.get("claimed")):
        return
    for name, attack in metrics["membership"].items():
        bound, epsilon = attack["epsilon_bound"], claimed["epsilon"]
        broken = "is broken by" if name == "canaries" else "is broken, if training and test samples are alike, by"
        outcome = "stands against" if bound <= epsilon else broken
        yield f"The guarantee {outcome} {SHORT[name]}: ε is at least {bound:.2f}, and the run claims {epsilon:.2f}."
