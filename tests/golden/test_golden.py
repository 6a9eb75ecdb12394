"""Golden runs: every method for two rounds on embedded data, bit-equal to the recorded ones.

Renaming and restructuring must not change a number. A commit that changes numbers on purpose records the file again and
says why: `python -m tests.golden.test_golden`.

Golden runs use kernels that give the same bits on every x86-64 processor (see `portable.py`).
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer.methods import names
from tests.golden.portable import start_portable_process

GOLDEN = Path(__file__).with_name("golden.json")

FEW_SHOT: dict[str, Any] = {
    "data_options": {"split": "4/3/3"},
    "partition": "iid",
    "method_options": {"way": 2, "shot": 1, "queries": 2, "tasks": 2, "test_tasks": 4, "validate_every": 2},
}
FIVE_LOSSES = {"mi_scope": "across", "learn_from": "task"}
GROUPS: dict[str, Any] = {
    "rounds": 4,
    "method_options": {"way": 2, "group_size": 2, "eval_groups": 2, "samples_per_class": 20},
}
AUTHORS_STEPS = {"local_steps": 2, "weight_decay": 5e-4, "crop": 1, "temperature": 10}
NEW_CLIENTS: dict[str, Any] = {"clients": 8, "cohort": 3}
CONDENSE = {
    "per_class": 2,
    "min_samples": 5,
    "matching_steps": 5,
    "outer_steps": 2,
    "refine_from": 1,
    "server_steps": 10,
    "match_rounds": "all",
}
SYNTHESIS = {"epochs": 2, "generator_steps": 2, "generator_batch_size": 16, "distill_steps": 3, "local_steps": 20}
ONE_INNER_STEP = {"labels": "held", "inner_steps": 1, "restart_every": 1, "server_lr": 0.1}
FAULTS = {"drop": 0.15, "slow": 0.15, "corrupt": 0.15, "seed": 3, "clients": 8, "cohort": 8}

CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("local", "fedavg", "fedavg-augmented", "fedavg-calibrated", "fedprox")},
    **{name: {} for name in ("fedensemble", "fedgen", "feddistill", "feddistill-logits")},
    **{name: {"method_options": SYNTHESIS} for name in ("dense", "co-boosting")},
    "feddm": {"method_options": {"per_class": 2, "matching_steps": 5, "real_per_class": 8, "server_steps": 10}},
    "fusefl": {"rounds": 2, "method_options": {"local_steps": 20}},
    "centralized": {"method_options": {"local_steps": 20}},
    "fedbn": {"norm": "batch"},
    "fedavg-ft": {"norm": "batch", "method_options": {"ft_steps": 3}},
    "fedseq": {},
    **{
        name: {}
        for name in ("fedopt", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova", "fedelmy", "dpsgd-ring")
    },
    **{name: {} for name in ("fedper", "fedrep", "fedbabu", "lg-fedavg", "ditto", "apfl", "fedproto", "fedrod")},
    **{name: {} for name in ("dbe", "knn-per")},
    **{name: {"rounds": 3} for name in ("scaffold", "feddyn", "moon", "fedala")},
    **{name: {"cohort": 2} for name in ("fedncm", "fedcof", "fed3r")},
    "fedpft": {"cohort": 2, "method_options": {"components": 2, "em_steps": 3, "server_steps": 10}},
    "fedavg-head": {},
    "fedmk": {"method_options": CONDENSE},
    "fedmk-paper": {"method_options": {"per_class": 2, "outer_steps": 3, "server_steps": 10, **ONE_INNER_STEP}},
    "dp-fedmk": {
        "cohort": 2,
        "method_options": {"per_class": 2, "nets": 2, "matching_steps": 5, "server_steps": 10},
    },
    "fedmk-avg": {"rounds": 3, "method_options": {**CONDENSE, "local_steps": 5, "first_steps": 5}},
    **dict.fromkeys(("fedmeta", "fedavg-meta", "reptile", "per-fedavg", "alone"), NEW_CLIENTS),
    **dict.fromkeys(("fedbabu-meta", "knn-per-meta"), NEW_CLIENTS),
    "frl": GROUPS,
    "frl-meta-head": GROUPS,
    "frl-scratch": GROUPS,
    "coprefl": GROUPS,
    "frl-fine-tuning": GROUPS,
    "frl-per-fedavg": GROUPS,
    "frl-warm-start": {**GROUPS, "rounds": 8, "method_options": {**GROUPS["method_options"], "warmup_rounds": 4}},
    "frl-deploy": {},
    "metafed": {"validation": 0.2},
    **dict.fromkeys(("f2l", "fl-maml", "fl-proto", "fl-base", "fedfsl", "local-maml", "local-proto"), FEW_SHOT),
    # Other branches of a method, dropout (the global generators) and injected faults.
    "fedavg, best": {"validation": 0.3, "rounds": 4, "method_options": {"keep": "best", "lr": 1.0}},
    "fedbn, best": {"validation": 0.3, "rounds": 4, "method_options": {"keep": "best", "lr": 1.0}},
    "fedseq, faults": FAULTS,
    "scaffold, faults": {"rounds": 4, **FAULTS},
    "metafed, last": {"validation": 0.2, "method_options": {"keep": "last", "transfer": "fine-tune"}},
    "fedavg, codec uint8": {"method_options": {"codec": "uint8"}},
    "fedavg, faults": FAULTS,
    "fedavg, text": {
        "data": "shakespeare-mini",
        "partition": "natural",
        "model": "char-lstm",
        "model_options": {"hidden": 32, "context": 20},
        "clients": 3,
        "rounds": 1,
        "fraction": 0.1,
        "method_options": {"local_steps": 2},
    },
    "fedbn, faults": FAULTS,
    "fedmk, shared": {
        "method_options": {**CONDENSE, "init_from": "shared", "sample_weights": "class", "restart_every": 2}
    },
    "fedmk, faults": {**FAULTS, "method_options": CONDENSE},
    "fedmk, matched once": {"rounds": 3, "method_options": {**CONDENSE, "match_rounds": 1}},
    "fedmk, nets near the global model": {"method_options": {**CONDENSE, "matching_nets": "global"}},
    "fedmk, trained nets and tiles": {
        "method_options": {**CONDENSE, "matching_nets": "trained", "queue_size": 2, "tiles": 2}
    },
    "fedmk-avg, mixed images": {
        "rounds": 3,
        "method_options": {**CONDENSE, "local_steps": 5, "first_steps": 5, "mixed_images": 4, "distill_until": 0},
    },
    "fedmk-paper, literal": {"norm": "batch", "method_options": {"per_class": 2, "outer_steps": 3, "server_steps": 10}},
    "fedmeta, fomaml": {**NEW_CLIENTS, "method_options": {"algorithm": "fomaml", "inner_steps": 2, "batch_size": 8}},
    "fedmeta, meta-sgd with local steps": {
        **NEW_CLIENTS,
        "method_options": {"algorithm": "meta-sgd", "local_steps": 2, "clip_norm": 1.0},
    },
    "frl, linear": {**GROUPS, "method_options": {**GROUPS["method_options"], "head": "linear"}},
    "frl, distance": {**GROUPS, "method_options": {**GROUPS["method_options"], "head": "distance", "optimizer": "sgd"}},
    "frl, fedncm": {**GROUPS, "method_options": {**GROUPS["method_options"], "head": "fedncm"}},
    "frl, fedcof": {**GROUPS, "method_options": {**GROUPS["method_options"], "head": "fedcof", "subsets": 2}},
    "frl, the authors' steps": {
        **GROUPS,
        "method_options": {**GROUPS["method_options"], **AUTHORS_STEPS, "meta_steps": 2, "optimizer": "sgd"},
    },
    "frl-per-fedavg, the authors' steps": {**GROUPS, "method_options": {**GROUPS["method_options"], **AUTHORS_STEPS}},
    "metafed, distill": {"validation": 0.2, "method_options": {"distill_threshold": 0.0, "ignore_threshold": 0.1}},
    "metafed, federations": {"validation": 0.2, "clients": 6, "method_options": {"federations": 3, "nets": "cnn,mlp"}},
    "metafed, shuffled ring": {"validation": 0.2, "method_options": {"ring_seed": 1}},
    "metafed, faults": {**FAULTS, "validation": 0.2},
    "f2l, five losses": {
        **FEW_SHOT,
        "method_options": {**FEW_SHOT["method_options"], **FIVE_LOSSES, "detach_client_features": False},
    },
    "f2l, client features as constants": {
        **FEW_SHOT,
        "method_options": {**FEW_SHOT["method_options"], **FIVE_LOSSES},
    },
}
"""Settings by case. A case is a method's name, with a comma and a remark if its settings are special."""


