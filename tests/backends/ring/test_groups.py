"""What the leader of a group does with callers that leave and callers that come at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from kakeya.backends.ring.groups import FILE, RingGroups
from kakeya.backends.ring.members import FILE as MEMBERS_FILE
from kakeya.backends.ring.members import MOST, GroupEnded, Memberships
from kakeya.backends.ring.spec import RingSeat, RingSpec
from kakeya.backends.ring.state import PAUSES_S
from kakeya.core.clock import SystemClock
from kakeya.core.errors import (
    Conflict,
    DeadlineExceeded,
    InvariantBroken,
    KakeyaError,
    NotFound,
    PeerUnavailable,
)
from kakeya.core.files import write_atomically
from kakeya.core.tasks import Supervisor
from kakeya.generation.facts import ModelState
from kakeya.generation.spec import EMBEDDED_FOLDER
from tests.waiting import until

SPEC = RingSpec(
    name="big",
    source="kakeya-tiny",
    split="tensor",
    seats=(RingSeat(node="left"), RingSeat(node="right")),
)


class Model:
    """The model of a group, in memory once `room` is set; `fault` = why it is not."""

    def __init__(self) -> None:
        self.model_id = SPEC.name
        self.failures = SimpleNamespace(is_barred=False, clear=lambda: None)
        self.check: Any = None
        self.backend = self.resident = None
        self.restarts, self.last_error, self.state = 0, "", ModelState.LOADING
        self.room = asyncio.Event()
        self.fault = ""
        self.refusal: KakeyaError | None = None
        self.tries = 0

    @asynccontextmanager
    async def lend(self, _: object) -> AsyncIterator[None]:
        self.tries += 1
        await self.room.wait()
        if self.fault:
            raise PeerUnavailable(self.fault)
        if self.refusal:
            raise self.refusal
        self.state = ModelState.READY
        yield


class Home:
    """The models of a node; `may_leave` lets their engines end."""

    def __init__(self) -> None:
        self.arbiter = None
        self.model = Model()
        self.served: list[Model] = []
        self.may_leave = asyncio.Event()
        self.stays = False

    async def add_group(self, *_: object) -> Model:
        self.served.append(self.model)
        return self.model

    async def remove_group(self, model: Model) -> None:
        model.fault = "its engine is ended"
        model.room.set()
        await self.may_leave.wait()
        if self.stays:
            raise InvariantBroken("a model without an engine leaves memory", model.model_id)
        self.served.remove(model)


class Peers:
    """The other nodes; `away` are not live."""

    own_id = own_label = "left"
    away: Sequence[str] = ()
    known: ClassVar[Mapping[str, Any]] = {}

    @property
    def others(self) -> Sequence[Any]:
        return [one for name, one in self.known.items() if name not in self.away]

    def label_of(self, node: str) -> str:
        return node

    def are_live(self, nodes: Sequence[str]) -> bool:
        return not set(self.away) & set(nodes)

    async def groups(self) -> tuple[list[object], list[str]]:
        return [], []

    def all(self) -> Sequence[object]:
        return tuple(self.others)

    def get(self, node: str) -> Any:
        if node in self.away or node not in self.known:
            raise PeerUnavailable(f"node {node} is away")
        return self.known[node]


class Leader:
    """The groups of a node."""

    def __init__(self, folder: Path) -> None:
        self.home, self.peers = Home(), Peers()
        own = SimpleNamespace(folder=lambda _: EMBEDDED_FOLDER / "kakeya-tiny")
        make: Callable[..., RingGroups] = RingGroups
        self.groups = make(
            self.home,
            self.peers,
            SimpleNamespace(own=own, ranks=()),
            folder=folder,
            sockets=None,
            clock=SystemClock(),
            spread=self.spread,
        )
        self.spreads: list[str] = []

    async def spread(self) -> None:
        self.spreads.append(str(self.status()["state"]))

    async def up(self) -> None:
        async for _ in self.groups.raise_group(SPEC, is_for_leader=True):
            pass

    async def down(self) -> None:
        await self.groups.end_group(SPEC.name, is_for_leader=True)

    def status(self) -> dict[str, Any]:
        return dict(self.groups.status()[0])


async def test_a_group_that_is_ended_while_it_comes_up_is_ended_once_and_wholly(
    tmp_path: Path,
) -> None:
    leader = Leader(tmp_path)
    leader.home.may_leave.set()
    up = asyncio.create_task(leader.up())
    await until(lambda: leader.home.model.tries, "it comes up")
    assert leader.status()["ranks"][1]["state"] == "asked"
    await leader.down()
    assert leader.home.served == []
    assert leader.groups.status() == []
    with pytest.raises(Conflict, match="was ended while it came up"):
        await up
    assert leader.home.served == []


@pytest.mark.parametrize("leaves", ["up", "down"])
async def test_a_group_is_ended_wholly_though_its_caller_leaves(
    tmp_path: Path, leaves: str
) -> None:
    leader = Leader(tmp_path)
    up = asyncio.create_task(leader.up())
    await until(lambda: leader.home.model.tries, "it comes up")
    if leaves == "down":
        leader.home.model.room.set()
        await up
    call = up if leaves == "up" else asyncio.create_task(leader.down())
    if leaves == "up":
        up.cancel()
    await until(lambda: leader.home.model.fault, "its engine is being ended")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert leader.status()["state"] == "ending"
    leader.home.may_leave.set()
    await until(lambda: not leader.home.served, "it is gone")
    await until(lambda: not leader.groups.status(), "its name is free")


async def test_a_group_of_which_memory_stays_can_be_ended_again(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    leader.home.may_leave.set()
    leader.home.model.room.set()
    await leader.up()
    leader.home.stays = True
    with pytest.raises(InvariantBroken):
        await leader.down()
    assert leader.status()["state"] == "ending"
    leader.home.stays = False
    await leader.down()
    assert leader.groups.status() == []
    assert leader.home.served == []


async def test_members_that_were_there_all_the_time_do_not_shorten_the_pause(
    tmp_path: Path,
) -> None:
    leader = Leader(tmp_path)
    leader.home.may_leave.set()
    leader.home.model.room.set()
    async with Supervisor(SystemClock()) as tasks:
        leader.groups.start(tasks)
        await leader.up()
        model = leader.home.model
        group = next(iter(leader.groups._groups.values()))
        for _ in PAUSES_S:
            group.state = group.state.began(0.0).failed("a rank was refused", 1e12)
        leader.groups.fleet_changed()
        assert group.state.retry_mono == 1e12 + PAUSES_S[-1]
        leader.peers.away = ("right",)
        leader.groups.fleet_changed()
        assert group.state.retry_mono == 1e12 + PAUSES_S[-1]
        leader.peers.away = ()
        leader.groups.fleet_changed()
        assert group.state.retry_mono == 1e12 + 1.0
        assert model.tries == 1
        await leader.groups.aclose()


async def test_a_group_whose_member_is_away_is_not_tried_so_its_model_is_not_offered(
    tmp_path: Path,
) -> None:
    leader = Leader(tmp_path)
    leader.home.model.room.set()
    await leader.up()
    leader.peers.away = ("right",)
    with pytest.raises(KakeyaError, match="is not up: right is away"):
        await leader.groups._form(leader.groups._groups[SPEC.name])
    assert (leader.home.model.tries, leader.status()["state"]) == (1, "waiting")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"[]", b"{}", b'{"groups": [1]}', b'{"groups": "\xff"}']
)
async def test_a_damaged_file_of_wishes_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    leader = Leader(tmp_path)
    await leader.groups.restore()
    assert leader.groups.status() == []
    assert (tmp_path / FILE).with_suffix(".damaged").read_bytes() == content


async def test_a_wish_that_is_written_twice_is_one(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    leader.home.may_leave.set()
    leader.home.model.room.set()
    await leader.up()
    file = tmp_path / FILE
    text = file.read_text()
    wish = text[text.index("[") + 1 : text.rindex("]")]
    file.write_text(f'{{"groups": [{wish}, {wish}]}}')
    again = Leader(tmp_path)
    await again.groups.restore()
    assert [group["name"] for group in again.groups.status()] == [SPEC.name]
    with pytest.raises(KakeyaError):
        await again.up()


async def test_a_fault_of_the_code_leaves_no_wish_without_a_keeper(tmp_path: Path) -> None:
    first = Leader(tmp_path)
    first.home.model.room.set()
    await first.up()
    leader = Leader(tmp_path)
    await leader.groups.restore()

    def broken(*_: object) -> Model:
        raise KeyError("none")

    leader.home.add_group = broken  # type: ignore[method-assign]
    async with Supervisor(SystemClock()) as tasks:
        leader.groups.start(tasks)
        await until(lambda: leader.status()["state"] == "waiting", "its try failed")
        assert "KeyError" in leader.status()["reason"]
        del leader.home.add_group
        leader.home.model.room.set()
        leader.groups.fleet_changed()
        await until(lambda: leader.status()["state"] == "up", "it is tried again")
        await leader.groups.aclose()


async def test_the_reason_is_that_of_the_last_try_and_not_of_one_before(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    model = leader.home.model
    model.room.set()
    await leader.up()
    group = leader.groups._groups[SPEC.name]
    refused = {"state": "refused", "reason": "it said something else"}

    async def prepare() -> None:
        pass

    model.check = SimpleNamespace(status=lambda: refused, prepare=prepare)
    group.formation.refusal = PeerUnavailable("node right is away")
    model.fault = "its engine ended"
    with pytest.raises(KakeyaError, match="is not up: its engine ended"):
        await leader.groups._form(group)
    assert "its engine ended" in leader.status()["reason"]


async def test_all_peers_hear_of_a_group_before_it_counts_as_up(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    leader.home.may_leave.set()
    leader.home.model.room.set()
    await leader.up()
    assert leader.spreads == ["up"]


async def test_a_wish_that_a_member_ended_is_gone_when_its_leader_is_back(tmp_path: Path) -> None:
    first = Leader(tmp_path)
    first.home.model.room.set()
    await first.up()
    again = Leader(tmp_path)
    await again.groups.restore()
    again.home.may_leave.set()
    again.home.model.room.set()
    again.home.model.refusal = GroupEnded("it was ended on right while this node was away")
    async with Supervisor(SystemClock()) as tasks:
        again.groups.start(tasks)
        await until(lambda: not again.groups.status(), "its wish is gone")
        third = Leader(tmp_path)
        await third.groups.restore()
        assert third.groups.status() == []
        again.home.model.refusal, again.home.model.fault = None, ""
        await again.up()
        await again.groups.aclose()


class Answering:
    """A node that is asked to end a group."""

    def __init__(self, answer: str | KakeyaError) -> None:
        self.answer = answer

    async def end_group(self, name: str) -> str:
        if isinstance(self.answer, KakeyaError):
            raise self.answer
        return self.answer


async def test_a_member_ends_the_wish_of_a_leader_that_is_away(tmp_path: Path) -> None:
    member = Leader(tmp_path).groups
    peers: Any = member._peers
    await member.members.note("big", "mini-1", "wish-1")
    peers.known = {"mini-1": Answering("ended there")}
    assert await member.end_group("big", is_for_leader=False) == "ended there"
    with pytest.raises(NotFound):
        await member.end_group("big", is_for_leader=True)  # its leader is there to be asked
    for gone in (PeerUnavailable("no answer"), DeadlineExceeded("no answer")):
        await member.members.note("big", "mini-1", "wish-1")
        peers.known = {"mini-1": Answering(gone)}
        said = await member.end_group("big", is_for_leader=False)
        assert said.startswith("mini-1, which led it when a rank was here, does not answer; if it")
    assert member.members.is_ended("wish-1")
    await member.members.note("big", "mini-1", "wish-2")
    peers.away = ("mini-1",)
    assert "mini-1" in await member.end_group("big", is_for_leader=True)
    assert member.members.is_ended("wish-2")
    with pytest.raises(NotFound):
        await member.end_group("big", is_for_leader=True)


async def test_two_that_end_a_group_at_once_are_told_the_same(tmp_path: Path) -> None:
    member = Leader(tmp_path).groups
    await member.members.note("big", "mini-1", "wish-1")
    asked: list[str] = []
    may_fail = asyncio.Event()

    class Leaving:
        async def end_group(self, name: str) -> str:
            asked.append(name)
            await may_fail.wait()
            raise PeerUnavailable("no answer")

    cast("Any", member._peers).known = {"mini-1": Leaving()}
    ends = [asyncio.create_task(member.end_group("big", is_for_leader=False)) for _ in range(2)]
    await until(lambda: len(asked) == 2)
    may_fail.set()
    told = await asyncio.gather(*ends)
    assert told[0] == told[1]
    assert member.members._ended == ["wish-1"]


@pytest.mark.parametrize("answer", ["", NotFound("none")])
async def test_nothing_is_promised_for_a_group_that_its_leader_ended(
    tmp_path: Path, answer: str | KakeyaError
) -> None:
    member = Leader(tmp_path).groups
    peers: Any = member._peers
    await member.members.note("big", "mini-1", "wish-1")
    peers.known = {"mini-1": Answering(answer)}
    with contextlib.suppress(NotFound):
        assert await member.end_group("big", is_for_leader=False) == answer
    peers.known, peers.away = {}, ("mini-1",)
    with pytest.raises(NotFound, match="no ring group is called 'big'"):
        await member.end_group("big", is_for_leader=False)


async def test_of_two_groups_of_one_name_only_that_which_ended_is_forgotten(tmp_path: Path) -> None:
    member = Leader(tmp_path).groups
    peers: Any = member._peers
    for number in (1, 2):
        await member.members.note("big", f"mini-{number}", f"wish-{number}")
    peers.known = {"mini-1": Answering(PeerUnavailable("no answer")), "mini-2": Answering("")}
    assert await member.end_group("big", is_for_leader=False) == ""
    again = Leader(tmp_path).groups
    await again.restore()
    cast("Any", again._peers).known = peers.known
    assert "mini-1" in await again.end_group("big", is_for_leader=False)
    assert [again.members.is_ended(f"wish-{number}") for number in (1, 2)] == [True, False]


async def test_a_node_that_has_no_rank_asks_those_that_may_have(tmp_path: Path) -> None:
    asked = Leader(tmp_path).groups
    peers: Any = asked._peers
    peers.known = {"a": Answering(NotFound("none")), "b": Answering("mini-1 is away")}
    assert await asked.end_group("big", is_for_leader=False) == "mini-1 is away"
    peers.known = {"a": Answering(NotFound("none"))}
    with pytest.raises(NotFound, match="no ring group is called 'big'"):
        await asked.end_group("big", is_for_leader=False)


async def test_a_group_of_a_leader_that_gives_no_wish_is_not_ended_for_all_others(
    tmp_path: Path,
) -> None:
    member = Leader(tmp_path).groups
    await member.members.note("big", "mini-1", "")
    cast("Any", member._peers).away = ("mini-1",)
    with pytest.raises(NotFound):
        await member.end_group("big", is_for_leader=True)
    assert not member.members.is_ended("")


async def test_a_wish_of_an_older_build_gets_its_id_once(tmp_path: Path) -> None:
    older = {key: one for key, one in SPEC.to_json().items() if key != "wish"}
    (tmp_path / FILE).write_text(json.dumps({"groups": [older]}))
    wishes = set()
    for _ in range(2):
        run = Leader(tmp_path)
        await run.groups.restore()
        wishes |= {group.spec.wish for group in run.groups._groups.values()}
    assert len(wishes) == 1


async def test_what_is_known_last_is_on_the_disk_last(tmp_path: Path, monkeypatch: Any) -> None:
    may_write = threading.Event()
    members, writes = Memberships(tmp_path), iter((may_write.wait, int))

    def slow(path: Path, data: bytes) -> None:
        next(writes)()
        write_atomically(path, data)

    monkeypatch.setattr("kakeya.backends.ring.members.write_atomically", slow)
    noting = asyncio.create_task(members.note("big", "mini-1", "wish"))
    await asyncio.sleep(0)
    ending = asyncio.create_task(members.end("big", "mini-1"))
    await asyncio.wait((ending,), timeout=0.1)  # as if it overtook the first
    may_write.set()
    await asyncio.gather(noting, ending)
    again = Memberships(tmp_path)
    await again.restore()
    assert again.is_ended("wish")


async def test_memberships_outlive_a_run_and_stay_few(tmp_path: Path) -> None:
    members = Memberships(tmp_path)
    for number in range(MOST + 5):
        await members.note(f"g{number}", "mini", f"w{number}")
    await members.end(f"g{MOST}", "mini")
    again = Memberships(tmp_path)
    await again.restore()
    assert again.is_ended(f"w{MOST}")
    assert [again.leaders(f"g{number}") for number in (0, 9, MOST)] == [[], ["mini"], []]
    (tmp_path / MEMBERS_FILE).write_text('{"hosted": 3}')
    damaged = Memberships(tmp_path)
    await damaged.restore()
    assert not damaged.is_ended(f"w{MOST}")
