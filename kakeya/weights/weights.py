"""The models on the disk of a node: listed with those of its peers, fetched, served, removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, NotFound, QueueFull
from kakeya.core.figures import Figure, Json, counter, gauge
from kakeya.core.ids import ModelId
from kakeya.core.tasks import Supervisor
from kakeya.core.units import MIB
from kakeya.fleet.cards.disk_model import MAX_NAME_BYTES, DiskModel
from kakeya.v1.weights_pb2_grpc import (
    add_ModelFilesServiceServicer_to_server,
    add_WeightsServiceServicer_to_server,
)
from kakeya.weights.choice import PulledModel, to_remove
from kakeya.weights.config import WeightsConfig
from kakeya.weights.found import FoundModel
from kakeya.weights.index import WeightIndex
from kakeya.weights.listed import (
    ListedModel,
    listed_models,
    note_use,
    parts_of,
    pulled_models,
    uses,
)
from kakeya.weights.manifest import check_model_name
from kakeya.weights.partial import disk_error, remove_folder, sweep
from kakeya.weights.peers import Neighbours, WeightsPeers
from kakeya.weights.progress import PullState
from kakeya.weights.pull import Pull
from kakeya.weights.schedule import RateBound
from kakeya.weights.service import ModelFilesService, WeightsService
from kakeya.weights.tools import PullTools

MOST_PULLS = 4
_FAILED_S = 600.0
"""For so long the status tells why a pull failed, unless its model is pulled again."""
_MOST_FAILED = 8


class Leaves(Protocol):
    """The end of a model's service."""

    async def __call__(self, found: FoundModel, *, is_forced: bool) -> None:
        """Raises Conflict while it is in use, unless `is_forced`."""
        ...


