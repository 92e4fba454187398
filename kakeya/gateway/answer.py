"""One answer in the making: frames in, text and a finish reason out. Sans-I/O.

The stop token is no text. A stop string cuts exactly before itself, wherever the frames were cut,
and the token that completes it is the last one that counts.
"""

from __future__ import annotations

from typing import Literal, assert_never

from kakeya.generation.frames import Done, Frame, Progress, StopReason, Tokens, Usage
from kakeya.text.detokenizer import Detokenizer
from kakeya.text.stops import StopMatcher

FinishReason = Literal["stop", "length"]


class GeneratedAnswer:
    """The text of one generation so far. `finish_reason` is set at the end of the text.

    `usage` is the engine's account; None when a stop string ended the answer before it.
    `cached_tokens` are tokens of the prompt with KV from earlier requests.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: StopMatcher | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.usage: Usage | None = None

    def take(self, frame: Frame) -> str:
        """Take the next frame; returns the text that it adds."""
        match frame:
            case Tokens():
                return self._add(frame.token_ids)
            case Progress():
                self.cached_tokens = frame.cached_tokens
                return ""
            case Done():
                return self._end(frame)
            case _:
                assert_never(frame)

    def _add(self, token_ids: tuple[int, ...]) -> str:
        if self._stops is None:
            self.completion_tokens += len(token_ids)
            is_stopped = token_ids[-1] in self._stop_token_ids
            return self._detokenizer.feed(token_ids[:-1] if is_stopped else token_ids)
        text = ""
        # One by one: tokens that a step committed behind a stop string are no part of the answer.
        for token_id in token_ids:
            self.completion_tokens += 1
            is_shown = token_id not in self._stop_token_ids
            said = self._detokenizer.feed((token_id,)) if is_shown else ""
            text += self._stops.feed(said + self._stops.sign(token_id))
            if self._stops.is_stopped:
                self.finish_reason = "stop"
                break
        return text

    def _end(self, done: Done) -> str:
        self.usage = done.usage
        self.cached_tokens = done.usage.cached_tokens
        self.finish_reason = "stop" if done.reason is StopReason.STOP_TOKEN else "length"
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        rest = self._stops.feed(rest)
        if self._stops.is_stopped:
            self.finish_reason = "stop"
        return rest + self._stops.finish()
