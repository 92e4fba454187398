"""One round of push-pull with several peers at once, each answer merged alone.

Peers that know digests get one, and then the bodies that they want; other peers, and now and then
all, get every card (`sync.py` makes the messages, this module moves them).

A peer can be dead, hung, of another service or hostile: each ends as a `PeerOutcome` with a
sentence, within its own deadline, and never as an exception of the round.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict

import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import (
    DeadlineExceeded,
    KakeyaError,
    PeerError,
    PeerProtocol,
    UnknownMethod,
)
from kakeya.core.log import event
from kakeya.fleet.gossip.outcome import PeerOutcome, Round, joined
from kakeya.fleet.gossip.sync import MAX_CARDS_BYTES, MAX_REPAIR_BYTES, Accepted, Sync
from kakeya.fleet.view.registry import CapabilityRegistry, MergeReport
from kakeya.fleet.view.slices import in_slices
from kakeya.wire.calls import call_bytes
from kakeya.wire.channels import Channels

_log = logging.getLogger(__name__)
EXCHANGE_METHOD = "/kakeya.v1.CapabilityService/ExchangeCapabilities"
SYNC_METHOD = "/kakeya.v1.GossipService/Sync"
PUSH_METHOD = "/kakeya.v1.GossipService/Push"
DEFAULT_TIMEOUT_S = 5.0
MIN_TIMEOUT_S = 0.05
PATIENCE_S = 1.0
"""Patience with a silent target: many times the round trip of a local network."""
PLAIN_S = 600.0
"""Time for which an address without Sync gets full exchanges; it may be updated later."""


async def exchange_once(
    registry: CapabilityRegistry,
    targets: Sequence[str],
    *,
    channels: Channels | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sync: Sync | None = None,
) -> Round:
    """Exchange with all targets at once: this node and each that answers then hold the union.

    A target that was sent bodies is asked a second time: an answer leaves out cards that these
    might have outdated. Without `channels` the call opens and closes its own, in plain text.
    Returns within `timeout_s` and half a second. Failures mark their address in the registry and
    stand in `errors` of the result.
    """
    clock, opened = clock or SystemClock(), channels or Channels()
    started_mono = clock.mono()
    sync = sync or Sync(registry, rng=rng or random.Random())
    exchanger = Exchanger(registry, sync, channels=opened, clock=clock, timeout_s=timeout_s)
    try:
        first = await exchanger.round(targets)
        again = [outcome.address for outcome in first.outcomes if outcome.has_pushed]
        if not again:
            return first
        left_s = max(started_mono + timeout_s - clock.mono(), MIN_TIMEOUT_S)
        exchanger = Exchanger(registry, sync, channels=opened, clock=clock, timeout_s=left_s)
        return joined(first, await exchanger.round(again))
    finally:
        if channels is None:
            await opened.aclose()


class Exchanger:
    """Exchanges with each peer in the way that it understands, and remembers that way."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        sync: Sync,
        *,
        channels: Channels,
        clock: Clock,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._registry = registry
        self._sync = sync
        self._channels = channels
        self._clock = clock
        self._timeout_s = timeout_s
        self._plain_until: dict[str, float] = {}

    async def round(
        self,
        targets: Sequence[str],
        full: Collection[str] = (),
        *,
        relied_on: Collection[str] = (),
        spares: Sequence[str] = (),
    ) -> Round:
        """Exchange with all targets at once; with those in `full`, all cards.

        For each target `relied_on` that refuses, or is silent for `PATIENCE_S`, one of the `spares`
        is asked in the rest of the time, so that lost messages do not make fewer peers hear news.
        """
        started_mono = self._clock.mono()
        self._forget_old(started_mono)
        digest = _Digest(self._sync, self._times())
        tasks = [self._begin(address, digest, is_full=address in full) for address in targets]
        try:
            if spares and tasks:
                await asyncio.wait(tasks, timeout=PATIENCE_S)
                silent = sum(
                    (not task.done() or bool(task.result().error)) and address in relied_on
                    for address, task in zip(targets, tasks, strict=True)
                )
                left_s = max(self._timeout_s - PATIENCE_S, PATIENCE_S)
                digest = _Digest(self._sync, self._times())
                tasks += [self._begin(a, digest, timeout_s=left_s) for a in spares[:silent]]
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return Round(
            outcomes=tuple(outcomes),
            seconds=self._clock.mono() - started_mono,
            sent_bytes=sum(outcome.sent_bytes for outcome in outcomes),
        )

    def _begin(
        self,
        address: str,
        digest: _Digest,
        *,
        is_full: bool = False,
        timeout_s: float | None = None,
    ) -> asyncio.Task[PeerOutcome]:
        timeout_s = timeout_s or self._timeout_s
        work = self._exchange(address, None if is_full else digest, timeout_s=timeout_s)
        return asyncio.get_running_loop().create_task(work)

    async def say_farewell(self, targets: Sequence[str], timeout_s: float) -> int:
        """Make the last card and push it to all targets at once; returns how many took it."""
        push = self._sync.farewell(**self._times())
        batch = self._sync.batch(**self._times())
        tellings = (self._tell_farewell(a, push, batch, timeout_s) for a in targets)
        answers = await asyncio.gather(*tellings, return_exceptions=True)
        return sum(not isinstance(answer, BaseException) for answer in answers)

    async def _tell_farewell(
        self, address: str, push: bytes, batch: bytes, timeout_s: float
    ) -> None:
        call = _Call(self._channels.get(address), address, self._clock, timeout_s)
        if not self._is_plain(address):
            try:
                await call.send(PUSH_METHOD, push)
            except UnknownMethod:
                pass
            else:
                return
        await call.send(EXCHANGE_METHOD, batch)

    async def _exchange(
        self, address: str, digest: _Digest | None, *, timeout_s: float
    ) -> PeerOutcome:
        registry, clock = self._registry, self._clock
        call = _Call(self._channels.get(address), address, clock, timeout_s)
        call.node_id = registry.node_at(address)
        try:
            accepted = await self._converse(call, digest)
        except KakeyaError as failure:
            if isinstance(failure, DeadlineExceeded):
                registry.mark_missed(address, mono=clock.mono())
            elif isinstance(failure, PeerError):
                registry.mark_failed(address, mono=clock.mono())
            return call.failed(failure.message, failure.code)
        except Exception as failure:  # noqa: BLE001 - a gossip peer must not end the round
            registry.mark_failed(address, mono=clock.mono())
            _log.debug("traceback", exc_info=failure)
            return call.failed(f"{address}: {failure!r}", "internal")
        if call.node_id or registry.trust is None:
            registry.mark_alive(address)  # else any member may have answered there
        report = accepted.report
        log_report(report, registry, address)
        return PeerOutcome(
            address=address,
            rtt_s=call.rtt_s,
            sent_bytes=call.sent_bytes,
            cards_received=accepted.cards_received,
            has_pushed=accepted.push is not None,
            changed=report.changed,
            dropped=report.dropped,
            clamped=report.clamped,
        )

    async def _converse(self, call: _Call, digest: _Digest | None) -> Accepted:
        if digest is not None and not self._is_plain(call.address):
            try:
                return await self._by_digest(call, digest)
            except UnknownMethod:
                self._plain_until[call.address] = self._clock.mono() + PLAIN_S
        max_bytes = MAX_CARDS_BYTES if self._is_plain(call.address) else MAX_REPAIR_BYTES
        batch = self._sync.batch(**self._times(), max_bytes=max_bytes)
        answer = await call.send(EXCHANGE_METHOD, batch)
        await self._verify_ahead(answer, in_field=1)
        with _as_peer_protocol(call.address):
            accepted = await in_slices(
                self._sync.taking_batch(
                    answer, rtt_s=call.rtt_s, peer=call.node_id, **self._times()
                )
            )
        if not accepted.report.has_own:
            self._accept_refusal(call.address)
        return accepted

    async def _by_digest(self, call: _Call, digest: _Digest) -> Accepted:
        answer = await call.send(SYNC_METHOD, digest.request())
        await self._verify_ahead(answer, in_field=2)
        with _as_peer_protocol(call.address):
            accepted = await in_slices(
                self._sync.accepting(answer, rtt_s=call.rtt_s, peer=call.node_id, **self._times())
            )
        if accepted.push is not None:
            await call.send(PUSH_METHOD, accepted.push)
        return accepted

    async def _verify_ahead(self, answer: bytes, *, in_field: int) -> None:
        work = self._sync.verification(answer, in_field)
        if work is not None:
            await asyncio.to_thread(work)

    def _accept_refusal(self, address: str) -> None:
        if self._registry.accept_refusal(**self._times()):
            event(_log, "own stamps ran ahead of the peers; began a new incarnation", peer=address)

    def _is_plain(self, address: str) -> bool:
        return address in self._plain_until or self._registry.is_plain_at(address)

    def _forget_old(self, mono: float) -> None:
        for address in [a for a, until in self._plain_until.items() if mono > until]:
            del self._plain_until[address]

    def _times(self) -> _Times:
        return {"now": self._clock.wall(), "mono": self._clock.mono()}


