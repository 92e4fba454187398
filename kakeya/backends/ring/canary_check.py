"""Compare a ring group with one process before it serves, and again now and then while it is idle.

    before each start   with a known answer of the same weights and numerics; without one, with a
                        single engine that the arbiter loads where it fits, and its answer is kept
    unlike numerics     only: a group that is equal is right, and one that differs need not be wrong
    neither             the group is unverified, and serves
    audit               the same question, when nothing runs on the node; it ends for any request

A group that differs is refused: it is ended, and the model fails with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Protocol

from kakeya.backends.engine.child import ChildClient
from kakeya.backends.engine.failures import GroupRefused
from kakeya.backends.ring import canary
from kakeya.backends.ring.canary import Answer, Different, Numerics, SaidToken, Tie
from kakeya.backends.ring.canary_answers import AnswerFiles, KnownAnswer
from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, PeerProtocol
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Frame, Progress, Tokens
from kakeya.generation.progress import LoadPhase, LoadProgress

_log = logging.getLogger(__name__)
ANSWER_S = 600.0
"""The longest canary of one group or process."""
AGAIN_S = 600.0
"""An audit that had to end for a request, or got no answer, is tried again after so long."""
Teller = Callable[[LoadProgress], None]


class OneProcess(Protocol):
    """The same weights in one process."""

    async def answer(
        self, tokens: int, hears: Callable[[Frame], None]
    ) -> tuple[ModelFacts, Answer] | None:
        """Answer a prompt of so many tokens, and give the memory back before returning; None =
        there is no room for it. Raises KakeyaError."""
        ...

    def weights(self) -> str:
        """The digest of the weights; "" = not known here. Blocks."""
        ...


class GroupCheck:
    """Implements `backends.engine.engine.EngineCheck` for the successive groups of one model.

    `alone` is the same model in one process, `end` ends the ranks of a group that was refused, and
    `is_idle` says whether nothing runs on the node. `audit_every_s` as in `canary`.
    """

    def __init__(
        self,
        model_id: str,
        alone: OneProcess,
        answers: AnswerFiles,
        *,
        end: Callable[[], None],
        is_idle: Callable[[], bool],
        clock: Clock,
        audit_every_s: float = canary.AUDIT_EVERY_S,
    ) -> None:
        self._model_id = model_id
        self._alone = alone
        self._answers = answers
        self._end = end
        self._is_idle = is_idle
        self._clock = clock
        self._audit_every_s = audit_every_s
        self._audit_mono = 0.0
        self._known: KnownAnswer | None = None
        self._said: Json = {"state": "not checked", "reason": "no group was there yet"}

    def status(self) -> Json:
        """`state` (not checked, preparing, checking, verified, unverified, refused), `reason`."""
        return self._said

    async def prepare(self) -> None:
        """Let one process answer before the group takes the memory, unless an answer is known."""
        weights = await asyncio.to_thread(self._alone.weights)
        stored = await asyncio.to_thread(self._answers.of, weights) if weights else ()
        installed = await asyncio.to_thread(version, "mlx")
        if weights and not any(one.numerics.mlx == installed for one in stored):
            self._tell("preparing", "one process answers the canary")
            await self._asked_alone(canary.PROMPT_TOKENS, weights, lambda _: None)

    async def admit(self, client: ChildClient, facts: ModelFacts, told: Teller) -> None:
        """Check a group that has loaded. Raises GroupRefused, and the errors of its decode."""
        began_mono = self._clock.mono()
        self._known = None
        self._tell("checking", "it answers the canary")
        told(LoadProgress(phase=LoadPhase.CANARY))
        tokens = canary.prompt_tokens(facts)
        if not tokens or not facts.base_fingerprint:
            why = "its context is too short" if facts.base_fingerprint else "weights have no digest"
            self._tell("unverified", f"{why} for a canary")
            return
        known = await self._wanted(tokens, facts, told)
        if known is None:
            self._tell(
                "unverified",
                "one process of its weights does not fit beside it, and no answer is known",
            )
            return
        progress = _Counted(told, known.prompt_tokens, is_second=True)
        apart = await self._compared(client, facts, known, progress.hears)
        if apart is None:
            return
        if known.numerics != (own := Numerics.of(facts)):
            known = await self._answered(client, facts, known, own)
        self._known = known
        self._audit_mono = self._clock.mono() + self._audit_every_s
        took_s = self._clock.mono() - began_mono
        self._tell(
            "verified",
            f"its {canary.ANSWER_TOKENS} tokens are those of {known.said_by}",
            apart=apart,
            seconds=round(took_s, 2),
        )

    async def audit(self, client: ChildClient, facts: ModelFacts) -> None:
        """Check a group that serves, if it is time and the node is idle. Raises GroupRefused."""
        known = self._known
        if known is None or self._clock.mono() < self._audit_mono or not self._is_idle():
            return
        self._audit_mono = self._clock.mono() + AGAIN_S
        try:
            apart = await self._compared(client, facts, known, self._yields, is_audit=True)
        except _Yielded:
            return
        except GroupRefused:
            raise
        except KakeyaError as problem:  # the next probe finds out whether it is lost
            event(_log, "no audit of a ring group", model=self._model_id, error=problem.message)
            return
        self._audit_mono = self._clock.mono() + self._audit_every_s
        self._said = {**self._said, "audited_at": self._clock.wall()}
        event(_log, "ring group audited", model=self._model_id, apart=apart)

    async def _wanted(self, tokens: int, facts: ModelFacts, told: Teller) -> KnownAnswer | None:
        """The answer to compare with; None = there is none."""
        weights, numerics = facts.base_fingerprint, Numerics.of(facts)
        stored = [
            one
            for one in await asyncio.to_thread(self._answers.of, weights)
            if canary.is_long_enough(one.prompt_tokens, facts)
        ]
        if same := next((one for one in stored if one.numerics == numerics), None):
            return same
        known = await self._asked_alone(tokens, weights, _Counted(told, tokens).hears)
        return known or next(iter(stored), None)

    async def _asked_alone(
        self, tokens: int, weights: str, hears: Callable[[Frame], None]
    ) -> KnownAnswer | None:
        """What one process says, which is kept; None = there is no room for it."""
        try:
            found = await self._alone.answer(tokens, hears)
        except (KakeyaError, TimeoutError) as problem:
            what = "no single process answered the canary of a ring group"
            event(_log, what, level=logging.WARNING, model=self._model_id, error=problem)
            return None
        if found is None or found[0].base_fingerprint != weights:
            return None
        known = KnownAnswer(
            numerics=Numerics.of(found[0]),
            prompt_tokens=tokens,
            said_by="one process",
            answer=found[1],
        )
        await asyncio.to_thread(self._answers.add, weights, known)
        return known

    async def _compared(
        self,
        client: ChildClient,
        facts: ModelFacts,
        known: KnownAnswer,
        hears: Callable[[Frame], None],
        *,
        is_audit: bool = False,
    ) -> float | None:
        """How far log probabilities lie apart; None = the group is unverified."""
        own = Numerics.of(facts)
        loose = max(own, known.numerics, key=lambda one: one.distance_bound)
        ids = canary.prompt(facts.vocab_size, known.prompt_tokens)
        tokens = [said.token for said in known.answer]
        said: Answer = ()
        reason = f"parted at more than {canary.MOST_TIES} places"
        for _ in range(canary.MOST_TIES + 1):
            start = len(said)
            asked = canary.request((*ids, *tokens[:start]), len(tokens) - start, is_audit=is_audit)
            answer = await collected(client.decode(asked, ANSWER_S), hears)
            outcome = canary.compare(known.answer, answer, loose, start)
            if isinstance(outcome, Different):
                reason = outcome.reason
                break
            said += answer[: outcome.place + 1 - start] if isinstance(outcome, Tie) else answer
            if len(said) < len(tokens):
                continue
            apart = canary.distance(known.answer, said)
            if (far := canary.judge_distance(apart, loose)) is None:
                return apart
            reason = far.reason
            break
        if known.numerics == own:
            raise self._refused(reason)
        self._tell("unverified", f"it {reason}; but one process of other numerics said that")
        return None

    async def _answered(
        self, client: ChildClient, facts: ModelFacts, known: KnownAnswer, own: Numerics
    ) -> KnownAnswer:
        """The answer of a group that was found equal to one of other numerics, which is kept."""
        asked = canary.request(
            canary.prompt(facts.vocab_size, known.prompt_tokens), canary.ANSWER_TOKENS
        )
        said = KnownAnswer(
            numerics=own,
            prompt_tokens=known.prompt_tokens,
            said_by="a group that was equal to " + known.said_by,
            answer=await collected(client.decode(asked, ANSWER_S), lambda _: None),
        )
        await asyncio.to_thread(self._answers.add, facts.base_fingerprint, said)
        return said

    def _refused(self, reason: str) -> GroupRefused:
        """End the group. The error says why."""
        self._known = None
        refusal = GroupRefused(
            f"the ring group of {self._model_id} computes something else than one process: it "
            f"{reason}; the group was ended: look at the links between its nodes"
        )
        self._tell("refused", refusal.message, code=refusal.code)
        self._end()
        return refusal

    def _yields(self, _: Frame) -> None:
        if not self._is_idle():
            raise _Yielded

    def _tell(self, state: str, reason: str, **more: object) -> None:
        self._said = {"state": state, "reason": reason, "at": self._clock.wall(), **more}
        level = logging.WARNING if state in ("unverified", "refused") else logging.INFO
        event(_log, f"ring group {state}", level=level, model=self._model_id, reason=reason, **more)


class _Yielded(Exception):
    """A request came during an audit."""


class _Counted:
    """Tells how far a canary is: the one process is the first half where there is one."""

    def __init__(self, told: Teller, prompt_tokens: int, *, is_second: bool = False) -> None:
        self._told = told
        self._whole = prompt_tokens + canary.ANSWER_TOKENS
        self._before = self._whole if is_second else 0
        self._prompt = self._answer = 0

    def hears(self, frame: Frame) -> None:
        """Count a frame."""
        if isinstance(frame, Progress):
            self._prompt = max(self._prompt, frame.computed_tokens)
        if isinstance(frame, Tokens):
            self._answer += len(frame.token_ids)
        done = self._before + min(self._whole, self._prompt + self._answer)
        self._told(
            LoadProgress(phase=LoadPhase.CANARY, done_bytes=done, total_bytes=2 * self._whole)
        )


async def collected(frames: AsyncGenerator[Frame, None], hears: Callable[[Frame], None]) -> Answer:
    """The tokens of a decode to its end. Raises its errors."""
    answer: list[SaidToken] = []
    async with aclosing(frames):
        async for frame in frames:
            hears(frame)
            if isinstance(frame, Tokens):
                if len(frame.logprobs) != len(frame.token_ids):
                    raise PeerProtocol("an engine gave tokens without their log probabilities")
                answer += canary.said_by(frame)
    return tuple(answer)
