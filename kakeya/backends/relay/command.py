"""A command: a program that reads a prompt on its standard input and prints an answer.

Each request starts the program anew, in a session of its own. It is killed with its process group
as soon as the client leaves, its time is over, or its answer has all that was asked for; what it
leaves running behind itself is killed with its end.
"""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.command_answer import CommandAnswer, prompt_of, unfollowed
from kakeya.backends.request import Request
from kakeya.core.errors import DeadlineExceeded, PeerError, QueueFull
from kakeya.core.process import signal_group
from kakeya.core.units import KIB
from kakeya.text.tools.answer import Part

_CHUNK_BYTES = 64 * KIB
_TAIL_BYTES = 4 * KIB
"""Of the program's errors: their last line is told."""
_TAIL_S = 0.2
"""How long the last line is waited for behind the end of the program."""


class _Program(SubprocessStreamProtocol):
    """A running program. `Process.wait` would also wait for the end of its pipes, which programs
    that it leaves behind hold open; `exited` does not."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(limit=_CHUNK_BYTES, loop=loop)
        self.exited = loop.create_future()
        self.transport: asyncio.SubprocessTransport

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Self:
        """Start a program in a session of its own. Raises OSError."""
        loop = asyncio.get_running_loop()
        transport, program = await loop.subprocess_exec(
            cls, *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        program.transport = transport
        return program

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set_result(None)

    def kill(self) -> None:
        """Kill the group of the program, also what of it outlives the program."""
        signal_group(self.transport.get_pid())

    async def close(self) -> None:
        """Kill the group, and close the pipes, whatever holds their other ends."""
        self.kill()
        self.transport.close()
        await self.exited


class CommandBackend:
    """The backend of [commands.NAME]."""

    def __init__(self, name: str, argv: Sequence[str], *, timeout_s: float, at_once: int) -> None:
        """The values are those of `CommandSettings`."""
        self._who = f"the command {name}"
        self._argv = argv
        self._timeout_s = timeout_s
        self._at_once = at_once
        self._running = 0
        self._problem = ""

    async def start(self) -> None:
        """As `Backend`: looks whether there is such a program."""
        program = self._argv[0]
        if await asyncio.to_thread(shutil.which, program) is None:
            self._problem = f"{self._who} cannot be started: there is no program {program}"

    async def stop(self) -> None:
        """As `Backend`."""

    def health(self) -> str:
        """As `Backend`: whether there was such a program when it was last looked for."""
        return self._problem

    def check(self, asked: Request) -> list[str]:
        """As `Backend`."""
        return unfollowed(asked, self._who)

    async def handle(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        """As `Backend`. Raises QueueFull where as many run as may, DeadlineExceeded where the
        program takes too long, and PeerError where it cannot be started or fails."""
        answer = CommandAnswer(asked)
        prompt = prompt_of(asked).encode(errors="replace")
        with self._place():
            program = await self._spawn()
            errors = asyncio.create_task(_last_line(program))
            helpers = (errors, *map(asyncio.create_task, (_feed(program, prompt), _reap(program))))
            try:
                async for output in self._output(program):
                    for part in answer.feed(output):
                        yield part
                    if answer.is_over:
                        break
                else:
                    await self._check_exit(program, errors)
                for last in answer.finish():
                    yield last
            finally:
                for helper in helpers:
                    helper.cancel()
                await program.close()
                await asyncio.gather(*helpers, return_exceptions=True)

    @contextmanager
    def _place(self) -> Iterator[None]:
        most = self._at_once
        if self._running >= most:
            raise QueueFull(f"{self._who} runs {self._running} times, and may run {most} times")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _spawn(self) -> _Program:
        """Start the program. A request that is cancelled meanwhile leaves none behind."""
        spawning = asyncio.create_task(_Program.start(self._argv))
        try:
            program = await asyncio.shield(spawning)
        except OSError as fault:
            reason = fault.strerror or fault
            self._problem = f"{self._who} cannot be started: {self._argv[0]}: {reason}"
            raise PeerError(self._problem) from None
        except asyncio.CancelledError:
            spawning.add_done_callback(_kill_spawned)
            raise
        self._problem = ""
        return program

    async def _output(self, program: _Program) -> AsyncGenerator[bytes, None]:
        """The output as it comes. Raises DeadlineExceeded."""
        assert program.stdout is not None
        end = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            with self._late():
                async with asyncio.timeout_at(end):
                    output = await program.stdout.read(_CHUNK_BYTES)
                    if not output:
                        await asyncio.shield(program.exited)
                        return
            yield output

    @contextmanager
    def _late(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as late:
            most_s = self._timeout_s
            raise DeadlineExceeded(f"{self._who} took more than {most_s:g} s") from late

    async def _check_exit(self, program: _Program, errors: asyncio.Task[str]) -> None:
        status = program.transport.get_returncode()
        if status == 0:
            return
        await asyncio.wait((errors,), timeout=_TAIL_S)
        said = errors.result() if errors.done() else ""
        how = f"was ended by signal {-status}" if status and status < 0 else f"ended with {status}"
        raise PeerError(f"{self._who} {how}" + f": {said}" * bool(said))


async def _feed(program: _Program, prompt: bytes) -> None:
    """Write the prompt; a program that does not read it to its end is no fault."""
    stdin = program.stdin
    assert stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(prompt)
        await stdin.drain()
    stdin.close()


async def _reap(program: _Program) -> None:
    """Once the program has ended, end what it left behind, which would keep its output open."""
    await asyncio.shield(program.exited)
    program.kill()


async def _last_line(program: _Program) -> str:
    """Read the errors of the program to their end; returns the last line that is not empty."""
    assert program.stderr is not None
    tail = b""
    while data := await program.stderr.read(_CHUNK_BYTES):
        tail = (tail + data)[-_TAIL_BYTES:]
    lines = [" ".join(line.split()) for line in tail.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _kill_spawned(spawning: asyncio.Task[_Program]) -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().kill()
        spawning.result().transport.close()
