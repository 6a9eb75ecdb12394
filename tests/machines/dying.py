"""A SuperNode that dies when it begins to send what an answer is made of: announced is it by then."""

import os

from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

FleetHttpClient.PushObject = lambda *_, **__: os._exit(9)  # type: ignore[method-assign]

__all__ = ["flower_supernode"]
