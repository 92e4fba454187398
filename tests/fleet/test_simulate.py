"""The command line of the simulation, small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.outcome import Outcome, table
from benchmarks.virtual_fleet import VirtualFleet
from benchmarks.virtual_time import run_virtual
from kakeya.fleet.view.beats import Beats
from kakeya.fleet.view.registry import CapabilityRegistry

TOP = Path(__file__).resolve().parents[2]
COMMAND = "from benchmarks.simulate import main; raise SystemExit(main())"


def _simulate(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--nodes", "3", "--hours", "0.1", "--jobs", "1", *options],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


@pytest.mark.slow
def test_outcomes_are_printed_for_machines_and_can_be_shown_again() -> None:
    lines = _simulate("--loss", "0.1", "--seeds", "2", "--partition", "200", "--json")
    outcomes = [Outcome.from_line(line) for line in lines.splitlines()]
    assert [o.case.control for o in outcomes] == ["", "fanout 1", "30 s, fanout 3", "no memory"]
    assert [outcome.to_line() for outcome in outcomes] == lines.splitlines()
    ours = outcomes[0]
    assert ours.hours is not None
    assert ours.share_within_goal("heal") == 1.0
    assert outcomes[-1].share_within_goal("heal") == 0.0
    assert table(outcomes).row_count == 4


@pytest.mark.slow
def test_a_plot_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "plot.png"
    shown = _simulate("--loss", "0", "--seeds", "1", "--no-controls", "--plot", str(picture))
    assert "oldest" in shown
    assert 10_000 < picture.stat().st_size < 200_000


def test_nodes_introduced_by_copies_hold_what_they_would_have_merged() -> None:
    async def compare() -> None:
        fleet = VirtualFleet(12, seed=3)
        nodes = list(fleet.nodes.values())
        merged = VirtualFleet(12, seed=3)
        wires = [node.registry.own.wire for node in nodes]
        keys = np.array([node.registry.own.key for node in nodes], np.uint64)
        beats = Beats(keys, np.zeros(12, np.uint32), np.zeros(12), np.zeros(0, np.uint64))
        fleet.introduce_all()
        for copy, real in zip(nodes, merged.nodes.values(), strict=True):
            clock = real.clock
            real.registry.merge(wires, now=clock.wall(), mono=clock.mono(), beats=beats)
            mono = clock.mono()
            assert copy.clock.mono() == mono
            assert _state(copy.registry, mono) == _state(real.registry, mono)
            assert _state(copy.registry, mono + 121.0) == _state(real.registry, mono + 121.0)
        fleet.start()
        await fleet.run(60.0)
        assert fleet.completeness() == 1.0
        assert all(0.0 < node.ages().max() < 60.0 for node in nodes)
        await fleet.stop()

    run_virtual(compare())


def _state(registry: CapabilityRegistry, mono: float) -> list[object]:
    held = registry.peers.held
    cards = sorted(held, key=lambda card: card.node_id)
    return [
        len(registry),
        registry.snapshot(mono=mono),
        [held.number(card) for card in cards],
        [mono - held.lived_mono(card) for card in cards] == pytest.approx([0.0] * len(cards)),
        [registry.peers.find(card.grpc_address) for card in cards],
        held.has_plain,
        len(held.beats(mono)),
    ]
