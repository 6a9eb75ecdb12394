"""Verdicts: one plain sentence for each attack."""

from typing import Any

from fewer.audit import Audit
from fewer.audit.summary import summary_rows, verdicts


def make_audit(**metrics: Any) -> Audit:
    return Audit("fedavg", "digits", 1, "0", [0], {"membership": {}, **metrics})


def attack(**changed: Any) -> dict[str, Any]:
    found = {"auc": 0.51, "low": 0.49, "high": 0.53, "true_positive_rate": 0.01, "members": 2000, "nonmembers": 2000}
    return {**found, "strict_true_positive_rate": 0.001, "strict_low": 0.0003, "epsilon_bound": 0.0, **changed}


def test_membership_verdicts() -> None:
    guessing, certain, both, few = (
        attack(),
        attack(strict_true_positive_rate=0.05, strict_low=0.04),
        attack(auc=0.7, low=0.68, strict_true_positive_rate=0.05, strict_low=0.04),
        attack(auc=0.7, low=0.68, nonmembers=812, strict_true_positive_rate=None, strict_low=None),
    )
    assert [verdicts(make_audit(membership={"loss": found}))[0] for found in (guessing, certain, both, few)] == [
        "Membership by the loss: no better than guessing on these samples (AUC 0.510).",
        "Membership by the loss: near guessing on average (AUC 0.510), but it finds 5.0 % of them at 0.1 % false "
        "positives.",
        "Membership by the loss: members score higher (AUC 0.700), and it finds 5.0 % of them at 0.1 % false "
        "positives.",
        "Membership by the loss: members score higher (AUC 0.700).",
    ]
    row = summary_rows(make_audit(membership={"loss": few}))[0]
    assert row[2] == "0.5: guessing; finds 1.0 % at 1 % false positives (0.1 % needs 1,000 nonmembers, there are 812)"
    assert "1 % false positives, 5.0 % at 0.1 %" in summary_rows(make_audit(membership={"loss": both}))[0][2]


def test_a_bound_above_the_claim_breaks_the_guarantee() -> None:
    claimed = {"epsilon": 1.0, "delta": 1e-5}
    for bound, outcome in ((0.5, "stands against"), (1.5, "is broken by")):
        audit = make_audit(membership={"canaries": attack(epsilon_bound=bound)}, claimed=claimed)
        assert verdicts(audit)[-1] == (
            f"The guarantee {outcome} canaries: ε is at least {bound:.2f}, and the run claims 1.00."
        )
        assert summary_rows(audit)[-1] == ("ε is at least, by canaries", f"{bound:.2f}", "claimed: 1.00 at δ = 1e-05")
    without = make_audit(membership={"canaries": attack()})
    assert len(verdicts(without)) == 1 and summary_rows(without)[-1][2] == "the run claims none"


def test_verdicts_on_copies_and_gradients() -> None:
    copies = {"near_copies": 0.0, "nearest_is_member": {"low": 0.51, "fraction": 0.6}}
    leakage = {"attacks": [{"psnr": 9.0}, {"psnr": 21.0}], "psnr_of_lookalike": 20.0, "gradients_of": "real"}
    assert verdicts(make_audit(copies=copies, leakage=leakage)) == [
        "No synthetic image is a near-copy of a real image.",
        "Synthetic images memorize training images: 60.0 % are nearest to one.",
        "The gradient of one training image gives real images away: 21.0 dB, where a look-alike has 20.0 dB.",
    ]
    copies = {"near_copies": 0.02, "nearest_is_member": {"low": 0.49, "fraction": 0.5}}
    leakage = {**leakage, "psnr_of_lookalike": 22.0, "gradients_of": "synthetic"}
    assert verdicts(make_audit(copies=copies, leakage=leakage)) == [
        "2.0 % of the synthetic images are a near-copy of a real image.",
        "Synthetic images show no sign of memorizing training images: 50.0 % are nearest to one.",
        "The gradient of one synthetic image gives no real image away: 21.0 dB, where a look-alike has 22.0 dB.",
    ]


def test_verdicts_on_class_means() -> None:
    for restored, away in ((21.0, "give real images away"), (19.0, "give no real image away")):
        audit = make_audit(prototypes={"psnr": restored, "psnr_of_lookalike": 20.0})
        assert verdicts(audit) == [f"Class means {away}: {restored:.1f} dB, where a look-alike has 20.0 dB."]
        assert summary_rows(audit) == [("restored from class means", f"{restored:.1f} dB", "20.0 dB: a look-alike")]
    audit = make_audit(logits={"psnr": 19.0, "psnr_of_lookalike": 20.0})
    assert verdicts(audit) == ["Class logits give no real image away: 19.0 dB, where a look-alike has 20.0 dB."]
    assert summary_rows(audit) == [("restored from class logits", "19.0 dB", "20.0 dB: a look-alike")]
