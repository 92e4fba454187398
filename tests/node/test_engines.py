"""Where engine sockets lie, and that a killed node's are gone after the next start."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from kakeya.node.child import NodeProcess
from kakeya.node.engines import sockets_folder
from tests.node.nodes import VERIFIER, eventually, model_state


def test_a_data_directory_too_deep_for_sockets_leaves_them_to_the_system() -> None:
    assert sockets_folder(Path("/home/me/.local/share/kakeya")) == Path(
        "/home/me/.local/share/kakeya/run"
    )
    assert sockets_folder(Path("/" + "x" * 80)) is None


async def test_the_sockets_of_a_killed_node_go_with_the_next_start() -> None:
    with tempfile.TemporaryDirectory(prefix="kk") as home:
        folder = Path(home)
        run = folder / "data" / "run"
        async with NodeProcess(folder, "--model", VERIFIER) as node:
            await eventually("an engine's socket", lambda: list(run.glob("*/*.sock")))
            left = set(run.iterdir())
            node.send(signal.SIGKILL)
            await node.wait()
        assert set(run.iterdir()) == left
        async with NodeProcess(folder, "--model", VERIFIER) as node:
            await eventually("ready", lambda: model_state(node, VERIFIER)["state"] == "ready")
            assert not left & set(run.iterdir())
        assert not list(run.iterdir())
