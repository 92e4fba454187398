"""The terms on which generations and drafts ask the memory arbiter for their model."""

from __future__ import annotations

from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.memory.api import Terms
from kakeya.memory.arbiter.plan import FOREVER
from kakeya.memory.arbiter.resident import RequestPriority

DRAFT_TERMS = Terms(priority=RequestPriority.BATCH)
"""The least urgent terms: drafts only make a generation faster."""
_PRIORITIES = {
    GenerationPriority.URGENT: RequestPriority.URGENT,
    GenerationPriority.HIGH: RequestPriority.HIGH,
    GenerationPriority.NORMAL: RequestPriority.NORMAL,
    GenerationPriority.LOW: RequestPriority.LOW,
    GenerationPriority.BATCH: RequestPriority.BATCH,
    GenerationPriority.SPECULATIVE: RequestPriority.BATCH,
}


def decode_terms(request: DecodeRequest) -> Terms:
    """Make the terms of a generation: its urgency, and its caller's deadline."""
    return Terms(
        priority=_PRIORITIES[request.priority],
        timeout_s=FOREVER if request.deadline_s is None else request.deadline_s,
    )
