"""What several files of this folder start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.kv_rig import Prefixes


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefixes]:
    with Prefixes(tmp_path_factory.mktemp("pages")) as pages:
        yield pages
