"""How soon a death, a hang, a silent wire and a return are noticed, over real sockets.

    .venv/bin/python -m benchmarks.detection [--quick]

Rows 1, 2, 4 and 30 of the fault catalogue, medians; the baselines are the same calls without the
options that bound them. Nearly all of it is waiting, so the slow ones run side by side: three
minutes, or with `--quick` half of one (an outage of 4 s, no keepalive at its default pace, no
controls).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from benchmarks.report import emit, median
from kakeya.wire.channels import Keepalive, Option, message_options
from tests.fleet.nodes import running_node
from tests.fleet.outages import (
    child_node,
    cut_stream,
    end_of,
    fleet_of,
    hold,
    seconds_to_return,
    suspecting,
    without,
)
from tests.waiting import until

NODES = 25
SCALED = Keepalive(interval_s=2.0, timeout_s=1.0)
LIMIT_S = 120.0
"""After which a control that noticed nothing is given up."""
Measure = Callable[[], Awaitable[float]]


async def _killed_s() -> float:
    """Until a stream from a killed process breaks."""
    async with child_node() as child, running_node("a") as a:
        call = await hold(a.channels.get(child.address))
        return (await end_of(call, child.send(signal.SIGKILL)))[0]


async def _known_to_all_s() -> float:
    """Until all of a fleet suspect a killed node, from the first call that failed."""
    async with child_node() as child, fleet_of(NODES, child) as nodes:
        call = await hold(nodes[0].node.channels.get(child.address))
        await end_of(call, child.send(signal.SIGKILL))
        nodes[0].fail("child")
        return await until(lambda: suspecting(nodes) == len(nodes), limit_s=LIMIT_S)


async def _stopped_s(options: tuple[Option, ...]) -> float:
    """Until a stream from a stopped process breaks."""
    async with child_node() as child:
        async with grpc.aio.insecure_channel(child.address, options=options) as channel:
            call = await hold(channel)
            return (await end_of(call, child.send(signal.SIGSTOP)))[0]


async def _client_s(keepalive: Keepalive) -> float:
    return (await cut_stream(keepalive)).client_s


async def _server_s(keepalive: Keepalive) -> float:
    return (await cut_stream(keepalive)).server_s


async def _repeat(name: str, measure: Measure, times: int) -> float:
    """The median of runs, one after the other, each told on stderr."""
    taken = []
    for turn in range(times):
        taken.append(await measure())
        print(f"detection: {name} {turn + 1}/{times}: {taken[-1]:.3g} s", file=sys.stderr)
    return median(taken)


def _tell(what: str, ours: float, goal_s: float, baseline: float | None = None) -> None:
    reference = goal_s if baseline is None else baseline
    emit(
        f"{what}, s" + ("" if baseline is not None else " (baseline: the goal)"),
        ours=ours,
        baseline=reference,
        ratio=ours / reference,
        goal=f"<= {goal_s:g} s",
        met=ours <= goal_s,
    )


async def _deaths(times: int) -> None:
    _tell("row 1: stream from a killed process", await _repeat("row 1", _killed_s, 5), 0.1)
    all_s = await _repeat(f"row 1, N = {NODES}", _known_to_all_s, times)
    _tell(f"row 1: a death is known to all of {NODES}", all_s, 10.0)


async def _short() -> None:
    options = SCALED.client_options()
    stopped, client, server, back = await asyncio.gather(
        _repeat("row 2", lambda: _stopped_s(options), 5),
        _repeat("row 4, client", lambda: _client_s(SCALED), 5),
        _repeat("row 4, server", lambda: _server_s(SCALED), 5),
        _repeat("row 30", lambda: seconds_to_return(4.0), 3),
    )
    _tell("row 2: stopped process, pings 2 + 1 s", stopped, 4.0)
    _tell("row 4: silent wire, client, pings 2 + 1 s", client, 4.0)
    _tell("row 4: silent wire, server, pings 2 + 1 s", server, 5.0)
    _tell("row 30: back after 4 s", back, 6.0)


async def _long() -> None:
    default = Keepalive()
    unbounded = without(default.client_options(), "grpc.http2.ping_timeout_ms")
    bounded_s, unbounded_s, client, back, back_late = await asyncio.gather(
        _repeat("row 2, default", lambda: _stopped_s(default.client_options()), 3),
        _repeat("row 2, control", lambda: _stopped_s(unbounded), 1),
        _repeat("row 4, default", lambda: _client_s(default), 3),
        _repeat("row 30, 60 s", lambda: seconds_to_return(60.0), 2),
        _repeat("row 30, control", lambda: seconds_to_return(60.0, message_options()), 1),
    )
    _tell("row 2: stopped process, default pings", bounded_s, 16.0, unbounded_s)
    _tell("row 4: silent wire, client, default pings", client, 16.0)
    _tell("row 30: back after 60 s", back, 6.0, back_late)


async def _run(*, is_quick: bool) -> None:
    await _deaths(1 if is_quick else 5)
    await _short()
    if not is_quick:
        await _long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="half a minute, without controls")
    grpc.aio.init_grpc_aio()
    asyncio.run(_run(is_quick=parser.parse_args().quick))


if __name__ == "__main__":
    main()
