"""The facts for the plan of a ring group, asked of real services on loopback; and its HTTP path."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kakeya.backends.ring.own_share import NodeShare, OwnShare
from kakeya.cli.main import main
from kakeya.core.errors import InvalidArgument, NotFound, PeerProtocol
from kakeya.core.units import MIB
from kakeya.dispatch.peers import ring_survey
from kakeya.dispatch.peers.ring_survey import RingSurvey
from kakeya.dispatch.peers.ring_wire import ShareReport, report_from_wire, report_to_wire
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.placement.ring_speed import RingCable
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.api import MemoryArbiter
from kakeya.v1 import serving_pb2 as pb
from tests.dispatch.peers.test_neighbours import Front, silent
from tests.dispatch.peers.world import ServingNode, ToyModels
from tests.fakes import FakeClock
from tests.gateway.toy import serving

SHARE = NodeShare(
    lend_bytes=2000 * MIB,
    weights_per_s=1e9,
    products_per_s=1e11,
    speed_from="measured",
    has_thunderbolt5=False,
)
TINY = str(EMBEDDED_FOLDER / "kakeya-tiny")


class Fleet:
    """The front node, which has `tiny`, and a node that is asked."""

    def __init__(self, front: Front, survey: RingSurvey, left: ServingNode) -> None:
        self.front, self.survey, self.left = front, survey, left


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is late on a busy machine."""
    monkeypatch.setattr(ring_survey, "SURVEY_S", 60.0)
    monkeypatch.setattr(ring_survey, "_MEASURE_S", 60.0)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    front = Front(tmp_path / "front")
    async with AsyncExitStack() as stack:
        left = await stack.enter_async_context(
            ServingNode(ToyModels(), tmp_path / "left").serving()
        )
        left.shared = report_to_wire(ShareReport(share=SHARE))
        front.hear("left", address=left.address)
        stack.push_async_callback(front.channels.aclose)
        ledger = MemoryArbiter(budget=2000 * MIB, clock=FakeClock())
        own = OwnShare(ledger.status, tuple, {"tiny": TINY})
        yield Fleet(front, RingSurvey(front, own, front.clock, str), left)


