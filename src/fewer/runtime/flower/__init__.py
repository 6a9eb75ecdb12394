"""Clients on machines of their own. Flower's SuperLink and SuperNodes carry our messages; that is all they do.

Both programs run as they come, with TLS and a key for each client, and both in Flower's `process` isolation: they hand
work to whoever holds a secret, and start no program themselves. We hold it. So the server's loop stays in the
process of the command, and a client answers with the package that it has installed: nothing that a server sends is
ever run as code (the app that Flower wants to be sent has no code in it), and no process is started for a message.

    credentials.py   the authority, the server's certificate, the clients' keys
    programs.py      Flower's programs as children, quiet and offline
    executor.py      taking work from them
    envelope.py      our calls and replies as Flower's messages
    link.py          the server's side: a SuperLink and one run on it
    node.py          a client's side: a SuperNode and the loop that answers
    clients.py       the runtime
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
"""No word to the outside, nothing fetched from there."""
os.environ.update(QUIET)  # before anything of Flower's is imported


def without_proxy(*hosts: str) -> None:
    """Reach these straight, whatever proxy the environment names: it would not find this machine's own programs."""
    for name in ("no_proxy", "NO_PROXY"):
        given = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*given, *hosts]))


without_proxy("localhost", "127.0.0.1", "::1")


def need_flower() -> None:
    """SettingError where the extra is not installed."""
    if find_spec("flwr") is None:
        raise SettingError("this needs Flower, which is not installed (pip install 'fewer[flower]')")
