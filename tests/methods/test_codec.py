"""One codec for every method: it encodes all floating-point tensors, except in fields that a handler names as exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import fewer
from fewer.cli.app import app
from fewer.methods import Client, Method, ModelState, names
from fewer.methods.fedavg import FedAvg
from fewer.models import Task
from fewer.runs.artifacts import deploy_settings
from fewer.runs.experiment import make_method, parse_settings
from fewer.runs.settings import settings_hash
from fewer.runtime import Clients, on_client
from fewer.runtime.handlers import Call, HandlerRunner, Reply
from fewer.wire import Field, Schema, decode, encode
from tests.golden.test_golden import CASES, GROUPS

FEDERATIONS: dict[str, Any] = {"validation": 0.2, "clients": 6, "norm": "batch"}
RUNS: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in names()},
    "fedmeta": {**CASES["fedmeta"], "norm": "batch"},
    "metafed": {**CASES["metafed"], "method_options": {"sealed": False}},
    "metafed, fedbn": {**FEDERATIONS, "method_options": {"federations": 3, "inner_method": "fedbn", "sealed": False}},
}
"""Settings of a tiny run of each method, with messages that anyone can read."""
SCORE, ANSWER_QUERIES = ("evaluate/score", "model"), ("evaluate/answer_queries", "model")
EXACT = {
    **{name: {SCORE} for name in ("fedavg", "fedavg-augmented", "fedprox", "feddistill", "fedensemble", "fedbn")},
    **{name: {SCORE} for name in ("centralized", "dense", "co-boosting", "fusefl")},
    "feddm": {SCORE, ("condense", "model")},
    **{
        name: {SCORE}
        for name in ("fedavg-ft", "fedseq", "fedelmy", "fedopt", "fedavgm", "fedadam", "fedyogi", "fedadagrad")
    },
    **{
        name: {SCORE}
        for name in (
            "fedavg-calibrated",
            "scaffold",
            "fednova",
            "feddyn",
            "moon",
            "fedper",
            "fedrep",
            "fedbabu",
            "lg-fedavg",
        )
    },
    **{name: {SCORE} for name in ("ditto", "apfl", "fedproto", "fedala", "fedrod", "dbe", "knn-per")},
    **{name: {SCORE} for name in ("fedncm", "fedcof", "fed3r", "fedpft", "fedavg-head")},
    "fedgen": {SCORE, ("train_with_generator", "class_weights")},
    "fedmk": {SCORE, ("condense", "model")},
    "dp-fedmk": {SCORE, ("send_statistics", "counts")},
    "fedmk-paper": {SCORE, ("condense", "model")},
    "fedmk-avg": {SCORE, ("condense", "model"), ("local_train", "model")},
    **{
        name: {ANSWER_QUERIES}
        for name in ("fedavg-meta", "fedbabu-meta", "knn-per-meta", "reptile", "per-fedavg", "alone")
    },
    "fedmeta": {ANSWER_QUERIES, ("local_train", "buffers")},
    "frl-deploy": {SCORE},
    "metafed, fedbn": {("send_model", "shared")},
}
"""The floating-point fields that each method sends without a codec, by kind of message. All others have one."""
SEND_NO_FLOATS = {"local", "alone", "frl-scratch", "local-maml", "local-proto"}
"""Methods whose clients send no floating-point tensors."""


class Message(NamedTuple):
    """A message of a run."""

    side: str
    """`down` to a client, `up` from it, or `server` if it never leaves the server."""
    kind: str
    blob: bytes
    codecs: dict[str, str | None]
    """The codec of each field with floating-point tensors."""


def read_header(blob: bytes) -> tuple[dict[str, Any], int]:
    """The header of a message, and the number of bytes before its data."""
    length = int.from_bytes(blob[:8], "little")
    return json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["fewer"]), 8 + length


def parse_message(side: str, blob: bytes) -> Message:
    header, _ = read_header(blob)
    fields = {name: entry.get("tensor") or entry.get("tree") for name, entry in header["fields"].items()}
    floats = [name for name, items in fields.items() if any("F" in item[2] for item in items)]  # F64, F32, F16, BF16
    return Message(side, header["kind"], blob, {name: header["fields"][name].get("codec") for name in floats})


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """All messages of a run, as the clients receive and send them."""
    recorded: list[Message] = []
    answer = HandlerRunner.answer

    def record(self: HandlerRunner, call: Call, blob: bytes) -> Reply:
        reply = answer(self, call, blob)
        for side, sent in (("down", blob), ("up", reply.blob)):
            if sent:
                recorded.append(parse_message("server" if call.on_server else side, sent))
        return reply

    monkeypatch.setattr(HandlerRunner, "answer", record)
    return recorded


@pytest.mark.parametrize("case", RUNS)
def test_every_float_field_has_the_codec_unless_it_is_exact(case: str, messages: list[Message], tmp_path: Path) -> None:
    settings = {"data": "digits", "clients": 4, "rounds": 1, **RUNS[case], "codec": "int8"}
    if case == "frl-deploy":
        fewer.run("frl-scratch", out=tmp_path / "prepared", **{**settings, **GROUPS})
        settings["method_options"] = {"prepared": str(tmp_path / "prepared")}
        messages.clear()
    result = fewer.run(case.partition(",")[0], **settings)
    codecs = {"server": set[Any](), "down": set[Any](), "up": set[Any]()}
    for message in messages:
        codecs[message.side] |= {(message.kind, name, codec) for name, codec in message.codecs.items()}
    assert {codec for _, _, codec in codecs["server"]} <= {None}
    sent = {field for field in codecs["down"] | codecs["up"] if field[1:] != ("sums", None)}  # of evaluations
    assert {(kind, name) for kind, name, codec in sent if codec is None} == EXACT.get(case, set())
    assert {codec for _, _, codec in sent} <= {None, "int8"}
    # The same answers in float32 have more bytes, if there are floating-point tensors in them.
    assert any(codec == "int8" for _, _, codec in codecs["up"]) != (case in SEND_NO_FLOATS)
    up = [message.blob for message in messages if message.side == "up" and not message.kind.startswith("evaluate/")]
    if case not in SEND_NO_FLOATS:
        assert result.history[-1]["up"] <= sum(map(len, up))  # the ledger of the run leaves out inner federations
        assert sum(map(len, up)) < sum(len(encode(*decode(blob), codec="float32")) for blob in up)


VALUES = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Echo(Method):
    """A client sends back what it received, and says whether it arrived unchanged."""

    def init(self, task: Task, seed: int) -> ModelState:
        return ModelState(task.initial_weights(seed))

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        returns: Schema = {"kept": VALUES, "coded": VALUES, "kept_arrived": bool, "coded_arrived": bool}
        (answer,) = clients.ask([0], self.echo, kept=VALUES, coded=VALUES, returns=returns)
        assert answer["kept_arrived"] and torch.equal(answer["kept"], VALUES)
        assert not answer["coded_arrived"] and not torch.equal(answer["coded"], VALUES)
        assert torch.allclose(answer["coded"], VALUES, atol=0.01)
        return state

    @on_client(exact=("kept",))
    def echo(self, client: Client, kept: torch.Tensor, coded: torch.Tensor) -> dict[str, Any]:
        arrived = {"kept_arrived": torch.equal(kept, VALUES), "coded_arrived": torch.equal(coded, VALUES)}
        return {"kept": kept, "coded": coded, **arrived}


@pytest.mark.parametrize("codec", ["uint8", "float16", "float32"])
def test_an_exact_field_arrives_unchanged_in_both_directions(codec: str) -> None:
    fewer.run(Echo(rounds=1, codec=codec), "digits", clients=2)


def test_a_field_without_floats_has_no_codec_in_its_header() -> None:
    fields: dict[str, Field] = {"counts": torch.arange(3), "model": {}}
    assert read_header(encode("k", fields, "int8")) == read_header(encode("k", fields))
    coded = parse_message("up", encode("k", {**fields, "a": VALUES, "b": VALUES}, "uint8", exact=("b",)))
    assert coded.codecs == {"a": "uint8", "b": None}
    assert torch.equal(decode(coded.blob)[1]["b"], VALUES)


def test_fedavg_with_float16_sends_two_bytes_per_parameter(messages: list[Message]) -> None:
    result = fewer.run("fedavg", "digits", model="logistic", clients=3, rounds=2, codec="float16")
    assert result.method.codec == "float16"
    parameters = 64 * 10 + 10
    trained = [message.blob for message in messages if message.kind == "local_train"]
    assert len(trained) == 2 * 2 * 3  # two directions, two rounds, three clients
    assert all(len(blob) - read_header(blob)[1] == 2 * parameters for blob in trained)
    assert result.history[-1]["up"] + result.history[-1]["down"] == sum(map(len, trained))


# --- the setting ------------------------------------------------------------------------------------------------


def test_codec_is_a_setting_that_an_option_of_the_method_overrides() -> None:
    default, flag = parse_settings({}), parse_settings({"codec": "int8"})
    option = parse_settings({"method_options": {"codec": "int8"}})
    assert make_method(FedAvg, default).codec == "float32"
    assert make_method(FedAvg, flag).codec == make_method(FedAvg, option).codec == "int8"
    both = parse_settings({"codec": "int8", "method_options": {"codec": "float16"}})
    assert make_method(FedAvg, both).codec == "float16"
    hashes = [settings_hash(settings, make_method(FedAvg, settings)) for settings in (default, flag, option)]
    assert hashes[0] != hashes[1] == hashes[2]


@pytest.mark.parametrize("command", [["run", "fedavg"], ["compare", "fedavg", "fedprox"], ["prepare"]])
def test_an_unknown_codec_is_one_line_with_the_allowed_values(command: list[str]) -> None:
    outcome = CliRunner().invoke(app, [*command, "--data", "digits", "--codec", "int9"])
    assert outcome.exit_code == 2
    allowed = "(allowed: bfloat16, float16, float32, int8, uint8)"
    line = f"fewer: codec = 'int9': unknown codec 'int9', did you mean 'int8'? {allowed}\n"
    assert outcome.output == line


def test_compare_applies_the_codec_to_all_methods() -> None:
    comparison = fewer.compare(["fedavg", FedAvg(lr=0.2)], "digits", clients=2, rounds=1, seeds=1, codec="int8")
    assert [row.settings["codec"] for row in comparison.rows] == ["int8", "int8"]


def test_a_deployment_has_the_codec_of_its_preparation_unless_it_is_given(tmp_path: Path) -> None:
    fewer.run("frl-scratch", "digits", clients=4, codec="int8", out=tmp_path / "prepared", **GROUPS)
    for given, codec in ({}, "int8"), ({"codec": "uint8"}, "uint8"):
        settings = parse_settings(deploy_settings(tmp_path / "prepared", given))
        assert make_method(fewer.methods.find("frl-deploy"), settings).codec == codec
