"""One fetch of a model from peers: look, check what is here, fetch what is missing, prove, rename.

Pieces come from several peers at once, and from those, too, that are still fetching the model; each
is proven before it is written. A peer that is lost is waited for; one that sends wrong bytes is
left. The fetch ends with an error only where the disk refuses, or where nothing came for
PATIENCE_S; what came stays for the next fetch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Collection
from pathlib import Path

from kakeya.core.errors import (
    KakeyaError,
    NotFound,
    PeerProtocol,
    PeerUnavailable,
    StoreFailed,
    UnknownMethod,
)
from kakeya.core.log import event
from kakeya.core.units import format_bytes
from kakeya.weights.choice import sources_of
from kakeya.weights.find import LOOK_S, ModelSearch
from kakeya.weights.found import FoundModel, PullRecord, found_model, keep_record
from kakeya.weights.hub import HubDownload
from kakeya.weights.listed import drop_parts
from kakeya.weights.manifest import WeightsManifest
from kakeya.weights.partial import PartialModel, check_free, check_target, disk_error
from kakeya.weights.peers import WeightsPeer
from kakeya.weights.progress import TELL_S, PullMeter, PullState
from kakeya.weights.schedule import PieceSchedule
from kakeya.weights.tools import PullTools

_log = logging.getLogger(__name__)
PATIENCE_S = 30.0
"""A fetch ends when nothing came for so long, from any source."""
MOST_SOURCES, STREAMS = 4, 3
"""Peers at once that give, and pieces at once of each: 48 MiB are in memory at most. While one
piece of a peer is proven and one is written, the third comes."""
SETTLE_S = 1.0
"""Longer than two nodes take to tell each other that they are about to ask the hub."""
MOST_ROUNDS = 3
"""A disk on which pieces are wrong after so many fetches of them is broken."""


class Pull:
    """See the module. It runs by `run`, once; any number of callers `follow` it."""

    def __init__(
        self,
        name: str,
        tools: PullTools,
        *,
        from_node: str,
        keep: bool,
        may_use_hub: bool = True,
    ) -> None:
        self._meter = PullMeter(name, tools.clock)
        self._from = from_node
        self._tools = tools
        self._clock = tools.clock
        self._search = ModelSearch(
            name,
            from_node,
            tools.peers,
            self._clock,
            lambda note: self._meter.tell(phase="waiting" if note else "looking", note=note),
            may_use_hub=may_use_hub,
        )
        self.keep = keep
        self.follow = self._meter.follow
        self._schedule = PieceSchedule(0)
        self._labels: dict[str, WeightsPeer] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._failure: KakeyaError | None = None
        self._last_failure, self._failed_mono = "", 0.0
        """Of a source, since the beginning of the last piece that came."""
        self._wake = asyncio.Event()
        self._given_up = threading.Event()
        self._news = asyncio.Event()
        self.is_from_hub = False
        """Whether it is downloaded, and has no digest before the end."""
        self.is_begun = False
        """Whether the download has begun, so that no other node is to begin it."""
        self.part = ""
        """The name of the folder of what comes, in PULLS."""
        self.partial: PartialModel | None = None
        self.held: set[int] = set()
        """The pieces that are here."""

    @property
    def state(self) -> PullState:
        """How far it is."""
        return self._meter.state

    async def run(self) -> Path:
        """Fetch it; return where it lies. Raises KakeyaError."""
        try:
            path = await self._run()
        except OSError as problem:
            raise disk_error(problem, self._tools.folder) from problem
        finally:
            self._given_up.set()
            self._told()
        return path

    async def news(self) -> None:
        """Wait until more pieces are here, or the end."""
        await self._news.wait()

    async def _run(self) -> Path:
        name, index = self.state.name, self._tools.index
        try:
            found = await self._look()
        except NotFound:  # of peers; what is here needs none
            own = await index.models(anew=True)
            here = next((one for one in own if one.name == name), None)
            if self._from or here is None:
                raise
            return await self._is_here(here)
        own = await index.models(anew=True)
        if found is None:
            here = next((one for one in own if one.name == name), None)
        else:
            self.is_from_hub = False
            held = await index.with_digest(found[0].digest)
            here = held[0] if held else None
        if here is not None:
            return await self._is_here(here)
        await asyncio.to_thread(check_target, self._tools.folder, name)
        if found is None:
            return await self._from_hub()
        manifest, first = found
        self._meter.tell(bytes=manifest.bytes, digest=manifest.digest)
        await self._check(manifest)
        for _ in range(MOST_ROUNDS):
            await self._fetch_all(manifest, first)
            self._meter.tell(phase="verifying")
            wrong = await asyncio.to_thread(self._made.unproven, self._given_up.is_set)
            if not wrong:
                return await self._finish(manifest)
            self.held -= wrong
            self._meter.add(-sum(manifest.pieces[piece].size for piece in wrong))
            self._schedule.again(wrong)
        raise StoreFailed(
            f"{len(wrong)} pieces of {name} were wrong on the disk {MOST_ROUNDS} times after they "
            f"were written; check the disk of {self._tools.folder}"
        )

    async def _look(self) -> tuple[WeightsManifest, WeightsPeer] | None:
        """The manifest of the model and a peer that has it; None = the hub may have it, and this
        node is the one of the house to ask. Raises as `ModelSearch.find`."""
        await self._tools.peers.known()
        found = await self._search.find()
        if found is None:
            self.is_from_hub = True
            if self._tools.peers.all():
                # A node that begins at the same moment is told of this one, or tells of itself.
                await self._clock.sleep(SETTLE_S)
            found = await self._search.find(may_be_ahead=False)
            self.is_begun = found is None
        return found

    async def _is_here(self, model: FoundModel) -> Path:
        if self.keep:
            await asyncio.to_thread(keep_record, model)
        other = "" if model.name == self.state.name else f", as {model.name}"
        told = {"bytes": model.bytes, "done_bytes": model.bytes, "path": str(model.path)}
        self._meter.tell(phase="done", note=f"it is here already{other}", **told)
        return model.path

    async def _finish(self, manifest: WeightsManifest) -> Path:
        """Name a whole model; a fetch that is given up ends after that, not while a thread still
        works in its folder."""
        naming = asyncio.create_task(self._name(manifest), name=f"name {self.state.name}")
        try:
            return await asyncio.shield(naming)
        finally:
            await asyncio.wait((naming,))

    async def _name(self, manifest: WeightsManifest) -> Path:
        record = self._record(manifest.digest)
        path = await asyncio.to_thread(self._made.finish, record)
        await asyncio.to_thread(drop_parts, self._tools.folder, record.name)
        await self._tools.index.learn(path, manifest)
        await self._tools.changed()
        self._meter.tell(phase="done", done_bytes=manifest.bytes, path=str(path))
        return path

    def _record(self, digest: str) -> PullRecord:
        return PullRecord(
            name=self.state.name,
            digest=digest,
            keep=self.keep,
            source=", ".join(self.state.sources),
            pulled_at=self._clock.wall(),
        )

    @property
    def _made(self) -> PartialModel:
        if self.partial is None:
            raise NotFound(f"nothing of {self.state.name} is here yet")
        return self.partial

    async def _from_hub(self) -> Path:
        """Download it from the hub; peers wait for it meanwhile."""
        name, tools = self.state.name, self._tools
        download = HubDownload(name, tools.folder)

        async def sized(size: int) -> None:
            self._meter.tell(bytes=size)
            await tools.make_room(self.part)
            await asyncio.to_thread(check_free, tools.folder, download.folder, size)

        def told(size: int) -> None:
            self._meter.add(min(size, self.state.bytes) - self.state.done_bytes)
            self._meter.measure()

        self.part = download.folder.name
        self._meter.begin()
        self._meter.tell(phase="fetching", sources=("the hub",), note="")
        await asyncio.to_thread(download.open, self._record(""))
        await download.run(sized, told)
        self._meter.tell(phase="verifying")
        model = await asyncio.to_thread(found_model, name, download.folder)
        if model is None:
            raise NotFound(f"what the hub has as {name} is no model that a node loads")
        manifest = await tools.index.manifest(model)
        await asyncio.to_thread(download.check, manifest)
        self._meter.tell(bytes=manifest.bytes, digest=manifest.digest)
        self.partial = PartialModel(tools.folder, manifest, download.folder)
        return await self._finish(manifest)

    async def _check(self, manifest: WeightsManifest) -> None:
        """Make room, and find out what is here of an earlier fetch."""
        self.part = manifest.digest
        await self._tools.make_room(self.part)
        partial = self.partial = PartialModel(self._tools.folder, manifest)
        await asyncio.to_thread(partial.open, self._record(manifest.digest))
        await asyncio.to_thread(partial.check_room)
        self._meter.tell(phase="checking")
        loop = asyncio.get_running_loop()

        def told(size: int) -> None:
            loop.call_soon_threadsafe(self._meter.add, size)

        self.held = await asyncio.to_thread(partial.present, told, self._given_up.is_set)
        here = sum(manifest.pieces[piece].size for piece in self.held)
        self._meter.tell(done_bytes=here, resumed_bytes=here)
        count = len(manifest.pieces)
        # Nodes that fetch the same model begin at different places, and exchange what they have.
        own = int.from_bytes(hashlib.sha256(self._tools.peers.own_id.encode()).digest()[:4], "big")
        self._schedule = PieceSchedule(count, self.held, first=own % max(1, count))

    async def _fetch_all(self, manifest: WeightsManifest, first: WeightsPeer) -> None:
        self._meter.begin()
        self._meter.tell(phase="fetching")
        try:
            while not self._schedule.is_done and self._failure is None:
                self._wake.clear()
                await self._find_sources(manifest, first)
                self._meter.measure()
                self._check_sources()
                await self._clock.sleep(LOOK_S, self._wake)
        finally:
            tasks = [task for several in self._tasks.values() for task in several]
            self._tasks.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    async def _find_sources(self, manifest: WeightsManifest, first: WeightsPeer) -> None:
        """Find sources, and begin to fetch from those that are new."""
        try:
            asked = self._search.asked()
        except NotFound:  # the one that was named is gone for now
            asked = ()
        offers, _ = await self._tools.peers.offers(asked)
        found = sources_of(manifest.digest, offers)
        self._make_place({peer.node_id for peer in found})
        for peer, is_whole in found.items():
            name = peer.node_id
            if self._schedule.why_left(name):
                continue
            if name not in self._tasks:
                giving = self._schedule.giving & self._tasks.keys()
                if len(giving) >= MOST_SOURCES and peer != first:
                    continue
                self._schedule.join(name, None if is_whole else ())
                self._tasks[name] = [
                    asyncio.create_task(self._work(name, manifest), name=f"pull {self.state.name}")
                    for _ in range(STREAMS)
                ]
            self._labels[name] = peer  # it may have another address by this look
            self._schedule.back(name)
            if is_whole:
                self._schedule.join(name, None)
            elif all(task.done() for task in self._tasks[name][STREAMS:]):
                self._tasks[name].append(asyncio.create_task(self._watch(peer, manifest)))
        self._tell_sources()

    def _make_place(self, seen: Collection[str]) -> None:
        """End the work for sources that are lost, so that others get their places."""
        for name in [one for one in self._tasks if one not in seen]:
            if self._schedule.sources[name].lost:
                for task in self._tasks.pop(name):
                    task.cancel()

    async def _watch(self, peer: WeightsPeer, manifest: WeightsManifest) -> None:
        """Follow what a peer has that fetches the model itself."""
        pieces = self._tools.peers.watch(peer, manifest.digest, len(manifest.pieces))
        try:
            async for held in pieces:
                self._schedule.join(peer.node_id, held)
        except KakeyaError as failure:
            # The next look finds it again, as one that has all if it was done.
            event(_log, "a peer ended its own fetch", peer=peer.label, why=failure.message)

    async def _work(self, name: str, manifest: WeightsManifest) -> None:
        """Fetch pieces from a peer, one after the other."""
        try:
            while not self._schedule.is_done and not self._schedule.why_left(name):
                piece = self._schedule.take(name, self._clock.mono())
                if piece is None:
                    await self._clock.sleep(TELL_S)
                else:
                    await self._fetch(self._labels[name], manifest, piece)
        except KakeyaError as failure:  # the disk refused
            self._failure = self._failure or failure
        finally:
            if self._schedule.is_done or self._failure:
                self._wake.set()

    async def _fetch(self, peer: WeightsPeer, manifest: WeightsManifest, piece: int) -> None:
        wanted, name = manifest.pieces[piece], peer.node_id
        came, began_mono = 0, self._clock.mono()

        def told(size: int) -> None:
            nonlocal came
            came += size
            self._meter.add(size)

        try:
            await self._clock.sleep(self._tools.bound.turn(wanted.size, self._clock.mono()))
            data = await self._tools.peers.piece(peer, manifest.digest, piece, wanted.size, told)
            await asyncio.to_thread(_prove, data, wanted.sha256, piece, peer.label)
        except (KakeyaError, asyncio.CancelledError) as failure:
            self._meter.add(-came)
            is_wrong = isinstance(failure, PeerProtocol) and not isinstance(failure, UnknownMethod)
            wrong = str(failure) if is_wrong else ""
            is_known = bool(self._schedule.why_left(name))
            self._schedule.failed(name, piece, self._clock.mono(), wrong=wrong)
            if not isinstance(failure, KakeyaError):
                raise
            self._tools.count("wrong" if is_wrong else "lost")
            if not is_wrong:
                self._last_failure = f"; {failure.message}"
                self._failed_mono = self._clock.mono()
            elif not is_known:
                self._tell_left(peer, failure)
            return
        if piece in self.held:  # another source was quicker
            self._meter.add(-came)
            self._schedule.arrived(name, piece, self._clock.mono())
            return
        try:
            await asyncio.to_thread(self._made.write, wanted, data)
        except asyncio.CancelledError:
            self._meter.add(-came)
            self._schedule.failed(name, piece, self._clock.mono())
            raise
        if piece in self.held:
            self._meter.add(-came)
        self.held.add(piece)
        self._schedule.arrived(name, piece, self._clock.mono())
        if began_mono >= self._failed_mono:
            self._last_failure = ""
        self._tools.count("pieces")
        self._tools.count("bytes", wanted.size)
        self._told()

    def _tell_left(self, peer: WeightsPeer, failure: KakeyaError) -> None:
        event(
            _log,
            "a peer sent wrong bytes of a model, and is not asked for it any more",
            level=logging.WARNING,
            model=self.state.name,
            peer=peer.label,
            why=failure.message,
        )
        self._tell_sources()

    def _check_sources(self) -> None:
        """Raise PeerUnavailable where nothing comes any more, and the error of a broken task."""
        for task in (task for several in self._tasks.values() for task in several):
            if task.done() and not task.cancelled() and (fault := task.exception()):
                raise fault
        left = [why for name in self._labels if (why := self._schedule.why_left(name))]
        expected_mono = max(self._meter.came_mono, self._tools.bound.free_mono)
        is_silent = self._clock.mono() - expected_mono > PATIENCE_S
        if not is_silent and (not left or self._schedule.usable):
            return
        state = self.state
        raise PeerUnavailable(
            f"nothing of {state.name} comes any more"
            + "".join(f"; left: {reason}" for reason in left)
            + self._last_failure
            + f"; {format_bytes(state.done_bytes)} of {format_bytes(state.bytes)} are here: pull "
            "it again once a node that has it is there"
        )

    # --- how far it is

    def _tell_sources(self) -> None:
        names = [name for name in self._labels if not self._schedule.why_left(name)]
        self._meter.tell(sources=tuple(sorted(self._labels[name].label for name in names)))

    def _told(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _prove(data: bytearray, sha256: bytes, piece: int, peer: str) -> None:
    if hashlib.sha256(data).digest() != sha256:
        raise PeerProtocol(f"{peer}: the bytes of piece {piece} are not those of the model")
