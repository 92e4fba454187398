"""Rows 6, 7 and 12 and the choice of links on real networks: one process per machine.

Times are those of the test's short TTL and rounds; the rows' own are proven in virtual time.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import netns

pytestmark = netns.needs_netns()
REPO = Path(__file__).parents[2]
TTL_S = 10.0
INTERVAL_S = 0.5
REPROBE_S = 15.0


class Plane:
    """The fleet plane of one machine, asked over its stdin."""

    def __init__(self, machine: netns.Machine, name: str, log_file: Path, **options: Any) -> None:
        self.machine, self.name, self.log_file = machine, name, log_file
        described = {
            "node_id": name,
            "seeds": [],
            "ttl_s": TTL_S,
            "interval_s": INTERVAL_S,
            "advertise": f"{machine.ip}:50051",
            **options,
        }
        command = machine.command(
            sys.executable, "-m", "tests.fleet.child_fleet", json.dumps(described)
        )
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPO,
                text=True,
            )

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log_file.read_text()[-3000:]
        return line

    def wait_ready(self) -> None:
        assert self._line() == "ready\n"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def view(self) -> dict[str, Any]:
        self.tell("view")
        return self.answer()

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._line())
        return found

    def sees(self, *names: str) -> bool:
        return self.view()["view"] == sorted(names)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(5)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def planes(
    folder: Path, machines: tuple[netns.Machine, ...], **options: Any
) -> Iterator[list[Plane]]:
    """One plane on each machine, `n1` being the seed of the others."""
    seeds = [f"{machines[0].ip}:50051"]
    started: list[Plane] = []
    try:
        for number, machine in enumerate(machines, 1):
            mine = {"seeds": seeds if number > 1 else [], **options}
            started.append(Plane(machine, f"n{number}", folder / f"n{number}.log", **mine))
        for plane in started:
            plane.wait_ready()
        names = {plane.name for plane in started}
        for plane in started:
            within(20, lambda plane=plane: plane.sees(*(names - {plane.name})))
        yield started
    finally:
        for plane in started:
            plane.stop()


def within(limit_s: float, condition: Callable[[], bool]) -> float:
    """Wait for a condition; returns how long that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.mark.slow
def test_one_sided_reachability_leaves_all_views_equal(tmp_path: Path) -> None:
    """Row 6: n3 cannot dial n1, n1 can dial n3; nobody calls anybody dead."""
    with netns.network(3) as machines:
        one, _, three = machines
        three.drop_dials_to(one)
        with planes(tmp_path, machines, seeds=[f"{m.ip}:50051" for m in machines]) as (n1, n2, n3):
            # Doubts of the start, when a seed was called that did not listen yet.
            within(15, lambda: not (n1.view()["suspects"] or n2.view()["suspects"]))
            end = time.monotonic() + 1.2 * TTL_S
            rounds = n3.view()["rounds"]
            while time.monotonic() < end:
                for plane, others in ((n1, ["n2", "n3"]), (n2, ["n1", "n3"]), (n3, ["n1", "n2"])):
                    assert plane.view()["view"] == others
                assert n2.view()["suspects"] == []
                assert n1.view()["suspects"] == []
                time.sleep(0.5)
            seen = n3.view()
            assert seen["rounds"] - rounds > 10
            # n3's own doubt is of its edge: n2, whom it asked, reaches n1.
            assert seen["suspects"] == ["n1"]
            within(10, lambda: n3.view()["doubts"]["n1"] == "asymmetric")
            three.pass_out()
            within(15, lambda: n3.view()["suspects"] == [])


@pytest.mark.parametrize(
    "silently",
    [
        pytest.param(False, id="pulled"),
        pytest.param(True, id="silent", marks=pytest.mark.slow),
    ],
)
def test_a_partition_longer_than_the_ttl_heals(tmp_path: Path, *, silently: bool) -> None:
    """Row 7: n2 and n3 know no seed but n1, which is cut off until all have forgotten it."""
    with netns.network(3) as machines, planes(tmp_path, machines) as (n1, n2, n3):
        machines[0].cut(silently=silently)
        # The view empties at the TTL, counted from the last beat that was heard.
        gone_s = within(TTL_S + 30, lambda: n1.sees() and n2.sees("n3") and n3.sees("n2"))
        assert gone_s > TTL_S / 4
        machines[0].heal()
        within(30, lambda: n1.sees("n2", "n3") and n2.sees("n1", "n3") and n3.sees("n1", "n2"))


@pytest.mark.slow
def test_a_node_that_slept_doubts_everybody_before_it_believes_anybody(tmp_path: Path) -> None:
    """Row 12: n3 sleeps past the TTL; while it does, n2 dies."""
    with netns.network(3) as machines, planes(tmp_path, machines) as (n1, n2, n3):
        n3.tell(f"sleep {TTL_S + 3}")
        n2.stop()
        # The answer to `sleep` is the view at the very moment of waking.
        n3.answer()
        woke = time.monotonic()
        within(6, lambda: n3.view()["suspects"] == ["n2"] or "n2" not in n3.view()["view"])
        within(6, lambda: "n1" in n3.view()["view"] and "n1" not in n3.view()["suspects"])
        within(10, lambda: n1.sees("n3") and n3.sees("n1"))
        assert time.monotonic() - woke < 20


@pytest.mark.parametrize("slack", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_the_cable_is_used_lost_told_and_taken_back(tmp_path: Path, slack: int) -> None:
    """Within its seconds on a quiet machine; beside other tests in ten times as many."""
    with (
        netns.network(2, thunderbolt=True) as (one, two),
        planes(tmp_path, (one, two)) as (n1, n2),
    ):
        by_cable = f"{two.cables['thunderbolt0']}:50051"
        by_switch = f"{two.ip}:50051"

        def n1_uses(address: str) -> bool:
            return bool(n1.view()["addresses"]["n2"] == address)

        for _ in range(1 if slack == 1 else 3):
            within(10 * slack, lambda: n1_uses(by_cable))
            assert n1.view()["downgrades"] == 0
            two.unplug("thunderbolt0")
            within(6 * slack, lambda: n1_uses(by_switch))
            # A node too busy to be heard by the switch, too, lost no cable as far as n1 knows.
            with contextlib.suppress(AssertionError):
                within(10, lambda: n1.view()["downgrades"] == 1)
                break
            two.plug("thunderbolt0")
        assert n1.view()["downgrades"] == 1
        assert n1.view()["downgraded"] == ["n2"]
        assert n2.sees("n1")
        log = n1.log_file.read_text()
        assert log.count("a better link was lost") == 1
        assert "thunderbolt" in log

        two.plug("thunderbolt0")
        within((REPROBE_S + 5) * slack, lambda: n1_uses(by_cable))
        within(5 * slack, lambda: n1.view()["downgraded"] == [])
        assert n1.view()["downgrades"] == 1
        assert n1.view()["suspects"] == []


def test_nobody_typed_an_address(tmp_path: Path) -> None:
    """Discovery alone: all see each other, and the cut-off one returns without a word."""
    with (
        netns.network(3) as machines,
        planes(tmp_path, machines, seeds=[], mdns=True) as (n1, n2, n3),
    ):
        assert n1.sees("n2", "n3")
        assert n2.sees("n1", "n3")
        assert n3.sees("n1", "n2")
