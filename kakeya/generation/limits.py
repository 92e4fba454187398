"""Bounds of a request that every front door keeps."""

from __future__ import annotations

MAX_PROMPT_TOKENS = 128 * 1024
"""Tokens that one call may have checked, copied and computed."""
