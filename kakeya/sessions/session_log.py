"""Lines of the log about sessions and their generations."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from kakeya.core.errors import InvariantBroken
from kakeya.core.log import event
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.generation.frames import Done, Frame, Progress, Tokens
from kakeya.sessions.session import Session
from kakeya.wire.request_log import GenerationLine, log_answered

_log = logging.getLogger(__name__)
_MOST_ID = 64
"""Characters of the id of a session that does not exist: any text."""


class GenerateLog:
    """Follows one Generate call, for its line; `status` is that of its end."""

    def __init__(self, session_id: str, mono: Callable[[], float]) -> None:
        self._request_id = session_id[:_MOST_ID]
        self._mono = mono
        self._began_mono = mono()
        self._session: Session | None = None
        self._prompt_tokens = self._cached_tokens = self._tokens = 0
        self._first_token_s: float | None = None
        self._prefill_s: float | None = None
        self.status = grpc.StatusCode.INTERNAL

    def begin(self, session: Session) -> None:
        """Note that the call has its session: its id is the session's with a number."""
        session.generations += 1
        self._request_id = f"{session.session_id}.{session.generations}"
        self._session = session

    def saw(self, frame: Frame, history_length: int) -> None:
        """Note a frame, before it changes a history of that length."""
        match frame:
            case Tokens():
                if self._first_token_s is None:
                    self._first_token_s = self._mono() - self._began_mono
                    self._prompt_tokens = history_length
                self._tokens += len(frame.token_ids)
            case Progress():
                self._cached_tokens = frame.cached_tokens
            case Done():
                self._cached_tokens = frame.usage.cached_tokens
                self._prefill_s = frame.usage.prefill_s

    def write(self) -> None:
        """Write the line."""
        log_answered(
            method="gRPC",
            path="RuntimeService/Generate",
            status=self.status.name,
            seconds=self._mono() - self._began_mono,
            request_id=self._request_id,
            made=self._made(),
            is_refused=self.status is not grpc.StatusCode.OK,
        )

    def _made(self) -> GenerationLine | None:
        if self._session is None:
            return None
        model, has_begun = self._session.model, self._first_token_s is not None
        return GenerationLine(
            model=model.model_id,
            node=model.served_by if has_begun and isinstance(model, RoutedModel) else "",
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            tokens=self._tokens,
            first_token_s=self._first_token_s,
            prefill_s=self._prefill_s,
        )


def log_cut(session: Session, dropped: int) -> None:
    """Log the cost of a cut. Under a configured window every turn cuts, and every cut is logged."""
    event(
        _log,
        "history cut",
        session=session.session_id,
        dropped=dropped,
        kept=session.history_length,
        kv_kept=session.window.sink_tokens,
        because="a cut moves every token behind the sink to another position, "
        "and no cache class moves what it has computed",
    )


def log_failure(session: Session, broken: InvariantBroken) -> None:
    """Log that a session failed by a fault of this program."""
    event(
        _log,
        "session failed",
        level=logging.ERROR,
        session=session.session_id,
        error=broken.message,
    )
