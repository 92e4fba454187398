"""Where engine sockets lie, and what a node says of the engines behind them."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engines import sockets_folder
from kakeya.cli.child import NodeProcess
from kakeya.config import config
from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.generation.facts import ModelState
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.node.memory import EngineSetup, NodeMemory
from tests.node.nodes import VERIFIER, model_state
from tests.waiting import eventually


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


async def test_a_model_can_be_loaded_before_the_node_is_wholly_up(tmp_path: Path) -> None:
    """A client that is there when the doors open is not told that its model failed."""
    spec = ModelSpec(model_id="toy", source=VERIFIER, role=ModelRole.VERIFIER)
    with tempfile.TemporaryDirectory(prefix="kk") as home:
        run = Path(home) / "run"
        memory = await asyncio.to_thread(memory_of, [spec], tmp_path, lambda: None, sockets=run)
        async with memory, asyncio.timeout(60):
            facts = await memory.engines.get("toy").ready(15.0)
            assert facts.model_id == "toy"


def toy_command(spec: ModelSpec, resolved: str) -> Callable[[Path], Sequence[str]]:
    """An engine that says its BLAS is slow."""
    module = (sys.executable, "-m", "tests.backends.engine.toy_engine")
    return lambda socket: (*module, "--socket", str(socket), "--model-id", spec.model_id)


def memory_of(
    specs: Sequence[ModelSpec],
    folder: Path,
    on_change: Callable[[], None],
    *,
    sockets: Path | None = None,
) -> NodeMemory:
    return NodeMemory(
        config.load(("--data-dir", str(folder)), {}).memory,
        specs,
        EngineSetup(command=toy_command, options=EngineOptions(stop_grace_s=0.5), sockets=sockets),
        data_dir=folder,
        clock=SystemClock(),
        rng=random.Random(1),
        on_change=on_change,
    )


async def test_the_hint_at_a_faster_blas_is_logged_once_however_many_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    specs = [
        ModelSpec(model_id=name, source=VERIFIER, role=ModelRole.VERIFIER)
        for name in ("one", "two")
    ]
    changed = asyncio.Event()
    # It looks at the models' folders.
    memory = await asyncio.to_thread(memory_of, specs, tmp_path, changed.set)
    async with memory, Supervisor(SystemClock()) as tasks, asyncio.timeout(60):
        await memory.start(tasks, "node")
        while len(memory.engines.offered()) < len(specs):
            changed.clear()
            await changed.wait()
    assert sum("OpenBLAS is missing" in record.message for record in caplog.records) == 1


async def test_n_grams_are_ready_to_draft_and_other_proposers_once_they_are_loaded(
    tmp_path: Path,
) -> None:
    specs = [
        ModelSpec(model_id="ngram", source="ngram", role=ModelRole.PROPOSER),
        ModelSpec(model_id="drafter", source=VERIFIER, role=ModelRole.PROPOSER),
        ModelSpec(model_id="decoder", source=VERIFIER, role=ModelRole.VERIFIER),
    ]
    memory = await asyncio.to_thread(memory_of, specs, tmp_path, lambda: None)
    states = {standing.model_id: standing.state for standing in memory.engines.proposers()}
    assert states == {"ngram": ModelState.READY, "drafter": ModelState.LOADING}
