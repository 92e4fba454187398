"""What may go wrong in a step, as one of our errors."""

from __future__ import annotations

import logging

from kakeya.core.errors import InvariantBroken, KakeyaError

_log = logging.getLogger(__name__)


def as_kakeya_error(failure: Exception) -> KakeyaError:
    """The error itself, or that a step failed, with its traceback in the log."""
    if isinstance(failure, KakeyaError):
        return failure
    _log.error("a step failed", exc_info=failure)
    return InvariantBroken("engine_step", repr(failure))
