"""The server and the client of a run between machines, without processes."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
import fewer
from fewer.data import RawDataset, load
from fewer.data.federated import hold_out_rows
from fewer.data.sources import EMBEDDED, read
from fewer.errors import DataError, SettingError
from fewer.methods.frl_deploy import FRLDeploy
from fewer.report.page import write_report
from fewer.runs.engine import build_handler_runner, run_experiment, runtime_options
from fewer.runs.experiment import Experiment
from fewer.runs.machines import ClientDaemon, FlowerServer, _describe_session
from fewer.runs.reader import RunReader
from fewer.runs.result import Result
from fewer.runtime import Inline
from fewer.runtime.flower import envelope
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.superlink import SuperLinkLost
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.keys import PinnedKeys
from fewer.runtime.noise import SECRET
from fewer.runtime.ring import Journal
from fewer.wire import Refused, decode, encode
from fewer.wire.sealing import public_key
from tests.helpers import FRL_SETTINGS, experiment, run_contents, same_state
from tests.helpers import call as command
from tests.runtime.flower.harness import connect_daemons, make_reply, session

# --- delivery ---------------------------------------------------------------------------------------------------


def test_changed_settings_survive_a_lost_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quorums = []

    def resume(out: Path, **options: Any) -> None:
        quorums.append(options.get("quorum"))
        if len(quorums) == 1:
            raise SuperLinkLost("gone")

    monkeypatch.setattr("fewer.runs.machines.resume", resume)
    FlowerServer(Credentials(tmp_path)).resume(tmp_path / "run", quorum=0.5)
    assert quorums == [0.5, 0.5]


def test_a_run_resumes_only_with_the_keys_of_its_clients(tmp_path: Path) -> None:
    server = FlowerServer(Credentials.create(tmp_path / "keys", 2))
    with pytest.raises(SettingError, match=r"clients = 3, but .* has keys of clients \[0, 1\]"):
        server._connect_to(tmp_path)(experiment(3), tmp_path, 1)


def test_a_run_resumes_after_a_client_was_added_and_waits_only_for_its_own(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path / "keys", 3)
    server = FlowerServer(credentials, timeout=0)
    with pytest.raises(SettingError, match=r"clients = 2, but .* has keys of clients \[0, 1, 2\]$"):
        server.check_experiment(experiment(2))
    server.check_experiment(experiment(2), resumes=True)
    server.superlink = SimpleNamespace(online_clients=lambda: [0, 2])  # type: ignore[assignment]
    clients = connect_daemons(tmp_path / "run", ["", ""])(experiment(2), tmp_path, 0)
    assert server._online(clients) == [0]  # type: ignore[arg-type]
    (credentials.client_folder(1) / "node.pub").unlink()
    with pytest.raises(SettingError, match=r"has keys of clients \[0, 2\] \(add one with: fewer keys add NAME --keys"):
        server.check_experiment(experiment(2), resumes=True)


# --- the server's data ------------------------------------------------------------------------------------------


def test_a_servers_file_is_not_divided(tmp_path: Path) -> None:
    name = write_client_data(tmp_path)
    data = experiment(5, data=name, partition="dirichlet", min_samples_per_client=100).data
    assert (len(data), len(data.test), data.classes) == (5, 50, 4)  # 50 samples are too few for this partition
    assert not data.notes  # such as one on test samples that are training samples, too
    for unknown in (data.client, data.size):
        with pytest.raises(DataError, match="the data of client 2 is on its own machine"):
            unknown(2)
    one_machine = load(name, clients=2, partition="iid")
    assert len(one_machine.test) == 10 and data.test.scale == pytest.approx(one_machine.test.scale, rel=0.1)
    arrays = np.load(tmp_path / "mine.npz")
    np.savez(tmp_path / "both.npz", **arrays, x_test=arrays["x"][:7], y_test=arrays["y"][:7])
    assert len(experiment(5, data=f"npz:{tmp_path / 'both.npz'}").data.test) == 7
    with pytest.raises(SettingError, match="cohort = 6, but there are only 5 clients"):
        experiment(5, data=name, cohort=6)
    with pytest.raises(DataError, match="is on its own machine"):
        experiment(3).data.client(0)  # its clients may have data of their own, too
    assert experiment(3).data.fingerprint() == experiment(3, runtime="inline").data.fingerprint()


def test_a_report_on_a_run_between_machines_shows_no_partition(tmp_path: Path) -> None:
    name, out = write_client_data(tmp_path), tmp_path / "run"
    settings: dict[str, Any] = {"data": name, "rounds": 1}
    run_experiment(experiment(2, **settings), out, connect=connect_daemons(out, [name, name]))
    page, *files = write_report([out], tmp_path / "report")
    assert "Label distribution" not in page.read_text() and not [file for file in files if "partition" in file.name]
    assert "data is on their own machines and is not shown" in page.read_text()
    assert [file for file in files if "examples" in file.name]
    assert "dirichlet" not in RunReader(out).data_summary
    result = fewer.open_run(out)
    assert len(result.data.test) == 50 and result.model
    with pytest.raises(DataError, match="the data of client 0 is on its own machine"):
        result.data.client(0)
    run_experiment(experiment(2, runtime="inline", rounds=1), tmp_path / "inline")
    assert "Label distribution" in write_report([tmp_path / "inline"], tmp_path / "report")[0].read_text()


def test_a_run_between_machines_gets_more_rounds(tmp_path: Path) -> None:
    for name, rounds in (("extended", 1), ("unbroken", 2)):
        out = tmp_path / name
        small = experiment(2, "fedbn", norm="batch", rounds=rounds)
        run_experiment(small, out, connect=connect_daemons(out, [None, None]))
    out = tmp_path / "extended"
    fewer.resume(out, rounds=2, connect=connect_daemons(out, [None, None]))
    assert run_contents(out) == run_contents(tmp_path / "unbroken")
    stores = [sorted((tmp_path / name).glob("client-*/runs/*/*/*/*.safetensors")) for name in ("extended", "unbroken")]
    assert stores[0] and [file.read_bytes() for file in stores[0]] == [file.read_bytes() for file in stores[1]]


# --- keys -------------------------------------------------------------------------------------------------------


def test_a_client_creates_its_sealing_key_and_pins_the_keys_of_others(tmp_path: Path) -> None:
    first, second = PinnedKeys(tmp_path / "one"), PinnedKeys(tmp_path / "two")
    for keys in (first, second):
        keys.folder.mkdir()
        with pytest.raises(Refused, match="fewer keys seal"):
            keys.private(0)
    printed = command("keys", "seal", second.folder).stdout.strip()
    assert command("keys", "seal", second.folder).stdout.strip() == printed == second.create().hex()
    assert stat.S_IMODE((second.folder / "seal.key").stat().st_mode) == 0o600
    first.create()
    with pytest.raises(Refused, match="no key of client 1 is pinned"):
        first.public(0, 1)
    command("keys", "trust", first.folder, f"1={printed}")
    command("keys", "trust", first.folder, f"2={'00' * 32}")
    assert first.public(0, 1) == public_key(second.private(1)) and first.public(0, 2) == bytes(32)
    for wrong in ("1", "x=00", "1=zz", "1=00"):
        command("keys", "trust", first.folder, wrong, code=2)
    other_pin = f"1={'11' * 32}"
    refused = command("keys", "trust", first.folder, other_pin, code=2).stderr
    assert "client 1: another key is pinned (pass --replace" in refused
    command("keys", "trust", first.folder, f"1={printed}")  # the same key again
    assert first.public(0, 1).hex() == printed
    command("keys", "trust", first.folder, other_pin, "--replace")
    assert first.public(0, 1).hex() == "11" * 32 and first.public(0, 2) == bytes(32)


# --- a client ---------------------------------------------------------------------------------------------------


def write_client_data(folder: Path, classes: int = 4, height: int = 8) -> str:
    """Writes a client's own data, like digits: 50 samples."""
    x = np.random.default_rng(0).integers(0, 17, (50, height, 8), np.uint8)
    np.savez(folder / "mine.npz", x=x, y=np.arange(50) % classes)
    return f"npz:{folder / 'mine.npz'}"


