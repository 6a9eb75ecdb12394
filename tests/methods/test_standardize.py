"""Standardization: clients send sums of their columns, and no row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fewer
from fewer import FedAvg
from fewer.data.federations import group_clients
from fewer.data.schema import Column
from fewer.errors import SettingError
from fewer.methods.standardize import MIN_SAMPLES, _one_hot_inputs, standardize
from fewer.runs.engine import build_handler_runner, experiment_from_arguments, runtime_options
from fewer.runs.reader import RunReader
from fewer.wire import decode, encode
from tests.helpers import Stop, Stopping, Wiretap, call, metrics, same_state

RNG = np.random.default_rng(0)
Y = np.arange(240) % 2
X = (RNG.normal(size=(240, 4)) * [1, 1e3, 0, 1e-3] + [0, 5e5, 7, 1e-2] + Y[:, None] * [1, 1e3, 0, 1e-3]).astype(
    "float32"
)
"""Columns of very different size; the third is constant."""


def make_data(**settings: Any) -> fewer.data.ArrayData:
    arguments: dict[str, Any] = {"clients": 4, "alpha": 1.0, "standardize": True, **settings}
    return fewer.data.from_arrays(X, Y, test=(X, Y), **arguments)


def connect(data: fewer.data.ArrayData, folder: Path, **settings: Any) -> Wiretap:
    experiment = experiment_from_arguments(FedAvg(), data, "logistic", settings)
    return Wiretap(**runtime_options(experiment), handlers=build_handler_runner(experiment, folder))


def test_statistics_are_those_of_the_pooled_training_samples(tmp_path: Path) -> None:
    data = make_data()
    schema = standardize(FedAvg(), connect(data, tmp_path), data)
    pooled = data.source.x[torch.from_numpy(data.train.rows)].double()
    assert np.allclose(schema.shift, pooled.mean(0), rtol=1e-6)
    std = pooled.std(0, unbiased=False).numpy()
    std[2] = 1  # constant: not scaled
    assert np.allclose(schema.scale, 1 / std, rtol=1e-6)
    x = data.rescale(schema).source.all()[0]
    assert torch.allclose(x.mean(0), torch.zeros(4), atol=1e-4)
    assert torch.allclose(x.std(0, unbiased=False), torch.tensor([1.0, 1, 0, 1]), atol=1e-4)


def test_only_three_sums_leave_a_client_and_all_bytes_are_counted(tmp_path: Path) -> None:
    data = make_data()
    clients = connect(data, tmp_path)
    schema = standardize(FedAvg(codec="uint8"), clients, data)  # the codec does not touch the sums
    assert [call.client for call, _ in clients.up] == [0, 1, 2, 3]
    for client, (_, blob) in enumerate(clients.up):
        kind, fields = decode(blob)
        own = data.client(client).train.all()[0].double()
        assert kind == "column_sums" and fields.keys() == {"count", "sums", "squares"} and fields["count"] == len(own)
        assert torch.allclose(fields["sums"], own.sum(0), rtol=1e-12)
        assert torch.allclose(fields["squares"], own.square().sum(0), rtol=1e-12)
    back = {name: torch.tensor(getattr(schema, name), dtype=torch.float64) for name in ("shift", "scale")}
    down = 4 * len(encode("column_sums", {})) + 4 * len(encode("column_scale", back))
    assert clients.ledger.total == {"up": sum(len(blob) for _, blob in clients.up), "down": down}
    assert {entry.round for entry in clients.ledger.entries} == {0}


def test_a_client_with_few_samples_does_not_reveal_them(tmp_path: Path) -> None:
    sizes = [MIN_SAMPLES - 1, MIN_SAMPLES, 100]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    data = fewer.data.from_clients([(X[rows], Y[rows]) for rows in parts], test=(X, Y), standardize=True)
    clients = connect(data, tmp_path)
    schema = standardize(FedAvg(), clients, data)
    sent = [decode(blob)[1] for _, blob in clients.up]
    assert [fields["count"] for fields in sent] == [0, *sizes[1:]] and not sent[0]["sums"].any()
    assert np.allclose(schema.shift, X[MIN_SAMPLES - 1 : sum(sizes)].astype("float64").mean(0), rtol=1e-6)
    tiny = fewer.data.from_clients([(X[:3], Y[:3]), (X[3:6], Y[3:6])], test=(X, Y), standardize=True)
    with pytest.raises(SettingError, match="no client has 5 or more training samples"):
        standardize(FedAvg(), connect(tiny, tmp_path), tiny)


def test_clients_that_do_not_answer_have_no_part(tmp_path: Path) -> None:
    data = make_data(clients=12)
    clients = connect(data, tmp_path, drop=0.4, corrupt=0.2)
    answered: list[int] = list(range(12))
    clients.on_absent = lambda absent, handler: answered.remove(absent.client)
    schema = standardize(FedAvg(), clients, data)
    assert 0 < len(answered) < 12
    pooled = torch.cat([data.client(client).train.all()[0] for client in answered]).double()
    assert np.allclose(schema.shift, pooled.mean(0), rtol=1e-6)


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_a_run_standardizes_and_resumes_bit_for_bit(runtime: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "logistic", "drop": 0.2, "seed": 1}
    unbroken = fewer.run(FedAvg(rounds=3), make_data(), **settings, out=tmp_path / "unbroken")
    assert unbroken.accuracy > 0.6
    raw = fewer.run(FedAvg(rounds=3), make_data(standardize=False), **settings)
    assert not same_state(raw.state, unbroken.state)
    with pytest.raises(Stop):
        fewer.run(
            FedAvg(rounds=3), make_data(), **settings, runtime=runtime, out=tmp_path / "run", callbacks=[Stopping()]
        )
    resumed = fewer.resume(tmp_path / "run", data=make_data())
    assert same_state(resumed.state, unbroken.state) and metrics(resumed) == metrics(unbroken)
    ledgers = [(tmp_path / name / "ledger.csv").read_text() for name in ("run", "unbroken")]
    assert ledgers[0] == ledgers[1] and "0,0,down,column_scale," in ledgers[0]
    assert sum(RunReader(tmp_path / "run").traffic.values()) == sum(resumed.metrics[way] for way in ("up", "down"))
    schema = json.loads((tmp_path / "run/schema.json").read_text())
    assert len(schema["shift"]) == 4 and list(resumed.schema.shift) == schema["shift"]
    x = resumed.data.test.all()[0]
    for result in (fewer.open_run(tmp_path / "run"), fewer.open_run(tmp_path / "run", data=make_data())):
        assert torch.equal(result.predict(X).outputs, unbroken.model(x).detach())


def test_the_model_of_a_standardized_table_is_used_on_raw_files(tmp_path: Path) -> None:
    lines = ["a,b,c,d,label", *(",".join(map(str, [*row, f"class {y}"])) for row, y in zip(X, Y, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    args = ["--data", f"csv:{tmp_path / 't.csv'}", "--clients", "3", "--partition", "iid", "--model", "logistic"]
    call("run", "fedavg", *args, "--standardize", "--rounds", "3", "--no-report", "--out", tmp_path / "run")
    expected = fewer.open_run(tmp_path / "run").predict(X)
    (tmp_path / "t.csv").unlink()
    gone = fewer.open_run(tmp_path / "run").predict(X)
    assert torch.equal(gone.outputs, expected.outputs)
    call("export", tmp_path / "run", "--out", tmp_path / "e")
    model = json.loads((tmp_path / "e/model.json").read_text())
    x = torch.from_numpy(((X.astype("float64") - model["shift"]) * model["scale"]).astype("float32"))
    program = torch.export.load(tmp_path / "e/model.pt2").module()
    assert torch.allclose(program(x), expected.outputs, atol=1e-6)


def test_federations_standardize_their_members() -> None:
    data = make_data()
    schema = data.schema.from_dict({**data.schema.to_dict(), "shift": [1, 2, 3, 4], "scale": [1, 1, 1, 1]})
    members = group_clients(data, 2).rescale(schema).members_of(1)
    own = data.client(2).train.all()[0]
    assert torch.allclose(members.client(0).train.all()[0], own - torch.tensor([1.0, 2, 3, 4]))


def test_categories_are_not_scaled() -> None:
    columns = (Column("age"), Column("sex", ("f", "m")), Column("height"))
    assert _one_hot_inputs(columns, 4).tolist() == [False, True, True, False]
    assert _one_hot_inputs((), 2).tolist() == [False, False]


def test_only_tables_are_standardized() -> None:
    with pytest.raises(SettingError, match=r"standardize is for tables, but data 'digits' has images of shape \(1, 8"):
        fewer.data.load("digits", standardize=True)
    assert make_data().fingerprint() != make_data(standardize=False).fingerprint()
