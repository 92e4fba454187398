"""The open connections of each caller, learned from its calls.

gRPC reports calls, not connections; the sockets of the process (`sockets.py`) tell which
connections are still open, and are read only when a limit is reached. A caller at its limit loses
its connection that was idle the longest, so that a node that returns by a new path is served.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kakeya.core.errors import Refused
from kakeya.wire.server import sockets as hangup
from kakeya.wire.server.sockets import Peer

_TIDY_EVERY = 256
"""New connections between two searches for closed ones."""
_ANSWER_S = 1.0
"""How long a refused connection stays open, so that its caller can read the reason."""


def surplus(open_now: Sequence[Peer], known: Collection[Peer], limit: int) -> tuple[Peer, ...]:
    """Choose connections to close so that no host has more than `limit`; known ones stay.

    This bounds a host that opens connections and makes no call, and so has no account.
    """
    by_host: dict[str, list[Peer]] = defaultdict(list)
    for peer in open_now:
        by_host[peer.rpartition(":")[0]].append(peer)
    return tuple(
        peer
        for peers in by_host.values()
        for peer in [peer for peer in peers if peer not in known][: max(0, len(peers) - limit)]
    )


@dataclass(slots=True)
class _Link:
    """One connection: the number of calls on it, and the time until which it may be used."""

    calls: int = 0
    ends_at: float = math.inf


class Connections:
    """Counts and closes connections; `limit` is per caller. Two functions reach the sockets."""

    def __init__(
        self,
        limit: int,
        *,
        open_peers: Callable[[], frozenset[Peer]] = hangup.open_peers,
        hang_up: Callable[[Collection[Peer]], int] = hangup.hang_up,
    ) -> None:
        self._limit = limit
        self._open_peers = open_peers
        self._hang_up = hang_up
        self._held: dict[str, OrderedDict[Peer, _Link]] = {}
        self._admissions: dict[tuple[str, Peer], asyncio.Task[None]] = {}
        self._noted = 0

    @property
    def noted(self) -> int:
        """Connections that came to a call, since the start."""
        return self._noted

    async def admit(self, caller: str, peer: Peer, *, ends_at: float = math.inf) -> None:
        """Note a connection before its first call. Raises Refused if it is one too many.

        `ends_at` is the end of the certificate that the caller showed on it (wall seconds).
        """
        known = self._held[caller].get(peer) if caller in self._held else None
        if known is not None:
            known.ends_at = ends_at  # a new connection may come from the port of an old one
            return
        # Calls that come at once on one connection are admitted once: after that it may have been
        # closed for the next, and is not noted again.
        admission = self._admissions.get((caller, peer))
        if admission is None:
            admission = asyncio.create_task(self._admit(caller, peer, ends_at))
            self._admissions[caller, peer] = admission
            admission.add_done_callback(lambda done: self._end_admission(done, caller, peer))
        await asyncio.shield(admission)

    async def _admit(self, caller: str, peer: Peer, ends_at: float) -> None:
        self._noted += 1
        is_full = len(self._held.get(caller, ())) >= self._limit
        if is_full or self._noted % _TIDY_EVERY == 0:
            known = self.known()
            self._forget(known - await asyncio.to_thread(self._open_peers))
        held = self._held.setdefault(caller, OrderedDict())
        if len(held) >= self._limit:
            self._make_room(caller, held, peer)
        held[peer] = _Link(ends_at=ends_at)

    @contextmanager
    def call(self, caller: str, peer: Peer) -> Iterator[None]:
        """Count one call on an admitted connection while it runs."""
        held = self._held.get(caller, OrderedDict())
        link = held.get(peer) or _Link()  # it may have been closed since: its calls end
        link.calls += 1
        if peer in held:
            held.move_to_end(peer)
        try:
            yield
        finally:
            link.calls -= 1

    def of(self, caller: str) -> tuple[Peer, ...]:
        """List the last known connections of a caller, the least recently used first."""
        return tuple(self._held.get(caller, ()))

    def callers(self) -> tuple[str, ...]:
        """List the callers that were last known to have a connection."""
        return tuple(self._held)

    def known(self) -> frozenset[Peer]:
        """List the connections that carried a call."""
        return frozenset(peer for held in self._held.values() for peer in held)

    def drop(self, caller: str) -> int:
        """Close all connections of a caller with their calls; return their number."""
        held = self._held.pop(caller, OrderedDict())
        self._close(tuple(held))
        return len(held)

    def drop_ended(self, now: float) -> int:
        """Close connections with expired certificates; return their number."""
        gone = [
            (caller, peer)
            for caller, held in self._held.items()
            for peer, link in held.items()
            if now > link.ends_at
        ]
        for caller, peer in gone:
            del self._held[caller][peer]
            if not self._held[caller]:
                del self._held[caller]
        self._close({peer for _, peer in gone})
        return len(gone)

    def _make_room(self, caller: str, held: OrderedDict[Peer, _Link], newcomer: Peer) -> None:
        idle = next((peer for peer, link in held.items() if not link.calls), None)
        if idle is None:
            asyncio.get_running_loop().call_later(_ANSWER_S, self._close, (newcomer,))
            raise Refused(
                f"{caller} has {len(held)} connections in use here and may have {self._limit}; "
                "send calls over one of them"
            )
        del held[idle]
        self._close((idle,))

    def _close(self, peers: Collection[Peer]) -> None:
        """Begin to close, in a thread, since that walks through all open files of the process."""
        if peers:
            asyncio.get_running_loop().run_in_executor(None, self._hang_up, peers)

    def _forget(self, closed: Collection[Peer]) -> None:
        for caller, held in list(self._held.items()):
            for peer in [peer for peer in held if peer in closed]:
                del held[peer]
            if not held:
                del self._held[caller]

    def _end_admission(self, admission: asyncio.Task[None], caller: str, peer: Peer) -> None:
        del self._admissions[caller, peer]
        if not admission.cancelled():
            admission.exception()  # the calls that were refused may be gone
