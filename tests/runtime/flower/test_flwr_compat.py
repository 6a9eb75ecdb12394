"""What Fewer relies on in Flower's private API, checked against the installed version."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")

import flwr
import httpx
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import Context
from flwr.proto.run_pb2 import Run
from flwr.proto.runtime_pb2 import PullTaskInputResponse

from fewer.runtime.flower import envelope
from fewer.runtime.flower import flwr_compat as compat
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.executor import PollingClient, connect_executor
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program, find_free_port
from fewer.runtime.flower.superlink import APP, SuperLink
from fewer.runtime.handlers import Call, Reply

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src" / "fewer"
COMPAT = SOURCES / "runtime" / "flower" / "flwr_compat.py"


# --- versions and sources ---------------------------------------------------------------------------------------


def test_the_installed_flower_is_one_that_fewer_was_run_with() -> None:
    assert version("flwr") in compat.TESTED_VERSIONS


def test_the_flower_extra_allows_only_tested_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = [line.removeprefix("flwr==") for line in extras["flower"] if line.startswith("flwr")]
    assert pinned and set(pinned) <= set(compat.TESTED_VERSIONS)


def private_names(file: Path) -> Iterator[str]:
    """Imports of Flower, other than of its documented `flwr.app`, and texts that name one of its modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flwr":
            if node.module != "flwr.app" or any(alias.name not in flwr.app.__all__ for alias in node.names):
                yield f"{file}:{node.lineno}: {node.module}"
        elif isinstance(node, ast.Import):
            yield from (f"{file}:{node.lineno}: {alias.name}" for alias in node.names if alias.name.startswith("flwr"))
        elif isinstance(node, ast.Constant) and re.match(r"/?flwr\.", str(node.value)):
            yield f"{file}:{node.lineno}: {node.value!r}"


def test_no_other_module_uses_a_private_name_of_flower() -> None:
    assert any(private_names(COMPAT))
    assert [name for file in SOURCES.rglob("*.py") if file != COMPAT for name in private_names(file)] == []


