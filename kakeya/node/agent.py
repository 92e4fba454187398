"""The agent: one node's parts, built and wired here and nowhere else, in one exit stack.

    start   lock the data directory, bind both ports, build, accept; then engines begin to load
    run     each change of a model's state restamps the card and wakes the gossip
    stop    health NOT_SERVING, farewell card, both servers drain, engines end, the lock falls

Ports are bound before anything is built, so that an unusable one ends the start at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from grpc_health.v1 import health_pb2_grpc
from prometheus_client.core import Metric

from kakeya.core.clock import SystemClock
from kakeya.core.ids import NGRAM
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.decoding.ngram import NGramProposer
from kakeya.decoding.service import ProposerService
from kakeya.fleet.exchange import Round
from kakeya.fleet.gossip import Gossip, GossipConfig
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.fleet.ring import probe_ring_environment
from kakeya.fleet.service import add_capability_service
from kakeya.fleet.sync import Sync
from kakeya.node import metrics
from kakeya.node.card import Place, make_offer
from kakeya.node.config import NodeConfig
from kakeya.node.datadir import DataDir, NodeState, RunInfo, default_folder, next_state
from kakeya.node.directory import Models, failed_addresses
from kakeya.node.drafting import FleetDrafts
from kakeya.node.engines import EngineCommand, Engines, sockets_folder
from kakeya.node.health import NodeHealth
from kakeya.node.machine import draw_node_id, host_names, platform_name, unified_memory_bytes
from kakeya.node.models import Role
from kakeya.node.ports import bind
from kakeya.node.settings import split_address
from kakeya.node.status import Json, View, describe
from kakeya.node.watchdog import LoopWatchdog
from kakeya.runtime.generation import ModelState, Usage
from kakeya.runtime.service import RuntimeService
from kakeya.runtime.store import SessionLimits, SessionStore
from kakeya.serving.backends.engine_backend import EngineOptions
from kakeya.serving.gateway import build_app
from kakeya.serving.server import HttpServer, serve_http
from kakeya.v1.distributed_pb2_grpc import add_ProposerServiceServicer_to_server
from kakeya.v1.runtime_pb2_grpc import add_RuntimeServiceServicer_to_server
from kakeya.wire.channels import Channels

_log = logging.getLogger(__name__)
GRACE_S = 5.0
"""How long calls that run may go on after a stop signal."""
_FAREWELL_S = 1.0
_STUCK = "loop"
_RUNTIME = "kakeya.v1.RuntimeService"
_ALWAYS_SERVING = ("kakeya.v1.CapabilityService", "kakeya.v1.ProposerService")


class Agent:
    """A node from start to stop: an `async with` inside which it serves.

    Entering raises ConfigError for an address, a folder or a model that cannot be used, Conflict
    for a data directory that another node holds.
    """

    def __init__(self, config: NodeConfig, engine_command: EngineCommand) -> None:
        self._config = config
        self._clock = SystemClock()
        self._rng = random.Random()
        self._started_mono = self._clock.mono()
        self._stack = AsyncExitStack()
        self._changed = asyncio.Event()
        self._changed.set()
        self._engines = Engines(
            config.models,
            engine_command,
            clock=self._clock,
            options=EngineOptions(),
            on_change=self._changed.set,
            sockets=sockets_folder(self._folder()),
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._drain()
        finally:
            await self._stack.aclose()

    @property
    def node_id(self) -> str:
        """The name of this node in the fleet."""
        return self._state.node_id

    @property
    def grpc(self) -> str:
        """HOST:PORT where gRPC is bound."""
        return self._ports.grpc

    @property
    def http(self) -> str:
        """HOST:PORT where HTTP is bound."""
        return self._ports.http

    # Start

    async def _start(self, stack: AsyncExitStack) -> None:
        self._health = NodeHealth()
        self._watchdog = stack.enter_context(
            LoopWatchdog(
                on_stuck=lambda: self._health.hold(_STUCK, "the event loop was stuck just now"),
                on_calm=lambda: self._health.release(_STUCK),
            )
        )
        self._home = stack.enter_context(DataDir(self._folder()))
        self._ports = bind(self._config.listen)
        stack.push_async_callback(self._ports.server.stop, None)
        stack.callback(self._ports.http_socket.close)
        self._state = self._next_life()
        self._build_fleet(stack)
        self._models = Models(self._engines.of_role(Role.VERIFIER), self._suspect_failed_drafters)
        self._drafts = FleetDrafts(self._registry, self._clock)
        self._add_services()
        await stack.enter_async_context(self._runtime)
        for name in _ALWAYS_SERVING:
            self._health.set(name, serves=True)
        await self._ports.server.start()
        self._tasks = await stack.enter_async_context(Supervisor(self._clock))
        self._http = await stack.enter_async_context(self._serve_http())
        await stack.enter_async_context(self._engines)
        self._gossip.start(self._tasks)
        self._tasks.start("models", self._follow_changes)
        self._tell_command_line()

    def _folder(self) -> Path:
        return self._config.data_dir or default_folder(
            os.environ, platform=sys.platform, home=Path.home()
        )

    def _next_life(self) -> NodeState:
        state = next_state(
            self._home.load_state(),
            node_id=self._config.node_id,
            drawn_id=draw_node_id(self._rng),
            now=self._clock.wall(),
        )
        self._save(state)
        return state

    def _save(self, state: NodeState) -> None:
        try:
            self._home.save_state(state)
        except OSError as problem:
            # The next start then repeats an incarnation, which peers correct: worth a warning.
            event(_log, "state not saved", level=logging.WARNING, problem=problem)

    def _tell_command_line(self) -> None:
        run = RunInfo(pid=os.getpid(), node_id=self.node_id, grpc=self.grpc, http=self.http)
        try:
            self._home.write_run(run)
        except OSError as problem:
            # The node itself needs no disk, so a full one is no reason not to serve.
            event(
                _log,
                "addresses not saved; the command line cannot find this node",
                level=logging.WARNING,
                problem=problem,
            )

    def _build_fleet(self, stack: AsyncExitStack) -> None:
        fleet = self._config.fleet
        self._place = Place(
            grpc_address=self._ports.advertised,
            ring_address=probe_ring_environment().address(),
            platform=platform_name(),
            unified_memory_bytes=unified_memory_bytes(),
            ttl_s=fleet.ttl_s,
        )
        self._registry = CapabilityRegistry(
            self._state.node_id,
            make_offer(self._place, ()),
            now=self._clock.wall(),
            mono=self._clock.mono(),
            incarnation=self._state.incarnation,
        )
        channels = Channels()
        stack.push_async_callback(channels.aclose)
        self._sync = Sync(self._registry, rng=self._rng)
        self._gossip = Gossip(
            self._registry,
            GossipConfig(seeds=fleet.peers, interval_s=fleet.interval_s, fanout=fleet.fanout),
            channels=channels,
            clock=self._clock,
            rng=self._rng,
            on_round=self._round_done,
            sync=self._sync,
        )

    def _add_services(self) -> None:
        server = self._ports.server
        limits = SessionLimits(
            capacity=self._config.sessions.capacity, idle_ttl_s=self._config.sessions.idle_ttl_s
        )
        secret = random.SystemRandom()  # session ids are the only key to a history
        self._runtime = RuntimeService(
            models=self._models,
            drafts=self._drafts,
            store=SessionStore(clock=self._clock, rng=secret, limits=limits),
            clock=self._clock,
            rng=self._rng,
        )
        add_RuntimeServiceServicer_to_server(self._runtime, server)
        self._capability = add_capability_service(
            server, self._registry, clock=self._clock, rng=self._rng, sync=self._sync
        )
        self._proposers = ProposerService({NGRAM: NGramProposer()}, clock=self._clock)
        add_ProposerServiceServicer_to_server(self._proposers, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    def _serve_http(self) -> AbstractAsyncContextManager[HttpServer]:
        addresses = {split_address(address)[0] for address in (self.http, self._ports.advertised)}
        app = build_app(
            self._models,
            self._drafts,
            status=self.status,
            clock=self._clock,
            rng=self._rng,
            hosts=host_names() | addresses,
            collect=self._metrics,
            proposers=self._engines.proposers,
            unready=self._health.reason,
        )
        return serve_http(app, self._ports.http_socket, grace_s=0.0)

    # Run

    async def _follow_changes(self) -> None:
        """After each change: who drafts, the card, the runtime's health, the state on disk."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._serve_ready_drafters()
            self._gossip.announce(make_offer(self._place, self._engines.ready()))
            verifiers = self._models.verifiers()
            is_ready = bool(verifiers) and verifiers[0].state is ModelState.READY
            self._health.set(_RUNTIME, serves=is_ready)
            if self._registry.incarnation != self._state.incarnation:
                self._state = replace(self._state, incarnation=self._registry.incarnation)
                await asyncio.to_thread(self._save, self._state)

    def _serve_ready_drafters(self) -> None:
        served = self._proposers.served()
        for backend in self._engines.of_role(Role.PROPOSER):
            is_ready = backend.state is ModelState.READY
            if is_ready and backend.model_id not in served:
                self._proposers.serve(backend.model_id, backend)
            elif not is_ready:
                self._proposers.withdraw(backend.model_id)

    def _suspect_failed_drafters(self, usage: Usage) -> None:
        """Ask no peer again that just failed, until gossip finds that it answers."""
        for address in failed_addresses(usage):
            self._registry.mark_failed(address, mono=self._clock.mono())

    def _round_done(self, done: Round) -> None:
        if self._registry.incarnation != self._state.incarnation:
            self._changed.set()

    def status(self) -> Json:
        """Describe the node and the fleet as it sees it."""
        mono = self._clock.mono()
        cards = self._registry.snapshot(mono=mono)
        return describe(
            View(
                node_id=self.node_id,
                grpc=self.grpc,
                http=self.http,
                uptime_s=mono - self._started_mono,
                now=self._clock.wall(),
                cards=cards,
                ages={
                    card.node_id: self._registry.age_s(card.node_id, mono=mono) for card in cards
                },
                suspects=self._registry.suspects(),
                gossip=self._gossip.stats,
                models=self._engines.models(),
            )
        )

    def _metrics(self) -> Iterator[Metric]:
        known = len(self._registry.snapshot(mono=self._clock.mono()))
        suspects = len(self._registry.suspects())
        yield from metrics.fleet_metrics(
            known, suspects, self._gossip.stats, self._capability.stats
        )
        yield from metrics.model_metrics(self._engines.models())
        yield from metrics.session_metrics(self._runtime.stats)
        yield from metrics.task_metrics((*self._tasks.health(), *self._runtime.health()))
        yield from metrics.loop_metrics(self._watchdog.stalls, self._watchdog.worst_lag_s)

    # Stop

    async def _drain(self) -> None:
        """Say farewell, refuse what is new, let what runs go on for the grace."""
        await self._tasks.aclose()
        self._runtime.drain("it is stopping")
        # The listener closes first: who hears NOT_SERVING and comes anew is refused cleanly.
        closing = asyncio.ensure_future(self._ports.server.stop(GRACE_S))
        await asyncio.sleep(0)
        self._health.drain()
        farewell = self._gossip.farewell(_FAREWELL_S)
        faults = await asyncio.gather(
            closing, self._http.stop(GRACE_S), farewell, return_exceptions=True
        )
        for fault in faults:
            if isinstance(fault, Exception):
                event(_log, "draining was not clean", level=logging.WARNING, fault=repr(fault))
