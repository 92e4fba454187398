"""How many draft rows a forward should verify, so that drafting pays or is off.

A forward over `rows` rows costs Tv(rows); Tv(1) is the plain, pipelined step. With `p[i]` the
probability that the first i draft tokens are all accepted, k draft rows yield
E(k) = 1 + p[1] + ... + p[k] tokens in Tv(k + 1). The chosen k maximises

    E(k) - rate * Tv(k + 1)        rate = tokens a second achieved over the last steps

so rows are added while the probability of the next one exceeds its cost at the current rate. Where
even the best k stays below that rate, the text has become harder, and k maximises E(k) / Tv(k + 1)
instead. Besides, k > 0 must beat the plain step by MARGIN. Every number is learned:

Tv(rows)   a load-time sweep, then every forward (RowCosts)
    p          per source and kind of draft, per depth (Acceptance): from verified drafts, and
               from shadow drafts, which were only compared with the tokens of plain decoding
    wait       per source, the time that asking it takes before a forward can begin

Where n sequences share a plain forward of Tv'(n) seconds, the plain step costs each Tv'(n) / n. A
block is a forward of its own, and the other sequences still take theirs: a round with it saves only
one row, Tv'(n) - Tv'(n - 1), which is less than Tv'(n) / n, because a forward has a fixed cost. The
difference is added to the block's cost. So, however many sequences draft, the tokens a second of
all together are at least those of plain decoding.

Pure: no clock, no randomness. The same calls give the same decisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from kakeya.decoding.control.acceptance_rate import AcceptanceTable
from kakeya.decoding.control.row_cost import RowCosts
from kakeya.decoding.draft.acceptance import agreeing
from kakeya.decoding.draft.proposer import Draft

MARGIN = 1.02
"""A block must promise this many times the tokens a second of the plain step."""
MEMORY = 0.95
"""Decay per step of the achieved rate: about the last 20 steps count."""
NEGLIGIBLE = 0.01
"""Path probability below which deeper rows are not looked at."""
SHARED_WEIGHT = 0.1
"""Weight of the newest measurement of a shared forward."""
PROBE_COST = 0.005
"""Share of plain time that asking a source which does not pay may cost."""
PROBE_EVERY = 32
"""Steps between two such probes, at least."""
VAIN_ASKS = 16
"""Asks in a row without a draft in time, after which a source is only probed, ever more seldom."""
PROBE_STEPS = 8
"""Steps that a probe lasts: an answer that comes late is still seen."""
WAITS_KNOWN = 8
"""About so many of the last waits count in their mean."""
KEPT_SOURCES = 256
"""Sources that are remembered, the last used ones: callers may name any number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCount:
    """Tokens at one depth of drafts, behind right tokens only, and how many of them were right."""

    tried: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Counts of one draft source; tokens unless said.

    `offered` was drafted, `verified` was part of a forward, `accepted` of that was right;
    `shadowed` was only compared, `shadow_hits` of that was right. `per_depth` counts both kinds.
    """

    source: str
    drafts: int = 0
    offered: int = 0
    verified: int = 0
    accepted: int = 0
    shadowed: int = 0
    shadow_hits: int = 0
    mean_wait_s: float = 0.0
    per_depth: tuple[DepthCount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReport:
    """A snapshot of decisions and of their numbers. `row_costs_s[i]` is Tv(i + 1)."""

    plain_steps: int
    block_steps: int
    speedup: float
    row_costs_s: tuple[float, ...]
    sources: tuple[SourceReport, ...]


@dataclass(slots=True)
class _Source:
    acceptance: AcceptanceTable
    drafts: int = 0
    offered: int = 0
    verified: int = 0
    accepted: int = 0
    shadowed: int = 0
    shadow_hits: int = 0
    wait_s: float = 0.0
    waits: int = 0
    ask_s: float = 0.0
    asks: int = 0
    vain_asks: int = 0
    steps_unasked: int = 0
    tried: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)


class DraftController:
    """Decides for one model, over all its generations; not thread-safe.

    `max_rows` bounds the draft rows of one forward.
    """

    def __init__(self, *, max_rows: int = 16, margin: float = MARGIN) -> None:
        self._max_rows = max_rows
        self._margin = margin
        self._costs = RowCosts(max_rows + 1)
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._recent_tokens = 0.0
        self._recent_s = 0.0
        self._plain_steps = 0
        self._block_steps = 0
        self._sharers = 1
        self._shared_s: dict[int, float] = {}

    def seed_costs(self, seconds_by_rows: Mapping[int, float]) -> None:
        """Start from a sweep: seconds of a forward by its number of rows, 1 = the plain step."""
        self._costs.seed(seconds_by_rows)

    def rows(self, draft: Draft, *, wait_s: float = 0.0) -> int:
        """How many of the draft's tokens to verify now; 0 = decode one token plainly.

        `wait_s` is a wait that verifying this draft still needs, not one that is over.
        """
        if not draft.tokens:
            return 0
        chain: Iterable[float] = self._source(draft.source).acceptance.chain(draft, self._max_rows)
        if draft.is_certain:
            chain = repeat(1.0, min(len(draft.tokens), self._max_rows))
        return self._best(chain, wait_s)[0]

    def wait_budget_s(self, source: str) -> float:
        """The longest wait for this source that still pays, judged by all its drafts so far."""
        known = self._source(source)
        _, tokens, cost_s = self._best(known.acceptance.overall(self._max_rows), 0.0)
        return max(0.0, tokens * self._plain_s() / self._margin - cost_s)

    def wants(self, source: str) -> bool:
        """Whether to ask, in this step, a source that cannot be asked without waiting for it.

        True when it pays; else rarely, for a few steps, so that a source that has become good is
        noticed. A caller that asks tells `observe_wait`, also when nothing came.
        """
        known = self._source(source)
        if known.waits < PROBE_STEPS or self.wait_budget_s(source) >= known.wait_s:
            return True
        return self._is_probed(known, known.wait_s)

    def patience_s(self, source: str) -> float | None:
        """How long to wait, in this step, for a source that can be asked without waiting.

        The budget where waiting pays; 0 where drafts would pay and waiting for them did not; None,
        which is not to ask, where drafts do not pay, or never come in time: the peer would draft in
        vain. There it is 0 for a few steps now and then: such a probe costs only the asking,
        however long earlier answers took.
        """
        known = self._source(source)
        if known.vain_asks < VAIN_ASKS:
            budget_s = self.wait_budget_s(source)
            if budget_s >= known.wait_s:
                return budget_s
            if budget_s > 0 or known.waits < PROBE_STEPS:
                return 0.0
        return 0.0 if self._is_probed(known, known.ask_s) else None

    def observe_forward(self, rows: int, seconds: float) -> None:
        """Learn the time of a forward over `rows` rows; rows 1 = a step of plain decoding."""
        self._costs.observe(rows, seconds)
        if rows == 1:
            self._plain_steps += 1
            self._remember(1, self._costs.seconds(1))

    def share(self, sharers: int) -> None:
        """Set how many sequences take their plain steps in one forward; 1 = each alone."""
        self._sharers = max(1, sharers)

    def observe_shared(self, sharers: int, seconds: float) -> None:
        """Learn the time of a plain forward of several sequences."""
        if seconds <= 0 or sharers < 2:
            return
        known_s = self._shared_s.get(sharers, seconds)
        self._shared_s[sharers] = known_s + SHARED_WEIGHT * (min(seconds, 2 * known_s) - known_s)
        self._plain_steps += sharers
        self._remember(1, self._plain_s())

    def observe_verified(self, draft: Draft, offered_rows: int, accepted: int) -> None:
        """Learn that of the first `offered_rows` draft tokens the first `accepted` were right."""
        known = self._source(draft.source)
        known.drafts += 1
        known.offered += len(draft.tokens)
        known.verified += offered_rows
        known.accepted += accepted
        self._learn(known, draft, accepted, min(accepted + 1, offered_rows))
        self._block_steps += 1
        self._remember(accepted + 1, self._costs.seconds(offered_rows + 1))

    def observe_shadow(self, draft: Draft, actual: Sequence[int]) -> None:
        """Score a draft, or the part that was not verified, against the tokens that came.

        `actual` begins where the draft begins; where it is shorter, the rest stays unjudged.
        """
        known = self._source(draft.source)
        right = agreeing(draft.tokens, actual)
        judged = min(right + 1, len(draft.tokens), len(actual))
        known.drafts += 1
        known.offered += len(draft.tokens)
        known.shadowed += judged
        known.shadow_hits += right
        self._learn(known, draft, right, judged)

    def observe_wait(
        self,
        source: str,
        seconds: float,
        *,
        patience_s: float | None = None,
        has_draft: bool = True,
    ) -> None:
        """Learn how long the step was held up by asking this source, and whether a draft was there.

        `patience_s` is the longest wait that was allowed; 0 = it only asked.
        """
        known = self._source(source)
        known.vain_asks = 0 if has_draft else known.vain_asks + 1
        known.waits += 1
        known.wait_s += (seconds - known.wait_s) / min(known.waits, WAITS_KNOWN)
        if patience_s == 0:
            known.asks += 1
            known.ask_s += (seconds - known.ask_s) / min(known.asks, WAITS_KNOWN)
        self._remember(0, seconds)

    def report(self) -> ControllerReport:
        """Snapshot of the counts and of the learned numbers."""
        plain_s = self._costs.seconds(1)
        speedup = self._recent_tokens * plain_s / self._recent_s if self._recent_s else 1.0
        return ControllerReport(
            plain_steps=self._plain_steps,
            block_steps=self._block_steps,
            speedup=speedup,
            row_costs_s=self._costs.table(),
            sources=tuple(_report(name, known) for name, known in self._sources.items()),
        )

    def _plain_s(self) -> float:
        """Seconds of a plain step, as the share of one sequence."""
        if self._sharers == 1:
            return self._costs.seconds(1)
        known_s = self._shared_s.get(self._sharers)
        # A block of as many rows costs about the same, before any such step was measured.
        return (known_s or self._costs.seconds(self._sharers)) / self._sharers

    def _left_behind_s(self) -> float:
        """Seconds that the others pay when a row leaves a shared forward for a block.

        With Tv'(n) = fixed + n * row through Tv(1) and the plain step as it is shared now.
        """
        sharers, plain_s = self._sharers, self._plain_s()
        if sharers == 1:
            return 0.0
        return max(0.0, self._costs.seconds(1) - plain_s) / (sharers - 1)

    def _is_probed(self, known: _Source, cost_s: float) -> bool:
        """Whether this is one of the few steps in which a source that does not pay is asked."""
        known.steps_unasked += 1
        dear = PROBE_STEPS * cost_s / (PROBE_COST * self._costs.seconds(1))
        pause = max(PROBE_EVERY * (1 + known.vain_asks // VAIN_ASKS), dear)
        if known.steps_unasked >= pause + PROBE_STEPS:
            known.steps_unasked = 0
        return known.steps_unasked >= pause

    def _best(self, chain: Iterable[float], wait_s: float) -> tuple[int, float, float]:
        """The best k for these conditional acceptances, with its E(k) and its seconds."""
        costs = self._costs.table()
        plain_s = self._plain_s()
        rate = max(self._recent_tokens / self._recent_s if self._recent_s else 0.0, 1.0 / plain_s)
        swiftest = worthiest = (0, 1.0, plain_s)
        top_speed = 1.0 / plain_s
        top_worth = 1.0 - rate * plain_s
        wait_s += self._left_behind_s()
        path, tokens = 1.0, 1.0
        for k, acceptance in enumerate(chain, start=1):
            path *= acceptance
            if path < NEGLIGIBLE:
                break
            tokens += path
            cost_s = costs[k] + wait_s
            if tokens * plain_s < self._margin * cost_s:
                continue
            if tokens > top_speed * cost_s:
                swiftest, top_speed = (k, tokens, cost_s), tokens / cost_s
            if tokens - rate * cost_s > top_worth:
                worthiest, top_worth = (k, tokens, cost_s), tokens - rate * cost_s
        return swiftest if rate >= top_speed else worthiest

    def _learn(self, known: _Source, draft: Draft, right: int, judged: int) -> None:
        known.acceptance.observe(draft, right, judged)
        while len(known.tried) < judged:
            known.tried.append(0)
            known.right.append(0)
        for depth in range(judged):
            known.tried[depth] += 1
        for depth in range(right):
            known.right[depth] += 1

    def _remember(self, tokens: int, seconds: float) -> None:
        keep = MEMORY if tokens else 1.0
        self._recent_tokens = keep * self._recent_tokens + tokens
        self._recent_s = keep * self._recent_s + seconds

    def _source(self, name: str) -> _Source:
        known = self._sources.get(name)
        if known is None:
            known = self._sources[name] = _Source(AcceptanceTable(self._max_rows))
            if len(self._sources) > KEPT_SOURCES:
                self._sources.popitem(last=False)
        self._sources.move_to_end(name)
        return known


def _report(name: str, known: _Source) -> SourceReport:
    return SourceReport(
        source=name,
        drafts=known.drafts,
        offered=known.offered,
        verified=known.verified,
        accepted=known.accepted,
        shadowed=known.shadowed,
        shadow_hits=known.shadow_hits,
        mean_wait_s=known.wait_s,
        per_depth=tuple(
            DepthCount(tried=tried, right=right)
            for tried, right in zip(known.tried, known.right, strict=True)
        ),
    )
