"""Every check of another node and of the fleet, as tables: the level, the words, the command."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import PeerProtocol
from kakeya.doctor import checks
from kakeya.doctor.checks import CertificateDates, Protocols
from kakeya.doctor.dials import DialAttempt, DialOutcome, Shown, outcome_of
from kakeya.doctor.report import (
    Examination,
    Finding,
    Severity,
    decode_report,
    encode_report,
    fault,
    ok,
    shell,
    warning,
)
from kakeya.doctor.way_checks import Here, Peer, check_back, check_path, check_way
from kakeya.fleet.cards.cards import Endpoint

DAY = 86_400.0
NOW = 1_700_000_000.0
MAC = Peer(name="mini-2", node_id="n2", platform="darwin-arm64")
LINUX = Peer(name="box", node_id="n2", platform="linux-x86_64")
ON_MAC = Here(platform="darwin", python="/opt/python", is_member=True)
ON_LINUX = Here(platform="linux", python="/usr/bin/python3", is_member=True)
WAY = Endpoint("10.0.0.5:50051", "lan", 20)
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def dial(outcome: DialOutcome, number: int = 0, **more: object) -> DialAttempt:
    fields: dict[str, object] = {"address": WAY.address, "outcome": outcome, "errno": number}
    return DialAttempt(**(fields | {"error": "the words"} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "platform", "outcome"),
    [
        (61, "darwin-arm64", DialOutcome.REFUSED),
        (65, "darwin", DialOutcome.HOST_UNREACHABLE),
        (51, "darwin", DialOutcome.NO_ROUTE),
        (60, "darwin", DialOutcome.TIMEOUT),
        (111, "linux-x86_64", DialOutcome.REFUSED),
        (113, "linux", DialOutcome.HOST_UNREACHABLE),
        (101, "linux", DialOutcome.NO_ROUTE),
        (110, "linux", DialOutcome.TIMEOUT),
        (65, "linux", DialOutcome.FAILED),
        (111, "plan9", DialOutcome.FAILED),
        (0, "linux", DialOutcome.FAILED),
    ],
)
def test_an_errno_is_read_by_the_system_that_said_it(
    number: int, platform: str, outcome: DialOutcome
) -> None:
    assert outcome_of(number, platform) is outcome


# --- ways


@pytest.mark.parametrize(
    ("found", "peer", "here", "words", "command", "on"),
    [
        (
            dial(DialOutcome.REFUSED, 111),
            LINUX,
            ON_LINUX,
            "refuses port 50051",
            "kakeya-node",
            "box",
        ),
        (
            dial(DialOutcome.TIMEOUT, 110),
            LINUX,
            ON_LINUX,
            "firewall there drops",
            "sudo ufw allow 50051/tcp",
            "box",
        ),
        (dial(DialOutcome.TIMEOUT, 60), MAC, ON_MAC, "firewall there drops", FIREWALL, "mini-2"),
        (
            dial(DialOutcome.TIMEOUT, 110),
            LINUX,
            Here(platform="linux", python="p", link_to="eth0", is_cut=True),
            "own link eth0 has no carrier: plug its cable in",
            "ip link show eth0",
            "",
        ),
        (
            dial(DialOutcome.HOST_UNREACHABLE, 65),
            MAC,
            Here(platform="darwin", python="p", link_to="en0", pings=False),
            "off, asleep or on another network; if it is on, System Settings > Privacy",
            "ping -c 3 10.0.0.5",
            "",
        ),
        (
            dial(DialOutcome.HOST_UNREACHABLE, 65),
            MAC,
            Here(platform="darwin", python="p", pings=True),
            "errno 65 though 10.0.0.5 answers a ping",
            "x-apple.systempreferences",
            "",
        ),
        (
            dial(DialOutcome.HOST_UNREACHABLE, 65),
            MAC,
            Here(platform="darwin", python="p", pings=False),
            "no machine has the address",
            "ping -c 3 10.0.0.5",
            "",
        ),
        (
            dial(DialOutcome.HOST_UNREACHABLE, 64),
            MAC,
            Here(platform="darwin", python="p", link_to="en0", pings=True),
            "off, asleep or on another network",
            "ping -c 3 10.0.0.5",
            "",
        ),
        (
            dial(DialOutcome.HOST_UNREACHABLE, 113),
            LINUX,
            Here(platform="linux", python="p", link_to="eth0"),
            "no machine has the address",
            "ping -c 3 10.0.0.5",
            "",
        ),
        (
            dial(DialOutcome.NO_ROUTE, 101),
            LINUX,
            ON_LINUX,
            "no way to",
            "ip route get 10.0.0.5",
            "",
        ),
        (dial(DialOutcome.NO_ROUTE, 51), MAC, ON_MAC, "no way to", "route -n get 10.0.0.5", ""),
        (dial(DialOutcome.FORBIDDEN, 1), LINUX, ON_MAC, "forbids", "/opt/python", ""),
        (dial(DialOutcome.FAILED, 5), LINUX, ON_LINUX, "the words", "ip route get", ""),
        (
            dial(DialOutcome.SILENT),
            LINUX,
            ON_LINUX,
            "does not answer",
            "lsof -nP -iTCP:50051",
            "box",
        ),
        (dial(DialOutcome.NO_NODE), LINUX, ON_LINUX, "another program", "lsof", "box"),
        (dial(DialOutcome.DENIED), LINUX, ON_LINUX, "refuses this one", "kakeya join", ""),
        (
            dial(DialOutcome.ANSWERED, node_id="other"),
            LINUX,
            ON_LINUX,
            "another node answers there: other",
            "kakeya status",
            "",
        ),
    ],
)
def test_a_way_that_fails_is_told_apart(
    found: DialAttempt, peer: Peer, here: Here, words: str, command: str, on: str
) -> None:
    line = check_way(WAY, found, peer, here, now=NOW, others_work=False)
    assert line.level is Severity.FAULT
    assert words in line.detail
    assert command in line.command
    assert line.on == on
    spared = check_way(WAY, found, peer, here, now=NOW, others_work=True)
    assert spared.level is Severity.WARNING


@pytest.mark.parametrize(
    ("shown", "is_member", "words", "command", "on"),
    [
        (Shown(not_before_at=NOW - 9 * DAY, not_after_at=NOW - 3 * DAY), True, "3 days", "join", 1),
        (Shown(not_before_at=NOW + 3 * DAY, not_after_at=NOW + 9 * DAY), True, "clock", "sntp", 0),
        (Shown(not_before_at=NOW - DAY, not_after_at=NOW + DAY), True, "another fleet", "join", 1),
        (Shown(not_before_at=NOW - DAY, not_after_at=NOW + DAY), False, "to none", "join", 0),
        (None, True, "no certificate", "join", 1),
        (None, False, "ends the connection", "lsof", 1),
    ],
)
def test_distrust_names_the_certificate_or_the_clock(
    shown: Shown | None, is_member: bool, words: str, command: str, on: bool
) -> None:
    here = Here(platform="darwin", python="p", is_member=is_member)
    found = dial(DialOutcome.UNTRUSTED, shown=shown)
    line = check_way(WAY, found, MAC, here, now=NOW, others_work=False)
    assert words in line.detail
    assert command in line.command
    assert line.on == ("mini-2" if on else "")


def test_a_way_that_works_is_fine_and_needs_no_command() -> None:
    found = dial(DialOutcome.ANSWERED, node_id="n2", rtt_ms=0.8)
    line = check_way(WAY, found, MAC, ON_MAC, now=NOW, others_work=True)
    assert (line.level, line.command) == (Severity.OK, "")
    assert "0.8 ms" in line.detail


@pytest.mark.parametrize(
    ("outcome", "number", "words", "command", "on"),
    [
        (DialOutcome.TIMEOUT, 60, "firewall of this machine", "/usr/bin/python3", ""),
        (DialOutcome.REFUSED, 61, "does not listen", "--bind 10.0.0.5:50051", ""),
        (DialOutcome.HOST_UNREACHABLE, 65, "Local Network", "x-apple", "mini-2"),
        (DialOutcome.HOST_UNREACHABLE, 64, "no way", "route -n get", "mini-2"),
        (DialOutcome.NO_ROUTE, 51, "no way", "route -n get", "mini-2"),
        (DialOutcome.FAILED, 0, "the words", "kakeya doctor", "mini-2"),
    ],
)
def test_what_the_peer_cannot_reach_is_mended_where_the_cause_is(
    outcome: DialOutcome, number: int, words: str, command: str, on: str
) -> None:
    here = Here(platform="darwin", python="/usr/bin/python3")
    line = check_back(dial(outcome, number), MAC, here, others_work=False)
    assert line.level is Severity.FAULT
    assert words in line.detail
    assert command in line.command
    assert line.on == on


CABLE = Endpoint("169.254.1.2:50051", "thunderbolt", 10)


def reached(way: Endpoint, rtt_ms: float) -> tuple[Endpoint, DialAttempt]:
    return way, DialAttempt(address=way.address, outcome=DialOutcome.ANSWERED, rtt_ms=rtt_ms)


def lost(way: Endpoint) -> tuple[Endpoint, DialAttempt]:
    return way, DialAttempt(address=way.address, outcome=DialOutcome.TIMEOUT)


@pytest.mark.parametrize(
    ("used", "ways", "level", "words", "command"),
    [
        (CABLE, [reached(CABLE, 0.2), reached(WAY, 2)], Severity.OK, "best of 2", ""),
        (
            WAY,
            [reached(CABLE, 0.2), reached(WAY, 2)],
            Severity.WARNING,
            "although thunderbolt",
            "kakeya doctor mini-2",
        ),
        (
            WAY,
            [lost(CABLE), reached(WAY, 2)],
            Severity.WARNING,
            "thunderbolt 169.254.1.2:50051 does not work",
            "networksetup -setdhcp 'Thunderbolt Bridge'",
        ),
        (WAY, [reached(WAY, 2)], Severity.OK, "lan 10.0.0.5", ""),
        (CABLE, [lost(CABLE), reached(WAY, 2)], Severity.WARNING, "does not work", "networksetup"),
    ],
)
def test_a_slower_path_in_use_is_told(
    used: Endpoint,
    ways: list[tuple[Endpoint, DialAttempt]],
    level: Severity,
    words: str,
    command: str,
) -> None:
    line = check_path(used.address, ways, MAC)
    assert line is not None
    assert line.level is level
    assert words in line.detail
    assert command in line.command


def test_there_is_no_path_to_judge_when_none_works() -> None:
    assert check_path(WAY.address, [lost(WAY)], MAC) is None


# --- clocks, versions, ids, certificates


@pytest.mark.parametrize(
    ("skew_s", "level"),
    [
        (0.0, Severity.OK),
        (5.0, Severity.OK),
        (-5.0, Severity.OK),
        (5.1, Severity.WARNING),
        (-30.0, Severity.WARNING),
        (30.1, Severity.FAULT),
        (-3600.0, Severity.FAULT),
    ],
)
def test_skew_is_a_warning_from_5_s_and_a_fault_from_a_quarter_of_the_ttl(
    skew_s: float, level: Severity
) -> None:
    line = checks.check_skew(skew_s, 120.0, MAC)
    assert line.level is level
    if level is not Severity.OK:
        assert ("ahead of" if skew_s > 0 else "behind") in line.detail
        assert line.command == "sudo sntp -sS time.apple.com"
        assert line.on == "mini-2"
        linux = checks.check_skew(skew_s, 120.0, LINUX)
        assert linux.command == "sudo timedatectl set-ntp true"


@pytest.mark.parametrize(
    ("skews", "level", "words"),
    [
        ({"a": 9.0, "b": 9.0}, None, ""),
        ({"a": 9.0, "b": 0.0, "c": 0.1}, Severity.OK, "agrees"),
        ({"a": 60.0, "b": 61.0, "c": 0.1}, Severity.FAULT, "behind theirs"),
        ({"a": -60.0, "b": -61.0, "c": -59.0}, Severity.FAULT, "ahead of theirs"),
        ({"a": 60.0, "b": 61.0, "c": 0.1, "d": 0.0}, Severity.FAULT, "2 of 4"),
    ],
)
def test_half_of_three_or_more_peers_blame_the_own_clock(
    skews: dict[str, float], level: Severity | None, words: str
) -> None:
    line = checks.check_own_clock(skews, "linux")
    assert (line and line.level) is level
    assert line is None or words in line.detail


@pytest.mark.parametrize(
    ("own", "theirs", "level", "words", "on"),
    [
        ((1, 1), (1, 1), Severity.OK, "protocol 1", ""),
        ((1, 2), (2, 3), Severity.OK, "2 to 3", ""),
        ((1, 1), (0, 0), Severity.OK, "all cards", ""),
        ((1, 1), (2, 3), Severity.FAULT, "mini-2 is newer: it speaks protocol 2 to 3", ""),
        ((3, 4), (1, 2), Severity.FAULT, "mini-2 is older: it speaks protocol 1 to 2", "mini-2"),
    ],
)
def test_versions_that_do_not_overlap_say_who_is_older(
    own: tuple[int, int], theirs: tuple[int, int], level: Severity, words: str, on: str
) -> None:
    line = checks.check_protocol(Protocols(*own), Protocols(*theirs), "0.1.0", MAC)
    assert line.level is level
    assert words in line.detail
    assert line.on == on
    assert bool(line.command) is (level is not Severity.OK)


@pytest.mark.parametrize(
    ("begins", "due", "ends", "level", "words", "command"),
    [
        (-10, 200, 300, Severity.OK, "300 days", ""),
        (-250, -0.5, 100, Severity.OK, "100 days", ""),
        (-250, -5, 100, Severity.WARNING, "not renewed", "kakeya-node"),
        (-400, -100, -3, Severity.FAULT, "3 days ago", "kakeya join TOKEN"),
        (2, 200, 300, Severity.FAULT, "clock of this machine is behind", "timedatectl"),
    ],
)
def test_certificate_dates(
    begins: float, due: float, ends: float, level: Severity, words: str, command: str
) -> None:
    dates = CertificateDates(NOW + begins * DAY, NOW + due * DAY, NOW + ends * DAY)
    line = checks.check_certificate(dates, NOW, "linux")
    assert line.level is level
    assert words in line.detail
    assert command in line.command


def test_a_second_process_under_the_id_is_a_fault() -> None:
    assert checks.check_conflicts([], data_dir="/d").level is Severity.OK
    line = checks.check_conflicts(["10.0.0.9:50051"], data_dir="/my data")
    assert line.level is Severity.FAULT
    assert "10.0.0.9:50051" in line.detail
    assert line.command == "mv '/my data' '/my data.copy'"
    assert line.on == "the machine of the copy"
    copy = checks.check_conflicts(["10.0.0.9:50051"], data_dir="/d", has_given_way=True)
    assert (copy.level, copy.on) == (Severity.FAULT, "")
    assert "serves nothing" in copy.detail


def test_a_rival_of_a_peer_is_told_with_its_address() -> None:
    assert checks.check_rivals([], MAC) is None
    line = checks.check_rivals(["10.0.0.9:50051"], MAC)
    assert line is not None
    assert line.level is Severity.FAULT
    assert "10.0.0.9:50051" in line.detail
    assert line.peer == MAC.name


@pytest.mark.parametrize(
    ("age_s", "level"),
    [(None, Severity.WARNING), (3.0, Severity.OK), (60.0, Severity.OK), (61.0, Severity.WARNING)],
)
def test_how_the_peer_sees_this_node(age_s: float | None, level: Severity) -> None:
    assert checks.check_seen(age_s, 120.0, WAY.address, MAC).level is level


def test_suspicion_is_told_from_both_sides() -> None:
    assert checks.check_suspicion(MAC, of_them=False, of_us=False) is None
    for of_them, of_us in ((True, False), (False, True)):
        line = checks.check_suspicion(MAC, of_them=of_them, of_us=of_us)
        assert line is not None
        assert line.level is Severity.WARNING


@pytest.mark.parametrize(
    ("own", "theirs", "level"),
    [
        ("", "", None),
        ("a+ring:0", "b+ring:1", Severity.OK),
        ("a+ring:0", "b+ring:0", None),
        ("a+ring:0", "b+else:1", None),
        ("a+ring:0", "", None),
        ("", "b+ring:1", None),
    ],
)
def test_two_ring_addresses_share_a_ring_or_are_no_matter(
    own: str, theirs: str, level: Severity | None
) -> None:
    line = checks.check_ring(own, theirs, MAC)
    assert (line and line.level) is level


@pytest.mark.parametrize(
    ("is_member", "is_revoked", "is_exposed", "level"),
    [
        (True, False, True, None),
        (True, True, True, Severity.FAULT),
        (False, False, True, Severity.WARNING),
        (False, False, False, Severity.OK),
    ],
)
def test_a_node_that_no_fleet_counts_in_is_told_so(
    is_member: bool, is_revoked: bool, is_exposed: bool, level: Severity | None
) -> None:
    line = checks.check_membership(
        is_member=is_member, is_revoked=is_revoked, is_exposed=is_exposed
    )
    assert (line and line.level) is level


# --- laws


OUTCOMES = st.sampled_from(list(DialOutcome))
TEXTS = st.text(max_size=40)


@given(OUTCOMES, TEXTS, TEXTS, st.sampled_from(["darwin", "linux", ""]), st.booleans())
def test_every_failed_way_has_one_command_and_nothing_of_a_peer_escapes_its_word(
    outcome: DialOutcome, host: str, name: str, platform: str, works: bool
) -> None:
    """A hostile card may say anything; what a person pastes must stay the command it looks like."""
    address = f"{host}:1"
    found = DialAttempt(
        address=address, outcome=outcome, errno=1, error=host, node_id="somebody else"
    )
    peer, here = Peer(name=name, node_id="n"), Here(platform=platform, python="p")
    way = Endpoint(address, "lan", 20)
    lines = [
        check_way(way, found, peer, here, now=NOW, others_work=works),
        check_back(found, peer, here, others_work=works),
    ]
    for line in lines:
        if line.level is Severity.OK:
            continue
        words = shlex.split(line.command)
        assert words[0] in {"kakeya", "kakeya-node", "sudo", "open", "ping", "ip", "route", "lsof"}
        assert not {";", "|", "&&", "`"} & set(words) or host.strip() in {";", "|", "&&", "`"}
        assert len(words) <= 7


def test_shell_keeps_a_hostile_word_in_one_piece() -> None:
    assert shlex.split(shell("ping", "$(rm -rf ~); `x`")) == ["ping", "$(rm -rf ~); `x`"]


# --- reports


LINES = st.builds(
    Finding,
    level=st.sampled_from(list(Severity)),
    what=TEXTS,
    detail=TEXTS,
    command=TEXTS,
    on=TEXTS,
    peer=TEXTS,
)


@given(st.lists(LINES, max_size=5))
def test_a_report_survives_its_json_and_its_level_is_the_worst(lines: list[Finding]) -> None:
    report = Examination(node="n", lines=tuple(lines), seconds=1.5)
    assert decode_report(encode_report(report)) == report
    order = list(Severity)
    assert report.level is max((line.level for line in lines), key=order.index, default=Severity.OK)


def test_levels_of_lines() -> None:
    assert Examination(node="", lines=(), seconds=0).level is Severity.OK
    lines = (ok("a", ""), warning("b", "", "c"))
    assert Examination(node="", lines=lines, seconds=0).level is Severity.WARNING
    assert (
        Examination(node="", lines=(*lines, fault("d", "", "e")), seconds=0).level is Severity.FAULT
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node": "", "lines": [1], "seconds": 0}', "x"])
def test_a_damaged_report_is_the_nodes_fault(text: str) -> None:
    with pytest.raises(PeerProtocol):
        decode_report(text)
