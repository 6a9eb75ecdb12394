"""Few-shot data for F2L and its baselines."""

from __future__ import annotations

import pytest

from fewer.data import ArrayData
from tests.methods.f2l_harness import make_data


@pytest.fixture(scope="module")
def data() -> ArrayData:
    return make_data()
