"""AdapterService: the owner of a node adds, lists and removes adapters, on the node's socket."""

from __future__ import annotations

from pathlib import Path

import grpc.aio

from kakeya.adapters.files.packed import Precision
from kakeya.adapters.files.store import AdapterRecord
from kakeya.adapters.manager import AdapterManager
from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.v1 import adapters_pb2 as pb
from kakeya.v1.adapters_pb2_grpc import AdapterServiceServicer
from kakeya.wire.status import abort

Context = grpc.aio.ServicerContext[object, object]


class AdapterService(AdapterServiceServicer):
    """Translates the owner's calls."""

    def __init__(self, adapters: AdapterManager) -> None:
        self._adapters = adapters

    async def RegisterAdapter(
        self, request: pb.RegisterAdapterRequest, context: Context
    ) -> pb.RegisterAdapterResponse:
        """Take an adapter in."""
        try:
            record = await self._register(request)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.RegisterAdapterResponse(adapter=self._info(record))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        """List all adapters, of every owner."""
        stale = await self._adapters.stale()
        found = [self._info(record) for record in self._adapters.records()]
        for info in found:
            info.problem = stale.get(info.model_id, "")
        found += [
            pb.AdapterInfo(model_id=name, problem=problem)
            for name, problem in self._adapters.problems().items()
        ]
        return pb.ListAdaptersResponse(adapters=found)

    async def RemoveAdapter(
        self, request: pb.RemoveAdapterRequest, context: Context
    ) -> pb.RemoveAdapterResponse:
        """Remove an adapter: no new request gets it."""
        try:
            record = await self._adapters.remove(request.model_id)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.RemoveAdapterResponse(adapter=_info(record))

    async def _register(self, request: pb.RegisterAdapterRequest) -> AdapterRecord:
        folder = Path(request.folder)
        if not folder.is_absolute():
            raise InvalidArgument(f"folder {request.folder[:200]!r} is not a whole path")
        return await self._adapters.register(
            request.name,
            request.base,
            folder,
            owner=request.owner,
            precision=Precision.EXACT if request.exact else Precision.INT8,
            is_replacing=request.replace,
        )

    def _info(self, record: AdapterRecord) -> pb.AdapterInfo:
        known = self._adapters.describe(record)
        info = _info(record)
        info.tier, info.leases, info.uses = known.tier.name.lower(), known.leases, known.uses
        return info


def _info(record: AdapterRecord) -> pb.AdapterInfo:
    return pb.AdapterInfo(
        model_id=record.model_id,
        name=record.name,
        base=record.base,
        owner=record.owner,
        rank=record.rank,
        precision=record.precision,
        digest=record.digest,
        packed_bytes=record.packed_bytes,
        registered_at_unix=record.registered_at,
    )
