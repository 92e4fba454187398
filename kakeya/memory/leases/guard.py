"""The guard beside a leased command: sends heartbeats, and ends the lease after the last process.

    python -m kakeya.memory.leases.guard ID    the lease as JSON on stdin; says "ok" when it guards

The command replaces the program that asked for its lease, so nothing stands between it and its
terminal, its signals and its exit status. The guard has no parent and a session of its own: no
signal of a terminal reaches it, and the command never waits for a child that it did not start. When
the guard is killed, the lease goes on as long as the command's processes are seen to live.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kakeya.core import errors
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.process import watched_exit
from kakeya.memory.leases import rules
from kakeya.memory.leases.codec import decode_lease, encode_lease
from kakeya.memory.leases.lease import Process, ProcessLease
from kakeya.memory.leases.place import open_lease_store
from kakeya.memory.leases.processes import Census, ProcessTree
from kakeya.memory.leases.store import LeaseStore

_START_S = 20.0
_POLL_S = 1.0
_END_S = 60.0
"""The time for which the end of the lease is retried at a store that is out of order."""


def start_guard(lease: ProcessLease, folder: Path, url: str) -> None:
    """Start the guard of a lease that this process holds. Raises StoreFailed. Blocks."""
    order = {
        "lease_id": lease.lease_id,
        "lease": encode_lease(lease),
        "folder": str(folder.resolve()),
        "url": url,
    }
    # The id is for a list of processes.
    command = [sys.executable, "-m", "kakeya.memory.leases.guard", lease.lease_id]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as started:
        try:
            said, _ = started.communicate(json.dumps(order).encode(), timeout=_START_S)
        except subprocess.TimeoutExpired:
            said = b""
            started.kill()
    if said.strip() != b"ok":
        raise errors.StoreFailed(
            f"the guard of lease {lease.lease_id} did not start: {said.decode(errors='replace')}"
        )


class LeaseGuard:
    """Guards one lease until its holder's processes have ended."""

    def __init__(
        self, store: LeaseStore, census: Census, lease: ProcessLease, *, clock: Clock
    ) -> None:
        self._store = store
        self._census = census
        self._lease = lease
        self._clock = clock
        self._ended = asyncio.Event()

    async def run(self, when_ready: Callable[[], None]) -> None:
        """Guard, with a first heartbeat before `when_ready`; then end the lease."""
        tree = await self._look()
        await self._beat(tree)
        when_ready()
        async with _when_ended(self._lease.processes[0], self._ended) as is_told:
            await self._watch(tree, is_told=is_told)
        await self._end_lease()

    async def _watch(self, tree: ProcessTree, *, is_told: bool) -> None:
        beat_mono = self._clock.mono()
        while tree.is_alive:
            # Once the first process has ended, its children are asked for more often.
            pause_s = _POLL_S if self._ended.is_set() or not is_told else rules.BEAT_S
            wake = asyncio.Event() if self._ended.is_set() else self._ended
            await self._clock.sleep(pause_s, wake)
            with contextlib.suppress(*rules.OUT_OF_ORDER):
                tree = await self._look()
                now = self._clock.mono()
                if tree.is_alive and now - beat_mono >= rules.BEAT_S:
                    beat_mono = now
                    await self._beat(tree)

    async def _look(self) -> ProcessTree:
        # The guard is the holder's child for a moment, or again where that adopts orphans: a guard
        # that counted itself would guard itself for ever.
        apart = frozenset({os.getpid()})
        trees = await asyncio.to_thread(self._census.process_trees, (self._lease,), apart)
        return trees[self._lease.lease_id]

    async def _beat(self, tree: ProcessTree) -> None:
        self._lease = await self._store.change(
            lambda book: rules.beat(
                book,
                self._lease,
                self._clock.mono(),
                processes=tree.processes,
                used_bytes=tree.used_bytes,
            )
        )

    async def _end_lease(self) -> None:
        until_mono = self._clock.mono() + _END_S
        while True:
            try:
                await self._store.change(lambda book: (book.without(self._lease.lease_id), None))
            except errors.StoreFailed:
                if self._clock.mono() >= until_mono:
                    return  # readers of the book see that no process of the holder lives
                await self._clock.sleep(_POLL_S)
            else:
                return


@contextlib.asynccontextmanager
async def _when_ended(process: Process, ended: asyncio.Event) -> AsyncIterator[bool]:
    """Set an event at once when a process ends; yields whether the system tells."""
    with contextlib.ExitStack() as stack:
        handle = None
        try:
            handle = stack.enter_context(watched_exit(process.pid))
        except ProcessLookupError:
            ended.set()
        except OSError:  # no descriptor is left: the processes are looked for
            pass
        if handle is not None:
            _call_once_readable(handle, ended.set, stack)
        yield handle is not None


def _call_once_readable(
    descriptor: int, call: Callable[[], None], stack: contextlib.ExitStack
) -> None:
    loop = asyncio.get_running_loop()

    def tell() -> None:
        loop.remove_reader(descriptor)
        call()

    loop.add_reader(descriptor, tell)
    stack.callback(loop.remove_reader, descriptor)


async def _main(order: dict[str, str]) -> None:
    lease = decode_lease(order["lease_id"], order["lease"])
    census = await asyncio.to_thread(Census)
    async with open_lease_store(Path(order["folder"]), order["url"]) as store:
        await LeaseGuard(store, census, lease, clock=SystemClock()).run(_detach)


def _detach() -> None:
    """Report that the guard works; then let go of the terminal and of the working folder."""
    sys.stdout.write("ok\n")
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    os.chdir("/")


if __name__ == "__main__":
    if os.fork():  # without a parent from here on; there is one thread yet
        os._exit(0)
    try:
        asyncio.run(_main(json.load(sys.stdin)))
    except errors.KakeyaError as problem:
        sys.stdout.write(problem.message)
        sys.exit(1)