def ask(daemon: ClientDaemon, description: Any, round: int = 1, client: int = 0) -> Reply:
    model = experiment(3).task.initial_weights(3)
    return daemon.answer(
        json.dumps(description), Call(client, "local_train", round), encode("local_train", {"model": model})
    )


def test_a_daemon_answers_like_a_handler_server_on_one_machine(tmp_path: Path) -> None:
    reply = ask(ClientDaemon(tmp_path / "store"), session(tmp_path), client=2)
    runner = build_handler_runner(experiment(3, runtime="inline"), tmp_path / "here")
    model = encode("local_train", {"model": experiment(3).task.initial_weights(3)})
    remote, local = decode(reply.blob)[1], decode(runner.answer(Call(2, "local_train", 1), model).blob)[1]
    assert reply.failure is None and remote["size"] == local["size"]
    assert all(torch.equal(remote["model"][name], tensor) for name, tensor in local["model"].items())


def test_a_clients_own_data_has_the_format_of_the_servers(tmp_path: Path) -> None:
    description, daemon = session(tmp_path), ClientDaemon(tmp_path / "store", write_client_data(tmp_path))
    data = daemon._build_experiment(description["settings"], description["data_info"]).data
    server_test = experiment(3).data.test
    client_data = data.client(1)
    assert (len(data), data.classes, len(client_data.train), len(client_data.test)) == (3, 10, 40, 10)
    assert (client_data.train.shift, client_data.train.scale) == (server_test.shift, server_test.scale)
    assert decode(ask(daemon, description, client=1).blob)[1]["size"] == 40
    reply = ask(ClientDaemon(tmp_path / "store", write_client_data(tmp_path, height=7)), description)
    assert reply.failure == "unable" and "the task needs torch.uint8 (1, 8, 8)" in reply.detail


