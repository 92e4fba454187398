"""`kakeya lease` as people and scripts use it, beside a real node and without one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.nodes import VERIFIER, NodeProcess, model_state, run_cli
from tests.waiting import eventually, wait_until

CAT = ("sh", "-c", "echo up; exec cat")
CLI = [sys.executable, "-m", "kakeya.cli.main", "lease"]


def lease(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    action, *rest = arguments
    return run_cli("lease", action, "--data-dir", str(folder), *rest)


def listed(folder: Path) -> list[dict[str, Any]]:
    done = lease(folder, "list", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["leases"]
    return found


@contextlib.contextmanager
def leased(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*CLI, "run", "--data-dir", str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def up(child: subprocess.Popen[str]) -> str:
    """What the command says first: it runs, and is guarded."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_command_runs_with_its_lease_and_its_own_exit_status(tmp_path: Path) -> None:
    done = lease(tmp_path, "run", "--mb", "10", "--", "sh", "-c", "echo $KAKEYA_LEASE_ID; exit 7")
    assert done.returncode == 7
    assert done.stdout.startswith("sh-")
    assert done.stderr == ""
    wait_until("the lease is over", lambda: not listed(tmp_path))


def test_a_signal_ends_the_command_as_if_nothing_stood_between(tmp_path: Path) -> None:
    with leased(tmp_path, "--mb", "10", "--", *CAT) as child:
        up(child)
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == -signal.SIGINT
    wait_until("the lease is over", lambda: not listed(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_guard_whom_the_command_adopted_does_not_guard_itself(tmp_path: Path) -> None:
    adopting = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1)"
    adopting += "; os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", adopting, *CLI, "run", "--data-dir", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--mb", "10", "--", *CAT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        up(child)
        (guarded,) = listed(tmp_path)
        child.kill()
        child.wait()
    wait_until(f"the lease {guarded['id']} is over", lambda: not listed(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mb", "x", "--", "true"], "--mb x: a whole number"),
        (["--mb", "0", "--", "true"], "0 bytes"),
        (["--mb", "5"], "no command"),
        (["--", "true"], "--mb"),
        (["--mb", "5", "--priority", "soon", "--", "true"], "one of urgent, high"),
        (["--mb", "5", "--wait", "-1", "--", "true"], "a number of seconds"),
        (["--mb", "5", "--resource", "GPU", "--", "true"], "'GPU'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    done = lease(tmp_path, "run", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_command_that_cannot_be_run_is_told_as_a_shell_does(tmp_path: Path) -> None:
    assert lease(tmp_path, "run", "--mb", "5", "--", "no-such-command").returncode == 127
    assert lease(tmp_path, "run", "--mb", "5", "--", "/etc/passwd").returncode == 126


@pytest.mark.parametrize("asked", [("run", "--mb", "5", "--", "true"), ("drain",)])
def test_a_file_in_the_place_of_the_folder_is_told_in_a_sentence(
    tmp_path: Path, asked: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("x")
    done = lease(tmp_path / "file", *asked)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "File exists; name a writable folder" in done.stderr


def test_what_never_fits_is_refused_and_what_may_fit_later_says_so(tmp_path: Path) -> None:
    never = lease(tmp_path, "run", "--mb", "900000000", "--", "true")
    assert never.returncode == 1
    assert "the budget is" in never.stderr
    with leased(tmp_path, "--mb", "10", "--resource", "gpu:0", "--", *CAT) as child:
        up(child)
        later = lease(
            tmp_path, "run", "--mb", "1", "--resource", "gpu:0", "--wait", "0", "--", "true"
        )
        assert later.returncode == 75
        assert "gpu:0, which sh (pid" in later.stderr


def test_killed_guard_and_killed_command_leave_what_still_lives_accounted(tmp_path: Path) -> None:
    """First what guards the lease is killed, then the command itself; its child lives on."""
    script = "sleep 600 & echo $!; exec cat"
    with leased(tmp_path, "--mb", "10", "--name", "train", "--", "sh", "-c", script) as child:
        sleeper = int(up(child))
        kill_guard(tmp_path)
        assert [one["name"] for one in listed(tmp_path)] == ["train"]
        child.kill()
        child.wait()
        assert [one["name"] for one in listed(tmp_path)] == ["train"]
        os.kill(sleeper, signal.SIGKILL)
        wait_until("the lease is over", lambda: not listed(tmp_path))


def test_a_drain_stops_holders_and_keeps_new_ones_out(tmp_path: Path) -> None:
    with leased(tmp_path, "--mb", "10", "--", *CAT) as child:
        up(child)
        done = lease(tmp_path, "drain", "--wait", "0")
        assert done.returncode == 1
        assert "still held" in done.stderr
        done = lease(tmp_path, "drain", "--stop", "--wait", "30")
        assert done.returncode == 0, done.stderr
        assert child.wait(30) == -signal.SIGTERM
    refused = lease(tmp_path, "run", "--mb", "1", "--", "true")
    assert refused.returncode == 75
    assert "kakeya lease drain --off" in refused.stderr
    assert lease(tmp_path, "drain", "--off").returncode == 0
    assert lease(tmp_path, "run", "--mb", "1", "--", "true").returncode == 0


def test_cleanup_says_which_leases_it_removed(tmp_path: Path) -> None:
    with leased(tmp_path, "--mb", "10", "--name", "train", "--", *CAT) as child:
        up(child)
        kill_guard(tmp_path)
        child.kill()
        child.wait()
    done = lease(tmp_path, "cleanup")
    assert f"train (pid {child.pid}) is gone" in done.stdout
    assert "nothing to remove" in lease(tmp_path, "cleanup").stdout


@pytest.mark.slow
async def test_a_job_beside_a_real_node_evicts_an_idle_model_which_comes_back(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    flags = ("--model", VERIFIER, "--memory-budget", "1000")
    async with NodeProcess(tmp_path, *flags) as node:
        await eventually("ready", lambda: model_state(node, VERIFIER)["state"] == "ready")
        with leased(data, "--mb", "950", "--", *CAT) as child:
            await eventually(
                "the model made room",
                lambda: model_state(node, VERIFIER)["state"] != "ready",
                limit_s=60,
            )
            await eventually(
                "it is granted",
                lambda: _leases(node)[0]["state"] == "granted",
                limit_s=60,
            )
            os.killpg(child.pid, signal.SIGKILL)
            await eventually("the lease is over", lambda: not _leases(node))
        body = {"model": VERIFIER, "prompt": "a", "max_tokens": 2, "stream": True}
        events = await asyncio.to_thread(lambda: list(node.api.stream("/v1/completions", body)))
        assert events
        assert model_state(node, VERIFIER)["state"] == "ready"


async def test_a_node_that_was_killed_finds_the_job_again_and_its_end(tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ("--proposer", "ngram", "--memory-budget", "1000")
    async with NodeProcess(tmp_path, *flags) as node:
        with leased(data, "--mb", "900", "--", *CAT) as child:
            await asyncio.to_thread(up, child)
            node.send(signal.SIGKILL)
            await node.wait()
            # Half of the wait is for other processes that write to the book.
            alone = await asyncio.to_thread(
                lease, data, "run", "--mb", "200", "--wait", "6", "--", "true"
            )
            assert alone.returncode == 75, alone.stderr
            assert "of 1000.0 MiB are free, sh (pid" in alone.stderr
            async with NodeProcess(tmp_path, *flags) as again:
                assert [one["state"] for one in _leases(again)] == ["granted"]
                memory: Any = again.api.get("/api/v1/status")["memory"]
                assert list(memory["foreign"].values()) == [900 << 20]
                child.kill()
                await eventually("the lease is over", lambda: not _leases(again))


def _leases(node: NodeProcess) -> list[dict[str, Any]]:
    memory: Any = node.api.get("/api/v1/status")["memory"]
    found: list[dict[str, Any]] = memory["leases"]["leases"]
    return found


def kill_guard(folder: Path) -> None:
    pattern = f"kakeya.memory.leases.guard {listed(folder)[0]['id']}"
    done = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
    for word in done.stdout.split():
        os.kill(int(word), signal.SIGKILL)
