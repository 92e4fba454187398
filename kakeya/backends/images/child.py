"""An image worker as the agent holds it: a process, and the link over which it draws.

start     the worker connects, loads, and says that it is ready
draw      one request at a time; a cancelled one ends at the end of a step, or with the process
death     ends the request with an error; `on_end` is called, and this worker draws no more
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from kakeya.backends.engine.process import Command, EngineProcess, SocketFolder
from kakeya.backends.images.frames import MAX_HEAD_BYTES, WorkerFrame, packed, receive_frame
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    KakeyaError,
    LoadFailed,
    MemoryRefused,
    PeerError,
    PeerProtocol,
    PeerUnavailable,
)
from kakeya.generation.image import DrawnImage, ImageRequest, Tell
from kakeya.generation.progress import LoadProgress

_Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]
STOP_GRACE_S = 0.5
"""From SIGTERM to SIGKILL: a worker saves nothing."""
CANCEL_S = 10.0
"""The least time that a cancelled request is given to end; twice the longest step, if that is more.
Then the process ends, and the next request pays for a load."""


class ImageWorker:
    """A worker that has loaded its pipeline. Its owner awaits `aclose`, which leaves no process."""

    def __init__(
        self,
        name: str,
        process: EngineProcess,
        link: _Link,
        *,
        clock: Clock,
        on_end: Callable[[], None],
    ) -> None:
        self._name = name
        self._process = process
        self._reader, self._writer = link
        self._clock = clock
        self._on_end = on_end
        self._stack = AsyncExitStack()
        self._frames: asyncio.Queue[WorkerFrame | None] = asyncio.Queue()
        self._number = 0
        self._longest_step_s = 0.0
        self._outgrown = ""
        self.end = ""
        """How the process ended, in a clause; "" = it lives."""

    @classmethod
    async def start(
        cls,
        name: str,
        command: Command,
        *,
        sockets: Path | None,
        timeout_s: float,
        clock: Clock,
        on_progress: Callable[[LoadProgress], None] = lambda _: None,
        on_process: Callable[[EngineProcess], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Self:
        """Start a worker and wait until it draws. `on_process` gets its process, which loads then;
        `on_end` is called when it ends by itself.

        Raises LoadFailed, and ConfigError for a program or a folder that cannot be used.
        """
        async with AsyncExitStack() as stack:
            folder = await stack.enter_async_context(SocketFolder.lent(sockets))
            socket = folder.next_socket()
            links = stack.enter_context(_Links())
            # Cancelled while it begins to listen, asyncio would leave the socket open.
            server = await asyncio.start_unix_server(
                links.add, path=socket, limit=MAX_HEAD_BYTES, start_serving=False
            )
            stack.callback(server.close)
            await server.start_serving()
            process = await EngineProcess.start(name, command, socket, on_progress=on_progress)
            stack.push_async_callback(process.aclose, STOP_GRACE_S)
            on_process(process)
            try:
                async with asyncio.timeout(timeout_s):
                    link = await _first(links.made.get(), process, name)
                    worker = cls(name, process, link, clock=clock, on_end=on_end)
                    await worker._loaded()
            except TimeoutError:
                raise LoadFailed(f"{name} did not load within {timeout_s:g} s") from None
            listening = asyncio.create_task(worker._listen(), name=f"frames of {name}")
            stack.push_async_callback(_cancelled, listening)
            worker._stack = stack.pop_all()
        return worker

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self, cause: str) -> None:
        """Kill the process for the memory that it takes: its request is refused; `cause` completes
        "because it ..."."""
        self._outgrown = cause
        self._process.kill(cause)

    async def aclose(self) -> None:
        """End the process; return when the system has its memory back."""
        self.end = self.end or "it was ended"
        await self._stack.aclose()

    async def draw(self, request: ImageRequest, tell: Tell) -> tuple[DrawnImage, ...]:
        """Draw the images of a request; see `ImageModel.draw`."""
        self._number += 1
        images, is_over = list[DrawnImage](), False
        self._check()
        self._send(
            "draw",
            prompt=request.prompt,
            seed=request.seed,
            count=request.count,
            size=request.size,
            steps=request.steps,
        )
        since = self._clock.mono()
        try:
            while True:
                frame = await self._next()
                match frame.kind:
                    case "step":
                        now = self._clock.mono()
                        self._longest_step_s = max(self._longest_step_s, now - since)
                        since = now
                        tell(*_progress(frame, request.count))
                    case "image":
                        images.append(DrawnImage(png=frame.body, seed=frame.number("seed")))
                    case "done":
                        is_over = True
                        break
                    case _:
                        is_over = True
                        raise _error(self._name, frame)
        finally:
            if not is_over and not self.end:
                await self._stop()
        if len(images) != request.count:
            raise PeerProtocol(f"{self._name} drew {len(images)} images of {request.count}")
        return tuple(images)

    # The link

    async def _loaded(self) -> None:
        frame = await receive_frame(self._reader)
        if frame is None:
            raise LoadFailed(f"{self._name} could not be loaded: {await self._exit()}")
        if frame.kind != "ready":
            raise LoadFailed(f"{self._name} could not be loaded: {frame.head.get('message')}")

    async def _listen(self) -> None:
        try:
            while frame := await receive_frame(self._reader):
                self._frames.put_nowait(frame)
        except PeerProtocol as wrong:
            self._process.kill(f"broke the protocol: {wrong.message}")
        self.end = await self._exit()
        self._frames.put_nowait(None)
        self._on_end()

    async def _exit(self) -> str:
        """How the process ends, which has closed its link."""
        if not await self._process.has_exited_within(STOP_GRACE_S):
            self._process.kill("closed its link")
        return (await self._process.exited()).describe()

    def _send(self, kind: str, **fields: object) -> None:
        self._writer.write(packed(kind, {"request": self._number, **fields}))

    async def _next(self) -> WorkerFrame:
        """The next frame of the current request. Raises PeerUnavailable when the process ends."""
        while True:
            self._check()
            frame = await self._frames.get()
            if frame is not None and frame.number("request") == self._number:
                return frame

    def _check(self) -> None:
        if self.end and self._outgrown:
            raise MemoryRefused(
                f"the process that draws with {self._name} was ended: it {self._outgrown}; ask for "
                "a smaller image, or give the node a larger --memory-budget"
            )
        if self.end:
            raise PeerUnavailable(
                f"the process that draws with {self._name} ended ({self.end}); ask again: the next "
                "request starts a new one",
                retry_after_s=1.0,
            )

    async def _stop(self) -> None:
        """End the current request, or the process."""
        self._send("cancel")
        wait_s = max(CANCEL_S, 2 * self._longest_step_s)
        try:
            async with asyncio.timeout(wait_s):
                while (await self._next()).kind not in ("done", "error"):
                    pass
        except (PeerUnavailable, MemoryRefused):
            pass  # it has ended
        except BaseException as problem:
            self.end = "it did not stop a request that was cancelled"
            self._process.kill("did not stop a request that was cancelled")
            if not isinstance(problem, TimeoutError):
                raise


class _Links:
    """The links that a worker makes: one. All are closed at the end, also one that comes later."""

    def __init__(self) -> None:
        self.made: asyncio.Queue[_Link] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for writer in self._writers:
            writer.close()

    def add(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a link."""
        if self._is_over:
            writer.close()
            return
        self._writers.append(writer)
        self.made.put_nowait((reader, writer))


async def _first(
    arrival: Coroutine[object, object, _Link], process: EngineProcess, name: str
) -> _Link:
    """The link that a process makes. Raises LoadFailed if it ends without one."""
    link = asyncio.ensure_future(arrival)
    ended = asyncio.ensure_future(process.exited())
    try:
        await asyncio.wait((link, ended), return_when=asyncio.FIRST_COMPLETED)
        if not link.done():
            raise LoadFailed(f"{name} could not be loaded: {ended.result().describe()}")
        return link.result()
    finally:
        for one in (link, ended):
            one.cancel()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _progress(frame: WorkerFrame, count: int) -> tuple[float, str]:
    image, step, steps = (frame.number(name) for name in ("image", "step", "steps"))
    of = f" of image {image + 1} of {count}" if count > 1 else ""
    return (image + step / max(1, steps)) / count, f"step {step} of {steps}{of}"


def _error(name: str, frame: WorkerFrame) -> KakeyaError:
    message = f"{name}: {frame.head.get('message')}"
    if frame.head.get("code") == "memory":
        # Without a time to come again: as large an image needs as much memory then.
        return MemoryRefused(f"{message}; ask for a smaller image")
    return PeerError(message)
