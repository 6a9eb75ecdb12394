"""The dashboard: runs of a directory in a browser, while they go on. It reads runs, and never computes them.

records.py      files that grow: the last lines, older pages, and what has come since
catalog.py    which runs there are, and how each is doing
control.py      stopping and resuming them
guard.py        who may ask
server.py       the answers
static/         the page, as the browser gets it
"""

from importlib.util import find_spec

from fewer.errors import SettingError


def need_dash() -> None:
    """SettingError where the extra is not installed."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise SettingError("this needs Starlette and uvicorn, which are not installed (pip install 'fewer[dash]')")
