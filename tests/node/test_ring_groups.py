"""A model over two real nodes, brought up, kept and ended by their agents; a third one asks it, and
has the same model alone."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from kakeya.cli.main import main
from kakeya.fleet.placement.ring import ring_path_available
from tests.node.nodes import QUICK, VERIFIER, NodeProcess, client_of, offers, seen_by
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
GROUP = "shared"
PROMPT = "def largest(numbers):\n"
UP_S = 120.0


class Fleet:
    """The node `front`, and the minis `left`, which leads, and `right`."""

    def __init__(self, folder: Path, front: NodeProcess, minis: dict[str, NodeProcess]) -> None:
        self.folder = folder
        self.front = front
        self.minis = minis
        self.openai = client_of(front)

    def said(self, *arguments: str) -> tuple[int, str]:
        """`kakeya ring` at the front: its exit status, and what it says."""
        at = ("--data-dir", str(self.folder / "front" / "data"))
        return said_by("ring", *arguments, *at)

    async def ring(self, *arguments: str) -> tuple[int, str]:
        return await asyncio.to_thread(self.said, *arguments)

    async def up(self, *flags: str) -> tuple[int, str]:
        return await self.ring("up", VERIFIER, "--nodes", "left,right", "--name", GROUP, *flags)

    def group(self) -> dict[str, Any] | None:
        """The group as the front hears of it; None also where its leader answers too late."""
        _, said = self.said("status", "--json")
        return next(iter(json.loads(said)), None)

    def led(self) -> dict[str, Any]:
        """The group as its leader has it."""
        groups = self.minis["left"].api.get("/api/v1/status")["rings"]["led"]
        return dict(groups[0]) if groups else {"state": "none"}

    def pids(self) -> list[int]:
        """The processes of both ranks."""
        left, right = (self.minis[name].api.get("/api/v1/status") for name in ("left", "right"))
        found = [model["pid"] for model in left["models"] if model["model_id"] == GROUP]
        return [*found, *(rank["pid"] for rank in right["rings"]["ranks"])]

    def lent(self, name: str) -> list[str]:
        """What a mini's ledger holds."""
        memory = self.minis[name].api.get("/api/v1/status")["memory"]
        return [f"{one['capability']}:{one['model']}" for one in memory["residents"]]

    def is_offered(self) -> bool:
        return GROUP in offers(seen_by(self.front)["left"])

    async def text(self, model: str, tokens: int = 24) -> str:
        reply = await self.openai.completions.create(
            model=model, prompt=PROMPT, max_tokens=tokens, temperature=0
        )
        return reply.choices[0].text

    async def stream(self, tokens: int) -> AsyncIterator[str]:
        parts = await self.openai.completions.create(
            model=GROUP, prompt=PROMPT, max_tokens=tokens, temperature=0, stream=True
        )
        async for part in parts:
            if part.choices:
                yield part.choices[0].text

    async def is_up_again(self, restarts: int = 0) -> None:
        await eventually(
            "the group is up again",
            lambda: self.led()["state"] == "up" and self.led()["restarts"] >= restarts,
            limit_s=UP_S,
        )


