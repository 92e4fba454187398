"""Rank 0's end of the control connections of a ring group.

    follower -> leader   ["hello", rank, token]   first, within JOIN_S
                         ["ready", facts]         its weights are in memory
                         ["failed", message]      and it ends
                         ["beat", finished]       each BEAT_S, and so many commands are finished
    leader -> follower   ["beat"], or a command

Commands go out in order, and a group never goes on without one of its ranks: whatever ends a
connection, or stops all counts, ends the group through `lost`.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kakeya.core.errors import ConfigError, KakeyaError, PeerProtocol, PeerUnavailable
from kakeya.engine.ring.link import RingLink
from kakeya.engine.ring.progress import BEAT_S, RingProgress

JOIN_S = 60.0
"""All ranks are in the ring when the first one connects here."""


class RingLeader:
    """Tells followers what to run. `lost` hears why the group has to end, from any thread."""

    def __init__(
        self,
        host: str,
        ranks: int,
        token: str,
        lost: Callable[[str], None],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at an address of this machine. Raises ConfigError where it is none."""
        self._token = token
        self._lost = lost
        self._timer = timer
        self._progress = RingProgress(ranks)
        self._counting = threading.Lock()
        self._links: dict[int, RingLink] = {}
        self._facts: dict[int, Mapping[str, object]] = {}
        self._failure = ""
        self._has_news = threading.Condition()
        self._own_finished = 0
        self._is_over = threading.Event()
        self._ranks = ranks
        try:
            self._listener = socket.create_server((host, 0), family=_family(host))
        except OSError as failure:
            raise ConfigError(
                f"rank 0 cannot listen at {host}: {failure.strerror or failure}; the first address "
                "of the hostfile must be one of the machine that runs rank 0"
            ) from failure

    @property
    def port(self) -> int:
        """The port that followers connect to."""
        return int(self._listener.getsockname()[1])

    def gather(self, within_s: float = JOIN_S) -> None:
        """Wait for all followers. Raises PeerUnavailable."""
        until_s = self._timer() + within_s
        while len(self._links) < self._ranks - 1:
            self._listener.settimeout(max(0.01, until_s - self._timer()))
            try:
                connection, _ = self._listener.accept()
                self._admit(RingLink(connection))
            except TimeoutError:
                missing = sorted(set(range(1, self._ranks)) - set(self._links))
                raise PeerUnavailable(
                    f"rank {', '.join(map(str, missing))} did not connect within {within_s:.0f} s"
                ) from None
        self._listener.close()
        for rank, link in self._links.items():
            threading.Thread(
                target=self._hear, args=(rank, link), name=f"ring-{rank}", daemon=True
            ).start()
        threading.Thread(target=self._watch, name="ring-watch", daemon=True).start()

    def facts(self) -> Sequence[Mapping[str, object]]:
        """Wait until all followers have loaded; return what rank 1 and the others say of it.

        Raises ConfigError where one could not load.
        """
        with self._has_news:
            self._has_news.wait_for(lambda: self._failure or len(self._facts) == len(self._links))
        if self._failure:
            raise ConfigError(self._failure)
        return [self._facts[rank] for rank in sorted(self._facts)]

    def tell(
        self, *commands: Sequence[object], tokens: int = 1, limit_s: float | None = None
    ) -> None:
        """Send commands, of which the last one computes so many tokens, and may take so long
        without a sign of getting on; None = as those before it let expect."""
        for rank, link in self._links.items():
            with self._counting:
                limit_s = self._progress.limit_s(tokens) if limit_s is None else limit_s
                for _ in commands:
                    self._progress.sent(rank, self._timer(), limit_s)
            try:
                for command in commands:
                    link.send(command)
            except PeerUnavailable as failure:
                self._end(rank, failure)

    def pending(self) -> list[int]:
        """The ranks that have commands left."""
        with self._counting:
            return self._progress.pending()

    def close(self) -> None:
        """Close all connections; followers end."""
        self._is_over.set()
        self._listener.close()
        for link in self._links.values():
            link.close()

    @contextmanager
    def working(self, tokens: int = 1, *, limit_s: float | None = None) -> Iterator[None]:
        """Compute the part of rank 0: a forward of so many tokens, or what takes `limit_s` at
        most."""
        began_s = self._timer()
        with self._counting:
            self._progress.sent(0, began_s, limit_s or self._progress.limit_s(tokens))
        try:
            yield
        finally:
            with self._counting:
                self._own_finished += 1
                now_s = self._timer()
                if limit_s is None:
                    self._progress.took(tokens, now_s - began_s)
                self._progress.finished(0, self._own_finished, now_s)

    def _admit(self, link: RingLink) -> None:
        """Take a connection that knows the token; close any other."""
        try:
            match link.receive():
                case ["hello", int(rank), str(token)] if (
                    token.isascii()
                    and hmac.compare_digest(token, self._token)
                    and 0 < rank < self._ranks
                    and rank not in self._links
                ):
                    self._links[rank] = link
                    return
        except KakeyaError:
            pass
        link.close()

    def _hear(self, rank: int, link: RingLink) -> None:
        """Read what a follower says, for as long as it lives."""
        try:
            while True:
                match link.receive():
                    case ["beat", int(count)]:
                        with self._counting:
                            self._progress.finished(rank, count, self._timer())
                    case ["ready", dict(facts)]:
                        with self._has_news:
                            self._facts[rank] = facts
                            self._has_news.notify_all()
                    case ["failed", str(message)] if rank not in self._facts:
                        self._fail(f"rank {rank}: {message}")
                    case ["failed", str(message)]:
                        raise PeerUnavailable(message)
                    case other:
                        raise PeerProtocol(f"it said {str(other)[:80]!r}")
        except KakeyaError as failure:
            self._end(rank, failure)

    def _watch(self) -> None:
        """Beat, and look whether the group gets on."""
        while not self._is_over.wait(BEAT_S):
            with self._counting:
                reason = self._progress.stuck(self._timer())
            if reason:
                self._is_over.set()
                self._lost(reason)
                return
            for rank, link in self._links.items():
                try:
                    link.send(["beat"])
                except PeerUnavailable as failure:
                    self._end(rank, failure)
                    return

    def _fail(self, message: str) -> None:
        with self._has_news:
            self._failure = self._failure or message
            self._has_news.notify_all()

    def _end(self, rank: int, failure: KakeyaError) -> None:
        """End the group because of one rank, unless that one said why it cannot load."""
        if self._is_over.is_set() or self._failure:
            return
        self._is_over.set()
        self._lost(f"rank {rank} is lost: {failure.message}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
