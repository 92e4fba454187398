"""The agent: the parts of one node, built and wired here only, in one exit stack.

    start   join if asked, bind the ports, build, accept; then engines load
    run     each change of a model's state restamps the card and wakes the gossip
    stop    health NOT_SERVING, farewell card, all servers drain, engines end

Ports are bound before the rest is built, so that an unusable port ends the start at once. The fleet
half is `fleet.py`; the services of every listener are registered here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from socket import socket
from typing import Self

from kakeya.backends.added.on_demand import OnDemandPulls
from kakeya.backends.added.pulled import PulledModels
from kakeya.backends.awake import StayAwake
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engines import EngineCommand, sockets_folder
from kakeya.backends.relay.relays import Relays
from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.groups import node_rings
from kakeya.config.config import NodeConfig, manifests_of, read_again
from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError
from kakeya.core.host import join_address, platform_name, unified_memory_bytes
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.dispatch.capabilities import Capabilities
from kakeya.dispatch.directory import VerifierDirectory, failed_addresses
from kakeya.dispatch.jobs import node_jobs
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.routed.relays import offered
from kakeya.dispatch.watch.recent_lines import RecentLines
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.cards.disk_model import DiskModel
from kakeya.fleet.cards.ring_offer import RingOffer
from kakeya.fleet.gossip.outcome import Round
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.identity.membership import open_trust
from kakeya.fleet.liveness.duplicate_id import DuplicateIdWatch
from kakeya.fleet.paths.own_addresses import OwnAddresses
from kakeya.fleet.placement.ring import probe_ring_environment
from kakeya.gateway.app import build_app
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.http.server import HttpServer, serve_http
from kakeya.gateway.owner.model_files import ModelFilesRoute
from kakeya.generation.frames import Usage
from kakeya.generation.spec import ModelRole
from kakeya.memory.estimate.size_file import hub_folder
from kakeya.node.card import NodeFacts, make_offer
from kakeya.node.control import control_socket
from kakeya.node.datadir import LIVE, DataDir, run_of_this_process
from kakeya.node.fleet import Chances, NodeFleet
from kakeya.node.handover import DrainedHttp
from kakeya.node.https import NodeHttps, check_http_start
from kakeya.node.memory import EngineSetup, NodeMemory
from kakeya.node.overview import Overview
from kakeya.node.pages import NodePages
from kakeya.node.services import Services
from kakeya.node.startup import become_member, begin, tell_command_line, to_remember
from kakeya.node.state_writer import StateWriter
from kakeya.node.warm import node_precache
from kakeya.prefix.peers.peers import read_fleet_key
from kakeya.weights.weights import NodeWeights
from kakeya.wire import traces
from kakeya.wire.server.health import NodeHealth
from kakeya.wire.server.listeners import Listeners
from kakeya.wire.server.ports import listen
from kakeya.wire.server.watchdog import LoopWatchdog

_log = logging.getLogger(__name__)
GRACE_S = 5.0
"""How long running calls may go on after a stop signal."""
_FAREWELL_S = 1.0  # for peers that have not heard when all other parts of a stop are done
_HEARD_S = 1.0  # for the first round of gossip; one without peers is over at once
_STUCK = "loop"
"""The cause of a hold: the whole node does not serve."""


class Agent:
    """A node from start to stop: it serves inside an `async with`.

    The caller holds the data directory from before the start until after the stop; `port` is a
    socket that listens at the HTTP address, None = one is opened. Entering raises
    ConfigError for an address, a folder, a key or a model that cannot be used, Conflict while
    another process serves under this node's id, and the errors of joining a fleet.
    """

    def __init__(
        self, config: NodeConfig, command: EngineCommand, home: DataDir, port: socket | None = None
    ) -> None:
        self._port = port
        self._command = command
        self._config = config
        self._home = home
        self._folder = config.data_dir
        self._clock = SystemClock()
        self._rng = random.Random()
        self._started_mono = self._clock.mono()
        self._stack = AsyncExitStack()
        self._changed = asyncio.Event()
        self._changed.set()
        self._heard = asyncio.Event()
        self._memory = NodeMemory(
            config.memory,
            config.models,
            EngineSetup(
                command=command,
                options=EngineOptions(max_running=config.chosen.rows),
                sockets=sockets_folder(self._folder),
                wait_s=config.chosen.wait_s,
                llama_server=config.chosen.llama_server,
            ),
            data_dir=self._folder,
            clock=self._clock,
            rng=self._rng,
            on_change=self._changed.set,
        )
        self._engines = self._memory.engines
        self._relays = Relays(config.backends, self._clock)
        self._group_seat: Callable[[], RingOffer | None] = lambda: None
        self._on_disk: Callable[[], tuple[DiskModel, ...]] = tuple
        self._awake = StayAwake(config.chosen.awake, clock=self._clock)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._drain()
        finally:
            await self._stack.aclose()

    @property
    def node_id(self) -> str:
        """The id of this node in the fleet."""
        return self._state.node_id

    @property
    def grpc(self) -> str:
        """The bound HOST:PORT of gRPC on the best network, or on loopback."""
        return self._reach.grpc

    @property
    def http(self) -> str:
        """The bound HOST:PORT of HTTP."""
        return self._http_address

    async def _start(self, stack: AsyncExitStack) -> None:
        self._lines = stack.enter_context(RecentLines(self._clock))
        self._health = NodeHealth()
        self._watchdog = stack.enter_context(
            LoopWatchdog(
                on_stuck=lambda: self._health.hold(_STUCK, "the event loop was stuck just now"),
                on_calm=lambda: self._health.release(_STUCK),
            )
        )
        await stack.enter_async_context(self._memory)
        identity = await become_member(self._config, self._clock)
        self._state = await begin(
            self._home, self._config, identity, clock=self._clock, rng=self._rng
        )
        self._label = self._config.label or (identity.label if identity else "")
        traces.begin(self._state.node_id, self._label)
        stack.push_async_callback(traces.end)
        self._is_authority = identity is not None and identity.is_authority
        self._ring_address = probe_ring_environment().ring_address()
        self._incarnation = 0
        await self._listen(stack, identity)
        self._weights = NodeWeights(
            self._config.weights,
            self._plane,
            data_dir=self._folder,
            hub=hub_folder(os.environ, Path.home()),
            configured=lambda: {**self._engines.lasting_sources, **self._memory.images.sources},
            loaded=self._engines.loaded,
            on_change=self._changed.set,
            heard=self._heard.wait,
            clock=self._clock,
        )
        self._on_disk = lambda: self._weights.on_disk
        stack.push_async_callback(self._weights.aclose)
        home = self._memory.model_home()
        self._pulled = PulledModels(home, self._weights)
        if self._config.weights.serve:
            await self._pulled.open()
        most_s = self._config.chosen.wait_s
        self._on_demand = OnDemandPulls(home, self._weights, self._config.weights, most_s=most_s)
        stack.push_async_callback(self._on_demand.aclose)
        self._pages = await stack.enter_async_context(
            NodePages(
                self._config.adapters,
                self._config.precache,
                self._memory,
                data_dir=self._folder,
                fleet_key=read_fleet_key(self._config.precache, self.node_id),
                clock=self._clock,
                rng=self._rng,
            )
        )
        sources = self._engines.sources
        self._engines.follow(lambda one: self._weights.used(sources.get(one.model_id, "")))
        verifiers = self._engines.of_role(ModelRole.VERIFIER)
        for model in verifiers:
            model.on_usage = self._suspect_failed_drafters
        self._models = VerifierDirectory(
            verifiers,
            self._pages.adapters.manager,
            self._engines.of_role(ModelRole.EMBEDDER),
            tuple(self._memory.images.by_id.values()),
        )
        home.opened, home.closed = self._model_opened, self._models.remove
        self._rings = node_rings(
            home,
            self._plane,
            self._command,
            folder=self._folder,
            pulled=self._config.weights.models_folder(self._folder),
            clock=self._clock,
            on_change=self._changed.set,
            spread=self._spread,
        )
        self._group_seat = lambda: self._rings.seat
        await self._rings.restore()
        self._engines.follow(self._rings.model_changed)
        stack.push_async_callback(self._rings.aclose)
        ahead = node_precache(
            self._config.precache, self._models, self._memory, self._pages, self._clock, self._rng
        )
        self._precache = await stack.enter_async_context(ahead)
        self._ladders = TaskRegistry(
            self._config.tasks,
            profiles=self._config.profiles,
            manifests=manifests_of(self._config.models),
            reread=lambda: read_again(self._config),
            apply=self._memory.take_manifests,
            allows_cloud=self._config.allow_cloud_fallback,
            file=self._folder / LIVE,
        )
        await self._ladders.restore()
        await stack.enter_async_context(self._relays)
        self._jobs = await stack.enter_async_context(node_jobs(self._folder, self._clock))
        self._services = Services(
            self._plane,
            self._models,
            self._relays,
            self._config.sessions,
            self._pages,
            self._precache,
            self._weights,
            self._on_demand,
            self._rings,
            data_dir=self._folder,
            wait_s=self._config.chosen.wait_s,
            resume_bytes=self._config.listen.http_resume_bytes,
            warm_nodes=self._config.precache.warm_nodes,
            share=self._memory.share,
            dispatch=self._memory.dispatch,
            on_drain=self._changed.set,
            port=DrainedHttp(self._home, self._http_socket, lambda: self._http),
            heard=self._heard.wait,
            health=self._health,
            clock=self._clock,
            rng=self._rng,
        )
        stack.push_async_callback(self._services.serving_peers.aclose)
        stack.push_async_callback(self._services.copies.aclose)
        stack.push_async_callback(self._services.mover.aclose)
        await stack.enter_async_context(self._services.runtime)
        await self._listeners.start()
        self._tasks = await stack.enter_async_context(Supervisor(self._clock))
        self._plane.start(self._tasks)
        await self._memory.start(self._tasks, self.node_id)
        # Until the own models are loaded, peers answer: none is known before the first round.
        await self._clock.sleep(_HEARD_S, self._heard)
        self._http = await stack.enter_async_context(self._serve_http())
        self._rings.start(self._tasks)
        self._jobs.start(self._tasks)
        self._services.start(self._tasks, self._changed.set)
        self._weights.start(self._tasks)
        self._pulled.start(self._tasks)
        self._https.start(self._tasks)
        self._tasks.start("listeners", self._listeners.watch)
        self._tasks.start("models", self._follow_changes)
        self._tasks.start("awake", self._awake.run)
        self._tasks.start("state", self._keeper.run)
        run = run_of_this_process(self.node_id, self.grpc, self.http, self._config.log_file)
        tell_command_line(self._home, run)

    async def _listen(self, stack: AsyncExitStack, identity: Identity | None) -> None:
        """Bind every address, then build the fleet half, which needs the addresses."""
        config = self._config
        await check_http_start(config.listen, self._folder, has_identity=identity is not None)
        self._http_socket = self._port or listen("--http", config.listen.http)
        stack.callback(self._http_socket.close)
        host, port = self._http_socket.getsockname()[:2]
        self._http_address = join_address(str(host), int(port))
        trust = open_trust(self._folder, identity) if identity else None
        self._listeners = Listeners(
            lambda server: self._services.register(server),
            clock=self._clock,
            material=trust.material if trust else None,
            trust=trust,
        )
        stack.push_async_callback(self._listeners.stop, None)
        self._reach = OwnAddresses(
            config.listen,
            config.fleet,
            has_identity=identity is not None,
            clock=self._clock,
            on_change=self._addresses_changed,
        )
        await self._reach.open(self._listeners)
        await self._open_control()
        self._plane = NodeFleet(
            config.fleet,
            state=self._state,
            data_dir=self._folder,
            trust=trust,
            reach=self._reach,
            offer=self._offer(),
            chances=Chances(clock=self._clock, rng=self._rng),
            on_round=self._round_done,
        )
        stack.push_async_callback(self._plane.aclose)
        self._namesake = DuplicateIdWatch(
            self._plane.registry,
            trust,
            self._health,
            clock=self._clock,
            why_not_dial=self._plane.why_not_dial,
            poke=self._plane.poke,
        )
        await self._plane.refuse_taken_id()
        if trust is not None:
            trust.subscribe(lambda _: self._drop_revoked())
        self._keeper = StateWriter(
            lambda: to_remember(self._plane.registry, self.node_id, self._clock),
            self._home.save_state,
            saved=None,
            clock=self._clock,
        )
        # Before any node can hear of the first card of this run.
        await self._keeper.flush()

    async def _open_control(self) -> None:
        path = control_socket(self._folder)
        try:
            await self._listeners.open_plain(f"unix:{path}", flag="--data-dir")
        except ConfigError as problem:
            # The node serves without this socket; only its owner's commands do not reach it.
            event(
                _log,
                "the command line cannot invite, revoke or examine",
                level=logging.WARNING,
                problem=problem.message,
            )

    def _model_opened(self, model: ResidentModel) -> None:
        if model.is_on_demand:  # the KV of ring groups lies in no pages
            model.prefixes = self._pages.prefixes
        model.on_usage = self._suspect_failed_drafters
        self._models.add(model)

    def _serve_http(self) -> AbstractAsyncContextManager[HttpServer]:
        overview = Overview(
            http=self.http,
            started_mono=self._started_mono,
            clock=self._clock,
            plane=self._plane,
            memory=self._memory,
            pages=self._pages,
            precache=self._precache,
            relays=self._relays,
            services=self._services,
            weights=self._weights,
            jobs=self._jobs,
            rings=self._rings,
            listeners=self._listeners,
            health=self._health,
            keeper=self._keeper,
            watchdog=self._watchdog,
            tasks=self._tasks.health,
        )
        self._services.doctor.warnings = overview.warnings
        self._services.facts.status = overview.status
        self._services.facts.more["events"] = self._lines.told
        self._https = https = NodeHttps(
            self._config.listen, self._folder, self._plane, address=self.http, clock=self._clock
        )
        app = build_app(
            self._services.models,
            self._services.drafts,
            status=overview.status,
            clock=self._clock,
            rng=self._rng,
            limits=HttpLimits(**asdict(self._config.http), ready_s=self._config.chosen.wait_s),
            hosts=https.hosts,
            origins=frozenset(self._config.listen.http_origins),
            keys=https.keys,
            figures=lambda: (*overview.figures(), *https.figures()),
            proposers=self._engines.proposers,
            unready=lambda: self._health.reason() or self._pages.unready(),
            precache=self._precache,
            texts=self._precache.texts,
            store_bytes=self._config.listen.http_store_bytes,
            copies=self._services.copies,
            clients=self._services.clients,
            tasks=self._ladders,
            relays=self._relays,
            routed=self._services.relays,
            jobs=self._jobs,
            capabilities=Capabilities(self._memory, self._jobs),
            ring=self._services.ring,
            watch=self._services.watch,
            held=self._services.models.held,
            files=ModelFilesRoute(self._weights, self._engines, self._memory.arbiter),
            adapters=self._pages.adapters.manager,
        )
        return serve_http(app, self._http_socket, tls=https.tls, grace_s=0.0)

    # Run

    def _offer(self) -> Offer:
        reach = self._reach
        place = NodeFacts(
            label=self._label,
            grpc_address=reach.advertised,
            endpoints=reach.endpoints,
            is_authority=self._is_authority,
            ring_address=self._ring_address,
            ring=self._group_seat(),
            platform=platform_name(),
            unified_memory_bytes=unified_memory_bytes(),
            ttl_s=self._config.fleet.ttl_s,
            is_careful=self._memory.is_careful,
            on_disk=self._on_disk(),
        )
        return make_offer(
            place,
            self._engines.offered(),
            self._memory.images.offered(),
            self._engines.unloaded(),
            offered(self._relays),
        )

    async def _follow_changes(self) -> None:
        """After each change, update the drafters, the card, the health and the state on disk."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            verifiers = self._engines.of_role(ModelRole.VERIFIER)
            is_ready = any(model.can_serve for model in verifiers)
            self._services.follow(
                self._engines.of_role(ModelRole.PROPOSER), is_runtime_ready=is_ready
            )
            works = self._memory.arbiter.is_in_use or bool(self._weights.fetching)
            self._awake.follow(offers=self._memory.offers_models, works=works)
            self._announce()

    def _announce(self) -> None:
        offer = replace(self._offer(), caches=self._services.peers.caches)
        if self._services.draining.is_under_way:
            offer = replace(offer, models=(), on_disk=())
        self._plane.gossip.announce(offer)

    async def _spread(self) -> None:
        self._announce()
        await self._plane.tell_all()

    def _suspect_failed_drafters(self, usage: Usage) -> None:
        """Ask a peer that just failed for no draft until gossip finds that it answers."""
        for address in failed_addresses(usage):
            self._plane.call_failed(address)

    def _addresses_changed(self) -> None:
        self._plane.addresses_changed()
        self._changed.set()

    def _drop_revoked(self) -> None:
        closed = self._listeners.drop_revoked()
        event(_log, "the fleet took nodes out", level=logging.WARNING, connections_closed=closed)

    def _round_done(self, done: Round) -> None:
        self._heard.set()
        incarnation = self._plane.registry.incarnation
        if done.changed or incarnation != self._incarnation:
            self._incarnation = incarnation
            self._keeper.poke()
        self._services.declared_copies.fleet_changed()
        self._rings.fleet_changed()
        if self._reach.settle_round_trips():
            self._changed.set()
        self._namesake.look()

    # Stop

    async def _drain(self) -> None:
        """Send the farewell card, refuse new calls, let running calls go on for the grace."""
        await self._tasks.aclose()
        self._namesake.cancel()
        self._services.drain("it is stopping")
        # The listeners close first: a client that hears NOT_SERVING and retries is refused cleanly.
        closing = asyncio.ensure_future(self._listeners.stop(GRACE_S))
        await asyncio.sleep(0)
        self._health.drain()
        farewell = asyncio.ensure_future(self._plane.gossip.farewell(GRACE_S))
        parts = (closing, self._http.stop(GRACE_S), self._keeper.flush(), self._on_demand.aclose())
        faults: list[object] = [*await asyncio.gather(*parts, return_exceptions=True)]
        await asyncio.wait((farewell,), timeout=_FAREWELL_S)
        if farewell.cancel():
            event(_log, "not all peers heard the farewell")
        faults += await asyncio.gather(farewell, return_exceptions=True)
        await self._services.mover.settled()
        for fault in faults:
            if isinstance(fault, Exception):
                event(_log, "draining was not clean", level=logging.WARNING, fault=repr(fault))
