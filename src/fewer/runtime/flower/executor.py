"""Taking work from a SuperLink or SuperNode in the place of Flower's own executor."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from fewer.runtime.flower.programs import secret_file

logging.getLogger("flwr").setLevel(logging.ERROR)


def executor(address: str, home: Path, root: bytes | None) -> RuntimeHttpClient:
    """Who is given work by the program whose home this is; `root` is the authority it is known by, None without TLS."""
    secret = secret_file(home).read_bytes()
    signing = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"})
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    return RuntimeHttpClient.from_server_address(address, root is None, root, [version, signing])


def beats(client: RuntimeHttpClient) -> bool:
    """Tell a SuperLink or SuperNode that its task is in good hands; False where it did not hear."""
    try:
        return client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
    except httpx.HTTPError:
        return False