class _Times(TypedDict):
    now: float
    mono: float


class _Digest:
    """The digest for all targets of one moment, made for the first that needs it."""

    def __init__(self, sync: Sync, times: _Times) -> None:
        self._sync, self._times = sync, times
        self._request: bytes | None = None

    def request(self) -> bytes:
        """The SyncRequest."""
        if self._request is None:
            self._request = self._sync.request(**self._times)
        return self._request


class _Call:
    """The calls of one exchange with one peer, under one deadline."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, clock: Clock, timeout_s: float
    ) -> None:
        self.address = address
        self.node_id = ""
        """The id of the node there, where it is known."""
        self.rtt_s = 0.0
        self.sent_bytes = 0
        self._channel = channel
        self._clock = clock
        self._timeout_s = timeout_s
        self._started_mono = clock.mono()

    async def send(self, path: str, message: bytes) -> bytes:
        """Send bytes and return the answer's."""
        started_mono = self._clock.mono()
        left_s = max(self._started_mono + self._timeout_s - started_mono, 0.001)
        self.sent_bytes += len(message)
        answer = await call_bytes(self._channel, self.address, path, message, timeout_s=left_s)
        self.rtt_s = self._clock.mono() - started_mono
        return answer

    def failed(self, error: str, code: str) -> PeerOutcome:
        """The outcome of an exchange that failed."""
        return PeerOutcome(
            address=self.address,
            error=error,
            error_code=code,
            rtt_s=self._clock.mono() - self._started_mono,
            sent_bytes=self.sent_bytes,
        )


@contextmanager
def _as_peer_protocol(address: str) -> Iterator[None]:
    try:
        yield
    except KakeyaError as failure:
        raise PeerProtocol(f"{address}: {failure.message}") from failure


def log_report(report: MergeReport, registry: CapabilityRegistry, peer: str) -> None:
    """Log news for the operator: another node with this id, an earlier life of this node."""
    for address in report.conflicts:
        event(
            _log,
            "another process uses this node's id; stop the one that runs on a copy of the data "
            "directory, and give that one a folder of its own",
            level=logging.ERROR,
            node_id=registry.node_id,
            its_address=address,
            heard_from=peer,
        )
    if report.has_jumped:
        event(
            _log,
            "peers know a later incarnation of this node; began a higher one",
            incarnation=registry.incarnation,
            heard_from=peer,
        )
