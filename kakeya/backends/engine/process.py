"""One engine child as a process of the operating system: spawned, read, ended, never left behind.

The child leads its own session, so that a Ctrl-C at the terminal reaches the agent alone. Its stdin
is a pipe that only the agent holds: when the agent ends, in whatever way, the child reads
end-of-file and exits. The lines of its stdout and stderr go into the agent's log.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from kakeya.backends.engine.restart import Exit
from kakeya.core.errors import ConfigError
from kakeya.core.log import event
from kakeya.core.process import signal_group
from kakeya.generation.progress import LoadProgress

_log = logging.getLogger("kakeya.child")
_CHILD_RECORD = re.compile(r"\d\d:\d\d:\d\d (debug|info|warning|error|critical) +(.*)")
"""A line of `core.log` in a child: stamp, level, the rest."""
MAX_SOCKET_PATH_BYTES = 100
"""sun_path holds 104 bytes on macOS and 108 on Linux, with the terminating zero."""
_MAX_LINE_BYTES = 2000
_TRACEBACK = "Traceback (most recent call last)"
_DRAIN_S = 0.2

Command = Callable[[Path], Sequence[str]]
"""Builds the command line of a child for a socket."""


class SocketFolder:
    """A private folder for the sockets of one backend; each child gets a new name in it."""

    def __init__(self, parent: Path | None = None) -> None:
        try:
            self._path = Path(tempfile.mkdtemp(prefix="kakeya-", dir=parent))
        except OSError as error:
            raise ConfigError(
                f"no folder for engine sockets can be made in {parent}: {error.strerror}"
            ) from None
        self._made = 0

    @property
    def path(self) -> Path:
        """The path of the folder."""
        return self._path

    def next_socket(self) -> Path:
        """Return a new path. Raises ConfigError if it is too long for a socket."""
        self._made += 1
        socket = self._path / f"{self._made}.sock"
        length = len(os.fsencode(socket))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {socket} has {length} bytes and a unix socket takes at most "
                f"{MAX_SOCKET_PATH_BYTES}: choose a shorter runtime folder or TMPDIR"
            )
        return socket

    @classmethod
    @asynccontextmanager
    async def lent(cls, parent: Path | None) -> AsyncIterator[Self]:
        """A folder that is deleted with its content at the end, also when its maker is cancelled
        in the middle."""
        making = asyncio.create_task(asyncio.to_thread(cls, parent), name="make a socket folder")
        try:
            yield await asyncio.shield(making)
        finally:
            await asyncio.to_thread((await making).remove)

    def remove(self) -> None:
        """Delete the folder and its content."""
        shutil.rmtree(self._path, ignore_errors=True)


class EngineProcess:
    """A running child. Its owner must await `aclose`, which leaves no process and no socket."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        socket: Path,
        on_progress: Callable[[LoadProgress], None],
    ) -> None:
        self._on_progress = on_progress
        self._name = name
        self._process = process
        self._socket = socket
        self._last_line = ""
        self._cause = ""
        self.outgrew = ""
        """How the child outgrew its memory, where it was ended for that, in words."""
        self._relay = asyncio.create_task(self._relay_output(), name=f"output of {name}")
        self._wait = asyncio.create_task(process.wait(), name=f"exit of {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        command: Command,
        socket: Path,
        env: Mapping[str, str] | None = None,
        on_progress: Callable[[LoadProgress], None] = lambda _: None,
    ) -> Self:
        """Spawn the child. `on_progress` hears how far its load is.

        Raises ConfigError if the program does not exist.
        """
        arguments = [str(argument) for argument in command(socket)]
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=env,
            )
        except OSError as error:
            raise ConfigError(f"{arguments[0]} cannot be run: {error.strerror}") from None
        return cls(name, process, socket, on_progress)

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended."""
        return self._wait.done()

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Call back once the process has ended."""
        self._wait.add_done_callback(lambda _: callback())

    async def exited(self) -> Exit:
        """Wait for the end of the child and return its exit."""
        returncode = await asyncio.shield(self._wait)
        await asyncio.wait((self._relay,), timeout=_DRAIN_S)
        return Exit(returncode=returncode, last_line=self._last_line, cause=self._cause)

    async def has_exited_within(self, timeout_s: float) -> bool:
        """Whether the child ends by itself in that time."""
        await asyncio.wait((self._wait,), timeout=timeout_s)
        return self._wait.done()

    def end(self, cause: str) -> None:
        """Ask the child to end; `cause` completes "because it ..." in the text of its exit."""
        self._cause = self._cause or cause
        self._signal(signal.SIGTERM)

    def kill(self, cause: str) -> None:
        """Kill the child; `cause` completes "because it ..." in the text of its exit."""
        self._cause = self._cause or cause
        self._signal(signal.SIGKILL)

    async def aclose(self, grace_s: float) -> None:
        """End the child: SIGTERM, then SIGKILL after `grace_s`; remove its socket."""
        try:
            if not self._wait.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait((self._wait,), timeout=grace_s)
        finally:
            if not self._wait.done():
                self._signal(signal.SIGKILL)
        await asyncio.to_thread(self._socket.unlink, missing_ok=True)
        await asyncio.shield(self._wait)
        await asyncio.wait((self._relay,), timeout=_DRAIN_S)
        self._relay.cancel()
        await asyncio.gather(self._relay, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            signal_group(self._process.pid, number)

    async def _relay_output(self) -> None:
        if self._process.stdout is None:
            return
        trace: list[str] = []
        async for line in _lines(self._process.stdout):
            if line.startswith(_TRACEBACK) or (trace and line.startswith(" ")):
                trace.append(line)
                continue
            line = line.strip()
            if progress := LoadProgress.from_line(line):
                self._on_progress(progress)
                continue
            level = logging.INFO
            if record := _CHILD_RECORD.fullmatch(line):
                level = logging.getLevelNamesMapping()[record[1].upper()]
                line = record[2]
            self._last_line = line
            more = {"traceback": "\n".join(trace)} if trace else {}
            level = max(level, logging.ERROR) if trace else level
            trace = []
            event(_log, line, level=level, child=self._name, pid=self._process.pid, **more)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield non-empty lines, ended by newline or carriage return; long ones come in pieces."""
    pending = b""
    while chunk := await reader.read(65536):
        *complete, pending = re.split(rb"[\r\n]+", pending + chunk)
        if len(pending) > _MAX_LINE_BYTES:
            complete.append(pending)
            pending = b""
        for line in complete:
            if text := _text(line):
                yield text
    if text := _text(pending):
        yield text


def _text(line: bytes) -> str:
    return line[:_MAX_LINE_BYTES].decode("utf-8", errors="replace").rstrip()


def owner_socket(data_dir: Path, name: str) -> Path:
    """Return the path of a socket of a data directory that only its owner can open.

    It lies in the data directory or, if that path would be too long to bind, in a private folder in
    /tmp, which is made here. $TMPDIR will not do: launchd and a shell set it differently.

    Raises ConfigError if that folder belongs to another user or is open to others.
    """
    inside = data_dir.absolute() / name
    if len(os.fsencode(inside)) <= MAX_SOCKET_PATH_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(inside)).hexdigest()[:16]
    folder = Path("/tmp") / f"kakeya-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(
            f"{folder} belongs to another user or is open to others; remove it, "
            "or choose a shorter --data-dir"
        )
    return folder / name
