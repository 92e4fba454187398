"""The picture of `scripts/simulate --plot`: how news spreads, how old cards get, what is sent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.outcome import Outcome
from benchmarks.virtual_fleet import card_bytes

COLORS = ("#1b6ca8", "#e08e1b", "#b23a48", "#5b8c5a", "#6a4c93")


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw three charts over the number of nodes into one PNG."""
    mpl.use("Agg")
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    ours = [outcome for outcome in outcomes if not outcome.case.control]
    sizes = sorted({outcome.case.nodes for outcome in outcomes})
    controls = [outcome for outcome in outcomes if outcome.case.control]
    _draw_rounds(left, ours)
    _draw_ages(middle, ours, controls)
    _draw_bytes(right, ours)
    for chart in (left, middle, right):
        chart.set_xscale("log")
        chart.xaxis.set_major_locator(FixedLocator(sizes))
        chart.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        chart.xaxis.set_minor_locator(NullLocator())
        chart.set_xlabel("nodes")
        chart.grid(alpha=0.25)
        chart.spines[["top", "right"]].set_visible(False)
        if chart is not middle:
            chart.legend(frameon=False, fontsize=8)
    middle.set_ylim(top=1.5 * middle.get_ylim()[1])  # room for the long legend
    middle.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    pace = ours[0].case.pace
    figure.suptitle(
        f"Gossip in virtual time, the product's code: every {pace.interval_s:g} s "
        f"with {pace.fanout} peers, TTL {pace.ttl_s:g} s"
    )
    figure.savefig(path, dpi=100)


def _by_loss(outcomes: Sequence[Outcome]) -> dict[float, list[Outcome]]:
    losses = dict.fromkeys(outcome.case.loss for outcome in outcomes)
    return {
        loss: sorted((o for o in outcomes if o.case.loss == loss), key=lambda o: o.case.nodes)
        for loss in losses
    }


def _draw_rounds(chart: Axes, outcomes: Sequence[Outcome]) -> None:
    chart.set_title("Rounds until news is everywhere (bars: to the worst seed)", fontsize=10)
    for color, (loss, fleets) in zip(COLORS, _by_loss(outcomes).items(), strict=False):
        fleets = [fleet for fleet in fleets if fleet.rounds["spread"]]
        sizes = [fleet.case.nodes for fleet in fleets]
        middles = [statistics.median(fleet.rounds["spread"]) for fleet in fleets]
        above = [max(f.rounds["spread"]) - m for f, m in zip(fleets, middles, strict=True)]
        chart.errorbar(
            sizes, middles, yerr=([0] * len(above), above), color=color, marker="o", capsize=3,
            label=f"{loss:.0%} of messages lost",
        )  # fmt: skip
    sizes = sorted({outcome.case.nodes for outcome in outcomes})
    chart.plot(sizes, [math.log2(n) for n in sizes], "k:", label="log2 of the nodes")
    chart.set_ylim(bottom=0)


def _draw_ages(chart: Axes, ours: Sequence[Outcome], controls: Sequence[Outcome]) -> None:
    chart.set_title("Oldest card in any view, seconds", fontsize=10)
    for color, (loss, fleets) in zip(COLORS, _by_loss(ours).items(), strict=False):
        _draw_oldest(chart, fleets, f"{loss:.0%} lost", color, "o-")
    by_name: dict[str, list[Outcome]] = {}
    for control in controls:
        by_name.setdefault(f"{control.case.control}, {control.case.loss:.0%} lost", []).append(
            control
        )
    for color, (name, fleets) in zip(reversed(COLORS), by_name.items(), strict=False):
        _draw_oldest(chart, fleets, name, color, "x--")
    chart.axhline(ours[0].case.pace.ttl_s, color="k", linewidth=1, label="TTL: gone from views")
    chart.set_ylim(bottom=0)


def _draw_oldest(
    chart: Axes, fleets: Sequence[Outcome], label: str, color: str, style: str
) -> None:
    points = [(f.case.nodes, f.hours.findings.oldest_age_s) for f in fleets if f.hours]
    if points:
        chart.plot(*zip(*points, strict=True), style, label=label, color=color)


def _draw_bytes(chart: Axes, ours: Sequence[Outcome]) -> None:
    chart.set_title("Payload sent by one node in one round, bytes", fontsize=10)
    for color, (loss, fleets) in zip(COLORS, _by_loss(ours).items(), strict=False):
        points = [(f.case.nodes, f.hours.sent_bytes_per_round) for f in fleets if f.hours]
        if points:
            chart.plot(*zip(*points, strict=True), "o-", color=color, label=f"{loss:.0%} lost")
    sizes = sorted({outcome.case.nodes for outcome in ours})
    calls = 2 * ours[0].case.pace.fanout  # as many begun as answered
    full = [calls * size * card_bytes() for size in sizes]
    chart.plot(sizes, full, "k:", label="every card in full, each time")
    chart.set_yscale("log")
