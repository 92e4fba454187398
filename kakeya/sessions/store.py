"""The sessions of one node: their number, their idle time, and one operation at a time on each.

Unknown, closed and expired ids get the same answer, so a guessed id tells nothing. A full store
refuses new sessions, and never takes a session away from its owner.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kakeya.core.clock import Clock
from kakeya.core.errors import CapacityExhausted, Conflict, InvariantBroken, NotFound, Refused
from kakeya.core.ids import SessionId, draw_id
from kakeya.generation.config import WAIT_S
from kakeya.generation.facts import ModelFacts
from kakeya.generation.model import ServedModel
from kakeya.sessions.session import MovedSession, Session, check_vocabulary, window_for

CAPACITY = 256
"""Sessions, some 100 kB each with a full context. Further sessions are refused, none evicted."""
IDLE_TTL_S = 1800.0
MOVING = "a move to another node"
"""The operation of a session that moves; it is no use of it."""
_PREFIX, _ID_CHARS = "ses", 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds of the store and of each session."""

    capacity: int = CAPACITY
    idle_ttl_s: float = IDLE_TTL_S
    sink_tokens: int = 4
    window_tokens: int | None = None
    """None: a history may fill the model's context, and is then cut to about half of it, so that
    its KV survives the turns until the context is full again. A given window is the limit as well:
    once the window is full, every turn cuts the history and computes sink and window anew, and the
    log says so each time."""
    sweep_interval_s: float = 15.0
    model_wait_s: float = WAIT_S
    """How long CreateSession waits for its model, where its call has no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCounts:
    """Sessions over the store's life, but for `active`, the count of this moment."""

    active: int = 0
    created: int = 0
    closed: int = 0
    expired: int = 0
    failed: int = 0
    refused: int = 0
    given: int = 0
    """To other nodes."""
    taken: int = 0
    """From other nodes."""


