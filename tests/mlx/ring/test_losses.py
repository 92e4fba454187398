"""A rank that is killed, stopped or hangs ends its group: no request waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.mlx.random_models import write_model
from tests.mlx.ring.rig import ENGINE, LAUNCH, Served, apart, group, is_running, loses
from tests.netns import needs_netns, network
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,  # the end of test_groups.py is the quick one
    pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed"),
]


@contextmanager
def decoding(
    folder: Path, engine: Sequence[str] = ENGINE
) -> Iterator[tuple[Served, Iterator[int]]]:
    """A group in the middle of an answer."""
    model = write_model(folder / "model", "llama", changes={"num_key_value_heads": 4})
    with group(2, model, "--ring", "tensor", engine=engine) as served:
        stream = served.serves().stream([5, 9, 13] * 10, 450)
        next(stream)
        yield served, stream


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_group(tmp_path: Path, rank: int) -> None:
    with decoding(tmp_path) as (served, stream):
        os.kill(served.pids()[rank], signal.SIGKILL)
        loses(served, stream)
        wait_until("the end of all", lambda: not any(map(is_running, served.pids())))


def test_a_stopped_rank_ends_the_group_and_ends_when_it_goes_on(tmp_path: Path) -> None:
    with decoding(tmp_path) as (served, stream):
        stopped = served.pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        loses(served, stream)
        os.kill(stopped, signal.SIGCONT)
        wait_until("the end of all", lambda: not is_running(stopped))
        reason = "rank 1 is lost: it said nothing for 6 s"
        wait_until("the launcher's word", lambda: reason in served.said())


def test_a_rank_that_hangs_and_beats_ends_the_group(tmp_path: Path) -> None:
    with decoding(tmp_path, ("tests.mlx.ring.child_hangs", "30", "5, 9, 13")) as (served, stream):
        loses(served, stream)
        wait_until("the reason", lambda: "no rank got on for" in served.said())
        wait_until("the ranks", lambda: "and work is left at rank 0, 1" in served.said())


@needs_netns()
@pytest.mark.parametrize("silently", [False, True], ids=["by its carrier", "in silence"])
def test_a_rank_that_is_cut_off_ends_the_group_on_both_machines(
    tmp_path: Path, silently: bool
) -> None:
    model = write_model(tmp_path / "model", "llama", changes={"num_key_value_heads": 4})
    with network(2) as machines, apart(machines, model, "--ring", "tensor") as ranks:
        stream = ranks[0].serves().stream([5, 9, 13] * 10, 450)
        next(stream)
        machines[1].cut(silently=silently)
        with pytest.raises(grpc.RpcError):
            list(stream)
        assert [rank.process.wait(60) for rank in ranks] == [1, 1]
        assert "rank 1 is lost" in ranks[0].said() or "no rank got on" in ranks[0].said()
        assert "rank 0 is lost" in ranks[1].said()
