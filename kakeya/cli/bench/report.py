"""The report of a bench: medians, goals, and lines for a person, of one report or of two. Pure.

A report holds no prompt, key, address or path; names of machines are in it only where they are
asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya.cli.bench.measure import BenchSamples
from kakeya.core.units import format_bytes

FORMAT = 1
_TITLES = {
    "decode_plain": ("one request, no drafts", "tokens/s"),
    "decode_drafts": ("one request, drafts", "tokens/s"),
    "copy_plain": ("repeated text, no drafts", "tokens/s"),
    "copy_drafts": ("repeated text, drafts", "tokens/s"),
    "at_once_plain": ("{clients} at once, no drafts", "tokens/s"),
    "at_once_drafts": ("{clients} at once, drafts", "tokens/s"),
    "prompt_short": ("short prompt", "tokens/s"),
    "prompt_long": ("long prompt", "tokens/s"),
    "first_short": ("first token, short, cold", "ms"),
    "first_long": ("first token, long, cold", "ms"),
    "first_warm": ("first token, long, warm", "ms"),
    "decode_accepted": ("drafts accepted", "%"),
    "copy_accepted": ("drafts accepted, repeated", "%"),
}
_SCALES = {"ms": 1000.0, "%": 100.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchGoal:
    """A ratio of two medians, `over` / `under`, that should be at least `aim`."""

    what: str
    over: str
    under: str
    aim: float


GOALS = (
    BenchGoal(what="HTTP / engine's own step", over="decode_plain", under="engine", aim=0.98),
    BenchGoal(what="new text, drafts / none", over="decode_drafts", under="decode_plain", aim=0.97),
    BenchGoal(what="repeated, drafts / none", over="copy_drafts", under="copy_plain", aim=2.5),
    BenchGoal(what="at once, drafts / none", over="at_once_drafts", under="at_once_plain", aim=1.0),
    BenchGoal(what="first token, cold / warm", over="first_long", under="first_warm", aim=20.0),
)
"""Those of the project's goals that need nothing but one node: 1, 24, 4, 11, 9."""


def summary(samples: BenchSamples) -> dict[str, dict[str, float]]:
    """Median, least and most of each name, in seconds, tokens per second and shares."""
    return {
        name: {
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "count": len(values),
        }
        for name, values in samples.values.items()
    }


def goals(
    results: Mapping[str, Mapping[str, float]], verify_ms: Mapping[str, float]
) -> list[dict[str, object]]:
    """The goals that these results can tell of."""
    medians = {name: one["median"] for name, one in results.items()}
    if step_ms := verify_ms.get("1"):
        medians["engine"] = 1000 / step_ms
    return [
        {
            "what": goal.what,
            "ratio": round(medians[goal.over] / medians[goal.under], 3),
            "aim": goal.aim,
        }
        for goal in GOALS
        if medians.get(goal.over) and medians.get(goal.under)
    ]


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines for a person, of one report."""
    machine, model = report["machine"], report["model"]
    name = f" of {machine['label']}" if machine.get("label") else ""
    if machine.get("cores"):
        name += f", {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}"
    yield (
        f"{model['id']} {model['quantization'] or ''}".rstrip()
        + f" on {model['device'] or 'an unknown device'}, {machine['platform']}{name}, "
        + f"kakeya {report['kakeya']}, {report['made_at']}"
    )
    results, settings = report["results"], report["settings"]
    for key, (title, unit) in _TITLES.items():
        if one := results.get(key):
            scale = _SCALES.get(unit, 1.0)
            told = [_number(one[part] * scale) for part in ("median", "least", "most")]
            yield (
                f"  {title.format(**settings):26} {told[0]:>9} {unit:8}"
                f"  {told[1]} to {told[2]} in {one['count']}"
            )
    yield from _costs(report["verify_ms"])
    for link in report["links"]:
        rate = link["bytes_per_second"]
        speed = f"{rate / 1e6:.0f} MB/s" if rate else "throughput not measured"
        rtt = "no round trip yet" if link["rtt_ms"] is None else f"{link['rtt_ms']:.2f} ms"
        yield f"  link to {link['peer']:18} {rtt}, {speed} ({link['network'] or 'unknown network'})"
    for goal in report["goals"]:
        verdict = "met" if goal["ratio"] >= goal["aim"] else "missed"
        yield (
            f"  goal: {goal['what']:26} {goal['ratio']:>6.2f}, at least {goal['aim']:g}: {verdict}"
        )
    for name in ("decode", "copy"):
        equal = results.get(f"{name}_equal")
        if equal and equal["least"] < 1:
            yield f"  drafts changed an answer ({name}): please report it"
    for sentence, count in report["spoilt"].items():
        yield f"  note: {sentence}" + (f" ({count} times)" if count > 1 else "")
    if not report["is_complete"]:
        yield "  note: the bench was ended before its last round"


def _costs(verify_ms: Mapping[str, float]) -> Iterator[str]:
    step_ms = verify_ms.get("1")
    if not step_ms:
        yield "  verifying L tokens: not measured yet; the engine does it when it has been idle"
        return
    told = (f"L={rows} {ms:.1f} ms (x{ms / step_ms:.2f})" for rows, ms in verify_ms.items())
    yield f"  verifying: {', '.join(told)}"


def compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """The lines for a person, of two reports. A ratio above 1 means that B is faster."""
    for name, one in (("A", a), ("B", b)):
        yield f"{name}: {next(lines(one))}"
    differ = [key for key, value in a["settings"].items() if b["settings"].get(key) != value]
    if differ:
        yield f"  note: they were measured with other settings: {', '.join(differ)}"
    if a["model"]["id"] != b["model"]["id"]:
        yield "  note: they measured two models"
    yield f"  {'':26} {'A':>9} {'B':>9}           B is"
    for key, (title, unit) in _TITLES.items():
        if key in a["results"] and key in b["results"]:
            scale = _SCALES.get(unit, 1.0)
            left, right = (one["results"][key]["median"] * scale for one in (a, b))
            yield _row(title.format(**a["settings"]), left, right, unit)
    for rows, left in a["verify_ms"].items():
        if right := b["verify_ms"].get(rows):
            yield _row(f"verifying {rows} tokens", left, right, "ms")


def _row(title: str, left: float, right: float, unit: str) -> str:
    over, under = (left, right) if unit == "ms" else (right, left)
    ratio = f"x {over / under:.2f}" if over and under and unit != "%" else ""
    return f"  {title:26} {_number(left):>9} {_number(right):>9} {unit:8}  {ratio}".rstrip()


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def links(
    fleet: Mapping[str, Any], measured: Sequence[Mapping[str, Any]], *, names: bool
) -> list[dict[str, object]]:
    """The links of this node to its peers; `measured` are those that its ring survey told."""
    found: list[dict[str, object]] = []
    nodes = fleet.get("nodes") or ()
    own = next((one["node_id"] for one in nodes if one.get("is_self")), "")
    for at, peer in enumerate((one for one in nodes if not one.get("is_self")), 1):
        pair = {own, peer["node_id"]}
        link = next((one for one in measured if set(one["node_ids"]) == pair), {})
        found.append(
            {
                "peer": (names and peer.get("label")) or f"peer {at}",
                "network": link.get("network") or (peer.get("route") or {}).get("network"),
                "rtt_ms": link.get("rtt_ms", peer.get("rtt_ms")),
                "bytes_per_second": link.get("bytes_per_second"),
            }
        )
    return found
