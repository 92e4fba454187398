"""The gossip loop: a round now, one each interval, and one soon after the own card changes.

Each round drops expired cards, chooses targets, exchanges, keeps counts and logs one line, for
debugging alone: news of peers is told when it comes (`liveness/news.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import overload

from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, every, shared_pause_s
from kakeya.fleet.cards.cards import (
    DEFAULT_INTERVAL_S,
    MAX_CARD_BYTES,
    Card,
    CardFault,
    Offer,
    is_dialable,
)
from kakeya.fleet.gossip.outcome import Round
from kakeya.fleet.gossip.round import DEFAULT_TIMEOUT_S, Exchanger
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.gossip.targets import DEFAULT_FANOUT, choose_targets, in_random_order
from kakeya.fleet.liveness.news import PeerNews
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.skew import WARN_S
from kakeya.wire.channels import Channels

_log = logging.getLogger(__name__)
MAX_FAREWELLS = 64
"""Peers that hear a farewell directly; the others hear it from them, or wait for the TTL."""
SLEEP_WATCH_S = 2.0
"""Time after waking within which this machine notices that it slept."""
FULL_EVERY = 12
"""Every so many rounds one peer gets all cards, so that no fault of the digests lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipConfig:
    """Pace, fanout and patience of rounds."""

    seeds: tuple[str, ...] = ()
    interval_s: float = DEFAULT_INTERVAL_S
    jitter: float = 0.1
    fanout: int = DEFAULT_FANOUT
    timeout_s: float = DEFAULT_TIMEOUT_S
    debounce_s: float = 0.5
    """Changes of the own card within this time share one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipStats:
    """Counts since the start; `dropped` by the reason of the card's fault, `clamped` cards that
    were kept with a TTL moved into the bounds."""

    rounds: int = 0
    exchanges: int = 0
    failures: int = 0
    cards_changed: int = 0
    sent_bytes: int = 0
    last_round_s: float = 0.0
    last_round_at: float = 0.0
    dropped: dict[CardFault, int] = field(default_factory=dict)
    clamped: int = 0

    def after(self, done: Round, now: float) -> GossipStats:
        """The counts with one more round added."""
        failed = len(done.errors)
        dropped = dict(self.dropped)
        for fault, count in done.dropped.items():
            dropped[fault] = dropped.get(fault, 0) + count
        return GossipStats(
            rounds=self.rounds + 1,
            exchanges=self.exchanges + len(done.outcomes) - failed,
            failures=self.failures + failed,
            cards_changed=self.cards_changed + done.changed,
            sent_bytes=self.sent_bytes + done.sent_bytes,
            last_round_s=done.seconds,
            last_round_at=now,
            dropped=dropped,
            clamped=self.clamped + done.clamped,
        )


class Gossip:
    """Keeps one registry in step with the fleet.

    `sync` is shared with the service. `sightings` are addresses that the local network shows,
    `may_dial` checks every address that the operator did not type, `routes` chooses among the
    addresses of a card.
    """

    def __init__(
        self,
        registry: CapabilityRegistry,
        config: GossipConfig,
        *,
        channels: Channels,
        clock: Clock,
        rng: random.Random,
        on_round: Callable[[Round], None] | None = None,
        sync: Sync | None = None,
        sightings: Callable[[], Collection[str]] = tuple,
        may_dial: Callable[[str], bool] = lambda address: True,
        routes: Callable[[Card], str] = lambda card: card.grpc_address,
    ) -> None:
        self._registry = registry
        self._config = config
        self._channels = channels
        self._clock = clock
        self._rng = rng
        self._on_round = on_round
        self._sync = sync or Sync(registry, rng=rng)
        self._exchanger = Exchanger(
            registry, self._sync, channels=channels, clock=clock, timeout_s=config.timeout_s
        )
        self._sightings, self._may_dial, self._routes = sightings, may_dial, routes
        self._is_clock_blamed = False
        self._is_trimmed = False
        self._unheard = set(config.seeds)
        """Seeds that neither answered so far nor were told to be silent."""
        self._wake = asyncio.Event()
        self._is_poked = False
        self._dialled: set[str] = set()
        self._stats = GossipStats()
        self.news = PeerNews(registry, clock)

    @property
    def stats(self) -> GossipStats:
        """Counts since the start."""
        return self._stats

    def start(self, supervisor: Supervisor) -> None:
        """Run the loop under a supervisor; its first round begins at once."""
        supervisor.start("gossip", self.run)
        supervisor.start("sleep watch", self._watch_sleep)
        supervisor.start("news of peers", self.news.run)

    async def run(self) -> None:
        """Gossip for ever."""
        await every(
            self._config.interval_s,
            self._tick,
            clock=self._clock,
            rng=self._rng,
            jitter=self._config.jitter,
            wake=self._wake,
        )

    def poke(self) -> None:
        """Ask for a round soon; many pokes within the debounce time are one."""
        self._is_poked = True
        self._wake.set()

    def announce(self, offer: Offer) -> None:
        """Announce a new offer and spread it soon; an equal offer does nothing."""
        if offer != self._registry.offer:
            clock = self._clock
            self._registry.announce(offer, now=clock.wall(), mono=clock.mono())
            self.poke()

    @property
    def sync(self) -> Sync:
        """The protocol's state, which the service shares."""
        return self._sync

    async def round(self, targets: Sequence[str] | None = None) -> Round:
        """Do one round now, with chosen targets or given ones."""
        now, mono = self._clock.wall(), self._clock.mono()
        start = self._registry.begin_round(now=now, mono=mono)
        if start.slept_s:
            self._log_sleep(start.slept_s)
        live: Sequence[str] = ()
        if targets is None:
            live = self._live(mono)
            targets = self._choose(live, now=now)
        self._dialled.update(targets)
        is_full_round = self._stats.rounds % FULL_EVERY == FULL_EVERY - 1
        if is_full_round or start.gone:
            await self._close_forgotten(targets, now=now, mono=mono)
        full = (self._rng.choice(targets),) if targets and is_full_round else ()
        done = await self._exchanger.round(
            targets,
            full,
            relied_on=self._known(targets, live, now=now),
            spares=self._draw(live, self._config.fanout, without=targets),
        )
        self._stats = self._stats.after(done, self._clock.wall())
        self._log_round(done, gone=len(start.gone))
        self._blame_clock()
        self._tell_of_trimmed()
        if self._on_round is not None:
            self._on_round(done)
        return done

    async def farewell(self, timeout_s: float = 2.0) -> int:
        """Tell the live peers that this node leaves; returns how many heard it."""
        told = self._draw(self._live(self._clock.mono()), MAX_FAREWELLS)
        heard = await self._exchanger.say_farewell(told, timeout_s)
        event(_log, "farewell", told=len(told), heard=heard)
        return heard

    async def _watch_sleep(self) -> None:
        # A round may be far away when a machine wakes, and placement must not wait for it.
        while True:
            await self._clock.sleep(shared_pause_s(SLEEP_WATCH_S, self._clock.mono()))
            slept_s = self._registry.notice_sleep(now=self._clock.wall(), mono=self._clock.mono())
            if slept_s:
                self._log_sleep(slept_s)
                self.poke()

    def _log_sleep(self, slept_s: float) -> None:
        event(_log, "this machine slept; every peer is in doubt until it is heard", seconds=slept_s)

    async def _tick(self) -> None:
        if self._is_poked and self._stats.rounds:
            await self._clock.sleep(self._config.debounce_s)
            self._wake.clear()
        self._is_poked = False
        await self.round()

    def _choose(self, live: Sequence[str], *, now: float) -> tuple[str, ...]:
        registry = self._registry
        return choose_targets(
            live=live,
            remembered=registry.remembered_addresses(now),
            seeds=self._config.seeds,
            own=registry.own_addresses,
            fanout=self._config.fanout,
            rng=self._rng,
            sightings=self._sightings(),
            may_dial=lambda address: is_dialable(address) and self._may_dial(address),
        )

    def _known(self, targets: Sequence[str], live: Sequence[str], *, now: float) -> list[str]:
        """The targets with a known live node, rather than a possible one."""
        hints = {*self._config.seeds, *self._sightings()}
        hints.update(self._registry.remembered_addresses(now))
        return [address for address in targets if address not in hints or address in live]

    def _live(self, mono: float) -> Sequence[str]:
        return _Addresses(self._registry.live_peers(mono=mono), self._routes)

    def _draw(self, live: Sequence[str], count: int, without: Collection[str] = ()) -> list[str]:
        """Some live addresses, none twice, for calls without a further check."""
        taken = {*without, *self._registry.own_addresses}
        drawn: dict[str, None] = {}
        for address in in_random_order(live, self._rng):
            if len(drawn) >= count:
                break
            if address not in taken and is_dialable(address):
                drawn[address] = None
        return list(drawn)

    async def _close_forgotten(self, targets: Sequence[str], *, now: float, mono: float) -> None:
        # A channel to a dead address would try to connect every few seconds for ever.
        wanted = {*self._live(mono), *self._registry.remembered_addresses(now)}
        wanted.update(self._config.seeds, targets)
        for address in self._dialled - wanted:
            await self._channels.discard(address)
        self._dialled &= wanted

    def _blame_clock(self) -> None:
        mono = self._clock.mono()
        skews = self._sync.skews
        is_blamed = skews.is_own_fault(mono)
        if is_blamed and not self._is_clock_blamed:
            event(
                _log,
                "the clock of this machine is wrong: most peers disagree with it; set it by NTP",
                level=logging.WARNING,
                fleet_is_ahead_s=skews.own(mono),
                limit_s=WARN_S,
            )
        self._is_clock_blamed = is_blamed

    def _tell_of_trimmed(self) -> None:
        left_out = self._registry.own_card.left_out
        if left_out and not self._is_trimmed:
            words = "this node's card is full: peers do not hear of all that it offers"
            event(_log, words, level=logging.WARNING, left_out=left_out, limit=MAX_CARD_BYTES)
        self._is_trimmed = left_out > 0

    def _log_round(self, done: Round, *, gone: int) -> None:
        event(
            _log,
            "round",
            level=logging.DEBUG,
            peers=len(done.outcomes),
            changed=done.changed,
            known=len(self._registry),
            gone=gone,
            dropped=sum(done.dropped.values()),
            errors="; ".join(done.errors.values()) or "none",
            seconds=done.seconds,
        )
        self._unheard -= {one.address for one in done.outcomes if not one.error}
        for address in self._unheard & done.errors.keys():
            self._unheard.discard(address)
            words = "no node answers at an address to begin with; it is tried again each round"
            problem = done.errors[address]
            event(_log, words, level=logging.WARNING, address=address, problem=problem)


class _Addresses(Sequence[str]):
    """Addresses of nodes, each computed on access: a round dials few of all nodes."""

    def __init__(self, cards: Sequence[Card], route: Callable[[Card], str]) -> None:
        self._cards, self._route = cards, route

    def __len__(self) -> int:
        return len(self._cards)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...

    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return [self._route(card) for card in self._cards[at]]
        return self._route(self._cards[at])
