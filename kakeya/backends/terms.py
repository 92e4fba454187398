"""On what terms generations and drafts of this node ask the memory arbiter for their model."""

from __future__ import annotations

from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.memory.api import Terms
from kakeya.memory.arbiter.plan import FOREVER
from kakeya.memory.arbiter.resident import RequestPriority

DRAFT_TERMS = Terms(priority=RequestPriority.BATCH)
"""Drafts make a generation faster; everything else is more urgent."""
_PRIORITIES = {
    GenerationPriority.URGENT: RequestPriority.URGENT,
    GenerationPriority.NORMAL: RequestPriority.NORMAL,
    GenerationPriority.BATCH: RequestPriority.BATCH,
    GenerationPriority.SPECULATIVE: RequestPriority.BATCH,
}


def decode_terms(request: DecodeRequest) -> Terms:
    """As urgent as the generation is, and no longer than its caller waits."""
    return Terms(
        priority=_PRIORITIES[request.priority],
        timeout_s=FOREVER if request.deadline_s is None else request.deadline_s,
    )