class SessionStore:
    """Owns every session, and which operation runs on it."""

    def __init__(self, *, clock: Clock, rng: random.Random, limits: SessionLimits) -> None:
        self._clock = clock
        self._rng = rng
        self._limits = limits
        self._sessions: dict[SessionId, Session] = {}
        self._created = self._closed = self._expired = self._failed = self._refused = 0
        self._given = self._taken = 0
        self.on_idle: Callable[[Session], None] = lambda _: None
        """Called when an operation on a session has ended, if it is no move."""

    @property
    def limits(self) -> SessionLimits:
        """Bounds of the store."""
        return self._limits

    @property
    def counts(self) -> SessionCounts:
        """Counts at this moment."""
        return SessionCounts(
            active=len(self._sessions),
            created=self._created,
            closed=self._closed,
            expired=self._expired,
            failed=self._failed,
            refused=self._refused,
            given=self._given,
            taken=self._taken,
        )

    def sessions(self) -> tuple[Session, ...]:
        """Every session, oldest first."""
        return tuple(self._sessions.values())

    def check_room(self) -> None:
        """Raise CapacityExhausted when the store is full."""
        if len(self._sessions) < self._limits.capacity:
            return
        self._refused += 1
        soonest = min(
            (self._limits.idle_ttl_s - session.idle_s(self._clock.mono()))
            for session in self._sessions.values()
        )
        raise CapacityExhausted(
            f"all {self._limits.capacity} sessions of this node are in use: "
            f"close one, or wait until an idle one expires",
            retry_after_s=max(1.0, soonest),
        )

    def create(
        self, model: ServedModel, facts: ModelFacts, *, stop_token_ids: frozenset[int], label: str
    ) -> Session:
        """Open a session on a model. Raises CapacityExhausted when the store is full."""
        self.check_room()
        session = self._new(self._draw(), model, facts, stop_token_ids)
        session.label = label
        self._created += 1
        return session

    def _new(
        self,
        session_id: SessionId,
        model: ServedModel,
        facts: ModelFacts,
        stop_token_ids: frozenset[int],
    ) -> Session:
        window = window_for(
            facts.context_tokens, self._limits.sink_tokens, self._limits.window_tokens
        )
        session = Session(
            session_id=session_id,
            model=model,
            facts=facts,
            window=window,
            stop_token_ids=stop_token_ids,
            used_mono=self._clock.mono(),
        )
        session.idle.set()
        self._sessions[session_id] = session
        return session

    def find(self, session_id: str) -> Session | None:
        """Find a session; None for unknown, closed and expired ids."""
        session = self._sessions.get(SessionId(session_id))
        if session is None or self._is_expired(session, self._clock.mono()):
            return None
        return session

    def get(self, session_id: str) -> Session:
        """Find a session. Raises NotFound for unknown, closed and expired ids alike."""
        session = self.find(session_id)
        if session is None:
            raise NotFound(
                f"no session {session_id[:64]!r}: it was never created here, was closed or expired"
            )
        return session

    @contextmanager
    def operation(self, session_id: str, name: str) -> Iterator[Session]:
        """Hold a session for one operation.

        Raises NotFound, Conflict while another one runs, InvariantBroken for a failed session.
        A law that breaks inside fails the session.
        """
        session = self.get(session_id)
        if session.is_busy:
            raise Conflict(
                f"session {session_id} is busy with {session.operation}: "
                f"{name} can run once that has ended"
            )
        if session.failure:
            raise InvariantBroken("session_failed", f"{session.failure}; begin a new session")
        session.operation, used_mono = name, session.used_mono
        session.idle.clear()
        try:
            yield session
        except InvariantBroken as broken:
            session.fail(broken)
            self._failed += 1
            raise
        finally:
            session.operation = ""
            session.idle.set()
            if name == MOVING:
                session.used_mono = used_mono
            else:
                session.used_mono = self._clock.mono()
                self.on_idle(session)

    def adopt(self, moved: MovedSession, model: ServedModel, facts: ModelFacts) -> None:
        """Take over a session of another node. Raises CapacityExhausted when the store is full,
        Conflict for one that is here, InvalidArgument for ids outside the vocabulary."""
        self.check_room()
        if self.find(moved.session_id) is not None or not is_session_id(moved.session_id):
            raise Conflict(f"session {moved.session_id[:64]!r} is here already, or is no session")
        check_vocabulary(moved.history, facts.vocab_size)
        session = self._new(SessionId(moved.session_id), model, facts, moved.stop_token_ids)
        session.label, session.client = moved.label, moved.client
        session.used_mono -= min(moved.idle_s, self._limits.idle_ttl_s)
        session.extend(moved.history)
        self._taken += 1

    def forget(self, session: Session) -> None:
        """Remove a session that is at another node now."""
        if self._sessions.pop(session.session_id, None) is not None:
            self._given += 1

    def close(self, session_id: str) -> Session:
        """Remove a session and return it. Raises NotFound, or Conflict while it is in use."""
        session = self.get(session_id)
        if session.is_busy:
            raise Conflict(
                f"session {session_id} is busy with {session.operation}: cancel that, then close"
            )
        del self._sessions[session.session_id]
        self._closed += 1
        return session

    def expired(self, now: float) -> tuple[Session, ...]:
        """The sessions that are idle for the TTL or longer; a session in use never is."""
        return tuple(s for s in self._sessions.values() if self._is_expired(s, now))

    def sweep(self) -> tuple[Session, ...]:
        """Remove the expired sessions and return them."""
        gone = self.expired(self._clock.mono())
        for session in gone:
            del self._sessions[session.session_id]
        self._expired += len(gone)
        return gone

    def _is_expired(self, session: Session, now: float) -> bool:
        return not session.is_busy and now - session.used_mono >= self._limits.idle_ttl_s

    def _draw(self) -> SessionId:
        for _ in range(8):
            session_id = SessionId(draw_id(_PREFIX, self._rng, length=_ID_CHARS))
            if session_id not in self._sessions:
                return session_id
        raise Refused("the random source repeats itself, no session id could be drawn")


def is_session_id(text: str) -> bool:
    """Whether a node of a fleet could have drawn this id."""
    return text.startswith(f"{_PREFIX}-") and len(text) == len(_PREFIX) + 1 + _ID_CHARS
