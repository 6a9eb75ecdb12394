"""The private names of Flower that Fewer uses. No other module of Fewer imports one.

Flower documents `flwr.app` and its programs, but no way to serve a run from a process of one's own. These names do:

    build_fab_from_files, Fab, fab_to_proto     pack the app that a SuperLink wants with each run
    user_config_to_proto                        packs the run's settings
    ControlHttpClient, …Node(s)Request,         register clients, submit a run
        StartRunRequest
    SuperExecAuthHttpInterceptor, TaskType,     claim the work of a SuperLink or SuperNode
        AcquireTaskRequest
    RuntimeHttpClient and its requests,         talk to a SuperLink or SuperNode about that work
        Runtime…HttpInterceptor
    HttpGrid, TaskIdentity, run_from_proto      enter a run as its server (see `RunGrid`)
    HeartbeatSender                             keeps a task alive
    HEARTBEAT_…                                 how often a SuperNode says that it is alive (see `DETECT_SOON`)
    pull_task_input, push_message,              read a question and return the answer, as Flower's executor does
        push_task_output, SubStatus
    get_all_nested_objects, ObjectPushError,    read messages object by object
        iterate_object_tree, inflate_object_from_contents
    ErrorCode, parse_address                    what Flower's errors mean, and which addresses it accepts

tests/runtime/flower/test_flwr_compat.py checks what Fewer relies on.
"""

from __future__ import annotations

from flwr.cli.build import build_fab_from_files
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.address import parse_address
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, inflate_object_from_contents
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

TESTED_VERSIONS = ("1.40.0", "1.41.0", "1.42.0")
"""Versions of Flower that Fewer was run with: 1.41.0 with all tests, the others with that test and a local cluster."""
SUPERLINK = "flwr.superlink.cli:flower_superlink"
SUPERNODE = "flwr.supernode.cli:flower_supernode"
"""Entry points of Flower's programs."""
HEARTBEAT = 6
"""A node counts as gone after twice these seconds without a heartbeat. Flower's own value is 30, its minimum 10."""
DETECT_SOON = {
    SUPERLINK: (
        f"import flwr.superlink.servicer.fleet.fleet_handlers as fleet; fleet.HEARTBEAT_MIN_INTERVAL = {HEARTBEAT}"
    ),
    SUPERNODE: (
        "import flwr.supernode.fleet_http_connection as connection, flwr.supercore.heartbeat as heartbeat; "
        f"connection.HEARTBEAT_DEFAULT_INTERVAL = heartbeat.HEARTBEAT_DEFAULT_INTERVAL = {HEARTBEAT}; "
        "heartbeat.HEARTBEAT_CALL_TIMEOUT = 2"
    ),
}
"""Statements that each program runs first. A SuperNode then sends a heartbeat about every 3 seconds."""
ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"
"""The request that only a holder of the secret may send."""


class RunGrid(HttpGrid):
    """A server's connection to its run. Fewer retries on its own: Flower's retries would interrupt this process."""

    def __init__(self, address: str, root_certificate: bytes, token: str) -> None:
        super().__init__(address, False, root_certificate, token=token)
        self._retry_invoker = None  # type: ignore[assignment]

    @property
    def http(self) -> RuntimeHttpClient:
        """The client for requests that the grid has no method for."""
        return self._runtime_client

    def enter_run(self) -> None:
        """Makes this process the server of the run. Its messages belong to the run from now on."""
        task = self.http.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        self.set_run(run_from_proto(task.run))
