"""The doctor as a person runs it: two joined nodes in two namespaces with a cable between them.

The tests share both and run in the order of this file: the last of them switches one off.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import netns
from tests.netns import Machine

pytestmark = netns.needs_netns()
FLAGS = ("--proposer", "ngram", "--no-mdns", "--exchange-interval", "0.5")


def kakeya(machine: Machine, data: Path, *arguments: str) -> tuple[int, str, str]:
    command = ("-m", "kakeya.cli.main", *arguments, "--data-dir", str(data))
    done = machine.python(*command, limit_s=60)
    return done.returncode, done.stdout, done.stderr


def examine(machine: Machine, data: Path, *peer: str) -> dict[str, dict[str, Any]]:
    """Lines by subject; where several have one, by subject and peer."""
    status, out, err = kakeya(machine, data, "doctor", *peer, "--json")
    assert out, err
    report = json.loads(out)
    assert report["seconds"] < 30
    assert status == (1 if report["level"] == "fault" else 0)
    return {line["what"]: line for line in report["lines"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("minis")


@pytest.fixture(scope="module")
def minis(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """The first made the fleet, the second joined it; both run and know each other."""
    with netns.network(2, thunderbolt=True) as (one, two):
        status, _, err = kakeya(one, folder / "one", "init", "--label", "one")
        assert status == 0, err
        start(one, folder / "one")
        status, out, err = kakeya(one, folder / "one", "invite", "--json")
        assert status == 0, err
        start(two, folder / "two", "--join", json.loads(out)["token"], "--label", "two")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            _, out, _ = kakeya(one, folder / "one", "status", "--json")
            if len(json.loads(out)["fleet"]["nodes"]) == 2:
                break
        yield one, two


def start(machine: Machine, data: Path, *flags: str) -> None:
    program = (sys.executable, "-m", "kakeya.node.daemon", "--data-dir", str(data))
    machine.spawn(*program, *FLAGS, *flags, log_file=data.with_suffix(".log"), limit_s=60)


def bad(lines: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines.values() if line["level"] != "ok" and line["what"] != "mlx"]


def faults(lines: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines.values() if line["level"] == "fault"]


def but_for(expected: dict[str, str]) -> Callable[[dict[str, dict[str, Any]]], list[Any]]:
    """Finds the lines that have another level: a dial may come late on a busy machine."""
    return lambda lines: [
        (what, lines.get(what))
        for what, level in expected.items()
        if lines.get(what, {}).get("level") != level
    ]


def cured(
    machine: Machine,
    data: Path,
    ills: Callable[[dict[str, dict[str, Any]]], list[dict[str, Any]]] = faults,
    peer: str = "",
    limit_s: float = 30.0,
) -> dict[str, dict[str, Any]]:
    """The lines once none of these ills is left."""
    deadline = time.monotonic() + limit_s
    while True:
        lines = examine(machine, data, *([peer] if peer else []))
        if not ills(lines) or time.monotonic() > deadline:
            assert not ills(lines)
            return lines


def test_two_minis_are_well_then_a_firewall_then_a_cable(
    minis: tuple[Machine, Machine], folder: Path
) -> None:
    one, two = minis
    well = cured(one, folder / "one", bad)
    cable = two.cables["thunderbolt0"]
    for address in (two.ip, cable):
        assert f"reach {address}:50051" in str(well)
    for address in (one.ip, one.cables["thunderbolt0"]):
        assert well[f"reached at {address}:50051"]["level"] == "ok"

    # A firewall on the second: what it sends out arrives, new calls to it get no answer.
    one.drop_dials_to(two)
    lan, wire = f"reach {two.ip}:50051 (lan)", f"reach {cable}:50051 (thunderbolt)"
    expected = but_for({lan: "warning", f"reached at {one.ip}:50051": "ok"})
    lost = cured(one, folder / "one", expected, "two")[lan]
    assert "no answer at all" in lost["detail"]
    assert lost["on"] == "two"
    one.pass_out()

    # The cable is pulled: its way fails, the other works, and the path says so.
    one.unplug("thunderbolt0")
    expected = but_for({lan: "ok", wire: "warning", "path": "warning"})
    lines = cured(one, folder / "one", expected, "two")
    assert "Thunderbolt Bridge" in lines["path"]["command"]
    one.plug("thunderbolt0")


@pytest.mark.slow
def test_the_own_cable_is_looked_at_first_and_the_cure_is_to_plug_it_in(
    minis: tuple[Machine, Machine], folder: Path
) -> None:
    one, two = minis
    one.unplug("thunderbolt0")  # the only way that is left is the switch
    one.cut()
    deadline = time.monotonic() + 20  # a system tells of a carrier when it has time for it
    while "no carrier at lan0" not in examine(one, folder / "one")["networks"]["detail"]:
        assert time.monotonic() < deadline
    lines = examine(one, folder / "one", "two")
    lost = lines[f"reach {two.ip}:50051 (lan)"]
    assert lost["detail"].startswith("the own link lan0 has no carrier")
    assert (lost["command"], lost["on"]) == ("ip link show lan0", "")
    shown = one.run(*shlex.split(lost["command"]))
    assert "NO-CARRIER" in shown.stdout
    one.heal()
    one.plug("thunderbolt0")
    assert cured(one, folder / "one")["networks"]["level"] == "ok"


def test_a_removed_node_comes_back_by_what_its_doctor_says(
    minis: tuple[Machine, Machine], folder: Path
) -> None:
    one, two = minis
    status, _, err = kakeya(one, folder / "one", "revoke", "two")
    assert status == 0, err
    deadline = time.monotonic() + 20
    while not (said := [x for x in examine(two, folder / "two").values() if "TOKEN" in str(x)]):
        assert time.monotonic() < deadline
    told = said[0]
    assert (told["level"], told["command"]) == ("fault", "kakeya join TOKEN")
    status, out, err = kakeya(one, folder / "one", "invite", "--json")
    assert status == 0, err
    two.spawned[-1].stop()
    words = told["command"].replace("TOKEN", json.loads(out)["token"]).split()
    status, out, err = kakeya(two, folder / "two", *words[1:], "--label", "two")
    assert status == 0, err
    start(two, folder / "two")
    lines = cured(two, folder / "two", bad)
    assert lines[f"reach {one.ip}:50051 (lan)"]["level"] == "ok"


def test_a_killed_node_comes_back_by_what_the_doctor_of_another_says(
    minis: tuple[Machine, Machine], folder: Path
) -> None:
    one, two = minis
    two.spawned[-1].stop(number=9)
    gone = examine(one, folder / "one", "two")[f"reach {two.ip}:50051 (lan)"]
    assert (gone["level"], gone["command"], gone["on"]) == ("fault", "kakeya-node", "two")
    start(two, folder / "two")
    cured(one, folder / "one")


def test_a_machine_that_is_switched_off_is_a_fault(
    minis: tuple[Machine, Machine], folder: Path
) -> None:
    one, two = minis
    two.spawned[-1].stop(number=9)
    lines = examine(one, folder / "one", "two")
    gone = lines[f"reach {two.ip}:50051 (lan)"]
    assert (gone["level"], "refuses port 50051" in gone["detail"]) == ("fault", True)
    two.cut(silently=True)
    lines = examine(one, folder / "one", f"{two.ip}:50051")
    gone = next(line for what, line in lines.items() if what.startswith(f"reach {two.ip}"))
    assert gone["level"] == "fault"
    assert "no answer at all" in gone["detail"]


@pytest.mark.parametrize(
    "peer", [pytest.param("10.77.0.2:50051", marks=pytest.mark.slow), "[fd00::9]:50051"]
)
def test_alone_an_address_is_dialled(tmp_path: Path, peer: str) -> None:
    with netns.network(2) as (one, _):
        lines = examine(one, tmp_path / "none", peer)
    assert lines[f"reach {peer}"]["level"] == "fault"
    assert lines["node"]["level"] == "warning"
