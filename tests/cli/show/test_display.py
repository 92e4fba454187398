"""A status as it is seen in the window of a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from kakeya.cli.show.display import show_status, watched_status

COLUMNS, LINES = 80, 24
LOAD = {"at": "41 %", "seconds": 12.0}
STATUS = {
    "node": {"node_id": "n" * 52, "label": "mini-1", "grpc": "10.88.0.1:50051"},
    "models": [{"model_id": "big-3g", "role": "verifier", "state": "loading", "load": LOAD}],
    "memory": {"budget_bytes": 1 << 34, "residents": []},
    "fleet": {
        "nodes": [
            {
                "node_id": f"{number}" * 52,
                "label": f"mini-{number}",
                "grpc_address": f"10.88.0.{number}:50051",
                "platform": "linux-x86_64",
                "age_s": 2.0,
                "models": [{"model_id": f"poet-{number}", "role": "verifier"}],
            }
            for number in range(1, 10)
        ],
        "warnings": ["the clock of this machine is wrong"],
    },
}


def watched(lines: int, pictures: int = 3) -> str:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=COLUMNS, height=lines)
    with watched_status(console) as show:
        for _ in range(pictures):
            show(STATUS)
    return written.getvalue()


def last_lines(written: str) -> list[str]:
    picture = written.split("\x1b[1;1H")[-1]
    lines = re.split(r"\x1b\[\d+;\d+H", picture)
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in lines]


def test_a_watched_status_stays_on_a_screen_of_its_own_and_goes_at_the_end() -> None:
    written = watched(LINES)
    assert written.startswith("\x1b[?1049h")
    assert "\x1b[?1049l" in written
    assert "\n" not in written, "a line feed would scroll"
    assert max(int(line) for line in re.findall(r"\x1b\[(\d+);\d+H", written)) == LINES


def test_a_window_that_is_too_small_shows_the_node_the_models_and_the_fleet_first() -> None:
    lines = last_lines(watched(LINES - 9))
    assert lines[0].startswith("mini-1")
    assert any("big-3g" in line and "loading, 41 %, 12 s" in line for line in lines)
    assert any("mini-3" in line and "2 s ago" in line and "poet-3" in line for line in lines)
    assert any(re.match(r"\+\d+ lines", line) for line in lines)


def test_a_window_that_is_large_enough_hides_nothing() -> None:
    lines = last_lines(watched(60))
    assert any("mini-9" in line for line in lines)
    assert not any(re.match(r"\+\d+ lines", line) for line in lines)


def test_requests_that_wait_for_the_same_are_one_line(capsys) -> None:
    wait = {"reason": "place", "says": "1st for a place, big-3g, about 3 s"}
    waiting = [{"model": "big-3g", "waits_for": wait}] * 3
    show_status({**STATUS, "requests": [*waiting, {"model": "big-3g", "waits_for": None}]})
    assert "waits  1st for a place, big-3g, about 3 s, and 2 more" in capsys.readouterr().out


def test_a_pipe_gets_addresses_whole(capsys) -> None:
    show_status(STATUS)
    assert "10.88.0.9:50051" in capsys.readouterr().out


def test_a_model_serves_before_its_speed_is_measured(capsys) -> None:
    model = {"model_id": "a", "role": "verifier", "state": "ready", "tokens_per_second": 0}
    for role, is_told in (("verifier", True), ("embedder", False)):
        show_status({**STATUS, "models": [{**model, "role": role}]})
        assert ("not measured" in capsys.readouterr().out) == is_told


def test_a_pull_that_failed_is_told_with_its_reason(capsys) -> None:
    show_status({**STATUS, "weights": {"pulls": [], "failed": {"org/none": "no peer has it"}}})
    assert "pull  org/none failed: no peer has it" in capsys.readouterr().out
