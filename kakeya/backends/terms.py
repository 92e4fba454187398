"""The terms on which generations and drafts ask the memory arbiter for their model."""

from __future__ import annotations

from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.memory.api import Terms
from kakeya.memory.arbiter.plan import FOREVER
from kakeya.memory.arbiter.resident import RequestPriority

DRAFT_TERMS = Terms(priority=RequestPriority.BATCH)
"""The least urgent terms: drafts only make a generation faster."""
REQUEST_PRIORITIES = {
    GenerationPriority.URGENT: RequestPriority.URGENT,
    GenerationPriority.HIGH: RequestPriority.HIGH,
    GenerationPriority.NORMAL: RequestPriority.NORMAL,
    GenerationPriority.LOW: RequestPriority.LOW,
    GenerationPriority.BATCH: RequestPriority.BATCH,
    GenerationPriority.SPECULATIVE: RequestPriority.BATCH,
}
"""The urgency of a request for memory, by that of the work that it is for."""


def decode_terms(request: DecodeRequest) -> Terms:
    """Make the terms of a generation: its urgency, and its caller's deadline."""
    deadline_s = request.deadline_s
    return terms_within(FOREVER if deadline_s is None else deadline_s, request.priority)


def terms_within(timeout_s: float, priority: GenerationPriority) -> Terms:
    """Make the terms of a wait of `timeout_s` at most for a model."""
    return Terms(priority=REQUEST_PRIORITIES[priority], timeout_s=timeout_s)