class NodeWeights:
    """See the module; lives on the event loop. `configured` tells the paths of the models of this
    node's configuration by name, `loaded` the names of all that are in memory.

    The part that serves pulled models sets `changed`, called when one came or went, `leaves`,
    called before one goes, which raises Conflict for one in use, and `unserved`, why one is not
    served.
    """

    def __init__(
        self,
        config: WeightsConfig,
        plane: Neighbours,
        *,
        data_dir: Path,
        hub: Path | None,
        configured: Callable[[], Mapping[str, str]],
        loaded: Callable[[], Collection[str]],
        on_change: Callable[[], None],
        heard: Callable[[], Awaitable[object]] | None = None,
        clock: Clock,
    ) -> None:
        """`on_change` hears of each fetch that begins or ends, and of other models on the disk;
        `heard` is as of `WeightsPeers`."""
        self.folder = config.models_folder(data_dir)
        self._config = config
        self._clock = clock
        self.configured = configured
        self._loaded = loaded
        self._on_change = on_change
        self.peers = WeightsPeers(plane, clock, heard)
        self.index = WeightIndex(
            self.folder,
            data_dir=data_dir,
            hub=hub,
            configured=configured,
            on_change=on_change,
            clock=clock,
        )
        self._tools = PullTools(
            folder=self.folder,
            index=self.index,
            peers=self.peers,
            bound=RateBound(config.pull_mb_per_s * MIB),
            clock=clock,
            make_room=self._make_room,
            changed=lambda: self.changed(),
        )
        self._pulls: dict[str, tuple[Pull, asyncio.Task[Path]]] = {}
        self._followers: dict[str, int] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._making_room = asyncio.Lock()
        self.changed: Callable[[], Awaitable[None]] = _nothing
        self.leaves: Leaves = _nothing
        self.unserved: Callable[[str], str] = lambda name: ""
        self._service = WeightsService(self)
        self._owner = ModelFilesService(self)

    def start(self, tasks: Supervisor) -> None:
        """Compute digests in the background, after a removal was ended that a kill cut off."""
        tasks.start("weights", self._run)

    async def _run(self) -> None:
        await asyncio.to_thread(sweep, self.folder)
        await self.index.run()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the services to one more server."""
        if self._config.peers:
            add_WeightsServiceServicer_to_server(self._service, server)
        add_ModelFilesServiceServicer_to_server(self._owner, server)

    async def aclose(self) -> None:
        """End all fetches; what came is kept."""
        tasks = [task for _, task in self._pulls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def fetching(self) -> tuple[Pull, ...]:
        """The fetches under way."""
        return tuple(pull for pull, task in self._pulls.values() if not task.done())

    @property
    def on_disk(self) -> tuple[DiskModel, ...]:
        """The models that peers may pull to write text with them."""
        if not self._config.peers:
            return ()
        return tuple(
            DiskModel(ModelId(one.name), one.bytes)
            for one in self.index.last_found
            if one.is_text and len(one.name.encode()) <= MAX_NAME_BYTES
        )

    def used(self, source: str) -> None:
        """Note that a model of this node is used now: it is loaded, or leaves memory."""
        asyncio.get_running_loop().run_in_executor(None, note_use, source)

    # --- fetch

    async def pull(
        self, name: str, *, from_node: str, keep: bool, may_use_hub: bool = True
    ) -> AsyncGenerator[PullState, None]:
        """Fetch a model, or follow the fetch that is under way; it ends with its last follower.
        Without `may_use_hub` only peers are asked.

        Raises InvalidArgument, NotFound, QueueFull, Conflict, DiskRefused, StoreFailed,
        PeerUnavailable.
        """
        check_model_name(name)
        while (ending := self._pulls.get(name)) and ending[1].cancelling():
            await asyncio.wait(ending[1:])  # its last follower has just left
        pull, task = self._pulls.get(name) or self._begin(
            name, from_node, keep=keep, may_use_hub=may_use_hub
        )
        pull.keep |= keep
        self._followers[name] = self._followers.get(name, 0) + 1
        try:
            async with aclosing(pull.follow(task)) as states:
                async for state in states:
                    yield state
        finally:
            self._followers[name] -= 1
            if not self._followers[name]:
                del self._followers[name]
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _begin(
        self, name: str, from_node: str, *, keep: bool, may_use_hub: bool
    ) -> tuple[Pull, asyncio.Task[Path]]:
        if len(self._pulls) >= MOST_PULLS:
            raise QueueFull(f"{MOST_PULLS} models are being pulled; come again when one is here")
        self._failed.pop(name, None)
        pull = Pull(name, self._tools, from_node=from_node, keep=keep, may_use_hub=may_use_hub)
        task = asyncio.create_task(pull.run(), name=f"pull {name}")
        self._pulls[name] = pull, task
        self._on_change()
        task.add_done_callback(lambda ended: self._ended(name, ended))
        return pull, task

    def _ended(self, name: str, task: asyncio.Task[Path]) -> None:
        del self._pulls[name]
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            self._failed[name] = self._clock.mono(), str(problem)
            for oldest in [*self._failed][:-_MOST_FAILED]:
                del self._failed[oldest]
        self._tools.count("failed" if task.cancelled() or problem is not None else "done")
        self._on_change()

    # --- list and remove

    async def listed(self) -> tuple[list[ListedModel], Mapping[str, str]]:
        """The models here and at peers, by name; and why peers did not tell theirs, by label."""
        offers, silent = await self.peers.offers(self.peers.all())
        own = []
        for model in await self.index.models(anew=True):
            made = self.index.known(model)
            own.append((model, made.digest if made else ""))
        return listed_models(own, offers), silent

    def uses(self, model: FoundModel) -> tuple[str, str]:
        """The name by which a model is loaded, and that by which the configuration has it; "" =
        neither."""
        return uses(model, self.configured(), set(self._loaded()))

    async def remove(self, name: str, *, force: bool) -> tuple[Path, int]:
        """Remove a model that a pull brought; return where it lay, and its bytes.

        Raises InvalidArgument, NotFound, Conflict for one that no pull brought, or that is in use
        or configured, unless `force`.
        """
        check_model_name(name)
        named = [one for one in await self.index.models(anew=True) if one.name == name]
        pulled = [one for one in named if one.record is not None]
        if not named:
            return await self._remove_parts(name)
        if not pulled:
            raise Conflict(
                f"{name} lies in {named[0].path}, and no pull brought it there; remove it yourself"
            )
        model = pulled[0]
        loaded, configured = await asyncio.to_thread(self.uses, model)
        if configured and not force:
            reason = (
                f"it is loaded as {loaded}" if loaded else f"the node serves it as {configured}"
            )
            raise Conflict(f"{name} is not removed: {reason}; --force removes it nevertheless")
        await self.leaves(model, is_forced=force)
        await self._drop(model.path)
        return model.path, model.bytes

    async def _remove_parts(self, name: str) -> tuple[Path, int]:
        """Remove what is here of a pull that did not end."""
        if any(pull.state.name == name for pull in self.fetching):
            raise Conflict(f"{name} is being pulled; end the pull first")
        parts = await asyncio.to_thread(parts_of, self.folder, name)
        if not parts:
            raise NotFound(f"no model on this node's disk is called {name[:80]!r}")
        for part in parts:
            await self._drop(part)
        return parts[0], 0

    async def _drop(self, path: Path) -> None:
        try:
            await asyncio.to_thread(remove_folder, self.folder, path)
        except OSError as problem:
            raise disk_error(problem, path) from problem
        finally:
            await self.index.models(anew=True)
            await self.changed()
        self._tools.count("removed")

    async def _make_room(self, part: str) -> None:
        others = [pull.state.name for pull in self.fetching if pull.part == part]
        if len(others) > 1:
            raise Conflict(f"the same files are being pulled as {others[0]}; wait for them")
        if not self._config.disk_bytes:
            return
        async with self._making_room:
            models = await self.index.models(anew=True)
            coming = {pull.part: pull.state.bytes for pull in self.fetching if pull.part}
            pulled = await asyncio.to_thread(
                lambda: list(
                    pulled_models(self.folder, models, lambda one: any(self.uses(one)), coming)
                )
            )
            here = {Path(one.path).name: one.bytes for one in pulled}
            missing = {one: max(0, size - here.get(one, 0)) for one, size in coming.items()}
            needed = missing.pop(part, 0)
            for one, size in missing.items():
                pulled.append(PulledModel(path=one, bytes=size, used_at=0.0, is_spared=True))
            whole = {str(model.path): model for model in models}
            for path in to_remove(pulled, needed, self._config.disk_bytes):
                if path in whole:
                    await self.leaves(whole[path], is_forced=False)
                await self._drop(Path(path))

    # --- what is told

    def status(self) -> Json:
        """The fetches under way, those that failed lately with the reason, and counts, as JSON."""
        pulls = [
            {
                "name": one.state.name,
                "phase": one.state.phase,
                "bytes": one.state.bytes,
                "done_bytes": one.state.done_bytes,
                "bytes_per_second": round(one.state.bytes_per_s),
                "sources": list(one.state.sources),
                "note": one.state.note,
            }
            for one in self.fetching
        ]
        since = self._clock.mono() - _FAILED_S
        failed = {name: why for name, (at, why) in self._failed.items() if at > since}
        told: Json = {"folder": str(self.folder), "pulls": pulls, "failed": failed}
        return told | {"served_bytes": self._service.bytes}

    def figures(self) -> Iterator[Figure]:
        """Figures of what was fetched and served."""
        counts = self._tools.counts
        yield gauge("kakeya_pulls", "Models being fetched now", len(self.fetching))
        ends = {end: counts.get(end, 0) for end in ("done", "failed")}
        yield counter("kakeya_pulls_ended{end}", "Fetches of models by end", ends)
        yield counter("kakeya_pulled_bytes", "Bytes of models from peers", counts.get("bytes", 0))
        faults = {fault: counts.get(fault, 0) for fault in ("lost", "wrong")}
        yield counter("kakeya_pull_faults{fault}", "Pieces that did not come right", faults)
        yield counter("kakeya_weights_served_bytes", "Bytes for peers", self._service.bytes)
        yield counter(
            "kakeya_weights_hashed_bytes", "Bytes read for digests", self.index.hashed_bytes
        )


async def _nothing(found: FoundModel | None = None, *, is_forced: bool = False) -> None:
    """Pulled models are not served."""
