"""The dashboard: shows the runs of a directory in a browser, live. It reads runs and never computes them.

catalog.py      finds runs and tracks their state
control.py      stops and resumes runs
guard.py        authentication and protection against other sites
server.py       the HTTP API
static/         the page
"""

from importlib.util import find_spec

from fewer.errors import SettingError


def need_dash() -> None:
    """Raises SettingError if the packages of the dashboard are not installed."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise SettingError("the dashboard needs Starlette and uvicorn: pip install 'fewer[dash]'")
