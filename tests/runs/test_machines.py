"""The server and the client of a run between machines, without processes."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from fewer.errors import DataError, SettingError
from fewer.methods.frl_deploy import FRLDeploy
from fewer.runs.engine import build_handler_runner, run_experiment
from fewer.runs.experiment import Experiment
from fewer.runs.machines import ClientDaemon, FlowerServer, _describe_session
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.superlink import SuperLinkLost
from fewer.runtime.handlers import Call, Reply
from fewer.runtime.keys import PinnedKeys
from fewer.runtime.ring import Journal
from fewer.wire import Refused, decode, encode
from fewer.wire.sealing import public_key
from tests.helpers import FRL_SETTINGS, experiment
from tests.helpers import call as command
from tests.runtime.flower.harness import session

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
    runner = build_handler_runner(experiment(3), tmp_path / "here")
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


def test_a_client_with_text_uses_the_servers_vocabulary(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} thing{n % 5}", "label": n % 2}) for n in range(60)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.jsonl").write_text("\n".join(lines[:20]).replace("good", "novel"))
    description = session(
        tmp_path, data=f"jsonl:{tmp_path / 'all.jsonl'}", model="text-bilstm", partition="iid", max_length=4
    )
    daemon = ClientDaemon(tmp_path / "store", f"jsonl:{tmp_path / 'mine.jsonl'}")
    data = daemon._build_experiment(description["settings"], description["data_info"]).data
    assert list(data.tokens) == description["data_info"]["tokens"] and "novel" not in data.tokens
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
    data = {"data": f"jsonl:{tmp_path / 'all.jsonl'}", "model": "text-bilstm", "partition": "iid"}
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
    assert reply.failure == "unable" and "has 25 classes, but the task has 10" in reply.detail


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