def hash_tensors(tree: Any) -> str:
    """One hash of all tensors and numbers in a tree. It does not include the names of dataclass fields."""
    digest = hashlib.sha256()
    for part in _leaves(tree):
        digest.update(part)
    return digest.hexdigest()[:16]


def _leaves(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, torch.Tensor):
        yield f"{tree.dtype} {tuple(tree.shape)} ".encode() + tree.detach().cpu().contiguous().numpy().tobytes()
    elif isinstance(tree, dict):
        for key in tree:
            yield from (str(key).encode(), *_leaves(tree[key]))
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _leaves(part)
    elif hasattr(tree, "__dict__"):
        yield from _leaves(list(vars(tree).values()))
    else:
        yield repr(tree).encode()


def record(case: str, runtime: str, folder: Path) -> dict[str, Any]:
    """Runs a case and returns its hashes, history and absences, without names that may change."""
    method = case.partition(",")[0]
    settings: dict[str, Any] = {"data": "digits", "model": "cnn", "clients": 4, "rounds": 2, **CASES[case]}
    if method == "frl-deploy":
        fewer.run("frl-scratch", out=folder / "prepared", **{**settings, **GROUPS})
        settings["method_options"] = {"prepared": str(folder / "prepared")}
    result = fewer.run(method, out=folder / runtime, runtime=runtime, **settings)
    lines = (folder / runtime / "events.jsonl").read_text().splitlines()
    absent = [event for event in map(json.loads, lines) if event["event"] == "absent"]
    clients = range(len(result.data)) if method in PERSONAL or result.method.keep == "best" else ()
    return {
        "weights": hash_tensors(result.state),
        "personal": [hash_tensors(dict(result.personal_model(client).state_dict())) for client in clients],
        "history": [[line.get("accuracy"), line.get("loss"), line["absent"]] for line in result.history],
        "absences": [[event["round"], event["client"], event["reason"]] for event in absent],
    }


