"""What the trials of one simulated fleet add up to, and the table of several."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field

from rich.table import Table

from benchmarks.audit import Findings
from benchmarks.faults import Faults
from benchmarks.trials import GIVE_UP_ROUNDS, Case, Hours
from benchmarks.virtual_fleet import Pace

KINDS = ("spread", "cold", "heal")
CAPTION = """\
Rounds are median / max over the seeds (share within the goal <= rounds):
  spread  until everybody holds news of everybody; in fleets of 2000 and more, of 100 nodes
  cold    until everybody knows everybody         heal    from the end of a split to full views
Over the long run:
  absent  share of pairs in which a living node was missing   ever    nodes that were, anywhere
  ghosts  dead nodes seen later than their TTL                oldest  age of the oldest card
  doubted share of pairs in which a living node gets no work, for it did not answer
  sent    payload of one node in one interval, requests and answers"""
HEAL_GOAL_ROUNDS = 4


@dataclass(slots=True)
class Outcome:
    """Rounds by kind of trial, in the order in which they ended, and the long run."""

    case: Case
    rounds: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    hours: Hours | None = None

    def add(self, kind: str, result: int | Hours) -> None:
        """Take in one trial."""
        if isinstance(result, Hours):
            self.hours = result
            if result.spread_rounds is not None:
                self.rounds["spread"].append(result.spread_rounds)
        else:
            self.rounds[kind].append(result)

    @property
    def is_empty(self) -> bool:
        """Whether no trial was asked for."""
        return self.hours is None and not any(self.rounds.values())

    def goal(self, kind: str) -> int | None:
        """Rounds that 99 % of the trials shall keep."""
        return {"spread": self.case.goal_rounds, "heal": HEAL_GOAL_ROUNDS}.get(kind)

    def share_within_goal(self, kind: str) -> float | None:
        """Share of the trials that kept the goal; None without a goal or a trial."""
        rounds, goal = self.rounds[kind], self.goal(kind)
        if not rounds or goal is None:
            return None
        return sum(count <= goal for count in rounds) / len(rounds)

    def to_line(self) -> str:
        """All of it as one line of JSON, with the goals and how often they were kept."""
        goals = {kind: self.goal(kind) for kind in KINDS}
        kept = {kind: self.share_within_goal(kind) for kind in KINDS}
        return json.dumps({**asdict(self), "goals": goals, "share_within_goal": kept})

    @classmethod
    def from_line(cls, line: str) -> Outcome:
        """What `to_line` wrote."""
        entry = json.loads(line)
        case, long = entry["case"], entry["hours"]
        case |= {"pace": Pace(**case["pace"]), "faults": Faults(**case["faults"])}
        if long is not None:
            long |= {"findings": Findings(**long["findings"])}
        return cls(Case(**case), entry["rounds"], None if long is None else Hours(**long))


def table(outcomes: list[Outcome]) -> Table:
    """The outcomes, a row each, controls last; columns that nobody fills are left out."""
    rows = [_row(outcome) for outcome in outcomes]
    shown = Table(caption=CAPTION, caption_justify="left")
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    for title in titles:
        shown.add_column(title, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        is_last = index + 1 < len(rows) and outcomes[index + 1].case.control and not row["control"]
        shown.add_row(*(row[title] for title in titles), end_section=bool(is_last))
    return shown


def _row(outcome: Outcome) -> dict[str, str]:
    case = outcome.case
    row = {
        "nodes": str(case.nodes),
        "lost": f"{case.loss:.0%}",
        "pace": f"{case.pace.interval_s:g} s x {case.pace.fanout}",
        "control": case.control,
    }
    row |= {kind: _rounds(outcome, kind) for kind in KINDS}
    run, found = outcome.hours, outcome.hours.findings if outcome.hours else None
    row["absent"] = _tiny(found.absent_share) if found else ""
    row["ever"] = str(found.nodes_ever_absent) if found else ""
    row["doubted"] = _tiny(found.doubted_share) if found else ""
    row["ghosts"] = str(found.ghosts) if found else ""
    row["oldest"] = f"{found.oldest_age_s:.0f} s" if found else ""
    row["sent"] = f"{run.sent_bytes_per_round / 1e3:.3g} kB" if run else ""
    return row


def _rounds(outcome: Outcome, kind: str) -> str:
    rounds = outcome.rounds[kind]
    if not rounds:
        return ""
    words = f"{_count(statistics.median(rounds))} / {_count(max(rounds))}"
    share = outcome.share_within_goal(kind)
    return words if share is None else f"{words} ({share:.0%} <= {outcome.goal(kind)})"


def _count(rounds: float) -> str:
    return "never" if rounds >= GIVE_UP_ROUNDS else f"{rounds:g}"


def _tiny(share: float) -> str:
    return f"{share:.1g}" if share else "0"
