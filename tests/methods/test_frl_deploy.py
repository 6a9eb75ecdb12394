"""A prepared model is deployed on a group, from Python and from the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fewer
from fewer.errors import SettingError
from fewer.experiments.studies import embed_samples
from fewer.learning.group_model import GroupModel
from fewer.methods.frl import (
    FRL,
)
from fewer.methods.frl_baselines import FRLMetaHead, FRLScratch
from fewer.models import Weights, load_weights
from fewer.models.artifact import ARTIFACT_FILE
from fewer.runs.inference import deploy
from fewer.runs.result import open_run
from fewer.runtime import stream
from tests.helpers import Stop, Stopping, call
from tests.methods.frl_harness import PAIRS, SMALL, UNSEEN, Small, federation, initial_net, read_messages


def test_all_members_deploy_unless_the_cohort_is_smaller(tmp_path: Any) -> None:
    pairs = [PAIRS[number % 5] for number in range(12)]
    fewer.run(FRLScratch(**SMALL), federation(), model=initial_net(), out=tmp_path / "run")
    for cohort, asked in ((None, 12), (3, 3)):
        settings: dict[str, Any] = {} if cohort is None else {"cohort": cohort}
        deploy(tmp_path / "run", federation(pairs), model=Small, rounds=1, out=tmp_path / str(cohort), **settings)
        sent = read_messages(tmp_path / str(cohort))
        assert (
            len({client for _, client, direction, kind, _ in sent if (direction, kind) == ("down", "local_train")})
            == asked
        )


def test_a_deployed_group_no_longer_needs_the_prepared_model(tmp_path: Path) -> None:
    fewer.run(FRLScratch(**SMALL), federation(), model=initial_net(), out=tmp_path / "run")
    deploy_group = partial(deploy, tmp_path / "run", federation(), model=Small)
    deploy_group(out=tmp_path / "uninterrupted")
    with pytest.raises(Stop):
        deploy_group(out=tmp_path / "interrupted", callbacks=[Stopping()])
    shutil.rmtree(tmp_path / "run")
    resumed = fewer.resume(tmp_path / "interrupted", data=federation(), model=Small)
    x = torch.from_numpy(UNSEEN[0])
    answers = [
        fewer.open_run(tmp_path / name, data=federation(), model=Small).model(x)
        for name in ("uninterrupted", "interrupted")
    ]
    assert (
        len(resumed.history) == 3 and torch.equal(answers[0], answers[1]) and torch.equal(resumed.model(x), answers[0])
    )


def test_a_group_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    text_data = replace(federation(), tokens=("a", "b"))
    fewer.run(FRLScratch(**SMALL), text_data, model=initial_net(), out=tmp_path / "run")
    deploy(tmp_path / "run", text_data, model=Small, rounds=1)
    for tokens in ((), ("b", "a")):
        with pytest.raises(SettingError, match="was prepared with another vocabulary"):
            deploy(tmp_path / "run", replace(text_data, tokens=tokens), model=Small)


def test_prototypes_for_prediction_are_sent_in_evaluated_rounds_only(tmp_path: Path) -> None:
    fewer.run(FRLScratch(head="distance", **SMALL), federation(), model=initial_net(), out=tmp_path / "run")
    sizes = {}
    for interval in (1, 3):
        out = tmp_path / str(interval)
        deployed = deploy(tmp_path / "run", federation(), model=Small, out=out, evaluate_every=interval)
        sizes[interval] = {
            round: [
                size
                for message_round, _, direction, _, size in read_messages(out)
                if (message_round, direction) == (round, "up")
            ]
            for round in (1, 2, 3)
        }
        assert deployed.state.classes.tolist() == [0, 1, 2, 3, 4]
    assert sizes[1][3] == sizes[3][3] and all(a > b for a, b in zip(sizes[1][2], sizes[3][2], strict=True))


@pytest.mark.parametrize(
    ("kind", "head"),
    [(FRL, "linear"), (FRLMetaHead, "linear"), *((FRL, head) for head in ("distance", "gpal", "fedncm", "fedcof"))],
    ids=str,
)
def test_deployment_gives_the_same_model_as_evaluation(kind: type[FRL], head: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"local_steps": 2, "temperature": 0.5, "weight_decay": 0.1}
    method = kind(rounds=4, head=head, batch_size=None, lr=0.2, way=2, group_size=2, eval_groups=1, **options)
    prepared = fewer.run(method, federation(), model=initial_net(), out=tmp_path / "prepared")
    group = deploy(tmp_path / "prepared", federation(), model=Small)
    assert group.method.rounds == 3 and (tmp_path / "prepared" / ARTIFACT_FILE).exists()
    supports = [federation().client(client).train for client in range(5)]

    class Context:  # the deployed group's seed and task, so the same head is drawn
        seed, task = 0, group.task

        def net(self, weights: Weights) -> nn.Module:
            net = Small()
            load_weights(net, weights)
            return net

    simulated = type(
        "Simulated",
        (FRL,),
        {"start_group": lambda self, g, model, _: FRL.start_group(self, g, model, stream(0, "head"))},
    )
    net = simulated(**method.model_dump()).group_model(Context(), prepared.state.initial, supports, 0).eval()
    x = torch.from_numpy(UNSEEN[0])
    assert torch.allclose(net(x)[:, :5], group.model(x)[:, :5], atol=1e-5)
    accuracy = float((net(x).argmax(1) == torch.from_numpy(UNSEEN[1])).float().mean())
    assert group.accuracy == pytest.approx(accuracy)
    warm, cold = (group.model(x)[:, :5], replace_temperature(group.model)(x)[:, :5])
    assert torch.allclose(warm, 2 * cold if head in ("distance", "gpal") else cold)


def replace_temperature(model: nn.Module) -> nn.Module:
    """The same group's model at temperature 1."""
    assert isinstance(model, GroupModel)
    means, cosine = model.get_buffer("means"), model.cosine
    plain = GroupModel(model.net, model.get_buffer("classes"), means, model.num_classes, cosine=cosine)
    return plain.eval()


