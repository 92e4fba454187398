"""A child that the server forks is what the same command would be without it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
COMMAND = (sys.executable, "-m", "tests.forked_child")
EXECUTED = {"pass_fds": (0,)}
"""Options with which a child is executed as elsewhere, and is the same."""


def said_by(tmp_path: Path, **options: Any) -> dict[str, Any]:
    # Other tests may have set more in this process since the server began.
    environ = {
        **fork_server.installed[0].environ,
        "KAKEYA_SAID": "so",
        "PYTEST_CURRENT_TEST": "this (call)",
    }
    run = subprocess.run(
        [*COMMAND, "one", ""],
        **options,
        input="given\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ,
        start_new_session=True,
        check=False,
    )
    assert run.returncode == 7, run.stderr
    assert run.stderr == "an error\n"
    return json.loads(run.stdout)


def test_a_forked_child_is_as_an_executed_one(tmp_path: Path) -> None:
    forked, executed = said_by(tmp_path), said_by(tmp_path, **EXECUTED)
    assert [one.pop("has_mlx") for one in (forked, executed)] == [True, False], "as was meant"
    assert forked["leads"]
    assert forked["parent"] == os.getpid()
    assert forked == executed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_its_parent_hears_how_it_ended(number: signal.Signals) -> None:
    for options in ({}, EXECUTED):
        child = await asyncio.create_subprocess_exec(
            *COMMAND, "wait", stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, **options
        )
        assert child.stdout is not None
        assert (await child.stdout.readline()).strip() == str(child.pid).encode()
        child.send_signal(number)
        assert await child.wait() == -number


def test_it_leads_its_group_as_soon_as_its_id_is_known() -> None:
    """As an executed one: a signal to the group that came sooner would be lost."""
    for _ in range(20):
        with subprocess.Popen(
            [*COMMAND, "wait"], stdin=-1, stdout=-1, start_new_session=True
        ) as child:
            os.killpg(child.pid, signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    client = fork_server.Client()
    request = {
        "arguments": [*COMMAND, "one"],
        "folder": str(tmp_path),
        "environ": dict(os.environ),
        "leads_session": False,
        "namespace": "",
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    with Path(os.devnull).open("r+b") as nothing:
        files = [nothing.fileno()] * 3
        assert os.waitpid(client.fork(request, files), 0)[1] == 7 << 8
        assert client.process is not None
        client.process.kill()
        with pytest.raises(ChildProcessError):
            client.fork(request, files)
        assert os.waitpid(client.fork(request, files), 0)[1] == 7 << 8
    client.end()
