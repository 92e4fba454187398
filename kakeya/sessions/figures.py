"""Figures of sessions and of generations over gRPC."""

from __future__ import annotations

from collections.abc import Iterator

from kakeya.core.figures import Figure, counter, gauge
from kakeya.sessions.service import RuntimeStats


def session_figures(stats: RuntimeStats) -> Iterator[Figure]:
    """Sessions and generations over gRPC."""
    yield gauge("kakeya_sessions", "Sessions now", stats.sessions.active)
    yield counter("kakeya_sessions_taken", "Sessions from other nodes", stats.sessions.taken)
    yield gauge("kakeya_generates_running", "Generate calls now", stats.generates_running)
    yield counter(
        "kakeya_generates{end}",
        "Generate calls that ended",
        {
            "done": stats.generates_done,
            "failed": stats.generates_failed,
            "cancelled": stats.generates_cancelled,
        },
    )
    yield counter("kakeya_generate_tokens", "Tokens sent by Generate", stats.tokens_out)
    yield counter(
        "kakeya_sessions_ended{end}",
        "Sessions by end",
        {
            "closed": stats.sessions.closed,
            "expired": stats.sessions.expired,
            "moved": stats.sessions.given,
            "failed": stats.sessions.failed,
            "refused": stats.sessions.refused,
        },
    )