def test_prepare_deploy_and_predict_from_the_command_line(tmp_path: Path) -> None:
    args = ["--data", "digits", "--partition", "shards", "-o", "way=3", "-o", "eval_groups=2", "-o", "group_size=3"]
    run, group = tmp_path / "run", tmp_path / "group"
    prepare_args = [
        "--data-option",
        "unseen_classes=5-9",
        "--clients",
        "12",
        "--rounds",
        "4",
        "-o",
        "lr=0.02",
        "--no-report",
    ]
    output = call("prepare", *args, *prepare_args, "--out", run).stdout
    assert "Mean over 2 groups" in output and f"fewer deploy {run}" in output
    group_args = ["--data", "digits", "--data-option", "classes=5-9", "--clients", "4", "--alpha", "1"]
    call("deploy", run / ARTIFACT_FILE, *group_args, "--out", group, "--rounds", "2", "--no-report")
    settings = json.loads((group / "settings.json").read_text())
    assert (
        settings["method"]["lr"] == 0.02 and settings["method"]["rounds"] == 2 and settings["method"]["head"] == "gpal"
    )
    members, deployed = (embed_samples(open_run(path), max_samples=40) for path in (run, group))
    assert members and members.own.any() and len(members.points) == 40 + members.own.sum()
    assert deployed and not deployed.own.any() and set(deployed.prototype_labels.tolist()) == set(range(5, 10))
    outputs = [call("report", path, "--out", tmp_path / "page").stdout for path in (run, group)]
    assert len(outputs) == 2 and (tmp_path / "page/pictures/embedding.csv").read_text().count("prototype") == 5
    (run / ARTIFACT_FILE).rename(tmp_path / ARTIFACT_FILE)  # a group needs only this file
    repeated = call(
        "deploy", tmp_path / ARTIFACT_FILE, *group_args, "--out", tmp_path / "again", "--rounds", "2", "--no-report"
    )
    assert repeated.stdout.split("MB")[0] == call("resume", tmp_path / "again", "--no-report").stdout.split("MB")[0]
    lines = call("predict", tmp_path / "again", "--data", "digits", "--data-option", "classes=5-9").stdout.splitlines()
    assert {line.split(",")[1] for line in lines[1:]} <= set("56789") and len(lines) > 150
    assert len(call("export", tmp_path / "again").stdout.splitlines()) == 3
    for wrong, text in (
        (["deploy", run / "events.jsonl", *group_args], "is not a prepared model"),
        (["deploy", tmp_path / "nowhere", *group_args], "no prepared model"),
        (["deploy", tmp_path / "again", *group_args], "no prepared model"),
        (
            ["deploy", tmp_path / ARTIFACT_FILE, "--data", "fashion-mini", "--clients", "4"],
            "was prepared for another net",
        ),
        (["prepare", "fedavg"], "fedavg does not prepare a model (allowed: coprefl, frl, "),
        (["predict", run, "--data", "digits"], "run `fewer deploy`"),
        (
            ["run", "frl", "--data", "digits", "--rounds", "6"],
            "rounds must be a multiple of 4 (",
        ),
    ):
        assert text in call(*wrong, code=2).stderr