def test_a_client_logs_the_notes_on_its_data(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 17, (50, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "mine.npz", x=x, y=np.where(np.arange(50) % 2, 3, 7))
    lines: list[str] = []
    description, name = session(tmp_path), f"npz:{tmp_path}/mine.npz"
    daemon = ClientDaemon(tmp_path / "store", name, log=lines.append)
    data = daemon._build_experiment(description["settings"], description["data_info"]).data
    assert lines == [f"data '{name}': images: 8×8×1 are read as height × width × channels (channels=first if not)"]
    assert set(data.client(0).train.labels.tolist()) == {3, 7}  # the server's classes, not numbered anew


def write_hospital(path: Path, seed: int, classes: Sequence[str], columns: str = "abc", label: str = "illness") -> None:
    """Writes a table in which the class is the column with the largest value: a is cold, b is flu, c is healthy."""
    x = np.random.default_rng(seed).normal(size=(400, 3))
    names = np.array(["cold", "flu", "healthy"])[x.argmax(1)]
    rows = [dict(zip("abc", map(str, row), strict=True)) | {label: name} for row, name in zip(x, names, strict=True)]
    lines = [[*columns, label], *([row[name] for name in [*columns, label]] for row in rows if row[label] in classes)]
    path.write_text("\n".join(map(",".join, lines)))


CLASSES = ("cold", "flu", "healthy")


def run_with_daemons(server: Experiment, daemons: Sequence[ClientDaemon], out: Path) -> Result:
    """Runs an experiment with daemons, without processes."""

    @dataclass
    class Daemons(Inline):
        """Delivers calls to daemons, as Flower would."""

        description: str = ""

        def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
            yield from super()._deliver_calls([(call, blob) for call, blob in calls if call.on_server])
            for call, blob in calls:
                if not call.on_server:
                    yield call, daemons[call.client].answer(self.description, call, blob)

    def connect(run: Experiment, folder: Path, done: int, **more: Any) -> Daemons:
        description = json.dumps(_describe_session(run, out, done))
        handlers = build_handler_runner(run, folder)
        return Daemons(**runtime_options(run), **more, handlers=handlers, description=description)

    return run_experiment(server, out, connect=connect)


def join_hospitals(folder: Path, files: Sequence[Path], options: Sequence[dict[str, Any]], **settings: Any) -> Result:
    """Trains with one daemon per file. The server has a public table."""
    folder.mkdir()
    write_hospital(folder / "public.csv", 0, CLASSES)
    public: dict[str, Any] = {
        "data": f"csv:{folder / 'public.csv'}",
        "data_options": {"label": "illness"},
        "partition": "iid",
    }
    training: dict[str, Any] = {"model": "logistic", "rounds": 8, "method_options": {"lr": 0.5}}
    daemons = [
        ClientDaemon(folder / f"store-{client}", f"csv:{file}", options[client]) for client, file in enumerate(files)
    ]
    return run_with_daemons(experiment(len(files), **public, **training, **settings), daemons, folder / "run")


def test_clients_map_classes_and_columns_by_name(tmp_path: Path) -> None:
    """Without names, a client without the class cold numbers flu as 0, and columns in another order are mixed up."""
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    write_hospital(files[0], 1, CLASSES)
    write_hospital(files[1], 2, CLASSES)
    pooled = join_hospitals(tmp_path / "same", files, [{}, {}])
    write_hospital(files[0], 1, ("flu", "healthy"), "bca")
    write_hospital(files[1], 2, CLASSES, "cab", label="diagnosis")
    by_name = join_hospitals(tmp_path / "other", files, [{}, {"label": "diagnosis"}])
    assert pooled.accuracy > 0.9 and by_name.accuracy > 0.9
    data = ClientDaemon(tmp_path, f"csv:{files[0]}")._load_own_data(
        {"clients": 2, "schema": pooled.data.schema.to_dict()}, pooled.settings
    )
    x, y = data.client(0).train.all()
    assert torch.equal(x.argmax(1), y) and set(y.tolist()) == {1, 2}


def test_clients_on_other_machines_standardize_their_own_data(tmp_path: Path) -> None:
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    write_hospital(files[0], 1, ("flu", "healthy"), "bca")
    write_hospital(files[1], 2, CLASSES)
    result = join_hospitals(tmp_path / "run", files, [{}, {}], standardize=True)
    samples = [read(f"csv:{file}", schema=result.schema, label="illness") for file in files]
    pooled = np.concatenate([np.asarray(raw.x)[hold_out_rows(raw, np.arange(len(raw.y)), 0.2)[0]] for raw in samples])
    assert np.allclose(result.schema.shift, pooled.astype("float64").mean(0), rtol=1e-6)
    assert np.allclose(result.schema.scale, 1 / pooled.astype("float64").std(0), rtol=1e-6)
    assert result.accuracy > 0.9


def test_standardization_is_the_same_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(3, 2, size=(200, 3)).astype(np.float32)
    monkeypatch.setitem(EMBEDDED, "table", lambda: RawDataset(x, x.argmax(1)))
    settings: dict[str, Any] = {"data": "table", "partition": "iid", "model": "logistic", "standardize": True}
    local = run_experiment(experiment(3, **settings, runtime="inline"), tmp_path / "local")
    daemons = [ClientDaemon(tmp_path / f"store-{client}") for client in range(3)]
    remote = run_with_daemons(experiment(3, **settings), daemons, tmp_path / "remote")
    assert same_state(local.state, remote.state) and local.schema == remote.schema and len(local.schema.shift) == 3
    assert (tmp_path / "local/ledger.csv").read_text() == (tmp_path / "remote/ledger.csv").read_text()


@pytest.mark.parametrize(
    ("header", "label", "problem"),
    [
        ("a,b,c,illness", "malaria", "has the class 'malaria', which the run does not know (it knows: cold, flu"),
        ("a,b,c,illness", "1", "has labels 1, but the run's classes have names (cold, flu, healthy): use these"),
        ("a,c,illness", "flu", "lacks the column 'b'"),
        ("a,b,c,ill", "flu", "has no labels"),
    ],
)
def test_a_client_with_unknown_names_is_unable(header: str, label: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("\n".join([header, *[",".join(["1"] * header.count(",") + [label])] * 20]))
    logged: list[str] = []
    write_hospital(tmp_path / "public.csv", 0, CLASSES)
    public: dict[str, Any] = {
        "data": f"csv:{tmp_path / 'public.csv'}",
        "data_options": {"label": "illness"},
        "model": "logistic",
    }
    daemon = ClientDaemon(tmp_path / "store", f"csv:{file}", log=logged.append)
    reply = ask(daemon, session(tmp_path / "run", **public, partition="iid"))
    assert reply.failure == "unable" and problem in reply.detail and logged == [reply.detail]


def test_own_data_that_lacks_a_label_may_join(tmp_path: Path) -> None:
    """The schema of a run may name the label; only a missing file is an error before."""
    write_hospital(tmp_path / "a.csv", 0, CLASSES)
    logged: list[str] = []
    daemon = ClientDaemon(tmp_path / "store", log=logged.append)
    daemon._try_own_data(f"csv:{tmp_path / 'a.csv'}")
    assert len(logged) == 1 and "has no column 'label'" in logged[0] and "the schema of a run may help" in logged[0]
    with pytest.raises(DataError, match="b.csv' does not exist"):
        daemon._try_own_data(f"csv:{tmp_path / 'b.csv'}")


def test_a_schema_names_no_file_that_a_client_reads(tmp_path: Path) -> None:
    description = session(tmp_path)
    description["data_info"]["schema"]["options"] = {"images": "../../etc"}
    reply = ask(ClientDaemon(tmp_path / "store", write_client_data(tmp_path)), description)
    assert reply.failure == "unable" and "images = ../../etc names a file" in reply.detail


def test_a_client_with_text_uses_the_servers_vocabulary(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} thing{n % 5}", "label": n % 2}) for n in range(60)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.jsonl").write_text("\n".join(lines[:20]).replace("good", "novel"))
    description = session(
        tmp_path, data=f"jsonl:{tmp_path / 'all.jsonl'}", model="text-bilstm", partition="iid", max_length=4
    )
    daemon = ClientDaemon(tmp_path / "store", f"jsonl:{tmp_path / 'mine.jsonl'}")
    data = daemon._build_experiment(description["settings"], description["data_info"]).data
    assert list(data.tokens) == description["data_info"]["schema"]["tokens"] and "novel" not in data.tokens
    tokens, _ = data.client(0).train.slice(0, 16)
    assert tokens.shape[1] == 4 and int(tokens.max()) < len(data.tokens)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "/tmp/evil.py:Evil"},
        {"model": "/tmp/evil.py:Evil"},
        {"loss": "evil.py:evil"},
        {"metrics": ["accuracy", "evil.py:evil"]},
        {"metrics": "evil.py:evil"},
        {"data": "npz:/etc/secret"},
        {"data": "qmnist", "data_options": {"images": "../../etc"}},
        {"method": "frl-deploy", "method_options": {"prepared": "secret"}},
        {"method": "frl-deploy", "method_options": {"prepared": "/etc/secret"}},
        {"model": "text-bilstm", "model_options": {"vectors": "secret.txt"}},
        {"method": "metafed", "method_options": {"inner_method": "evil.py:Evil"}},
        {"method": "metafed", "method_options": {"inner_options": {"deep": ["/etc/secret"]}}},
    ],
)
def test_a_client_accepts_no_file_from_a_server(changed: dict[str, Any], tmp_path: Path) -> None:
    description = session(tmp_path)
    description["settings"] |= changed
    reply = ask(ClientDaemon(tmp_path / "store"), description)
    assert reply.failure == "unable" and "names a file, which this client does not accept from a server" in reply.detail


