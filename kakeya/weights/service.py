"""The wire in: peers read the models of this node, and its owner looks after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import grpc.aio

from kakeya.core.errors import DeadlineExceeded, NotFound
from kakeya.core.units import MIB
from kakeya.v1 import weights_pb2 as pb
from kakeya.v1.weights_pb2_grpc import ModelFilesServiceServicer, WeightsServiceServicer
from kakeya.weights.found import FoundModel
from kakeya.weights.index import WeightIndex, read_piece
from kakeya.weights.listed import ListedModel, used_at
from kakeya.weights.manifest import PieceOfFile, WeightsManifest
from kakeya.weights.progress import TELL_S, PullState
from kakeya.weights.pull import Pull
from kakeya.weights.wire import held_to_wire, manifest_to_wire
from kakeya.wire.status import errors_end

Context = grpc.aio.ServicerContext[object, object]
PART_BYTES = MIB
WRITE_S = 30.0
"""A caller that takes no part for so long must not keep others from theirs."""
MOST_READS = 32
"""Parts that are read for peers, or wait to be taken, at the same time. A puller takes three, so
that a few that fall asleep do not keep others from theirs."""


class ModelsOfNode(Protocol):
    """The models on the disk of a node; `NodeWeights` is it."""

    @property
    def index(self) -> WeightIndex:
        """Those that are whole."""
        ...

    @property
    def fetching(self) -> Sequence[Pull]:
        """Those that come."""
        ...

    def pull(self, name: str, *, from_node: str, keep: bool) -> AsyncGenerator[PullState, None]:
        """Fetch one."""
        ...

    async def listed(self) -> tuple[Sequence[ListedModel], Mapping[str, str]]:
        """Those of the fleet, and why peers did not tell theirs."""
        ...

    @property
    def unserved(self) -> Callable[[str], str]:
        """Why a model that was pulled is not served, by its name."""
        ...

    def uses(self, model: FoundModel) -> tuple[str, str]:
        """The name by which one is loaded, and that by which it is configured."""
        ...

    async def remove(self, name: str, *, force: bool) -> tuple[Path, int]:
        """Remove one."""
        ...


class WeightsService(WeightsServiceServicer):
    """Answers peers. Only files of the index, and of fetches under way, are ever read."""

    def __init__(self, models: ModelsOfNode) -> None:
        self._models = models
        self._reads = asyncio.Semaphore(MOST_READS)
        self.bytes = 0
        """Sent to peers."""

    async def ListWeights(
        self, request: pb.ListWeightsRequest, context: Context
    ) -> pb.ListWeightsResponse:
        """List what is here, and what comes."""
        index = self._models.index
        entries = []
        for model in await index.models():
            made = index.known(model)
            digest = made.digest if made else ""
            entries.append(
                pb.WeightsEntry(name=model.name, bytes=model.bytes, digest=digest, is_whole=True)
            )
        for pull in self._models.fetching:
            state = pull.state
            # One that may come from this very caller is not told before something of it is here.
            if pull.held or pull.is_from_hub:
                entries.append(
                    pb.WeightsEntry(
                        name=state.name,
                        bytes=state.bytes,
                        digest=state.digest,
                        is_begun=pull.is_begun,
                    )
                )
        return pb.ListWeightsResponse(models=entries)

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: Context
    ) -> pb.WeightsManifest:
        """Tell the files of a model."""
        async with errors_end(context):
            manifest = await self._manifest(request.name, request.digest)
        return await asyncio.to_thread(manifest_to_wire, manifest)

    async def _manifest(self, name: str, digest: str) -> WeightsManifest:
        index = self._models.index
        if digest and (held := await index.with_digest(digest)) is not None:
            return held[1]
        pull = self._pull(digest)
        if pull is not None and pull.partial is not None:
            return pull.partial.manifest
        for model in await index.models():
            if model.name == name and not digest:
                return await index.manifest(model)
        raise NotFound(f"no model {name[:80]!r} {digest[:12]} is here")

    async def WatchPieces(  # type: ignore[override]
        self, request: pb.WatchPiecesRequest, context: Context
    ) -> None:
        """Tell the pieces that are here of a model that comes."""
        async with errors_end(context):
            while True:
                pull = self._pull(request.digest)
                if pull is None or pull.partial is None:
                    held = await self._models.index.with_digest(request.digest)
                    if held is None:
                        raise NotFound(f"no model {request.digest[:12]} is being pulled here")
                    count = len(held[1].pieces)
                    await context.write(held_to_wire(range(count), count))
                    return
                count = len(pull.partial.manifest.pieces)
                news = asyncio.ensure_future(pull.news())
                await context.write(held_to_wire(pull.held, count))
                await news
                await asyncio.sleep(TELL_S)  # many pieces come in this time

    async def ReadPiece(  # type: ignore[override]
        self, request: pb.ReadPieceRequest, context: Context
    ) -> None:
        """Send one piece."""
        async with errors_end(context), self._reads:
            at = 0
            while data := await self._read(request.digest, request.piece, at):
                try:
                    async with asyncio.timeout(WRITE_S):
                        await context.write(pb.PiecePart(data=data))
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"a part of piece {request.piece} was not taken within {WRITE_S:g} s"
                    ) from None
                at += len(data)
                self.bytes += len(data)

    def _pull(self, digest: str) -> Pull | None:
        for pull in self._models.fetching:
            if pull.partial is not None and pull.partial.manifest.digest == digest:
                return pull
        return None

    async def _read(self, digest: str, piece: int, at: int) -> bytes:
        """The part of a piece from a byte on; empty at its end."""
        pull = self._pull(digest)
        if pull is not None and pull.partial is not None and piece in pull.held:
            try:
                part = _part(pull.partial.manifest.pieces[piece], at)
                return await asyncio.to_thread(pull.partial.read, part)
            except OSError:
                pass  # it is whole just now, and has its name
        held = await self._models.index.with_digest(digest)
        if held is None:
            raise NotFound(f"no model {digest[:12]} is here")
        model, manifest = held
        if piece >= len(manifest.pieces):
            raise NotFound(f"model {digest[:12]} has {len(manifest.pieces)} pieces, no {piece}")
        place = _part(manifest.pieces[piece], at)
        name = manifest.files[place.file].name
        file = next(one for one in model.files if one.name == name)
        return await asyncio.to_thread(read_piece, file, place)


class ModelFilesService(ModelFilesServiceServicer):
    """Translates the owner's calls."""

    def __init__(self, models: ModelsOfNode) -> None:
        self._models = models

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """List the models here and at peers."""
        listed, silent = await self._models.listed()
        entries = await asyncio.to_thread(lambda: list(map(self._entry, listed)))
        return pb.ListModelsResponse(models=entries, silent=silent)

    async def PullModel(  # type: ignore[override]
        self, request: pb.PullModelRequest, context: Context
    ) -> None:
        """Fetch a model."""
        pull = self._models.pull(request.name, from_node=request.from_node, keep=request.keep)
        async with errors_end(context), aclosing(pull) as states:
            async for state in states:
                await context.write(
                    pb.PullProgress(
                        name=state.name,
                        phase=state.phase,
                        bytes=state.bytes,
                        done_bytes=state.done_bytes,
                        resumed_bytes=state.resumed_bytes,
                        bytes_per_second=state.bytes_per_s,
                        sources=state.sources,
                        digest=state.digest,
                        path=state.path,
                        note=state.note,
                    )
                )

    async def RemoveModel(
        self, request: pb.RemoveModelRequest, context: Context
    ) -> pb.RemoveModelResponse:
        """Remove a model that a pull brought."""
        async with errors_end(context):
            path, freed = await self._models.remove(request.name, force=request.force)
        return pb.RemoveModelResponse(path=str(path), freed_bytes=freed)

    def _entry(self, one: ListedModel) -> pb.ModelFilesEntry:
        entry = pb.ModelFilesEntry(
            name=one.name,
            bytes=one.bytes,
            digest=one.digest,
            peers=one.peers,
            fetching=one.fetching,
        )
        if one.found is not None:
            loaded, configured = self._models.uses(one.found)
            record = one.found.record
            entry.path = str(one.found.path)
            entry.is_loaded, entry.is_configured = bool(loaded), bool(configured)
            entry.is_pulled, entry.is_kept = record is not None, record is not None and record.keep
            entry.last_used_unix = used_at(one.found.path)
            entry.unserved = self._models.unserved(one.found.name) if record is not None else ""
        return entry


def _part(piece: PieceOfFile, at: int) -> PieceOfFile:
    """The part of a piece from a byte on."""
    left = max(0, piece.size - at)
    return piece._replace(offset=piece.offset + at, size=min(PART_BYTES, left))
