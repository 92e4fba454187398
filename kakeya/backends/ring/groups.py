"""The ring groups that this node leads: wished for, brought up, kept up, and ended.

    up      a group is formed once; where that fails, nothing stays of it
    kept    one that was up is wished for until it is ended, also by the next run of this node: a
            file has the wishes. Lost, it is formed again, after a pause or once its members are
            back (`state`)
    ended   its wish is gone, its engine and ranks are ended, and their memory is given back

The model of a group is one of the node's: requests, routing and failover know nothing of ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kakeya.backends.added.home import ModelHome
from kakeya.backends.engine.failures import GroupRefused
from kakeya.backends.engines import EngineCommand, sockets_folder
from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring import weights
from kakeya.backends.ring.calls import RingPeers
from kakeya.backends.ring.formation import Formation
from kakeya.backends.ring.host import RankHost, lends_not
from kakeya.backends.ring.led_group import BACKEND, LedGroup
from kakeya.backends.ring.members import GroupEnded, Memberships
from kakeya.backends.ring.spec import RingSpec
from kakeya.backends.ring.state import GroupPhase, GroupState
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    KakeyaError,
    LoadFailed,
    MemoryRefused,
    NotFound,
    PeerUnavailable,
)
from kakeya.core.figures import Figure, Json, from_zero, gauge
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.ring_offer import RingOffer
from kakeya.generation.manifest import Manifest
from kakeya.memory.api import Terms
from kakeya.prefix.peers.peers import Neighbourhood

_log = logging.getLogger(__name__)
FILE = "ring-groups.json"
"""The wishes, in the data directory."""
TELL_S = 1.0
UP_S = 1800.0
"""The longest way up: the largest models load for minutes."""


class RingGroups:
    """See the module; lives on the event loop."""

    def __init__(
        self,
        home: ModelHome,
        peers: RingPeers,
        host: RankHost,
        *,
        folder: Path,
        sockets: Path | None,
        clock: Clock,
        spread: Callable[[], Awaitable[None]],
        draw: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """`spread` has all live peers hear of this node's card; `draw` makes the ids of wishes."""
        self._spread = spread
        self._draw = draw
        self.members = Memberships(folder)
        self._home = home
        self._peers = peers
        self.host = host
        self._file = folder / FILE
        self._sockets = sockets
        self._clock = clock
        self._groups: dict[str, LedGroup] = {}
        self._saving = asyncio.Lock()
        self._tasks: Supervisor | None = None

    # Life

    async def restore(self) -> None:
        """Read the wishes of earlier runs; a file that is none is set aside."""
        await self.members.restore()
        try:
            data = await asyncio.to_thread(self._file.read_bytes)
        except OSError:
            return
        try:
            wished = [*json.loads(data)["groups"]]
            for said in wished:
                self._add(RingSpec.from_json(said))
            if not all(said.get("wish") for said in wished):  # an id is drawn once, for all runs
                await self._save()
        except (ConfigError, Conflict, ValueError, KeyError, TypeError) as fault:
            aside = self._file.with_suffix(".damaged")
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._file.rename, aside)
            event(_log, "wishes set aside", level=logging.WARNING, file=aside, fault=fault)
            await self._save()

    def start(self, tasks: Supervisor) -> None:
        """Bring up what is wished for."""
        self._tasks = tasks
        for group in self._groups.values():
            self._keep(group)

    async def aclose(self) -> None:
        """Stop keeping; the wishes stay."""
        groups = self._groups.values()
        tasks = [task for group in groups for task in group.tasks]
        tasks += [group.ending for group in groups if group.ending is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def fleet_changed(self) -> None:
        """Look whether groups that wait have their members back."""
        for group in self._groups.values():
            were_live = group.are_members_live
            group.are_members_live = self._peers.are_live([seat.node for seat in group.spec.seats])
            if group.are_members_live and not were_live:  # else no pause would be longer than 1 s
                state = group.state.members_seen(self._clock.mono())
                if state != group.state:
                    group.state = state
                    group.wake.set()

    def model_changed(self, model: ResidentModel) -> None:
        """Follow the change of a model's state."""
        if group := self._groups.get(model.model_id):
            group.look(self._clock.mono())

    # Commands

    async def raise_group(
        self, spec: RingSpec, *, is_for_leader: bool
    ) -> AsyncGenerator[Json, None]:
        """Bring a group up; its state, each second until it is up and all peers that can be reached
        have heard of it. Closing it ends the try.

        Raises NotFound for a node, Conflict for a name that is taken, and why it cannot be up.
        """
        if not is_for_leader:
            seats = [replace(seat, node=self._peers.node_id(seat.node)) for seat in spec.seats]
            spec = replace(spec, seats=tuple(seats))
            spec.check()
        leader = spec.seats[0].node
        if leader != self._peers.own_id:
            async for told in self._peers.get(leader).raise_group(spec):
                yield told
            return
        group = self._add(replace(spec, wish=""))
        trying = asyncio.create_task(self._form(group), name=f"ring group {spec.name}")
        group.trying = trying
        try:
            while not trying.done():
                await asyncio.wait((trying,), timeout=TELL_S)
                yield self._told(group)
            if group.ending is not None:
                raise Conflict(  # noqa: TRY301
                    f"ring group {spec.name} was ended while it came up"
                )
            await trying
            self._keep(group)
            await self._save()
            await self._spread()
        except BaseException:
            await self._drop(group)
            raise

    async def end_group(self, name: str, *, is_for_leader: bool) -> str:
        """End a group, here or at the node that leads it; what is still to happen, "" = nothing.

        The wish of a leader that is away is ended by a node that had a rank in the group. Raises
        NotFound, and the errors of the leader.
        """
        group = self._groups.get(name)
        if group is not None:
            await self._drop(group)
            return ""
        others = [] if is_for_leader else (await self._peers.groups())[0]
        leaders = {str(one["name"]): str(one["leader"]) for one in others}
        if name in leaders:
            note = await self._peers.get(leaders[name]).end_group(name)
            await self.members.forget(name, leaders[name])
            return note
        for leader in self.members.leaders(name):
            with contextlib.suppress(NotFound):
                return await self._end_of(leader, name, may_ask=not is_for_leader)
            if not is_for_leader:
                await self.members.forget(name, leader)
        if not is_for_leader:
            for peer in self._peers.all():
                with contextlib.suppress(KakeyaError):
                    return await peer.end_group(name)
        names = ", ".join((*self._groups, *leaders)) or "none"
        raise NotFound(
            f"no ring group is called {name[:80]!r} at this node or another one that answers; "
            f"there are {names}"
        )

    async def _end_of(self, leader: str, name: str, *, may_ask: bool) -> str:
        """End a group in which this node had a rank. Raises NotFound where its leader is there and
        has none such, or is not to be asked."""
        label = self._peers.label_of(leader)
        try:
            peer = self._peers.get(leader)
            if not may_ask and self._peers.are_live([leader]):
                raise NotFound(f"{label} leads it, and is there to be asked")
            if may_ask:
                note = await peer.end_group(name)
                await self.members.forget(name, leader)
                return note
        except (PeerUnavailable, DeadlineExceeded) as away:
            event(_log, "the leader of an ended group is away", group=name, why=away.message)
        await self.members.end(name, leader)
        return (
            f"{label}, which led it when a rank was here, does not answer; if it still has the "
            "group, it ends it once it is back and asks for its ranks"
        )

    async def groups(self, *, is_for_fleet: bool) -> tuple[list[Json], list[str]]:
        """The groups that this node leads, or that all live nodes lead, and the names of those
        that do not answer."""
        others, silent = await self._peers.groups() if is_for_fleet else ([], [])
        return [*self.status(), *others], silent

    def status(self) -> list[Json]:
        """The groups that this node leads."""
        return [self._told(group) for group in self._groups.values()]

    def overview(self) -> Json:
        """The groups that this node leads, and its ranks of others."""
        return {"led": self.status(), "ranks": [rank.status() for rank in self.host.ranks]}

    def figures(self) -> Iterator[Figure]:
        """The same as figures."""
        phases = Counter(str(group.state.phase) for group in self._groups.values())
        groups = from_zero(phases, GroupPhase)
        yield gauge("kakeya_ring_groups{phase}", "Ring groups that this node leads", groups)
        ranks = len(self.host.ranks)
        yield gauge("kakeya_ring_ranks", "Ranks here of groups that other nodes lead", ranks)

    @property
    def seat(self) -> RingOffer | None:
        """This node's rank in a group, for its card; None = it has none."""
        for group in self._groups.values():
            if group_id := group.formation.group_id:
                return _offer(group.spec, 0, group_id)
        for rank in self.host.ranks:
            if rank.group_id:
                return _offer(rank.order.spec, rank.order.rank, rank.group_id)
        return None

    # One group

    def _add(self, spec: RingSpec) -> LedGroup:
        if spec.name in self._groups:
            raise Conflict(
                f"a ring group {spec.name} is wished for already; end it with `kakeya ring down "
                f"{spec.name}`, or give the new one another --name"
            )
        spec = spec if spec.wish else replace(spec, wish=self._draw())
        formation = Formation(spec, self._peers, self.host.own.folder, self._sockets)
        group = self._groups[spec.name] = LedGroup(spec, formation)
        group.state = GroupState(since_mono=self._clock.mono())
        return group

    def _keep(self, group: LedGroup) -> None:
        if self._tasks is not None and group.keeping is None:
            group.keeping = asyncio.create_task(self._kept(group), name=f"keep {group.spec.name}")

    async def _kept(self, group: LedGroup) -> None:
        """Keep a group up for ever."""
        while True:
            now = self._clock.mono()
            phase, retry_mono = group.state.phase, group.state.retry_mono
            is_new = phase is GroupPhase.STARTING and group.model is None
            if is_new or (phase is GroupPhase.WAITING and now >= retry_mono):
                await self._try(group)
            elif phase is GroupPhase.WAITING:
                await self._clock.sleep(retry_mono - now, group.wake)
            else:
                await group.wake.wait()
            group.wake.clear()

    async def _try(self, group: LedGroup) -> None:
        try:
            await self._form(group)
        except GroupEnded:
            # Not awaited: the end waits for this very task.
            group.ending = group.ending or asyncio.create_task(
                self._end(group), name=f"end {group.spec.name}"
            )
        except KakeyaError:
            pass  # its state has the reason
        except Exception as fault:  # noqa: BLE001 - no fault may leave a wish without a keeper
            group.state = group.state.failed(repr(fault), self._clock.mono())
            event(_log, "ring group not formed", level=logging.ERROR, fault=repr(fault))

    async def _form(self, group: LedGroup) -> None:
        """Bring a group up. Raises why it cannot be."""
        group.state = group.state.began(self._clock.mono())
        group.formation.refusal = None
        check = group.model.check if group.model else None
        checked = check.status() if check else None
        try:
            if away := self._away(group):  # found out here, its model is offered at no moment
                raise PeerUnavailable(f"{', '.join(away)} is away")
            model = group.model or await self._register(group)
            if not model.failures.is_barred:
                model.failures.clear()  # the pauses are those of the group
            if model.check is not None:
                await model.check.prepare()
            async with model.lend(Terms(timeout_s=UP_S)):
                pass
        except KakeyaError as failure:
            told = self._why(group, failure, checked)
            group.state = group.state.failed(told.message, self._clock.mono())
            raise told from None
        group.look(self._clock.mono())

    def _away(self, group: LedGroup) -> Sequence[str]:
        """The members of a group that was up or tried before which are not there."""
        nodes = [seat.node for seat in group.spec.seats if group.model is not None]
        return [self._peers.label_of(node) for node in nodes if not self._peers.are_live([node])]

    async def _register(self, group: LedGroup) -> ResidentModel:
        spec = group.spec
        folder = await asyncio.to_thread(self.host.own.folder, spec)
        whole = await asyncio.to_thread(weights.estimate_of, folder)
        group.size = weights.rank_size(spec, 0, whole)
        pinned = replace(
            spec.model(), source=str(folder), manifest=Manifest(pin=True, may_displace_text=True)
        )
        group.model = await self._home.add_group(pinned, group.formation.form, group.size, whole)
        return group.model

    def _why(self, group: LedGroup, failure: KakeyaError, checked: Json | None) -> KakeyaError:
        """Why a group is not up, in the words of the part that failed; `checked` is what its check
        said before this try."""
        failure = group.formation.refusal or failure
        if isinstance(failure, MemoryRefused) and failure is not group.formation.refusal:
            size = group.size.bytes if group.size else 0
            return lends_not(self._peers.own_label, 0, size, self._home.arbiter, failure)
        check = group.model.check if group.model else None
        if check and (told := check.status()) is not checked and told["state"] == "refused":
            return GroupRefused(str(told["reason"]))
        if isinstance(failure, PeerUnavailable):
            # That is said to requests: this try is over, and `retry_s` tells of the next one.
            why = failure.message.removesuffix("; it is tried again later")
            return LoadFailed(f"ring group {group.spec.name} is not up: {why}")
        return failure

    async def _drop(self, group: LedGroup) -> None:
        """End a group for good: once, and to the end, also when a caller that waits leaves."""
        is_there = self._groups.get(group.spec.name) is group
        if group.ending is None or (group.ending.done() and is_there):
            ending = asyncio.create_task(self._end(group), name=f"end {group.spec.name}")
            group.ending = ending
        await asyncio.shield(group.ending)

    async def _end(self, group: LedGroup) -> None:
        group.state = group.state.ended(self._clock.mono())
        for task in group.tasks:
            task.cancel()
        await asyncio.gather(*group.tasks, return_exceptions=True)
        await self._save()  # first: the next run of a node that is killed has no such wish
        if group.model is not None:
            await self._home.remove_group(group.model)
        del self._groups[group.spec.name]  # only now: what is still there can be ended again
        event(_log, "ring group ended", group=group.spec.name)

    async def _save(self) -> None:
        """Write the wishes down. A full disk costs a restart the latest of them."""
        try:
            async with self._saving:  # the latest state last
                wished = [
                    group.spec.to_json()
                    for group in self._groups.values()
                    if group.state.phase is not GroupPhase.ENDING
                ]
                data = json.dumps({"groups": wished}).encode()
                await asyncio.to_thread(write_atomically, self._file, data)
        except OSError as problem:
            event(_log, "wishes not saved", level=logging.WARNING, problem=problem)

    def _told(self, group: LedGroup) -> Json:
        return group.describe(self._peers.label_of, self._clock.mono())


def _offer(spec: RingSpec, rank: int, group_id: str) -> RingOffer:
    return RingOffer(group_id, spec.name, BACKEND, spec.split, rank, len(spec.seats))


def node_rings(
    home: ModelHome,
    plane: Neighbourhood,
    command: EngineCommand,
    *,
    folder: Path,
    pulled: Path,
    clock: Clock,
    on_change: Callable[[], None],
    spread: Callable[[], Awaitable[None]],
) -> RingGroups:
    """The groups of a node with this data directory and folder of pulled models; `on_change` is
    called when the ranks here have changed, `spread` is as of `RingGroups`."""
    peers = RingPeers(plane, clock)
    sockets = sockets_folder(folder)
    own = weights.OwnWeights(lambda: peers.own_label, home.sources, pulled)
    host = RankHost(home.arbiter, own, command, sockets, clock=clock, on_change=on_change)
    return RingGroups(home, peers, host, folder=folder, sockets=sockets, clock=clock, spread=spread)
