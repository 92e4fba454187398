"""Fixtures that every floor's tests may use, and what holds for all of them."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

from benchmarks.models import REAL, REAL_EMBEDDER, REAL_GGUF
from kakeya.backends.llama.find import find_server
from kakeya.mlx.numerics.blas import preload_blas
from tests import findings, fork_server
from tests.late import (  # noqa: F401  # pytest finds its hooks by their names here
    pytest_addoption,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
)
from tests.spread import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)

if os.environ.get("KAKEYA_TEST_OPENBLAS") == "1":
    preload_blas(1)  # before any test imports mlx, as in an engine
IS_SOAK = os.environ.get("KAKEYA_ALL_CASES") == "1"
# A busy machine is no fault of the code: no example has to be quick. Each commit tries the same
# examples, so that a failure is the commit's own; scripts/soak draws others each time, and more.
settings.register_profile(
    "busy",
    max_examples=100 if IS_SOAK else 30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not IS_SOAK,
)
settings.load_profile("busy")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Each property is a law, of which scripts/soak tries more cases."""
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("law")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection makes stays: no search for garbage, there or later, walks it. Later ones come
    seldom: they cost a run more than what they free is worth."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 20)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_blocks_the_event_loop() -> Iterator[BlockBuster]:
    """Row 22: a call of ours that blocks a running loop fails its test, whichever test that is.

    What tests themselves do on their loop (read a log, wait for a child) is their own affair, and
    so is a call of what is there to block: the client of the command line, a program's key files.
    """
    guard = BlockBuster("kakeya", excluded_modules=["kakeya.cli.node_api"])
    guard.functions["os.stat"].can_block_in("kakeya/wire/tls.py", "current")
    guard.functions["io.BufferedReader.read"].can_block_in("kakeya/wire/tls.py", "current")
    guard.activate()
    yield guard
    guard.deactivate()


@pytest.fixture(scope="session", autouse=True)
def children_hear_interrupts() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def children_are_forked(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Engines and nodes start in a tenth of the time; those of scripts/soak as elsewhere."""
    if sys.platform == "linux" and not IS_SOAK:
        fork_server.may_block(nothing_blocks_the_event_loop)
        fork_server.install(fork_server.Client())


@pytest.fixture(scope="session", autouse=True)
def models_are_checked_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By whichever worker is the first."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "findings"
    shared.mkdir(mode=0o700, exist_ok=True)
    findings.shared.append(shared)


@pytest.fixture(scope="session", autouse=True)
def grpc_stays_up() -> Iterator[None]:
    """Keep gRPC's own thread: it is joined, on the loop, when the last channel is collected."""
    from grpc.aio import init_grpc_aio, shutdown_grpc_aio

    init_grpc_aio()
    yield
    shutdown_grpc_aio()


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> None:
    """Reading all authorities takes a client of `httpx` 20 ms, also for plain connections."""
    read = ssl.create_default_context

    @functools.cache
    def once(cafile: str, _changed_ns: int) -> ssl.SSLContext:
        return read(cafile=cafile)

    def create_default_context(*purpose: Any, **named: Any) -> ssl.SSLContext:
        if purpose or list(named) != ["cafile"] or not named["cafile"]:
            return read(*purpose, **named)
        return once(named["cafile"], Path(named["cafile"]).stat().st_mtime_ns)

    ssl.create_default_context = create_default_context


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets: macOS's temporary ones are longer than a socket's name may be."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="kk-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the model of real size."""
    return _made(REAL, "scripts/real_model")


@pytest.fixture(scope="session")
def real_embedder() -> Path:
    """The folder of the real encoder."""
    return _made(REAL_EMBEDDER, "scripts/real_model embedder")


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """The GGUF file of the model of real size."""
    return _made(REAL_GGUF, "scripts/real_model gguf")


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The program that runs GGUF files."""
    found = find_server()
    return found if found is not None else _missing("no llama-server", "scripts/llama_server")


def _made(path: Path, script: str) -> Path:
    return path if path.exists() else _missing(f"no model of real size in {path}", script)


def _missing(what: str, script: str) -> NoReturn:
    missing = f"there is {what}; {script} makes it"
    if os.environ.get("KAKEYA_REQUIRE_REAL") == "1":
        pytest.fail(missing)
    pytest.skip(missing)