async def test_all_nodes_are_asked_and_links_are_measured(fleet: Fleet) -> None:
    outlook = await fleet.survey.plan("tiny")
    assert [one.node_id for one in outlook.nodes] == ["front", "left"]
    assert [one.lend_bytes // MIB for one in outlook.nodes] == [2000, 2000]
    assert {one.node_id for one in outlook.plan.members} == {"front", "left"}
    assert outlook.plan.members[0].node_id == "front"
    asked = fleet.left.asked[0]
    assert (asked.model_id, list(asked.node_ids)) == ("tiny", ["front", "left"])
    answer = await fleet.survey.describe(
        pb.DescribeShareRequest(model_id="tiny", node_ids=["left", "front", "gone"])
    )
    assert answer.weights.layers == 4
    [link] = answer.links
    assert (link.node_id, link.network) == ("left", "loopback")
    assert 0 < link.rtt_seconds < 1
    unknown = await fleet.survey.describe(pb.DescribeShareRequest(model_id="?"))
    assert not unknown.HasField("weights")
    probed = await fleet.survey.describe(pb.DescribeShareRequest(probe_bytes=2**31))
    assert (len(probed.probe), probed.lend_bytes) == (4 * MIB, 0)


async def test_a_peer_may_know_the_model(fleet: Fleet) -> None:
    tiny = await fleet.survey.describe(pb.DescribeShareRequest(model_id="tiny"))
    fleet.left.shared.weights.CopyFrom(tiny.weights)
    assert (await fleet.survey.plan("theirs")).plan.model_id == "theirs"
    fleet.left.shared.ClearField("weights")
    with pytest.raises(NotFound, match="no live peer has it"):
        await fleet.survey.plan("theirs")


async def test_only_named_nodes_are_members_and_names_are_checked(fleet: Fleet) -> None:
    alone = await fleet.survey.plan("tiny", named=["front"])
    assert "left: it was not named" in alone.plan.reason_refused
    assert len((await fleet.survey.plan("tiny", named=["front", "le"])).plan.members) == 2
    with pytest.raises(NotFound, match="no live node is called 'lft'; did you mean left"):
        await fleet.survey.plan("tiny", named=["lft"])
    fleet.front.hear("left-over", address="127.0.0.1:9")
    with pytest.raises(InvalidArgument, match="names 2 nodes"):
        await fleet.survey.plan("tiny", named=["le"])


async def test_a_node_that_does_not_tell_is_no_member(fleet: Fleet) -> None:
    fleet.left.service.drain("it is stopping")
    async with silent() as address:
        fleet.front.hear("older", address=address)
        fleet.front.hear("closed", address="127.0.0.1:1")
        found = {one.node_id: one.refusal for one in (await fleet.survey.plan("tiny")).nodes}
    assert "it is stopping" in found["left"]
    assert "older build" in found["older"]
    assert found["closed"]
    assert found["front"] == ""


async def test_links_to_silent_peers_take_no_time_from_those_to_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(card: Card) -> RingCable:
        if card.node_id != "left":
            await asyncio.Event().wait()
        return RingCable(a="front", b=card.node_id)

    monkeypatch.setattr(ring_survey, "_MEASURE_S", 0.05)
    monkeypatch.setattr(fleet.survey, "_measure", measured)
    names = ["a-silent", "b-silent", "left"]
    for name in names[:2]:
        fleet.front.call_failed(fleet.front.hear(name))
    answer = await fleet.survey.describe(pb.DescribeShareRequest(node_ids=names))
    assert [link.node_id for link in answer.links] == ["left"]


def test_a_report_survives_the_wire_and_figures_that_are_none_do_not() -> None:
    cable = RingCable(a="x", b="y", rtt_s=0.25, bytes_per_s=1e6, network="lan")
    report = ShareReport(share=SHARE, cables=(cable,))
    assert report_from_wire(report_to_wire(report), "x", "m", "X") == report
    wrong = pb.DescribeShareResponse(weights_per_second=math.nan, speed_from="?")
    wrong.links.add(rtt_seconds=math.nan)
    wrong.links.add(rtt_seconds=-1.0)
    read = report_from_wire(wrong, "x", "m", "X")
    assert read.share.weights_per_s > 0
    assert (read.share.speed_from, [one.rtt_s for one in read.cables]) == ("assumed", [0.0])
    wrong.weights.layers = 3
    with pytest.raises(PeerProtocol, match="X: its facts of m"):
        report_from_wire(wrong, "x", "m", "X")


async def test_the_command_shows_a_plan(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(ring=fleet.survey) as served:

        async def said(*words: str) -> tuple[int, str, str]:
            status = await asyncio.to_thread(
                main, ["ring", "plan", *words, "--node", f"127.0.0.1:{served.port}"]
            )
            shown = capsys.readouterr()
            return status, shown.out, shown.err

        _, text, _ = await said("tiny")
        assert "tensor split, backend ring" in text
        assert max(map(len, text.splitlines())) <= 80
        _, text, _ = await said("tiny", "--json", "--nodes", "front,left", "--split", "tensor")
        told = json.loads(text)
        assert [one["label"] for one in told["members"]] == ["front", "left"]
        assert told["links"][0]["node_ids"] == ["front", "left"]
        status, text, _ = await said("tiny", "--split", "pipeline")
        assert status == 1
        assert "no pipeline of 'qwen3' models" in " ".join(text.split())
        for words in (["/no/such"], ["tiny", "--nodes", "front,nobody"]):
            status, _, error = await said(*words)
            assert (status, "404" in error) == (1, True)
        for path, code in (("", 400), ("model=tiny&split=x", 400), ("model=tiny&a=b", 400)):
            assert (await served.http.get(f"/api/v1/ring/plan?{path}")).status_code == code
