"""FedDistill, FedEnsemble and FedGen by name: in every runtime, on odd clients, in a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fewer
from fewer import FedDistill, FedEnsemble, FedGen
from fewer.data import Data
from fewer.methods.fedavg import LocalTraining
from fewer.methods.feddistill import FedDistillLogits
from tests.helpers import DIGITS, Interrupt, call, metrics, run_contents
from tests.methods.class_harness import EMPTY, PAIRS, SEED, encoder_head_net, federation

KINDS: list[type[LocalTraining]] = [FedDistill, FedDistillLogits, FedEnsemble, FedGen]


@pytest.mark.parametrize("kind", KINDS)
def test_pool_and_resume_give_the_same_bits(kind: type[LocalTraining], digits: Data, tmp_path: Path) -> None:
    method = kind(rounds=3, cohort=5, local_steps=4)
    settings: dict[str, Any] = {"drop": 0.2, "slow": 0.1, "corrupt": 0.2, "seed": 3}
    inline = fewer.run(method, digits, out=tmp_path / "inline", **settings)
    pool = fewer.run(method, digits, out=tmp_path / "pool", runtime="pool", workers=2, **settings)
    assert metrics(inline) == metrics(pool) and any(line["absent"] for line in inline.history)
    assert run_contents(tmp_path / "inline") == run_contents(tmp_path / "pool")
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, digits, out=tmp_path / "interrupted", callbacks=[Interrupt(3)], **settings)
    fewer.resume(tmp_path / "interrupted")
    assert run_contents(tmp_path / "interrupted") == run_contents(tmp_path / "inline")


@pytest.mark.parametrize("kind", KINDS)
def test_runs_survive_empty_clients_and_clients_with_one_class(kind: type[LocalTraining], tmp_path: Path) -> None:
    result = fewer.run(kind(rounds=3), federation([*PAIRS, EMPTY]), model=encoder_head_net(), seed=SEED, norm="none")
    assert [line["absent"] for line in result.history] == [1, 1, 1]
    single = fewer.run(kind(rounds=3), federation([PAIRS[2], EMPTY]), model=encoder_head_net(), seed=SEED)
    assert len(single.history) == 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ["feddistill", "-o", "distill_weight=-1"],
            "feddistill: distill_weight must be >= 0, got -1",
        ),
        (
            ["fedgen", "-o", "generator_weight=-1"],
            "fedgen: generator_weight must be >= 0, got -1",
        ),
        (
            ["fedgen", "-o", "generator_decay=1.1"],
            "fedgen: generator_decay must be <= 1, got 1.1",
        ),
        (
            ["fedgen", "-o", "generator_batch_size=1"],
            "generator_batch_size must be >= 2, got 1",
        ),
        (["fedensemble", "-o", "weight=1"], "fedensemble has no option 'weight'"),
    ],
)
def test_a_wrong_setting_is_reported_in_one_line(args: list[str], text: str) -> None:
    result = call("run", *args, *DIGITS, code=2)
    assert result.stderr.startswith("fewer: ") and result.stderr.count("\n") == 1 and text in result.stderr


def test_all_methods_can_be_compared(tmp_path: Path) -> None:
    names = ["fedavg", "fedprox", "feddistill", "fedensemble", "fedgen", "fedmk", "feddistill-logits"]
    small = ["matching_steps=30", "outer_steps=1", "server_steps=100", "per_class=5"]  # of FedMK
    options = [arg for option in small for arg in ("-o", option)]
    call("compare", *names, *DIGITS, "--rounds", "2", *options, "--out", tmp_path, "--json", tmp_path / "table.json")
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == names and all(row["accuracy"] > 0.2 for row in rows)
    for kind in KINDS:
        assert next(iter(kind.tunable)) == "lr" and len(kind.tunable) <= 2
        assert all(getattr(kind(), name) in grid for name, grid in kind.tunable.items())
