"""The end of a follower: any rank of a ring group but rank 0. See `leader` for the messages."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from kakeya.core.errors import KakeyaError, PeerProtocol, PeerUnavailable
from kakeya.engine.ring.leader import JOIN_S
from kakeya.engine.ring.link import RingLink
from kakeya.engine.ring.progress import BEAT_S


class RingFollower:
    """Hears commands. `lost` hears why this rank has to end, from any thread."""

    def __init__(self, link: RingLink, lost: Callable[[str], None]) -> None:
        self._link = link
        self._lost = lost
        self._commands: queue.SimpleQueue[Sequence[object]] = queue.SimpleQueue()
        self._finished = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._hear, name="ring-0", daemon=True).start()
        threading.Thread(target=self._beat, name="ring-beat", daemon=True).start()

    @classmethod
    def connect(
        cls, host: str, port: int, rank: int, token: str, lost: Callable[[str], None]
    ) -> RingFollower:
        """Connect to rank 0. Raises PeerUnavailable."""
        try:
            link = RingLink(socket.create_connection((host, port), timeout=JOIN_S))
        except OSError as failure:
            raise PeerUnavailable(
                f"rank 0 cannot be reached at {host}, port {port}: {failure}"
            ) from failure
        link.send(["hello", rank, token])
        return cls(link, lost)

    def ready(self, facts: Mapping[str, object]) -> None:
        """Say that the weights are in memory."""
        self._link.send(["ready", dict(facts)])

    def failed(self, message: str) -> None:
        """Say why this rank ends."""
        self._is_over.set()
        self._link.send(["failed", message])

    def close(self) -> None:
        """Close the connection; the group ends."""
        self._is_over.set()
        self._link.close()

    def commands(self) -> Iterator[Sequence[object]]:
        """Commands as they come; asking for the next one says that one is finished."""
        while True:
            yield self._commands.get()
            self._finished += 1

    def _hear(self) -> None:
        try:
            while True:
                match self._link.receive():
                    case ["beat"]:
                        pass
                    case [str(), *_] as command:
                        self._commands.put(command)
                    case other:
                        raise PeerProtocol(f"it said {str(other)[:80]!r}")
        except KakeyaError as failure:
            self._end(failure)

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            try:
                self._link.send(["beat", self._finished])
            except PeerUnavailable as failure:
                self._end(failure)
                return

    def _end(self, failure: KakeyaError) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._lost(f"rank 0 is lost: {failure.message}")
