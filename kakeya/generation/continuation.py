"""One generation across several engines: the tokens committed so far, and the rest to ask for.

An engine may die in the middle. The tokens that it streamed are committed; the next engine gets
the history with these tokens appended, the length of the prompt in it, the rest of the budget and
the same seed. Noise is keyed by position, and grammar and penalties are functions of the tokens
before a position, so the tokens are the same as without the death. The deadline is for the first
token: it goes on over a death before that token, and an engine after it gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from kakeya.core.errors import PeerProtocol
from kakeya.generation.frames import Done, Frame, Progress, StopReason, Tokens, Usage
from kakeya.generation.request import DecodeRequest, GenerationPriority

Loss = Literal["engine", "memory", "adapter"]
"""`memory`: an engine that outgrew its memory with this generation; beside `engine`."""


class Continuation:
    """Follows the frames of one generation; `now` is monotonic seconds."""

    def __init__(self, request: DecodeRequest, now: float) -> None:
        self._request = request
        self._committed: list[int] = []
        self._started_mono = now
        self._first_token_mono: float | None = None
        self._steps = 0
        self._computed = 0
        self._held: int | None = None
        self._was_interrupted = False
        self.losses: Counter[Loss] = Counter()
        """Losses in a row, without a token between them."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called at the first token."""

    @property
    def has_begun(self) -> bool:
        """Whether a token was committed."""
        return bool(self._committed)

    @property
    def is_under_way(self) -> bool:
        """Whether the present engine has begun with it."""
        return self._computed > 0

    @property
    def tokens(self) -> int:
        """How many tokens were committed."""
        return len(self._committed)

    @property
    def priority(self) -> GenerationPriority:
        """The class of its request."""
        return self._request.priority

    @property
    def prompt_tokens(self) -> int:
        """The length of its prompt."""
        return self._request.prompt_tokens or len(self._request.token_ids)

    def most_tokens(self, context_tokens: int) -> int:
        """How many tokens it may have in such a context."""
        room = context_tokens - len(self._request.token_ids)
        return max(0, min(self._request.max_tokens, room))

    def decoding_s(self, now: float) -> float | None:
        """Seconds since its first token; None = there is none."""
        return None if self._first_token_mono is None else now - self._first_token_mono

    def prompt_left(self, held: Callable[[Sequence[int], Sequence[int]], int]) -> int:
        """Tokens of the prompt that are left to compute, as the last engine tells, and before it
        does, as `held` tells of a history and its cuts; 0 = the answer has begun."""
        if self._committed:
            return 0
        tokens = self._request.token_ids
        if self._held is None:  # once: it takes a hash of the history, and is asked often
            self._held = held(tokens, self._request.cuts)
        return max(1, len(tokens) - (self._computed or self._held))

    def take(self, frame: Frame, now: float) -> Frame | None:
        """Record a frame and return it as the caller should see it; None hides it.

        Raises PeerProtocol when an engine commits more than it was asked for.
        """
        match frame:
            case Progress():
                self._computed = frame.computed_tokens
                return frame if not self._committed else None
            case Tokens():
                self._commit(frame.token_ids, now)
                return frame
            case Done():
                return replace(frame, usage=self._total(frame.usage, now))

    def interrupt(self, *losses: Loss) -> None:
        """Note that the engine was lost, or has lost the adapter."""
        self._was_interrupted = True
        self._computed = 0
        self.losses.update(losses or ("engine",))

    def rest(self, now: float) -> DecodeRequest:
        """The request to the next engine."""
        if not self._committed:
            return self._request.after(now - self._started_mono)
        return replace(
            self._request,
            deadline_s=None,
            token_ids=[*self._request.token_ids, *self._committed],
            prompt_tokens=self._request.prompt_tokens or len(self._request.token_ids),
            max_tokens=self._request.max_tokens - len(self._committed),
        )

    def finish(self, context_tokens: int, now: float) -> Done | None:
        """The last frame, if the tokens committed so far end the generation by themselves."""
        reason = self._reason(context_tokens)
        return None if reason is None else Done(reason=reason, usage=self._total(Usage(), now))

    def _reason(self, context_tokens: int) -> StopReason | None:
        if self._committed and self._committed[-1] in self._request.stop_token_ids:
            return StopReason.STOP_TOKEN
        if self._committed and len(self._committed) >= self._request.max_tokens:
            return StopReason.MAX_TOKENS
        if self._committed and self._length() >= context_tokens:
            return StopReason.CONTEXT_FULL
        return None

    def _length(self) -> int:
        return len(self._request.token_ids) + len(self._committed)

    def _commit(self, token_ids: tuple[int, ...], now: float) -> None:
        tokens = len(self._committed) + len(token_ids)
        if tokens > self._request.max_tokens:
            raise PeerProtocol(
                f"the engine committed {tokens} tokens, "
                f"asked for at most {self._request.max_tokens}"
            )
        self._committed.extend(token_ids)
        self._steps += 1
        if self.losses:
            self.losses.clear()
        if self._first_token_mono is None:
            self._first_token_mono = now
            self.on_begin()

    def _total(self, last: Usage, now: float) -> Usage:
        """Usage of all engines together. A lost engine reports nothing: its steps are counted here.

        The KV that the last engine found may reach into decoded tokens; of the prompt, at least one
        token was computed.
        """
        if not self._was_interrupted:
            return last
        first = self._first_token_mono if self._first_token_mono is not None else now
        accepted = len(self._committed) - self._steps
        return replace(
            last,
            prefill_s=first - self._started_mono,
            total_s=now - self._started_mono,
            cached_tokens=min(last.cached_tokens, len(self._request.token_ids) - 1),
            forwards=max(last.forwards, self._steps),
            drafted=max(last.drafted, accepted),
            verified=max(last.verified, accepted),
            accepted=max(last.accepted, accepted),
        )
