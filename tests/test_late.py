"""A test that is late, or that ends its worker, fails alone: one real run with two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOOKS = """
from contextlib import nullcontext
from tests import late
from tests.late import *
from tests.spread import *

bounded = late._bounded

def bounded_if_it_hangs(item, phase):
    return nullcontext() if "passes" in item.name else bounded(item, phase)

late._bounded = bounded_if_it_hangs
"""
CONFIGURATION = f"""
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
late_after_s = 1
pythonpath = {ROOT}
"""
HANGS = """
import asyncio, subprocess, sys, threading, time
import pytest

LOCKED = threading.Lock()
LOCKED.acquire()

def test_passes_before(): pass

async def test_awaits():
    print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    await where_it_waits()

async def where_it_waits():
    await asyncio.Event().wait()

async def test_ignores_its_end():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

def test_sleeps(): time.sleep(600)

async def test_waits_for_a_thread(): await asyncio.to_thread(LOCKED.acquire)

@pytest.fixture
async def unready(): await asyncio.sleep(600)

async def test_is_not_set_up(unready): pass

@pytest.fixture
def unending():
    yield
    time.sleep(600)

def test_is_not_torn_down(unending): pass

def test_passes_after(): pass
"""
DIES = """
import os

def test_passes_before(): pass

def test_ends_its_worker(): os._exit(1)

def test_passes_after(): pass
"""
FAILED = {
    "hangs.py::test_awaits",
    "hangs.py::test_ignores_its_end",
    "hangs.py::test_sleeps",
    "hangs.py::test_waits_for_a_thread",
    "hangs.py::test_is_not_set_up",
    "hangs.py::test_is_not_torn_down",
    "dies.py::test_ends_its_worker",
}


def test_a_test_that_is_late_or_ends_its_worker_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "pytest.ini").write_text(CONFIGURATION)
    passes = "".join(f"def test_passes_{n}(): pass\n" for n in range(10))
    for name, text in {"dies": DIES, "hangs": HANGS, "one": passes, "two": passes}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-rA", "-n", "2", "--dist", "loadfile"]
    # Each worker that ends has a successor: no plugin is loaded that has no part in this.
    plugins = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin,pytest_asyncio.plugin",
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | plugins,
    )
    told = set(re.findall(r"^(PASSED|FAILED|ERROR) test_(\S+)", done.stdout, re.MULTILINE))
    assert {test for how, test in told if how != "PASSED"} == FAILED, done.stdout
    assert len({test for how, test in told if how == "PASSED" and "passes" in test}) == 24
    assert "in where_it_waits" in done.stdout, "where a task waits, not only where it began"
    assert "in test_sleeps" in done.stdout
    child = re.search(r"child (\d+)", done.stdout)
    assert child
    state = ["ps", "-o", "stat=", "-p", child[1]]
    assert subprocess.run(state, capture_output=True, text=True).stdout.strip()[:1] in ("", "Z")
