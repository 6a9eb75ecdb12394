"""The Flower runtime: clients on their own machines, with Flower's SuperLink and SuperNodes as transport only.

Both programs run unmodified, with TLS and one key per client. Both use Flower's `process` isolation: they give work to
any process that holds a secret, and start no other program. Fewer holds that secret. So the server's loop stays in the
`fewer` process, and a client answers with its own installed package. No client ever runs code from a server (the app
that Flower must send contains no code), and no message starts a process.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from fewer.errors import SettingError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Turns off telemetry, update checks and package installation."""
os.environ.update(QUIET)  # before any import of Flower


def bypass_proxy(*hosts: str) -> None:
    """Connects to these hosts directly. A proxy from the environment could not reach programs on this machine."""
    for name in ("no_proxy", "NO_PROXY"):
        existing = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*existing, *hosts]))


bypass_proxy("localhost", "127.0.0.1", "::1")


def require_flower() -> None:
    """Raises SettingError if Flower is not installed."""
    if find_spec("flwr") is None:
        raise SettingError("this command needs Flower, which is not installed (pip install 'fewer[flower]')")