def test_every_private_name_is_used_and_explained() -> None:
    tree = ast.parse(COMPAT.read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for file in COMPAT.parent.glob("*.py"):
        used |= set(re.findall(r"\bcompat\.(\w+)", file.read_text()))
    explained = ast.get_docstring(tree) or ""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                assert alias.name in used, f"{alias.name} is not used"
                assert alias.name in explained or re.search("Request|Response|Interceptor", alias.name), alias.name


# --- signatures -------------------------------------------------------------------------------------------------

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (compat.ControlHttpClient.from_server_address, ("HOST:1", False, b"", []), {}),
    (compat.RuntimeHttpClient.from_server_address, ("HOST:1", False, b"", []), {}),
    (compat.SuperExecAuthHttpInterceptor, (), {"master_secret": b"", "protected_methods": {compat.ACQUIRE_TASK}}),
    (compat.RuntimeVersionHttpInterceptor, (), {"component_name": ""}),
    (compat.RuntimeTokenHttpInterceptor, ("token",), {}),
    (compat.HeartbeatSender, (bool,), {}),
    (compat.HttpGrid, ("HOST:1", False, b""), {"token": ""}),
    (compat.pull_task_input, (None,), {}),
    (compat.push_message, (None, None, None), {}),
    (compat.push_task_output, (None, None, "", ""), {}),
    *(
        (getattr(compat.ControlHttpClient, name), (None, None), {})
        for name in ("ListNodes", "RegisterNode", "UnregisterNode", "StartRun")
    ),
    *(
        (getattr(compat.RuntimeHttpClient, name), (None, None), {})
        for name in (
            *("AcquireTask", "SendTaskHeartbeat", "PullTaskInput", "PushTaskOutput"),
            *("PullMessages", "PullObject", "ConfirmMessageReceived"),
        )
    ),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_private_function_takes_the_arguments_that_fewer_passes(function: Any, args: Any, kwargs: Any) -> None:
    inspect.signature(function).bind(*args, **kwargs)


RESPONSES = {
    "control_pb2.ListNodesResponse": ["nodes_info"],
    "control_pb2.StartRunResponse": ["run_id"],
    "node_pb2.NodeInfo": ["node_id", "public_key", "unregistered_at", "last_activated_at"],
    "runtime_pb2.AcquireTaskResponse": ["token", "task"],
    "runtime_pb2.SendTaskHeartbeatResponse": ["success"],
    "runtime_pb2.PullTaskInputResponse": ["task_id", "run", "context"],
    "runtime_pb2.PullAppMessagesResponse": ["messages_list", "message_object_trees"],
    "message_pb2.PullObjectResponse": ["object_found", "object_available", "object_content"],
    "message_pb2.Metadata": ["message_id", "reply_to_message_id"],
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_has_the_fields_that_fewer_reads(name: str) -> None:
    module, _, message = name.partition(".")
    fields = getattr(__import__(f"flwr.proto.{module}", fromlist=[message]), message).DESCRIPTOR.fields_by_name
    assert set(RESPONSES[name]) <= set(fields)


def test_a_request_has_the_fields_that_fewer_writes() -> None:
    compat.RegisterNodeRequest(public_key=b"key", name="client-0")
    compat.UnregisterNodeRequest(node_id=1)
    compat.PullAppMessagesRequest(message_ids=["id"])
    compat.PullObjectRequest(object_id="id", node=None, run_id=1)
    compat.ConfirmMessageReceivedRequest(message_object_id="id", node=None, run_id=1)
    compat.PushTaskOutputRequest(sub_status=compat.SubStatus.COMPLETED, details="")
    assert compat.SubStatus.FAILED != compat.SubStatus.COMPLETED
    for task in (compat.TaskType.CLIENT_APP, compat.TaskType.SERVER_APP):
        assert list(compat.AcquireTaskRequest(supported_task_types=[task]).supported_task_types) == [task]


# --- behavior ---------------------------------------------------------------------------------------------------


def test_an_app_without_code_can_be_packed() -> None:
    content, _ = compat.build_fab_from_files({"pyproject.toml": APP})
    digest = hashlib.sha256(content).hexdigest()
    request = compat.StartRunRequest(
        fab=compat.fab_to_proto(compat.Fab(digest, content, {})),
        override_config=compat.user_config_to_proto({"experiment": "{}"}),
    )
    assert (request.fab.hash_str, request.fab.content) == (digest, content)
    assert request.override_config["experiment"].string == "{}"


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[compat.RunGrid]:
    Credentials.create(tmp_path / "keys", 1)
    grid = compat.RunGrid(f"127.0.0.1:{find_free_port()}", (tmp_path / "keys" / "ca.crt").read_bytes(), "token")
    yield grid
    grid.close()


def test_a_grid_without_a_superlink_fails_at_once(grid: compat.RunGrid) -> None:
    with pytest.raises(httpx.TransportError):
        list(grid.get_nodes())


def test_messages_belong_to_the_run_that_a_grid_has_entered(
    grid: compat.RunGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = compat.TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, None)
    task = PullTaskInputResponse(task_id=3, run=Run(run_id=7), context=Context(run_id=7, node_id=1))
    monkeypatch.setattr(compat.RuntimeHttpClient, "PullTaskInput", lambda self, request: task)
    with pytest.raises(RuntimeError):
        Message(RecordDict(), 5, envelope.TYPE)
    grid.enter_run()
    message = Message(RecordDict(), 5, envelope.TYPE, ttl=9.0, group_id="1")
    assert (message.metadata.run_id, message.metadata.src_node_id, message.metadata.dst_node_id) == (7, 1, 5)
    assert (identity.task_id, grid.run.run_id, grid.node.node_id) == (3, 7, 1)

    reply = Reply(b"\1\2\3", None, "", 0.5)
    question = Message(envelope.pack_question(Call(0, "train", 1), b"\0" * 10), 5, envelope.TYPE)
    answer = Message(envelope.pack_answer(reply), reply_to=question)
    parts = {key: part.deflate() for key, part in compat.get_all_nested_objects(answer).items()}
    assert envelope.message_size(answer) == sum(map(len, parts.values())) > 3
    inflated = compat.inflate_object_from_contents(answer.object_id, parts)
    assert isinstance(inflated, Message) and envelope.read_answer(inflated) == reply
    assert envelope.read_question(question.content)[1] == b"\0" * 10


def test_heartbeats_are_sent_until_they_are_stopped() -> None:
    beat = Event()

    def send() -> bool:
        beat.set()
        return True

    sender = compat.HeartbeatSender(send)
    sender.start()
    assert beat.wait(10) and sender.is_running
    sender.stop()
    assert not sender.is_running


@pytest.mark.parametrize(("address", "valid"), [("host.example:443", True), ("127.0.0.1:1", True), ("host", False)])
def test_an_address_without_a_port_is_none(address: str, valid: bool) -> None:
    assert (compat.parse_address(address) is not None) == valid


def test_requests_are_signed_and_pull_through_the_overridden_methods(tmp_path: Path) -> None:
    http = connect_executor("127.0.0.1:1", tmp_path, None)
    with pytest.raises(httpx.TransportError):  # not an error of the signing interceptor
        http.AcquireTask(compat.AcquireTaskRequest(supported_task_types=[compat.TaskType.CLIENT_APP]))
    http.close()
    source = inspect.getsource(compat.pull_task_input)
    for name in ("PullMessages", "PullObject"):
        assert f"client.{name}" in source and name in vars(PollingClient)


# --- programs ---------------------------------------------------------------------------------------------------


def flags(program: Program) -> set[str]:
    return {argument for argument in program.arguments if argument.startswith("--")}


def help_of(program: Program) -> str:
    module, _, function = program.entry.partition(":")
    code = f"import sys; from {module} import {function}; {function}()"
    return subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True).stdout


def test_the_programs_know_the_flags_that_fewer_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuperLink, "_start_program", lambda self: None)
    monkeypatch.setattr(SuperLink, "_register_clients", lambda self: None)
    keys = Credentials.create(tmp_path / "keys", 1)
    with SuperLink(keys) as link:
        assert link._program
        programs = [link._program, Node("host:1", keys.client_folder(0), tmp_path)._make_program()[0]]
    for program in programs:
        known = set(re.findall(r"--[\w-]+", help_of(program)))
        assert flags(program) and flags(program) <= known


@pytest.mark.parametrize(
    "text",
    [
        *("Connection attempt failed", "Connection successful", "SuperNode ID", "Receiving: "),
        *("Failed to send message %s: %s", "Failed to receive message %s: %s", "= 2004"),
    ],
)
def test_a_supernode_logs_the_texts_that_fewer_looks_for(text: str) -> None:
    package = Path(os.fspath(flwr.__file__)).parent
    files = [*(package / "supernode").rglob("*.py"), *(package / "supercore").rglob("*.py")]
    assert any(text in file.read_text() for file in files)
