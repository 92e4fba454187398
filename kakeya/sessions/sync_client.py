"""The client for programs without an event loop: the same calls, which block.

    with SyncClient("127.0.0.1:50051") as client, client.create_session() as session:
        session.append([1, 2, 3])
        for token_id in session.generate(max_tokens=64):
            ...

Each method is the one of `Client`, run on an event loop that all blocking clients of the process
share, in a thread of its own: gRPC's asyncio side does best with one loop. So it works where a
loop runs already, as in a notebook, and from several threads. Ctrl-C, and a loop that is left,
cancel the call at the node before they go on.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from kakeya.core.errors import Conflict
from kakeya.sessions.client import Client, ClientSession, GenerateSummary

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R")
_I = TypeVar("_I")
_I_co = TypeVar("_I_co", covariant=True)
_CANCEL_S = 5.0
"""The longest wait for a cancelled call; the loop's thread goes on with it."""
_END = object()


class _LoopThread:
    """An event loop in a daemon thread, until the interpreter ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kakeya-client", daemon=True
        )
        self._thread.start()
        atexit.register(self._stop)  # a generator that is freed later must find no frozen loop
        self.is_running = True

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a coroutine. Whatever ends the wait, Ctrl-C say, cancels it first."""
        if not self.is_running or threading.current_thread() is self._thread:
            work.close()
            raise Conflict(
                "a blocking client was called while the program ends, or on its own loop"
            )
        answer: Future[_T] = Future()
        begun: list[asyncio.Task[_T]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(work))
            begun[0].add_done_callback(lambda task: _settle(answer, task))

        try:
            self._loop.call_soon_threadsafe(begin)
            return answer.result()
        except BaseException:
            if not answer.done():
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in begun])
                wait([answer], _CANCEL_S)
            raise

    def _stop(self) -> None:
        self.is_running = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CANCEL_S)


def _settle(answer: Future[_T], task: asyncio.Task[_T]) -> None:
    if task.cancelled():
        answer.set_exception(asyncio.CancelledError())  # `wait` does not see `cancel`
    elif (failure := task.exception()) is not None:
        answer.set_exception(failure)
    else:
        answer.set_result(task.result())


@cache
def _shared_loop() -> _LoopThread:
    return _LoopThread()


class _Blocking(Protocol[_I_co]):
    """The blocking side of `inner`."""

    @property
    def inner(self) -> _I_co: ...


def _made_as(
    kind: Callable[_P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """Give a constructor the arguments of `kind`."""
    return lambda init: wraps(kind.__init__)(init)


def _blocking(
    method: Callable[Concatenate[_I, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_Blocking[_I], _P], _T]:
    @wraps(method)
    def call(self: _Blocking[_I], /, *given: _P.args, **named: _P.kwargs) -> _T:
        return _shared_loop().run(method(self.inner, *given, **named))

    return call


def _iterating(
    method: Callable[Concatenate[_I, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate[_Blocking[_I], _P], Generator[_T, None, None]]:
    @wraps(method)
    def iterate(
        self: _Blocking[_I], /, *given: _P.args, **named: _P.kwargs
    ) -> Generator[_T, None, None]:
        loop, items = _shared_loop(), method(self.inner, *given, **named)
        try:
            while (item := loop.run(_resolved(anext(items, _END)))) is not _END:
                yield item  # type: ignore[misc]
        finally:
            if loop.is_running:
                loop.run(items.aclose())

    return iterate


def _made_into(
    kind: Callable[[_T], _R], method: Callable[_P, Coroutine[Any, Any, _T]]
) -> Callable[_P, Coroutine[Any, Any, _R]]:
    @wraps(method)
    async def made(*given: _P.args, **named: _P.kwargs) -> _R:
        return kind(await method(*given, **named))

    return made


async def _resolved(answer: Awaitable[_T]) -> _T:
    return await answer


class SyncSession:
    """`ClientSession` without asyncio; a `with` that closes the session."""

    def __init__(self, inner: ClientSession) -> None:
        self.inner = inner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def session_id(self) -> str:
        """The id that the node gave the session."""
        return self.inner.session_id

    @property
    def last_done(self) -> GenerateSummary | None:
        """The summary of the generation that ended last."""
        return self.inner.last_done

    append = _blocking(ClientSession.append)
    generate = _iterating(ClientSession.generate)
    info = _blocking(ClientSession.info)
    close = _blocking(ClientSession.close)


class SyncClient:
    """`Client` without asyncio; a `with` that closes its channel. Arguments as there."""

    @_made_as(Client)
    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - those of Client
        self.inner = Client(*given, **named)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    create_session = _blocking(_made_into(SyncSession, Client.create_session))
    warm = _blocking(Client.warm)
    watch = _iterating(Client.watch)
    close = _blocking(Client.aclose)
