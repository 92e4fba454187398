"""What prefix reuse did since the start, counted in one place; as metrics, and for status."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily, Metric


class Source(StrEnum):
    """Where the KV of a prompt's tokens came from."""

    LIVE = "live"  # the engine still held it
    PAGES = "pages"
    DISK = "disk"
    PEER = "peer"
    COMPUTED = "computed"


@dataclass(slots=True)
class PrefixCounts:
    """Tokens of prompts by source, and blocks by what became of them."""

    tokens: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    committed: int = 0
    rolled_back: int = 0
    evicted: int = 0
    expired: int = 0
    written: int = 0
    waits: int = 0
    waited_s: float = 0.0
    logits_reused: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens that nobody had to compute."""
        return sum(self.tokens.values()) - self.tokens[Source.COMPUTED]

    def metrics(self) -> Iterator[Metric]:
        """All of it."""
        tokens = CounterMetricFamily(
            "kakeya_prefix_tokens",
            "Tokens of prompts by where their KV came from",
            labels=["source"],
        )
        for source, count in self.tokens.items():
            tokens.add_metric([source.value], count)
        blocks = CounterMetricFamily(
            "kakeya_prefix_block_events",
            "Blocks of KV by what became of them",
            labels=["event"],
        )
        for name in ("committed", "rolled_back", "evicted", "expired", "written"):
            blocks.add_metric([name], getattr(self, name))
        yield from (tokens, blocks)
        yield CounterMetricFamily(
            "kakeya_prefix_waits",
            "Requests that waited for blocks which another one computed",
            value=self.waits,
        )
        yield CounterMetricFamily(
            "kakeya_prefix_wait_seconds", "How long they waited together", value=self.waited_s
        )
        yield CounterMetricFamily(
            "kakeya_prefix_logits_reused",
            "Prompts whose first token was chosen from logits that were kept",
            value=self.logits_reused,
        )