def test_a_client_reads_named_word_vectors_from_its_own_data_directory(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} thing{n % 5}", "label": n % 2}) for n in range(60)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    for place, value in (("server", 1), ("same", 1), ("other", 2)):
        (tmp_path / place / "glove").mkdir(parents=True)
        (tmp_path / place / "glove" / "glove.6B.100d.txt").write_text(f"good {value} 0\nbad -1 0\n")
    data: dict[str, Any] = {"data": f"jsonl:{tmp_path / 'all.jsonl'}", "model": "text-bilstm", "partition": "iid"}
    description = session(tmp_path, **data, model_options={"vectors": "glove"}, data_dir=str(tmp_path / "server"))

    def build(place: str) -> Experiment:
        daemon = ClientDaemon(tmp_path / "store", data["data"], data_dir=tmp_path / place)
        return daemon._build_experiment(description["settings"], description["data_info"])

    assert float(build("same").task.net().get_buffer("encoder.vectors").max()) == 1
    with pytest.raises(DataError, match="the word vectors .vectors = glove. differ from the server's"):
        build("other")
    with pytest.raises(DataError, match="vectors = glove needs glove.6B.100d.txt"):
        build("missing")


def test_a_server_does_not_start_with_a_file_that_clients_lack(tmp_path: Path) -> None:
    server = FlowerServer(Credentials.create(tmp_path / "keys", 3))
    inner = experiment(3, "metafed", method_options={"inner_method": "mine.py:Mine"})
    with pytest.raises(SettingError, match="inner_method = mine.py:Mine names a file, which clients on other machines"):
        server.check_experiment(inner)