def said_by(*arguments: str) -> tuple[int, str]:
    """A command of `kakeya` in this process, which spares its imports."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, err.getvalue() if status else out.getvalue()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("ring")
    async with AsyncExitStack() as stack:
        flags = ("--node-id", "front", "--model", VERIFIER, *QUICK)
        front = await stack.enter_async_context(NodeProcess(folder / "front", *flags))
        minis = {}
        for name in ("left", "right"):
            own = ("--node-id", name, "--proposer", "ngram", "--peer", front.grpc, *QUICK)
            minis[name] = await stack.enter_async_context(NodeProcess(folder / name, *own))
        for node in (front, *minis.values()):
            await eventually("all know all", lambda node=node: len(seen_by(node)) == 3)
        found = Fleet(folder, front, minis)
        async with found.openai:
            yield found


async def test_a_refused_lease_gives_back_all_and_names_the_node(fleet: Fleet) -> None:
    status, said = await fleet.up("--lend-mb", "200,90000000")
    assert status == 1
    assert "right lends rank 1 no 90000000 MB" in said
    assert "MB are free" in said
    status, said = await fleet.up("--lend-mb", "90000000,200")
    assert status == 1
    assert "left lends rank 0 no 90000000 MB" in said
    assert await asyncio.to_thread(fleet.group) is None
    assert fleet.lent("left") == fleet.lent("right") == []


async def test_a_group_is_refused_for_what_it_cannot_be(fleet: Fleet) -> None:
    status, said = await fleet.ring("up", "org/none", "--nodes", "left,right")
    assert (status, "`kakeya models pull org/none`" in said) == (2, True), said
    status, said = await fleet.ring("up", VERIFIER, "--nodes", "left,nowhere")
    assert (status, "no live node of the fleet is called 'nowhere'" in said) == (1, True), said
    status, said = await fleet.ring("down", GROUP)
    assert (status, "no ring group is called" in said) == (1, True), said
    assert fleet.lent("left") == fleet.lent("right") == []


async def test_a_node_that_does_not_tell_its_groups_is_named(fleet: Fleet) -> None:
    at = ("--data-dir", str(fleet.folder / "front" / "data"))
    out, err = io.StringIO(), io.StringIO()
    fleet.minis["left"].send(signal.SIGSTOP)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            assert await asyncio.to_thread(main, ["ring", "status", "--json", *at]) == 0
    finally:
        fleet.minis["left"].send(signal.SIGCONT)
    assert json.loads(out.getvalue()) == []
    assert "no answer from left; groups led there are not shown" in err.getvalue()


async def test_a_group_serves_the_whole_fleet(fleet: Fleet) -> None:
    status, said = await fleet.up()
    assert status == 0, said
    assert "answers verified" in said
    assert await asyncio.to_thread(fleet.is_offered), "all have heard of it"
    assert await fleet.text(GROUP) == await fleet.text(VERIFIER)
    status, said = await fleet.up()
    assert (status, "is wished for already" in said) == (1, True), said
    addresses = [seen_by(fleet.front)[name]["ring_address"] for name in ("left", "right")]
    assert ring_path_available(*addresses), addresses
    status, said = await fleet.ring("down", GROUP)
    assert status == 0, said
    assert await asyncio.to_thread(fleet.group) is None
    assert fleet.lent("left") == fleet.lent("right") == []
    await eventually("the model leaves the cards", lambda: not fleet.is_offered())


@pytest.mark.slow
async def test_an_answer_goes_on_where_a_rank_is_killed_in_the_middle_of_it(fleet: Fleet) -> None:
    status, said = await fleet.up()
    assert status == 0, said
    whole = await fleet.text(VERIFIER, 80)
    parts, pids, restarts = [], fleet.pids(), fleet.led()["restarts"]
    async for part in fleet.stream(80):
        parts.append(part)
        if len(parts) == 3:
            os.kill(pids[1], signal.SIGKILL)
    assert "".join(parts) == whole
    await fleet.is_up_again(restarts + 1)
    group = await eventually("the front hears of the group", fleet.group)
    assert "rank 1" in group["reason"], group
    assert (await fleet.ring("down", GROUP))[0] == 0


@pytest.mark.slow
async def test_a_stopped_rank_a_lost_member_and_a_lost_leader_end_the_group_for_a_while(
    fleet: Fleet,
) -> None:
    status, said = await fleet.up("--split", "pipeline")
    assert (status, "mlx-lm has no pipeline of 'qwen3' models" in said) == (1, True), said
    status, said = await fleet.up()
    assert status == 0, said
    for rank in (1, 0):
        before = fleet.led()["restarts"]
        os.kill(fleet.pids()[rank], signal.SIGSTOP)
        await fleet.is_up_again(before + 1)
        assert len(fleet.pids()) == 2
    right, left = fleet.minis["right"], fleet.minis["left"]
    right.send(signal.SIGKILL)
    await right.wait()
    await eventually("the group waits", lambda: fleet.led()["state"] == "waiting")
    await eventually("the model leaves the cards", lambda: not fleet.is_offered())
    with pytest.raises(openai.APIStatusError):
        await fleet.text(GROUP)
    assert fleet.lent("left") == []
    async with right:
        await fleet.is_up_again()
        left.send(signal.SIGKILL)
        await left.wait()
        await eventually("the rank goes with its leader", lambda: fleet.lent("right") == [])
        async with left:
            await fleet.is_up_again()
            await eventually("the front hears of it", fleet.is_offered)
            assert await fleet.text(GROUP) == await fleet.text(VERIFIER)
            left.send(signal.SIGKILL)
            await left.wait()
            status, said = await fleet.ring("down", GROUP)
            assert (status, "left, which led it when a rank was here," in said) == (0, True), said
        async with left:
            await eventually("its wish is gone", lambda: fleet.led()["state"] == "none")
            assert fleet.lent("left") == fleet.lent("right") == []
            status, said = await fleet.up()
            assert status == 0, said
            status, said = await fleet.ring("down", GROUP)
            assert status == 0, said
