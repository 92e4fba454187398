"""Errors that only a generation can meet."""

from __future__ import annotations

from kakeya.core.errors import InvalidArgument


class ContextLengthExceeded(InvalidArgument):
    """Prompt and output do not fit into the model's context."""

    code = "context_length_exceeded"