def test_a_prepared_model_stays_on_the_server(tmp_path: Path) -> None:
    run_experiment(experiment(3, "frl-scratch", runtime="inline", **FRL_SETTINGS), tmp_path / "prepared")
    description = session(
        tmp_path, method="frl-deploy", rounds=1, method_options={"prepared": str(tmp_path / "prepared")}
    )
    assert description["settings"]["method_options"]["prepared"] == ""
    FlowerServer(Credentials.create(tmp_path / "keys", 3)).check_experiment(
        experiment(3, "frl-deploy", method_options={"prepared": str(tmp_path / "prepared")})
    )
    assert isinstance(ClientDaemon(tmp_path / "store")._build_handlers(description, 0).program, FRLDeploy)


def test_a_client_with_its_own_data_lacks_the_common_test_set(tmp_path: Path) -> None:
    """Otherwise it would evaluate its model on its own samples instead of the common ones."""
    description = session(tmp_path, method="local")
    totals = {}
    for data in (None, write_client_data(tmp_path)):
        for global_test in (False, True):
            daemon = ClientDaemon(tmp_path / "store", data)
            question = encode("score", {"model": {}, "use_global_test": global_test})
            reply = daemon.answer(json.dumps(description), Call(1, "score", 1), question)
            totals[data is None, global_test] = decode(reply.blob)[1]["total"]
    assert totals[False, True] == 0 and totals[False, False] == 10
    assert totals[True, True] == len(experiment(3).data.test) > totals[True, False] > 0


