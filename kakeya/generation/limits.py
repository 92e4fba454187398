"""Bounds of a request that every front door keeps."""

from __future__ import annotations

MAX_PROMPT_TOKENS = 128 * 1024
"""Of one call: what a caller may have checked, copied and computed at one go."""
