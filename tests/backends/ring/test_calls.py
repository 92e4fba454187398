"""What the leader of a group hears of a rank at another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from kakeya.backends.ring import calls
from kakeya.backends.ring.calls import RingPeer, RingPeers
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


class Lists(RingServiceServicer):
    """A node with one group."""

    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Any
    ) -> pb.ListGroupsResponse:
        return pb.ListGroupsResponse(groups_json=b'[{"name": "big"}]')


class Known(RingPeers):
    """The nodes that can be called, and the label of one that cannot."""

    def __init__(self, *peers: RingPeer, uncalled: str) -> None:
        self._peers = peers
        self._uncalled = uncalled

    def all(self) -> Sequence[RingPeer]:
        return self._peers

    def _others(self) -> Any:
        labels = [*(peer.label for peer in self._peers), self._uncalled]
        return [SimpleNamespace(node_id=label, label=label) for label in labels]


@asynccontextmanager
async def serving(path: Path, servicer: RingServiceServicer) -> AsyncIterator[RingPeer]:
    """A node that is called by the name of its socket."""
    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{path}")
    add_RingServiceServicer_to_server(cast(Any, servicer), server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield RingPeer(channel, path.name, path.name, "127.0.0.1")
    finally:
        await server.stop(None)


async def test_the_fault_of_a_rank_is_known_at_its_end_when_it_comes_behind_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_FAULT_S", 60.0)
    async with serving(tmp_path / "right", LateReport()) as peer, peer.lent(ORDER) as rank:
        await rank.end()
        assert rank.fault == "rank 1 is lost: right: rank 1 ended by signal SIGKILL"


async def test_nodes_that_do_not_tell_their_groups_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_LIST_S", 60.0)
    async with (
        serving(tmp_path / "left", Lists()) as left,
        grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as nobody,
    ):
        right = RingPeer(nobody, "right", "right", "127.0.0.1")
        found, silent = await Known(left, right, uncalled="far").groups()
    assert found == [{"name": "big"}]
    assert silent == ["far", "right"]