PERSONAL = ("local", "fedbn", "fedavg-ft", "metafed")
"""Methods whose clients have models of their own."""


@pytest.fixture(scope="session")
def portable() -> Iterator[ProcessPoolExecutor]:
    with start_portable_process() as process:
        yield process


@pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded on x86-64")
@pytest.mark.parametrize("runtime", ["inline", "pool"])
@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, runtime: str, portable: ProcessPoolExecutor, tmp_path: Path) -> None:
    expected = json.loads(GOLDEN.read_text())[case]
    assert portable.submit(record, case, runtime, tmp_path).result() == expected


def test_every_method_has_a_golden_run() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(names())
    assert json.loads(GOLDEN.read_text()).keys() == CASES.keys()


def main() -> None:
    """Record the cases named on the command line, or all."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    start = time.monotonic()
    with start_portable_process() as process, tempfile.TemporaryDirectory() as directory:
        for number, case in enumerate(sys.argv[1:] or CASES):
            folder = Path(directory) / str(number)
            golden[case] = process.submit(record, case, "inline", folder).result()
            print(f"{time.monotonic() - start:.0f} s", case, golden[case]["history"], len(golden[case]["absences"]))
    GOLDEN.write_text(json.dumps({case: golden[case] for case in CASES if case in golden}, indent=1) + "\n")


if __name__ == "__main__":
    main()
