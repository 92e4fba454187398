"""Three machines become a fleet by one pasted line each, and nobody else gets anything from it.

Each is a network namespace; everything runs as a person runs it, by `kakeya` and `kakeya-node`.
The tests share one fleet and run in the order of this file: the last one takes a node out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests import netns
from tests.node.child_stranger import methods

pytestmark = netns.needs_netns()
READY = re.compile(r"kakeya-node ready node_id=(\S+) grpc=(\S+) http=(\S+)\n")
WITHIN_S = 2.0
GRPC_PORT = 50051
HTTP = "127.0.0.1:8210"
PAUSE_S = 0.1
REFUSED = {"UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED"}


@dataclass
class Mini:
    """One machine with its data directory, its node, and a file of what its node saw."""

    label: str
    machine: netns.Machine
    folder: Path
    node_id: str = ""
    node: netns.Spawned | None = None
    ready_mono: float = 0.0

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def address(self) -> str:
        return f"{self.machine.ip}:{GRPC_PORT}"

    def identity(self, name: str) -> str:
        return str(self.data / "identity" / name)

    def kakeya(self, *arguments: str) -> dict[str, Any]:
        """Run a command of `kakeya` on this machine and return what it says as JSON."""
        command = ("-m", "kakeya.cli.main", *arguments, "--data-dir", str(self.data), "--json")
        done = self.machine.python(*command, limit_s=60)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def start(self, *flags: str) -> None:
        """Start `kakeya-node` with its defaults, a drafter and these flags; read its ready line."""
        # What it shows is its fleet; no model is needed for that.
        program = ("-m", "kakeya.node.daemon", "--data-dir", str(self.data))
        flags = ("--proposer", "ngram", *flags)
        self.node = self.machine.spawn(
            sys.executable, *program, *flags, log_file=self.folder / "node.log", limit_s=60
        )
        self.ready_mono = time.monotonic()
        ready = READY.fullmatch(self.node.first_line)
        assert ready is not None, self.node.first_line + self.node.log[-3000:]
        self.node_id = ready[1]

    def watch(self) -> None:
        """Begin to watch, also before the node starts, so that watching is never late."""
        self.folder.mkdir(parents=True)
        self.machine.spawn(
            *(sys.executable, "-m", "tests.node.child_watch", HTTP, str(self.folder / "seen")),
            log_file=self.folder / "watch.log",
        )

    def seen(self) -> list[tuple[float, dict[str, bool] | None]]:
        """Every view that it had: since when, and the others by id with whether each is suspect."""
        lines = (self.folder / "seen").read_text().splitlines(keepends=True)
        pairs = (line.split(" ", 1) for line in lines if line.endswith("\n"))
        return [(float(at), json.loads(view)) for at, view in pairs]

    def view(self) -> dict[str, bool] | None:
        """The latest one; None = it does not answer."""
        return self.seen()[-1][1]

    def sees(self, *others: Mini, suspect: bool | None = None) -> bool:
        """Whether it sees exactly these; `suspect` None = however it judges them."""
        view = self.view()
        if view is None or view.keys() != {other.node_id for other in others}:
            return False
        return suspect is None or all(doubt is suspect for doubt in view.values())


Fleet = tuple[Mini, Mini, Mini]


def within(limit_s: float, condition: Callable[[], bool]) -> float:
    """Wait for a condition; returns how long that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s"
        time.sleep(PAUSE_S)
    return time.monotonic() - started


