"""The book of leases in Redis, for hosts that run one anyway (`pip install kakeya[redis]`).

One hash for each machine: the head, a field for each lease, and a version that every change raises.
One script writes a change, only if the version is still that of the book it was decided on;
otherwise it is decided anew. An emptied Redis is a lost book: living holders write themselves down
again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from kakeya.core import errors
from kakeya.core.log import event
from kakeya.memory.leases.codec import decode_book, encode_head, encode_lease
from kakeya.memory.leases.lease import Book
from kakeya.memory.leases.store import changes

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = logging.getLogger(__name__)
SCHEMES = ("redis", "rediss", "unix")
TIMEOUT_S = 5.0
_LIMIT_S = 3 * TIMEOUT_S
"""The time limit of one call, the client's own repetitions included."""
_TRIES = 200
_PAUSE_S = 0.02
_VERSION, _HEAD, _LINE = "version", "head", "lease:"
_SWAP = """
local version = redis.call('HGET', KEYS[1], 'version') or '0'
if version ~= ARGV[1] then return 0 end
local written = tonumber(ARGV[2])
for i = 1, written do
  redis.call('HSET', KEYS[1], ARGV[1 + 2 * i], ARGV[2 + 2 * i])
end
for i = 3 + 2 * written, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
redis.call('HINCRBY', KEYS[1], 'version', 1)
return 1
"""
Result = TypeVar("Result")


class RedisLeaseStore:
    """See `store.LeaseStore`. `machine` gives the name of the machine that the book is of; it may
    block.

    Raises ConfigError for a URL that is none, and where the client is not installed.
    """

    def __init__(
        self, url: str, *, machine: Callable[[], str], rng: random.Random | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not (parts.hostname or parts.scheme == "unix"):
            raise errors.ConfigError(
                f"lease store {_without_password(url)!r} is no address of a Redis; "
                "redis://HOST:PORT/DB, rediss://... or unix://PATH is needed"
            )
        self._url = url
        self._place = _without_password(url)
        self._machine = machine
        self._key = ""
        self._rng = rng or random.Random()
        self._redis: Redis | None = None

    @property
    def place(self) -> str:
        """The URL without its password."""
        return self._place

    async def __aenter__(self) -> Self:
        self._redis = await asyncio.to_thread(_client, self._url)
        self._key = f"kakeya:leases:{await asyncio.to_thread(self._machine)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            await redis.aclose()

    async def read(self) -> Book:
        """See the contract."""
        book, _ = await self._load()
        return book

    async def change(self, decide: Callable[[Book], tuple[Book, Result]]) -> Result:
        """See the contract."""
        for attempt in range(_TRIES):
            before, version = await self._load()
            after, result = decide(before)
            if after is before or await self._swap(before, after, version):
                return result
            await asyncio.sleep(self._rng.random() * _PAUSE_S * min(8, attempt + 1))
        raise errors.StoreFailed(
            f"the lease store {self._place} changed {_TRIES} times in a row while one change was "
            "tried; try again"
        )

    async def _load(self) -> tuple[Book, str]:
        fields = await self._call(lambda redis: redis.hgetall(self._key))
        texts = {_text(name): _text(value) for name, value in fields.items()}
        lines = {
            name.removeprefix(_LINE): text for name, text in texts.items() if name.startswith(_LINE)
        }
        version = texts.get(_VERSION, "0")
        try:
            book, damaged = decode_book(texts.get(_HEAD), lines)
        except errors.PeerProtocol as problem:
            await self._remove(version, [_HEAD], problem.message)
            return await self._load()
        if damaged:
            await self._remove(version, [_LINE + key for key in damaged], *damaged.values())
            return await self._load()
        return book, version

    async def _swap(self, before: Book, after: Book, version: str) -> bool:
        written, removed = changes(before, after)
        puts = [_HEAD, encode_head(after)]
        for key in written:
            puts += [_LINE + key, encode_lease(after.leases[key])]
        return await self._script(version, puts, [_LINE + key for key in removed])

    async def _remove(self, version: str, fields: list[str], *problems: str) -> None:
        """Remove unreadable fields, so that they stop no other process."""
        if await self._script(version, [], fields):
            event(
                _log,
                "lines of the lease store were damaged and are taken out; holders that live "
                "write themselves again",
                level=logging.WARNING,
                store=self._place,
                problem="; ".join(problems),
            )

    async def _script(self, version: str, puts: list[str], removed: list[str]) -> bool:
        arguments = [version, str(len(puts) // 2), *puts, *removed]
        done = await self._call(lambda redis: redis.eval(_SWAP, 1, self._key, *arguments))
        return bool(done)

    async def _call(self, call: Callable[[Any], Awaitable[Any]]) -> Any:  # noqa: ANN401
        from redis.exceptions import RedisError

        if self._redis is None:
            raise errors.Conflict(f"the lease store {self._place} is not open; use `async with`")
        # In a task of its own: the client may swallow a cancellation that meets an answer, and
        # a process that left the queue would wait on.
        asked = asyncio.ensure_future(call(self._redis))
        try:
            await asyncio.wait((asked,), timeout=_LIMIT_S)
            if not asked.done():
                raise errors.StoreFailed(
                    f"the lease store {self._place} did not answer within {_LIMIT_S:g} s; look "
                    "whether that Redis works, or unset the setting leases.store"
                )
            return asked.result()
        except (RedisError, OSError) as problem:
            raise errors.StoreFailed(
                f"the lease store {self._place} cannot be used: {problem}; start that Redis, or "
                "unset the setting leases.store"
            ) from problem
        finally:
            asked.cancel()


def _client(url: str) -> Redis:
    try:
        from redis.asyncio import Redis
    except ImportError as problem:
        raise errors.ConfigError(
            "leases are to be kept in Redis, but its client is not installed; run "
            "`pip install kakeya[redis]`, or unset the setting leases.store"
        ) from problem
    # Without driver_info, which is read from files anew for each connection.
    return Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, driver_info=None
    )


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
