"""Simulate fleets of the product's own gossip code in virtual time, and print what they showed.

For each number of nodes and each share of lost messages: rounds until news is everywhere, rounds
from a cold start, and what views showed over hours; then the same for controls, which are worse
than the product on purpose. `scripts/simulate --help` names what can go wrong on the way.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from ctypes import Array, c_double
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.faults import Faults
from benchmarks.outcome import Outcome, table
from benchmarks.trials import (
    MANY_NODES,
    Case,
    Hours,
    cold_rounds,
    heal_rounds,
    hours,
    spread_rounds,
)
from benchmarks.virtual_fleet import Pace

CONTROL_SEEDS = 5
Result = int | Hours
_shares: Array[c_double]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    cases = _cases(options)
    outcomes = [Outcome(case) for case in cases]
    work = [
        (index, kind, seed)
        for index, case in enumerate(cases)
        for kind, seed in _trials(case, options.seeds, options.hours)
    ]
    try:
        _run(outcomes, work, options)
    except KeyboardInterrupt:
        print("simulate: stopped", file=sys.stderr)
        return 130
    if options.earlier:
        outcomes = [outcome for outcome in outcomes if not outcome.is_empty]
        outcomes += map(Outcome.from_line, options.earlier.read_text("utf-8").splitlines())
        outcomes.sort(key=lambda o: (bool(o.case.control), o.case.nodes, o.case.loss))
    if options.json:
        for outcome in outcomes:
            print(outcome.to_line())
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(outcomes))
    if options.plot:
        from benchmarks.simulate_plot import draw  # needs an extra that nothing else needs

        draw(outcomes, options.plot)
        print(f"simulate: wrote {options.plot}", file=sys.stderr)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    pace = Pace()
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Runs fleets of real gossip code in virtual time; see docs/gossip.png.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=_whole_numbers, default=[10, 100], metavar="N,N", help="sizes of fleets")
    add("--loss", type=_shares_of, default=[0.0, 0.1, 0.3], metavar="P,P", help="messages lost")
    add("--fanout", type=int, default=pace.fanout, help="peers that a node calls each round")
    add("--interval", type=float, default=pace.interval_s, help="seconds between rounds")
    add("--ttl", type=float, default=pace.ttl_s, help="seconds that a silent node stays in views")
    add("--hours", type=float, default=1.0, help="virtual hours of the long run; 0 = none")
    add("--seeds", type=int, default=20, help="trials of each short run")
    add("--partition", type=float, default=0.0, metavar="S", help="split the fleet for S seconds")
    add(
        "--skew", type=float, default=0.0, metavar="S", help="clocks are wrong by up to +-S seconds"
    )
    add("--churn", type=float, default=0.0, metavar="N", help="kills, leaves and joins per hour")
    add("--jump", type=float, default=0.0, metavar="S", help="one clock jumps S s, for 10 minutes")
    add("--probes", action="store_true", help="probe nodes that do not answer, as the product does")
    add("--no-controls", action="store_true", help="leave out fanout 1, 30 s / 3, and no memory")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="trials at the same time")
    add("--json", action="store_true", help="print a line of JSON for each fleet, not a table")
    add("--earlier", type=Path, metavar="FILE", help="show the outcome of a run with --json too")
    add("--plot", type=Path, metavar="FILE.png", help="draw the outcome")
    return parser.parse_args(arguments)


def _whole_numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{text}: a fleet has at least 2 nodes")
    return numbers


def _shares_of(text: str) -> list[float]:
    shares = [float(part) for part in text.split(",")]
    if not all(0 <= share < 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text}: a share lies between 0 and 1, such as 0.3")
    return shares


def _cases(options: argparse.Namespace) -> list[Case]:
    pace = Pace(interval_s=options.interval, fanout=options.fanout, ttl_s=options.ttl)
    faults = Faults(
        partition_s=options.partition,
        skew_s=options.skew,
        churn_per_hour=options.churn,
        jump_s=options.jump,
    )
    cases = [
        Case(nodes=count, loss=loss, pace=pace, faults=faults, has_probes=options.probes)
        for count in options.nodes
        for loss in options.loss
    ]
    if options.no_controls:
        return cases
    worst = max(options.loss)
    for count in options.nodes:
        lonely = Pace(interval_s=options.interval, fanout=1, ttl_s=options.ttl)
        slow = Pace(interval_s=30.0, fanout=3, ttl_s=options.ttl)
        cases += [
            Case(nodes=count, loss=worst, pace=lonely, faults=faults, control="fanout 1"),
            Case(nodes=count, loss=worst, pace=slow, faults=faults, control="30 s, fanout 3"),
        ]
        if options.partition:
            cases.append(
                Case(nodes=count, pace=pace, faults=faults, control="no memory", is_forgetful=True)
            )
    return cases


def _trials(case: Case, seeds: int, long_hours: float) -> list[tuple[str, int]]:
    some = range(min(seeds, CONTROL_SEEDS) if case.control else seeds)
    heals = [("heal", seed) for seed in some] if case.faults.partition_s else []
    if case.is_forgetful:
        return heals
    long = [("hours", 0)] if long_hours else []
    kinds: tuple[str, ...] = ("spread", "cold")
    if case.nodes >= MANY_NODES:
        kinds = () if long else ("spread",)
    return long + [(kind, seed) for kind in kinds for seed in some] + heals


def _run(
    outcomes: list[Outcome], work: list[tuple[int, str, int]], options: argparse.Namespace
) -> None:
    context = multiprocessing.get_context("spawn")
    shares: Array[c_double] = context.RawArray(c_double, len(work))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        bar = progress.add_task("simulating", total=len(work))
        pool = ProcessPoolExecutor(
            options.jobs,
            mp_context=context,
            initializer=_begin_worker,
            initargs=(shares,),
        )
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting: dict[Future[Result], tuple[int, str]] = {}
        for place, (index, kind, seed) in enumerate(work):
            job = (place, outcomes[index].case, kind, seed, options.hours * 3600.0)
            waiting[pool.submit(_trial, *job)] = (index, kind)
        while waiting:
            done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                index, kind = waiting.pop(future)
                outcomes[index].add(kind, future.result())
                case = outcomes[index].case
                progress.update(
                    bar, description=f"{kind}, {case.nodes} nodes, {case.loss:.0%} lost"
                )
            progress.update(bar, completed=sum(shares))


def _begin_worker(shares: Array[c_double]) -> None:
    global _shares  # where this process tells the first one how far it is
    _shares = shares
    logging.getLogger("kakeya").setLevel(logging.CRITICAL)  # lost messages are no news here


def _trial(place: int, case: Case, kind: str, seed: int, seconds: float) -> Result:
    parent = os.getppid()

    def progress(share: float) -> None:
        _shares[place] = share
        if os.getppid() != parent:
            sys.exit("simulate: whoever asked for this trial is gone")

    try:
        match kind:
            case "hours":
                return hours(case, seed, seconds, progress)
            case "spread":
                return spread_rounds(case, seed, progress)
            case "cold":
                return cold_rounds(case, seed, progress)
            case _:
                return heal_rounds(case, seed, progress)
    finally:
        progress(1.0)