def test_a_client_with_more_classes_than_the_task_is_reported(tmp_path: Path) -> None:
    reply = ask(ClientDaemon(tmp_path / "store", write_client_data(tmp_path, classes=25)), session(tmp_path))
    assert reply.failure == "unable" and "has the classes '10', '11', '12', " in reply.detail
    assert "which the run does not know (it knows: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)" in reply.detail


def test_a_resumed_run_names_the_clients_that_finished_their_hops(tmp_path: Path) -> None:
    Journal(tmp_path / "hops").put(3, 0, 2, Reply(b"x"))
    assert (
        _describe_session(experiment(3), tmp_path, 2)["finished_clients"] == [2]
        and _describe_session(experiment(3), tmp_path, 3)["finished_clients"] == []
    )


def test_a_client_can_be_limited_to_one_method(tmp_path: Path) -> None:
    description = session(tmp_path)
    reply = ask(ClientDaemon(tmp_path / "store", method="metafed"), description)
    assert reply.failure == "unable" and "method = fedavg, but this client takes part in metafed only" in reply.detail
    assert ask(ClientDaemon(tmp_path / "store", method="fedavg"), description).failure is None
    wrong = command("join", "localhost:1", "--key", tmp_path, "--method", "metafedd", code=2)
    assert "unknown method 'metafedd', did you mean 'metafed'?" in wrong.stderr


