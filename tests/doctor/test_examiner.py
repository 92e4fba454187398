"""Examinations between real nodes on loopback, plain and with identities."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.core.programs import Output
from kakeya.doctor.machine import Machine
from kakeya.doctor.report import Examination, Finding, Severity, decode_report
from kakeya.fleet.cards.cards import Endpoint
from kakeya.fleet.identity.authority import authority_of, new_fleet
from tests.doctor.small_nodes import (
    SmallNode,
    closed_port,
    full_port,
    silent_port,
    small_node,
)

DAY = 86_400.0


def find(report: Examination, what: str, peer: str | None = None) -> Finding:
    """The one line whose subject begins like this."""
    lines = [
        line
        for line in report.lines
        if line.what.startswith(what) and (peer is None or line.peer == peer)
    ]
    assert len(lines) == 1, (what, [line.what for line in report.lines])
    return lines[0]


def meet(one: SmallNode, two: SmallNode) -> None:
    one.meet(two)
    two.meet(one)


async def test_two_healthy_nodes_have_nothing_to_mend(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        meet(one, two)
        report = await one.examiner().examine("")
    assert report.level is Severity.OK, [
        line for line in report.lines if line.level is not Severity.OK
    ]
    assert report.node == "one"
    assert {line.peer for line in report.lines} == {"", "two"}
    for what in ("reach ", "reached at", "path", "clocks", "version", "seen"):
        assert find(report, what, "two").level is Severity.OK
    for what in ("answers at", "node id", "fleet", "disk", "files", "mlx", "ring", "networks"):
        assert find(report, what, "").level is Severity.OK
    assert report.seconds < 30


async def test_warnings_of_the_node_itself_are_in_its_report(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one:
        one.warnings = ("the plug-in rerank (reranker:capability) is not used: it is broken",)
        report = await one.examiner().examine("")
    line = next(line for line in report.lines if line.what == "node")
    assert (line.level, line.detail) == (Severity.WARNING, one.warnings[0])
    assert line.command == "kakeya status"


async def test_two_members_examine_each_other_over_tls(tmp_path: Path) -> None:
    fleet = new_fleet("one", time.time())
    authority = authority_of(fleet)
    assert authority is not None
    other = authority.new_identity("two", now=time.time())
    async with (
        small_node(tmp_path, "", identity=fleet) as one,
        small_node(tmp_path, "", identity=other) as two,
    ):
        meet(one, two)
        report = await one.examiner().examine(two.registry.node_id)
    assert report.level is Severity.OK, [
        line for line in report.lines if line.level is not Severity.OK
    ]
    assert "364 days" in find(report, "certificate").detail or "365" in str(report.lines)


async def test_addresses_that_only_a_peer_names_are_dialled_as_the_policy_says(
    tmp_path: Path,
) -> None:
    """A member's card must not make the owner's doctor knock at the ports of his machine."""
    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        knocks: list[object] = []

        async def knocked(reader: object, writer: asyncio.StreamWriter) -> None:
            knocks.append(reader)
            writer.close()

        async with await asyncio.start_server(knocked, "127.0.0.1", 0) as private:
            port = private.sockets[0].getsockname()[1]
            address = f"127.0.0.1:{port}"
            two.offer(Endpoint(address, "lan", 20))
            meet(one, two)
            one.forbidden[address] = "it is a loopback address"
            report = await one.examiner().examine("two")
            assert knocks == []
            line = find(report, f"reach {address}", "two")
            assert line.level is Severity.OK
            assert "not dialled" in line.detail
            one.forbidden.clear()  # the control
            await one.examiner().examine("two")
            assert knocks


@pytest.mark.parametrize(("is_in_fleet", "command"), [(True, "invite"), (False, "init")])
async def test_a_lonely_node_is_told_that_the_rest_needs_another(
    tmp_path: Path, is_in_fleet: bool, command: str
) -> None:
    identity = new_fleet("one", time.time()) if is_in_fleet else None
    async with small_node(tmp_path, "one", identity=identity) as one:
        report = await one.examiner().examine("")
    line = find(report, "peers")
    assert (line.level, line.command) == (Severity.WARNING, f"kakeya {command}")


async def test_a_peer_that_is_gone_is_a_fault_and_told_by_its_cause(tmp_path: Path) -> None:
    async with (
        small_node(tmp_path, "one", dial_s=1.0) as one,
        small_node(tmp_path, "two") as two,
    ):
        with closed_port() as closed, silent_port() as silent, full_port() as full:
            for address, words in (
                (closed, "refuses port"),
                (silent, "does not answer"),
                (full, "no answer at all"),
            ):
                two.address = address
                two.offer()
                one.meet(two)
                report = await one.examiner().examine("two")
                line = find(report, "reach ", "two")
                assert (line.level, words in line.detail) == (Severity.FAULT, True), line
                assert report.level is Severity.FAULT


async def test_the_slower_way_in_use_and_a_way_that_does_not_work_are_warnings(
    tmp_path: Path,
) -> None:
    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        port = two.address.rpartition(":")[2]
        cable, wifi = f"127.0.0.1:{port}", f"localhost:{port}"
        with closed_port() as closed:
            two.offer(
                Endpoint(cable, "thunderbolt", 10),
                Endpoint(wifi, "lan", 20),
                Endpoint(closed, "tailscale", 30),
            )
            meet(one, two)
            one.routes["two"] = wifi
            slow = await one.examiner().examine("two")
            one.routes["two"] = cable
            fast = await one.examiner().examine("two")
    assert find(slow, "path").level is Severity.WARNING
    assert f"although thunderbolt {cable} works" in find(slow, "path").detail
    assert find(fast, "path").level is Severity.OK
    assert find(fast, f"reach {closed}").level is Severity.WARNING
    assert fast.level is Severity.WARNING


async def test_the_peer_tells_what_it_cannot_reach_of_us(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        with closed_port() as closed:
            one.offer(Endpoint(one.address, "lan", 20), Endpoint(closed, "thunderbolt", 10))
            meet(one, two)
            report = await one.examiner().examine("two")
    assert find(report, f"reached at {one.address}").level is Severity.OK
    line = find(report, f"reached at {closed}")
    assert line.level is Severity.WARNING
    assert "does not listen" in line.detail
    assert find(report, f"answers at {closed}").level is Severity.FAULT


@pytest.mark.parametrize(
    ("ahead_s", "level"),
    [
        (0.0, Severity.OK),
        (12.0, Severity.WARNING),
        (-12.0, Severity.WARNING),
        (50.0, Severity.FAULT),
    ],
)
async def test_skew_is_measured_by_the_answer(
    tmp_path: Path, ahead_s: float, level: Severity
) -> None:
    async with (
        small_node(tmp_path, "one") as one,
        small_node(tmp_path, "two", ahead_s=ahead_s) as two,
    ):
        report = await one.examiner().examine(two.address)
    assert find(report, "clocks").level is level


async def test_the_own_clock_is_blamed_when_most_peers_disagree(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one:
        one.skews = {"a": 60.0, "b": 61.0, "c": 59.0}
        report = await one.examiner().examine("")
    assert find(report, "own clock").level is Severity.FAULT


async def test_a_peer_by_its_address_alone_becomes_known_by_its_answer(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        stranger = await one.examiner().examine(two.address)
        two.offer(label="Shelf, left")
        meet(one, two)
        known = await one.examiner().examine(two.address)
        labelled = await one.examiner().examine("shelf, LEFT")
    assert find(stranger, "seen", two.address).level is Severity.WARNING
    assert find(known, "seen", "Shelf, left").level is Severity.OK
    assert {line.peer for line in labelled.lines} == {"", "Shelf, left"}


async def test_a_peer_without_a_doctor_is_examined_from_one_side(tmp_path: Path) -> None:
    async with (
        small_node(tmp_path, "one") as one,
        small_node(tmp_path, "two", has_doctor=False) as two,
    ):
        meet(one, two)
        report = await one.examiner().examine("two")
    assert find(report, "reach ", "two").level is Severity.OK
    assert find(report, "checked back").level is Severity.WARNING


async def test_another_process_under_the_own_id_is_a_fault(tmp_path: Path) -> None:
    async with small_node(tmp_path, "same") as one, small_node(tmp_path, "same") as copy:
        one.meet(copy)
        report = await one.examiner().examine("")
    line = find(report, "node id")
    assert line.level is Severity.FAULT
    assert copy.address in line.detail


async def test_an_expiring_certificate_is_told(tmp_path: Path) -> None:
    fleet = new_fleet("one", time.time() - 300 * DAY)
    authority = authority_of(fleet)
    assert authority is not None
    async with small_node(tmp_path, "", identity=fleet) as one:
        report = await one.examiner().examine("")
    line = find(report, "certificate")
    assert line.level is Severity.WARNING
    assert "not renewed" in line.detail


async def test_a_node_that_was_taken_out_hears_it_once(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        meet(one, two)
        one.revoked.add("one")
        for peer in ("", "two"):
            report = await one.examiner().examine(peer)
            bad = [line for line in report.lines if line.level is not Severity.OK]
            assert [line.what for line in bad] == ["fleet"]
            assert bad[0].command == "kakeya join TOKEN"


async def test_a_peer_that_was_taken_out_is_named_so_and_asked_nothing(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        one.revoked.add("two")
        report = await one.examiner().examine(two.address)
    (line,) = [line for line in report.lines if line.peer]
    assert (line.level, line.command, line.on) == (
        Severity.FAULT,
        "kakeya join TOKEN",
        two.address,
    )


@pytest.mark.parametrize(
    ("limit_s", "most_s"), [pytest.param(1.0, 5.0, marks=pytest.mark.slow), (3.0, 25.0)]
)
async def test_an_examination_ends_by_its_limit_whatever_hangs(
    tmp_path: Path, limit_s: float, most_s: float
) -> None:
    async def hang(command: object, limit_s: float) -> Output | None:
        await asyncio.sleep(60)
        return None

    async with small_node(tmp_path, "one") as one, small_node(tmp_path, "two") as two:
        meet(one, two)
        with silent_port() as silent:
            two.address = silent
            two.offer()
            meet(one, two)
            machine = Machine(tmp_path, environ={}, run=hang)
            started = time.monotonic()
            report = await one.examiner(limit_s=limit_s, machine=machine).examine("")
    assert time.monotonic() - started < most_s
    assert find(report, "machine").level is Severity.WARNING
    assert find(report, "peer", "two").level is Severity.WARNING
    assert find(report, "answers at").level is Severity.OK


async def test_the_report_travels_as_json(tmp_path: Path) -> None:
    async with small_node(tmp_path, "one") as one:
        text = await one.examiner().examine_json("")
    assert decode_report(text).node == "one"


async def test_a_peer_that_cannot_be_meant(tmp_path: Path) -> None:
    async with (
        small_node(tmp_path, "one") as one,
        small_node(tmp_path, "mini-2a") as two,
        small_node(tmp_path, "mini-2b") as three,
    ):
        for other in (two, three):
            other.offer(label="twin")
            one.meet(other)
        examiner = one.examiner()
        with pytest.raises(NotFound, match="did you mean"):
            await examiner.examine("twni")
        for ambiguous in ("twin", "mini-2"):
            with pytest.raises(InvalidArgument, match="names 2 nodes"):
                await examiner.examine(ambiguous)
        report = await examiner.examine("mini-2a")
    assert {line.peer for line in report.lines} == {"", "twin"}
