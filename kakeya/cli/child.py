"""A whole node as a child process on loopback, for the demo, for benchmarks and for tests.

The child is the real daemon with free ports and its own folder, which also holds its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from kakeya.cli.node_api import NodeApi
from kakeya.core.errors import PeerUnavailable

_READY = re.compile(r"kakeya-node ready node_id=(\S+) grpc=(\S+) http=(\S+)\n")
_TAIL_CHARS = 2000
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


class NodeProcess:
    """A node from spawn to exit: an `async with` that stops it by SIGTERM, then SIGKILL."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        program: Sequence[str] = (sys.executable, "-m", "kakeya.node.daemon"),
        start_s: float = 90.0,
        stop_s: float = 12.0,
    ) -> None:
        """`flags` are those of `kakeya-node`; both addresses default to free loopback ports."""
        self._folder = folder
        self._command = [*program, "--data-dir", str(folder / "data")]
        for flag in ("--bind", "--http"):
            self._command += [] if flag in flags else [flag, "127.0.0.1:0"]
        self._command += flags
        self._start_s = start_s
        self._stop_s = stop_s
        self._process: asyncio.subprocess.Process | None = None
        self._is_told = False
        self.node_id = ""
        self.grpc = ""
        self.http = ""

    async def __aenter__(self) -> Self:
        log = await asyncio.to_thread(self._open_log)
        self._is_told = False
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        finally:
            log.close()
        try:
            await self._read_ready_line()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def log_file(self) -> Path:
        """The file that takes the node's stderr."""
        return self._folder / "node.log"

    @property
    def api(self) -> NodeApi:
        """The HTTP interface of the node."""
        return NodeApi(address=self.http)

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None and self.is_running:
            self._is_told |= number in _ENDING
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit status, negative for a signal."""
        return -1 if self._process is None else await self._process.wait()

    async def stop(self) -> int:
        """Stop the node and return its exit status.

        A node that was told to end gets no second signal: a second one ends it at once, with 1.
        """
        if not self._is_told:
            self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_s):
                return await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            return await self.wait()

    async def _read_ready_line(self) -> None:
        line = ""
        if self._process is not None and self._process.stdout is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._start_s):
                    line = (await self._process.stdout.readline()).decode()
        match = _READY.fullmatch(line)
        if match is None:
            tail = await asyncio.to_thread(self._log_tail)
            raise PeerUnavailable(f"the node did not start: {tail or 'no output'}")
        self.node_id, self.grpc, self.http = match.groups()

    def _open_log(self) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self.log_file.open("ab")

    def _log_tail(self) -> str:
        return self.log_file.read_text("utf-8", "replace")[-_TAIL_CHARS:].strip()