def test_sealed_messages_belong_to_one_run(tmp_path: Path) -> None:
    handlers = [
        ClientDaemon(tmp_path / "store")._build_handlers(session(tmp_path / run), 0) for run in ("one", "two", "one")
    ]
    assert handlers[0].run_id == handlers[2].run_id != handlers[1].run_id and handlers[0].run_id


def test_other_data_under_the_same_name_is_reported(tmp_path: Path) -> None:
    description = session(tmp_path)
    description["data_info"]["fingerprint"] = "00000000"
    assert "differs from the server's" in ask(ClientDaemon(tmp_path / "store"), description).detail


@pytest.mark.parametrize(
    "description", [[], {}, 5, {"run": "../x", "session": 1, "done": 0}, {"run": "a", "session": {}}]
)
def test_an_invalid_session_description_is_refused(description: Any, tmp_path: Path) -> None:
    assert ask(ClientDaemon(tmp_path / "store"), description).failure == "refused"
    assert not (tmp_path / "store").exists()


def test_a_new_session_drops_later_rounds_and_ends_the_old_session(tmp_path: Path) -> None:
    first = session(tmp_path, method="fedbn", norm="batch")
    daemon = ClientDaemon(tmp_path / "store")

    def stored_rounds() -> list[str]:
        return sorted(file.name.split(".")[-2] for file in (tmp_path / "store").rglob("*.safetensors"))

    blob = encode("train", {"model": {}})
    handlers = daemon._build_handlers(first, 0)
    for round in (1, 2, 3):
        handlers.contexts(0, round).store.put("model", {"a": torch.ones(1)})
    assert stored_rounds() == ["00000002", "00000003"]
    second = session(tmp_path, 2, method="fedbn", norm="batch")
    assert second["session"] == first["session"] + 1 and second["run"] == first["run"]
    # a client that finished its hop in a resumed ring keeps its state
    daemon._build_handlers({**second, "finished_clients": [0]}, 0)
    assert stored_rounds() == ["00000002", "00000003"]
    second = session(tmp_path, 2, method="fedbn", norm="batch")
    daemon._build_handlers(second, 0)
    assert stored_rounds() == ["00000002"]
    daemon._build_handlers(second, 0)  # the same session after a client restart: nothing changes
    reply = daemon.answer(json.dumps(first), Call(0, "local_train", 3), blob)
    assert reply.failure == "unable" and "session 1 of this run is over; session 3 has started" in reply.detail


def test_a_client_can_be_limited_to_secure_sums(tmp_path: Path) -> None:
    limited = ClientDaemon(tmp_path / "store", secure_sum=True)
    reply = ask(limited, session(tmp_path))
    assert reply.failure == "unable" and "takes part only in runs with secure sums" in reply.detail
    description = session(tmp_path)
    description["settings"] |= {"secure_sum": True}
    reply = ask(limited, description)
    assert not reply.failure and decode(reply.blob) == ("withheld", {})


# --- differential privacy -----------------------------------------------------------------------------------------


