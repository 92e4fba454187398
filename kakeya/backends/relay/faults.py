"""What a service that refuses a request says, as one of our errors. Pure.

400, 413, 422        InvalidArgument, with the parameter that it names
404                  NotFound
401, 402, 403        UpstreamDenied: it is this node's key that is refused, not the caller's
408, 504             DeadlineExceeded
429                  UpstreamBusy, with its Retry-After
503, 529             PeerUnavailable, with its Retry-After
all others           PeerError
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

from kakeya.core import errors

_MOST_CHARS = 500
"""Of a service's own words."""
_MOST_WAIT_S = 3600.0


class UpstreamDenied(errors.PeerError):
    """A service refuses this node."""

    code = "upstream_denied"


class UpstreamBusy(errors.Refused):
    """A service takes no request of this node now."""

    code = "upstream_busy"


def fault_of(
    service: str, status: int, headers: Mapping[str, str], body: bytes, *, now: float = 0.0
) -> errors.KakeyaError:
    """The error of an answer with this status; errors call it `service`, `now` is wall time."""
    said, param = told(body)
    message = f"{service} answered {status}" + f": {said}" * bool(said)
    wait_s = _retry_after_s(headers, now)
    match status:
        case 400 | 413 | 422:
            return errors.InvalidArgument(message, param=param or None)
        case 401 | 402 | 403:
            return UpstreamDenied(f"{message}; its key here, or what the key may do, is wrong")
        case 404:
            return errors.NotFound(message)
        case 408 | 504:
            return errors.DeadlineExceeded(message)
        case 429:
            return UpstreamBusy(message, retry_after_s=wait_s)
        case 503 | 529:
            return errors.PeerUnavailable(message, retry_after_s=wait_s)
        case _:
            return errors.PeerError(message)


def told(body: bytes) -> tuple[str, str]:
    """The message of an error's body, in any of the usual forms, and the parameter at fault."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return _short(body.decode(errors="replace")), ""
    inner = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(inner, dict):
        return _short(str(inner)), ""
    said = inner.get("message") or inner.get("detail") or ""
    param = inner.get("param")
    return _short(str(said)), param if isinstance(param, str) else ""


def _short(text: str) -> str:
    return " ".join(text.split())[:_MOST_CHARS]


def _retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds until another try is welcome; None = not told."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        said = headers.get(name, "")
        try:
            wait_s = float(said) * unit_s
        except ValueError:
            wait_s = _until(said, now)
        if 0 <= wait_s <= _MOST_WAIT_S:
            return wait_s
    return None


def _until(date: str, now: float) -> float:
    """Seconds until an HTTP date; -1 for what is none."""
    try:
        when = parsedate_to_datetime(date)
    except ValueError:
        return -1.0
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now
