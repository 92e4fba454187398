"""Run another program and collect its output."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output and exit status of a program; `status` None = it was killed at its limit."""

    status: int | None
    stdout: str
    stderr: str


RunProgram = Callable[[Sequence[str], float], Awaitable[Output | None]]
"""Runs a program with a limit in seconds; None = the program does not exist."""


async def run_program(command: Sequence[str], limit_s: float) -> Output | None:
    """Run a program in a thread and collect its output; the program ends at its limit.

    Cancelling the caller does not end the program earlier: a child that asyncio spawns cannot be
    cancelled safely while it starts.
    """
    return await asyncio.to_thread(_run, command, limit_s)


def _run(command: Sequence[str], limit_s: float) -> Output | None:
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        return Output(status=None, stdout="", stderr="")
    return Output(
        status=ended.returncode,
        stdout=ended.stdout.decode("utf-8", "replace"),
        stderr=ended.stderr.decode("utf-8", "replace"),
    )
