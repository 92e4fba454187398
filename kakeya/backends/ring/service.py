"""RingService: the ranks of this node for the nodes that lead groups, and the groups it leads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio

from kakeya.backends.ring import weights
from kakeya.backends.ring.groups import RingGroups
from kakeya.backends.ring.host import RankOrder
from kakeya.backends.ring.spec import RingSpec
from kakeya.core.errors import InvalidArgument, Refused
from kakeya.v1 import ring_pb2 as pb
from kakeya.v1.ring_pb2_grpc import RingServiceServicer
from kakeya.wire.beats import with_beats
from kakeya.wire.server.authorization import calling_node
from kakeya.wire.server.sockets import peer_of
from kakeya.wire.status import errors_end

Context = grpc.aio.ServicerContext[Any, Any]


class RingService(RingServiceServicer):
    """The servicer; `is_drained` tells whether the node is being drained."""

    def __init__(self, groups: RingGroups, is_drained: Callable[[], bool]) -> None:
        self._groups = groups
        self._is_drained = is_drained
        self._host = groups.host
        self._draining = ""

    def drain(self, reason: str) -> None:
        """End the ranks here and take no new ones."""
        self._draining = reason
        self._host.end_all()

    async def HostRank(  # type: ignore[override]
        self, request: pb.HostRankRequest, context: Context
    ) -> None:
        """Lend a rank for as long as the call lives."""
        async with errors_end(context):
            self._refuse_new()
            spec = RingSpec.from_wire(request.group)
            if not 0 < request.rank < len(spec.seats):
                raise InvalidArgument(f"rank is {request.rank}; it is 1 to {len(spec.seats) - 1}")
            leader = calling_node() or request.leader
            order = RankOrder(spec=spec, rank=request.rank, leader=leader)
            caller = peer_of(context.peer())
            seen = caller.rpartition(":")[0].strip("[]") if caller else "127.0.0.1"
            # Beats from the start: models in use may take long to make room.
            async with aclosing(with_beats(self._reports(order, seen))) as reports:
                async for told in reports:
                    if told is None:
                        self._host.measure()
                    await context.write(told or pb.RankReport())

    async def _reports(self, order: RankOrder, seen: str) -> AsyncGenerator[pb.RankReport, None]:
        """What is told of a rank, which is lent as long as this runs, to a leader that is `seen`
        at an address."""
        members, spec = self._groups.members, order.spec
        if members.is_ended(spec.wish):
            yield pb.RankReport(is_ended=True)
            return
        async with self._host.lent(order) as rank:
            await members.note(spec.name, order.leader, spec.wish)
            lent = pb.RankLent(
                port=rank.port,
                leader_host=seen,
                facts=await asyncio.to_thread(weights.facts_of, rank.folder),
                lent_bytes=rank.bytes,
            )
            yield pb.RankReport(lent=lent)
            async with aclosing(rank.reports()) as reports:
                async for told in reports:
                    progress = pb.RankProgress(
                        phase=told.phase.name,
                        done_bytes=told.done_bytes,
                        total_bytes=told.total_bytes,
                    )
                    yield pb.RankReport(progress=progress)

    async def StartRank(
        self, request: pb.StartRankRequest, context: Context
    ) -> pb.StartRankResponse:
        """Start the process of a rank."""
        async with errors_end(context):
            await self._host.start(request.name, request.rank, request.hosts_json)
            return pb.StartRankResponse()
        raise AssertionError("abort returned")

    async def EndRank(self, request: pb.EndRankRequest, context: Context) -> pb.EndRankResponse:
        """End a rank."""
        async with errors_end(context):
            await self._host.end(request.name, request.rank)
            return pb.EndRankResponse()
        raise AssertionError("abort returned")

    async def RaiseGroup(  # type: ignore[override]
        self, request: pb.RaiseGroupRequest, context: Context
    ) -> None:
        """Bring a group up; a caller that leaves before gives it up."""
        async with errors_end(context):
            self._refuse_new()
            spec = RingSpec.from_wire(request.group)
            steps = self._groups.raise_group(spec, is_for_leader=request.is_for_leader)
            async with aclosing(with_beats(steps)) as states:
                async for told in states:
                    said = b"" if told is None else json.dumps(told).encode()
                    await context.write(pb.GroupReport(group_json=said))

    async def EndGroup(self, request: pb.EndGroupRequest, context: Context) -> pb.EndGroupResponse:
        """End a group."""
        async with errors_end(context):
            note = await self._groups.end_group(request.name, is_for_leader=request.is_for_leader)
            return pb.EndGroupResponse(note=note)
        raise AssertionError("abort returned")

    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        """List groups."""
        async with errors_end(context):
            found, silent = await self._groups.groups(is_for_fleet=request.is_for_fleet)
            return pb.ListGroupsResponse(groups_json=json.dumps(found).encode(), silent=silent)
        raise AssertionError("abort returned")

    def _refuse_new(self) -> None:
        if reason := self._draining or ("it is being drained" if self._is_drained() else ""):
            raise Refused(f"this node takes no ranks: {reason}")
