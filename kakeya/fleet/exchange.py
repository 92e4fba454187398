"""One round of push-pull: the same batch to several peers at once, each answer merged alone.

A peer can be dead, hung, of another service or hostile: each ends as an `Outcome` with a sentence,
within its own deadline, and never as an exception of the round.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    DeadlineExceeded,
    KakeyaError,
    PeerError,
    PeerProtocol,
    PeerUnavailable,
)
from kakeya.core.ids import NodeId
from kakeya.core.log import event
from kakeya.fleet.cards import Card, CardFault
from kakeya.fleet.convert import MAX_BATCH_BYTES, join_cards, split_cards
from kakeya.fleet.registry import CapabilityRegistry, MergeReport
from kakeya.fleet.targets import fit_batch
from kakeya.wire.channels import Channels
from kakeya.wire.status import error_from_rpc

_log = logging.getLogger(__name__)
EXCHANGE_METHOD = "/kakeya.v1.CapabilityService/ExchangeCapabilities"
DEFAULT_TIMEOUT_S = 5.0
_GRACE_S = 0.5
"""After the RPC's own deadline; passes only when gRPC itself does not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one peer in a round. `error` is "" when it answered."""

    address: str
    error: str = ""
    error_code: str = ""
    rtt_s: float = 0.0
    cards_received: int = 0
    changed: tuple[NodeId, ...] = ()
    dropped: Mapping[CardFault, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round did. `sent_bytes` is the batch, once for each target."""

    outcomes: tuple[Outcome, ...]
    seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def errors(self) -> dict[str, str]:
        """A sentence for each peer that failed, by address."""
        return {outcome.address: outcome.error for outcome in self.outcomes if outcome.error}

    @property
    def changed(self) -> int:
        """Cards that were new or newer."""
        return sum(len(outcome.changed) for outcome in self.outcomes)

    @property
    def dropped(self) -> Mapping[CardFault, int]:
        """Cards that were refused, by fault."""
        total: Counter[CardFault] = Counter()
        for outcome in self.outcomes:
            total.update(outcome.dropped)
        return total


async def exchange_once(
    registry: CapabilityRegistry,
    targets: Sequence[str],
    *,
    channels: Channels,
    clock: Clock,
    rng: random.Random,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Round:
    """Restamp, push everything known to all targets at once, and merge what each answers.

    Returns within `timeout_s` and half a second. Failures mark their address in the registry.
    """
    started_mono = clock.mono()
    now = clock.wall()
    registry.restamp(now=now, mono=started_mono)
    wires = [card.wire for card in registry.snapshot(now)]
    batch = join_cards(fit_batch(wires, MAX_BATCH_BYTES, rng))
    outcomes = await asyncio.gather(
        *(
            _exchange(registry, address, batch, channels=channels, clock=clock, timeout_s=timeout_s)
            for address in targets
        )
    )
    return Round(
        outcomes=tuple(outcomes),
        seconds=clock.mono() - started_mono,
        sent_bytes=len(batch) * len(targets),
    )


async def push_card(
    card: Card, address: str, *, channels: Channels, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Send one card and ignore the answer. Raises PeerError or DeadlineExceeded."""
    await _call(channels.get(address), address, join_cards((card.wire,)), timeout_s)


async def _exchange(
    registry: CapabilityRegistry,
    address: str,
    batch: bytes,
    *,
    channels: Channels,
    clock: Clock,
    timeout_s: float,
) -> Outcome:
    started_mono = clock.mono()
    try:
        answer = await _call(channels.get(address), address, batch, timeout_s)
        wires = _split_answer(address, answer)
        report = registry.merge(wires, clock.wall())
    except KakeyaError as failure:
        if isinstance(failure, DeadlineExceeded):
            registry.mark_missed(address, clock.wall())
        elif isinstance(failure, PeerError):
            registry.mark_failed(address, clock.wall())
        return _failed(address, failure.message, failure.code, clock.mono() - started_mono)
    except Exception as failure:  # noqa: BLE001 - a gossip peer must not end the round
        registry.mark_failed(address, clock.wall())
        _log.debug("traceback", exc_info=failure)
        return _failed(address, f"{address}: {failure!r}", "internal", clock.mono() - started_mono)
    registry.mark_alive(address)
    log_report(report, registry, address)
    if not report.has_own and registry.accept_refusal(now=clock.wall(), mono=clock.mono()):
        event(_log, "own stamps ran ahead of the peers; began a new incarnation", peer=address)
    return Outcome(
        address=address,
        rtt_s=clock.mono() - started_mono,
        cards_received=len(wires),
        changed=report.changed,
        dropped=report.dropped,
    )


async def _call(channel: grpc.aio.Channel, address: str, batch: bytes, timeout_s: float) -> bytes:
    # Without serializers the call moves the bytes as they are.
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXCHANGE_METHOD)
    try:
        async with asyncio.timeout(timeout_s + _GRACE_S):
            answer: bytes = await method(batch, timeout=timeout_s)
    except grpc.RpcError as failure:
        raise error_from_rpc(failure, address) from failure
    except TimeoutError as failure:
        raise DeadlineExceeded(f"{address}: no answer in {timeout_s:g} s") from failure
    except asyncio.CancelledError as failure:
        if _is_cancelled():
            raise
        raise PeerUnavailable(f"{address}: the channel was closed during the call") from failure
    return answer


def _is_cancelled() -> bool:
    # gRPC raises CancelledError for a closed channel too; only a cancelled task may end by it.
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _split_answer(address: str, answer: bytes) -> list[bytes]:
    try:
        return split_cards(answer)
    except KakeyaError as failure:
        raise PeerProtocol(f"{address}: {failure.message}") from failure


def _failed(address: str, error: str, code: str, rtt_s: float) -> Outcome:
    return Outcome(address=address, error=error, error_code=code, rtt_s=rtt_s, dropped={})


def log_report(report: MergeReport, registry: CapabilityRegistry, peer: str) -> None:
    """Log what an operator must hear about: another node with our id, an earlier life of ours."""
    for address in report.conflicts:
        event(
            _log,
            "another node uses this node's id; give one of them another --node-id",
            level=logging.ERROR,
            node_id=registry.node_id,
            its_address=address,
            heard_from=peer,
        )
    if report.has_jumped:
        event(
            _log,
            "an earlier life of this node is known; went above it",
            incarnation=registry.incarnation,
            heard_from=peer,
        )
