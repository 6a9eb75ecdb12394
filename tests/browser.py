"""A real browser for tests of pages, if there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("FEWER_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser here (apt install chromium, or set FEWER_BROWSER)"
)


@contextmanager
def launch_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()
