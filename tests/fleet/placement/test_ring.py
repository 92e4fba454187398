"""The ring probe and the predicate that lets a flow use it (S4.20 to S4.22)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kakeya.fleet.cards.cards import Card, Offer
from kakeya.fleet.cards.convert import from_wire, to_wire
from kakeya.fleet.cards.ring_offer import RingOffer
from kakeya.fleet.placement.ring import (
    describe_groups,
    probe_ring_environment,
    ring_path_available,
)


@dataclass
class Group:
    place: int
    members: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.members


def _hostfile(folder: Path, ranks: int, port: int = 5000) -> str:
    path = folder / "hosts.json"
    path.write_text(json.dumps([[f"192.168.1.{i}:{port}"] for i in range(ranks)]))
    return str(path)


def test_outside_of_a_launch_there_is_no_ring_and_init_is_not_called() -> None:
    def init() -> Group:
        raise AssertionError("must not be called")

    found = probe_ring_environment({}, init=init)
    assert not found.is_available
    assert "MLX_RANK" in found.failure_reason
    assert found.world_size == 0
    assert found.render() == f"no mlx ring: {found.failure_reason}"
    assert found.ring_address("mini") == ""


def test_the_probe_reads_the_environment_of_the_process_by_default() -> None:
    assert not probe_ring_environment().is_available


def test_a_launched_rank_is_in_a_ring(tmp_path: Path) -> None:
    environ = {"MLX_RANK": "1", "MLX_HOSTFILE": _hostfile(tmp_path, 3)}
    found = probe_ring_environment(environ)
    assert (found.is_available, found.rank, found.world_size) == (True, 1, 3)
    assert (found.backend, found.failure_reason) == ("ring", "")
    assert found.render() == f"mlx ring {found.ring_name}: rank 1 of 3 (ring)"
    assert found.ring_address("mini").endswith(":1")
    assert found.ring_address("mini").startswith("mini+")


def test_a_group_of_one_is_no_ring(tmp_path: Path) -> None:
    environ = {"MLX_RANK": "0", "MLX_HOSTFILE": _hostfile(tmp_path, 3)}
    found = probe_ring_environment(environ, init=lambda: Group(0, 1))
    assert not found.is_available
    assert "group of 1" in found.failure_reason


def test_an_empty_hostfile_of_a_single_host_launch_is_no_ring(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("")
    environ = {"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")}
    assert not probe_ring_environment(environ).is_available


def test_what_init_says_counts() -> None:
    environ = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "2"}
    found = probe_ring_environment(environ, init=lambda: Group(1, 4))
    assert (found.is_available, found.rank, found.world_size) == (True, 1, 4)


def test_a_failing_init_is_a_finding() -> None:
    def init() -> Group:
        raise RuntimeError("[ring] Couldn't bind socket")

    found = probe_ring_environment({"MLX_RANK": "0", "MLX_WORLD_SIZE": "2"}, init=init)
    assert not found.is_available
    assert "Couldn't bind socket" in found.failure_reason


@pytest.mark.parametrize(
    "environ",
    [
        {"MLX_RANK": "x"},
        {"MLX_RANK": "-1"},
        {"MLX_RANK": "0"},
        {"MLX_RANK": "5", "MLX_WORLD_SIZE": "2"},
        {"MLX_RANK": "0", "MLX_WORLD_SIZE": "many"},
        {"MLX_RANK": "0", "MLX_HOSTFILE": "/nowhere/hosts.json"},
    ],
)
def test_the_probe_never_raises(environ: dict[str, str]) -> None:
    found = probe_ring_environment(environ)
    assert not found.is_available
    assert found.failure_reason


def test_a_broken_hostfile_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("{not json")
    environ = {"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")}
    assert not probe_ring_environment(environ).is_available


def test_the_ranks_of_one_launch_share_a_path_and_two_launches_do_not(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    files = _hostfile(tmp_path / "one", 2), _hostfile(tmp_path / "two", 2, port=6000)
    (one0, one1), (_, two1) = (
        [
            probe_ring_environment({"MLX_RANK": rank, "MLX_HOSTFILE": file}).ring_address(
                f"h{rank}"
            )
            for rank in ("0", "1")
        ]
        for file in files
    )
    assert ring_path_available(one0, one1)
    assert not ring_path_available(one0, two1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("a:0", "b:1", True),
        ("a:0", "a:1", True),
        ("a:0", "b:0", False),
        ("", "b:1", False),
        ("a:0", "", False),
        ("", "", False),
        ("a", "b:1", False),
        (":0", "b:1", False),
        ("a:x", "b:1", False),
        ("a+r1:0", "b+r1:1", True),
        ("a+r1:0", "b+r2:1", False),
        ("a+r1:0", "b:1", False),
        ("a+r1:0", "b+r1:0", False),
    ],
)
def test_a_path_needs_two_seats_of_one_ring(a: str, b: str, expected: bool) -> None:
    assert ring_path_available(a, b) is expected
    assert ring_path_available(b, a) is expected


def test_the_fleet_loads_no_mlx() -> None:
    code = (
        "import sys, kakeya.fleet.gossip.gossip, kakeya.fleet.gossip.service;"
        "import kakeya.fleet.placement.ring as r;"
        "r.probe_ring_environment();"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_groups_are_told_by_their_cards_with_a_gap_for_a_node_without_one() -> None:
    def card(node: str, rank: int) -> Card:
        ring = RingOffer("1f2e", "big", "ring", "tensor", rank, 3)
        return from_wire(to_wire(node, Offer(ring=ring), incarnation=1, announced_at=0.0))

    plain = from_wire(to_wire("d", Offer(), incarnation=1, announced_at=0.0))
    (group,) = describe_groups([card("c", 2), plain, card("a", 0)])
    assert group["nodes"] == ["a", None, "c"]
    assert (group["id"], group["model_id"], group["split"]) == ("1f2e", "big", "tensor")
