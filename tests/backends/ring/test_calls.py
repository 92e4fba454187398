"""What the leader of a group hears of a rank at another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from kakeya.backends.ring import calls
from kakeya.backends.ring.calls import RingPeer
from kakeya.backends.ring.host import RankOrder
from kakeya.backends.ring.spec import RingSeat, RingSpec
from kakeya.core.errors import PeerUnavailable
from kakeya.v1 import ring_pb2 as pb
from kakeya.v1.ring_pb2_grpc import RingServiceServicer, add_RingServiceServicer_to_server
from kakeya.wire.status import abort

SEATS = (RingSeat(node="left"), RingSeat(node="right"))
ORDER = RankOrder(
    spec=RingSpec(name="big", source="kakeya-tiny", split="tensor", seats=SEATS),
    rank=1,
    leader="left",
)


class LateReport(RingServiceServicer):
    """A node whose rank was killed, and that tells so after the answer to `EndRank`."""

    def __init__(self) -> None:
        self._is_asked = asyncio.Event()

    async def HostRank(
        self, request: pb.HostRankRequest, context: Any
    ) -> AsyncIterator[pb.RankReport]:
        yield pb.RankReport(lent=pb.RankLent(port=1, leader_host="127.0.0.1"))
        await self._is_asked.wait()
        await asyncio.sleep(0.1)
        await abort(context, PeerUnavailable("rank 1 ended by signal SIGKILL"))

    async def EndRank(self, request: pb.EndRankRequest, context: Any) -> pb.EndRankResponse:
        self._is_asked.set()
        return pb.EndRankResponse()


async def test_the_fault_of_a_rank_is_known_at_its_end_when_it_comes_behind_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_FAULT_S", 60.0)
    server = grpc.aio.server()
    address = f"unix:{tmp_path}/ring"
    server.add_insecure_port(address)
    add_RingServiceServicer_to_server(cast(Any, LateReport)(), server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            peer = RingPeer(channel, "right", "right", "127.0.0.1")
            async with peer.lent(ORDER) as rank:
                await rank.end()
                assert rank.fault == "rank 1 is lost: right: rank 1 ended by signal SIGKILL"
    finally:
        await server.stop(None)
