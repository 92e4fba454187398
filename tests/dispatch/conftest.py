"""The fleet as one node hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.dispatch.peers.test_neighbours import Front


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    made = Front(tmp_path / "texts")
    yield made
    await made.peers.aclose()
    await made.channels.aclose()