def all_see_all(fleet: Fleet, *, suspect: bool | None = None) -> bool:
    return all(mini.sees(*(m for m in fleet if m is not mini), suspect=suspect) for mini in fleet)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The first founds the fleet, the second and third start with one pasted line each."""
    with netns.network(4) as (*machines, _):
        folder = tmp_path_factory.mktemp("fleet")
        one, two, three = (
            Mini(f"mini-{number}", machine, folder / str(number))
            for number, machine in enumerate(machines, 1)
        )
        for mini in (one, two, three):
            mini.watch()
        one.kakeya("init", "--label", one.label)
        one.start()
        for mini in (two, three):
            token = one.kakeya("invite")["token"]
            assert re.fullmatch(r"\S+", token)
            mini.start("--join", token)
        yield one, two, three


@pytest.mark.parametrize("slack", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_all_see_each_other_within_two_seconds_of_the_last_ready_line(
    fleet: Fleet, slack: int
) -> None:
    """Within these seconds on a quiet machine; beside other tests in ten times as many."""
    within(15 * slack, lambda: all_see_all(fleet))
    complete = max(
        next(at for at, view in mini.seen() if view is not None and len(view) == 2)
        for mini in fleet
    )
    assert complete - fleet[2].ready_mono < WITHIN_S * slack


def test_the_ids_are_those_of_their_keys_and_the_labels_those_of_the_machines(
    fleet: Fleet,
) -> None:
    assert all(re.fullmatch(r"[a-z2-7]{52}", mini.node_id) for mini in fleet)
    nodes = fleet[0].kakeya("status")["fleet"]["nodes"]
    assert {card["node_id"] for card in nodes} == {mini.node_id for mini in fleet}
    assert fleet[0].label in {card["label"] for card in nodes}
    for card in nodes:
        assert [way["network"] for way in card["endpoints"]] == ["lan"]


def test_a_node_needs_its_token_once(fleet: Fleet) -> None:
    _, two, _ = fleet
    assert two.node is not None
    assert two.node.stop() == 0
    two.start()
    within(60, lambda: all_see_all(fleet, suspect=False))


@pytest.mark.parametrize(
    ("seconds", "silently"),
    [
        pytest.param(8, False, id="8 s"),
        *(
            pytest.param(
                seconds,
                silently,
                id=f"{seconds} s {'silent' if silently else 'pulled'}",
                marks=pytest.mark.slow,
            )
            for seconds in (60, 150)
            for silently in (False, True)
        ),
    ],
)
def test_a_partition_is_survived(fleet: Fleet, seconds: int, *, silently: bool) -> None:
    """Shorter and longer than the TTL of 120 s."""
    one, two, three = fleet
    within(60, lambda: all_see_all(fleet, suspect=False))
    three.machine.cut(silently=silently)
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # The two that are together never lose each other.
            for here, there in ((one, two), (two, one)):
                view = here.view()
                assert view is not None
                assert there.node_id in view
            time.sleep(PAUSE_S)
        if seconds > 120:
            assert one.sees(two)
            assert three.sees()
    finally:
        three.machine.heal()
    # Rounds are 10 s apart; a suspicion ends with the first one that comes through.
    within(60, lambda: all_see_all(fleet, suspect=False))


def test_a_process_without_a_certificate_gets_nothing_from_any_node(
    fleet: Fleet, tmp_path: Path
) -> None:
    """It knows the addresses, the fleet's CA and the nodes' names; it holds no key of the fleet."""
    stranger = fleet[1].machine  # as near as can be: on a member's machine, by its own addresses
    foreign = trustme.CA()
    leaf = foreign.issue_cert("stranger")
    (tmp_path / "key.pem").write_bytes(leaf.private_key_pem.bytes())
    (tmp_path / "cert.pem").write_bytes(leaf.cert_chain_pems[0].bytes())
    own = (str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    for mini in fleet:
        known = ("tls", mini.identity("ca.pem"), mini.node_id)
        for way in (("plain",), known, (*known, *own)):
            codes = call_everything(stranger, mini.address, *way)
            assert set(codes.values()) <= REFUSED, (way, codes)
            assert len(codes) == len(list(methods())) > 20


def test_the_same_calls_by_a_member_are_answered(fleet: Fleet) -> None:
    """The control: what keeps the stranger out is the certificate alone."""
    one, two, _ = fleet
    codes = call_everything(two.machine, one.address, *member_of(two, one))
    assert codes["/kakeya.v1.CapabilityService/GetNodeCapability"] == "OK"
    assert codes["/kakeya.v1.ControlService/Invite"] == "PERMISSION_DENIED"


def test_a_node_that_is_taken_out_is_out_everywhere(fleet: Fleet) -> None:
    one, two, three = fleet
    within(60, lambda: all_see_all(fleet))
    one.kakeya("revoke", three.node_id)
    within(60, lambda: one.sees(two) and two.sees(one))
    for mini in (one, two):
        codes = call_everything(three.machine, mini.address, *member_of(three, mini))
        # A service that no node has yet is refused before anybody asks who calls.
        assert set(codes.values()) <= {*REFUSED, "UNIMPLEMENTED"}, codes
        assert codes["/kakeya.v1.CapabilityService/GetNodeCapability"] == "PERMISSION_DENIED"
    # It stays out: nobody takes its card back from anybody.
    end = time.monotonic() + 12
    while time.monotonic() < end:
        assert one.sees(two)
        assert two.sees(one)
        time.sleep(PAUSE_S)


@pytest.mark.slow
def test_a_lost_cable_is_shown_in_status_and_taken_back(tmp_path: Path) -> None:
    """Two nodes with a Thunderbolt cable beside the switch, found by their own choice of links."""
    with netns.network(2, thunderbolt=True) as machines:
        one, two = (Mini(f"mini-{n}", m, tmp_path / str(n)) for n, m in enumerate(machines, 1))
        for mini in (one, two):
            mini.watch()
        one.kakeya("init", "--label", one.label)
        one.start()
        two.start("--join", one.kakeya("invite")["token"])
        within(10, lambda: one.sees(two) and two.sees(one))
        within(10, lambda: route(one, two)["network"] == "thunderbolt")
        assert route(one, two)["rtt_ms"] > 0
        two.machine.unplug("thunderbolt0")
        within(10, lambda: route(one, two)["network"] == "lan")
        within(10, lambda: route(one, two)["is_downgraded"])
        assert any("thunderbolt" in line for line in one.kakeya("status")["fleet"]["warnings"])
        assert one.sees(two)
        two.machine.plug("thunderbolt0")
        within(25, lambda: route(one, two)["network"] == "thunderbolt")
        assert one.kakeya("status")["fleet"]["warnings"] == []
        # What each measured on its own networks is on its card, and so everybody's to see.
        within(60, lambda: all(round_trips(one, two).values()))
        assert set(round_trips(one, two)) == {"thunderbolt", "lan"}
        within(15, lambda: round_trips(two, two) == round_trips(one, two))


def round_trips(here: Mini, there: Mini) -> dict[str, float]:
    """The round trips by network that the card of a node tells, as another's status shows it."""
    nodes = here.kakeya("status")["fleet"]["nodes"]
    cards = [card for card in nodes if card["node_id"] == there.node_id]
    return {way["network"]: way["rtt_ms"] for card in cards for way in card["endpoints"]}


def route(here: Mini, there: Mini) -> dict[str, Any]:
    """How one node reaches another, as its status says."""
    nodes = here.kakeya("status")["fleet"]["nodes"]
    found: dict[str, Any] = next(
        (card["route"] or {} for card in nodes if card["node_id"] == there.node_id), {}
    )
    return {"network": "", "rtt_ms": 0.0, "is_downgraded": False, **found}


def member_of(caller: Mini, callee: Mini) -> tuple[str, ...]:
    files = (caller.identity("cert.pem"), caller.identity("key.pem"))
    return ("tls", caller.identity("ca.pem"), callee.node_id, *files)


def call_everything(machine: netns.Machine, address: str, *way: str) -> dict[str, str]:
    done: subprocess.CompletedProcess[str] = machine.python(
        "-m", "tests.node.child_stranger", address, *way, limit_s=150
    )
    assert done.returncode == 0, done.stderr
    codes: dict[str, str] = json.loads(done.stdout)
    return codes