def ask_protected(daemon: ClientDaemon, description: Any, shares: int, model: Any = None) -> Reply:
    weights = experiment(3).task.initial_weights(3) if model is None else model
    call = Call(0, "local_train", 1, protect=shares)
    return daemon.answer(json.dumps(description), call, encode("local_train", {"model": weights}))


def test_a_client_draws_its_own_noise_and_answers_nothing_without(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    description = session(tmp_path, dp="record:noise=1", norm="group")
    first, second = (ClientDaemon(tmp_path / name) for name in ("first", "second"))
    replies = [ask_protected(daemon, description, 3) for daemon in (first, first, second)]
    models = [decode(reply.blob)[1]["model"]["head.weight"] for reply in replies]
    assert torch.equal(models[0], models[1])  # the same question again, as after an interruption
    assert not torch.equal(models[0], models[2])  # another secret
    moved = {name: tensor + 1e-7 for name, tensor in experiment(3).task.initial_weights(3).items()}
    other = decode(ask_protected(first, description, 3, moved).blob)[1]["model"]["head.weight"]
    assert (other - models[0]).abs().max() > 1e-3  # another question: its noise must not cancel
    assert envelope.read_answer(make_reply(envelope.pack_answer(replies[0]))).releases == replies[0].releases != ()
    refused = ask(first, description)
    assert refused.failure == "refused" and "dp protects every answer, and 'local_train' asks for one" in refused.detail
    assert "4 shares of noise, but there are 3 clients" in ask_protected(first, description, 4).detail


def test_a_question_without_noise_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    """A client of SCAFFOLD sends the difference to the control variate that it stored. That must be noisy, too."""
    pytest.importorskip("dp_accounting")
    daemon = ClientDaemon(tmp_path / "store")
    weights = experiment(3).task.initial_weights(3)
    message = encode("train_with_control", {"model": weights, "control": weights, "counted": 0})
    description = json.dumps(session(tmp_path, method="scaffold", dp="record:noise=1", norm="group"))
    for protect, written in ((0, False), (3, True)):
        reply = daemon.answer(description, Call(0, "train_with_control", 1, protect=protect), message)
        assert reply.failure == (None if written else "refused")
        assert bool([*(tmp_path / "store").rglob("*.safetensors")]) == written


def test_a_client_refuses_noise_that_does_not_protect_it(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    description = session(tmp_path, dp="record:noise=1", norm="group")
    daemon = ClientDaemon(tmp_path / "store", dp="record:noise=1")
    for dp, problem in (
        (None, "dp = None, but this client takes part in runs with dp = record:noise=1 only"),
        ("record:noise=0.1", "dp = record:noise=0.1, but this client"),
    ):
        reply = ask_protected(daemon, {**description, "settings": {**description["settings"], "dp": dp}}, 3)
        assert reply.failure == "unable" and problem in reply.detail
    for dp, problem in (("record:noise=1,public_noise", "public_noise"), ("noise=1,distributed", "needs secure_sum")):
        settings = {**description["settings"], "dp": dp}
        reply = ask_protected(ClientDaemon(tmp_path / "any"), {**description, "settings": settings}, 3)
        assert reply.failure == "unable" and problem in reply.detail


def test_a_new_session_has_other_noise_if_clients_share_it(tmp_path: Path) -> None:
    """The server may see the sums of an interrupted round twice, over different clients."""
    pytest.importorskip("dp_accounting")
    for dp, stays in (("user:noise=1,distributed", False), ("record:noise=1", True)):
        daemon, secrets = ClientDaemon(tmp_path / dp), []
        for _ in range(2):
            daemon._build_handlers(session(tmp_path / f"out {dp}", dp=dp, secure_sum=True, norm="group"), 0)
            (file,) = (tmp_path / dp).rglob(SECRET)
            secrets.append(file.read_bytes())
        assert (secrets[0] == secrets[1]) == stays
