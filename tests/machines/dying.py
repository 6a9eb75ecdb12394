"""A SuperNode that dies after it has announced an answer, before it sends the content."""

import os

from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

FleetHttpClient.PushObject = lambda *_, **__: os._exit(9)  # type: ignore[method-assign]

__all__ = ["flower_supernode"]
