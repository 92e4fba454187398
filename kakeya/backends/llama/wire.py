"""Generations as llama-server takes and tells them. Pure.

    POST /completion   token ids in; one event for each token, and one at the end
    token events       the newest id, the text since the last event, and how many ids there are

The text of an event ends at a whole character, so the first ids of a character that several tokens
spell come without an event: they are found again by their bytes. A token that ends an answer by the
model's file ends the generation there, whatever the request says; `CompletionReader.ended_by`
tells of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kakeya.backends.llama.gbnf import gbnf
from kakeya.backends.llama.json_gbnf import is_followed
from kakeya.core.errors import (
    ContextLengthExceeded,
    InvalidArgument,
    KakeyaError,
    MemoryRefused,
    PeerProtocol,
    PeerUnavailable,
    Unsupported,
)
from kakeya.generation.frames import Done, Frame, Progress, StopReason, TokenLogprob, Tokens, Usage
from kakeya.generation.request import DecodeRequest
from kakeya.text.grammar import schema_of

_SEEDS = (1 << 31) - 1
"""llama-server takes so many; it draws one for -1."""
_UNKNOWN_LOGPROB = -9999.0
"""The log probability of a token that came without an event, as OpenAI writes one that is lost."""
_NO_ROOM = "Context size has been exceeded"
_RETRY_S = 1.0
_FINAL_FIELDS = [
    "stop",
    "stop_type",
    "truncated",
    "tokens_predicted",
    "tokens_evaluated",
    "timings",
]
Spell = Callable[[str, int, int], Sequence[int]]
"""Finds the ids before the last one of a text, as many as are said: (text, count, last id)."""


def completion_body(
    request: DecodeRequest, text_of: Callable[[Sequence[int]], str], slot: int = -1
) -> dict[str, object]:
    """The body of a generation in a slot, -1 = any.

    Raises Unsupported for what llama-server cannot do.

    Noise is drawn from the seed and from the number of tokens that there are already: the same
    request gives the same tokens, but one that goes on in another engine does not give those of an
    undisturbed one. Penalties look at so many last tokens as the answer may have, some of which may
    be the prompt's; the repetition penalty looks at all.
    """
    if request.adapter_id:
        raise Unsupported("a model in a GGUF file takes no adapters", param="model")
    sampling = request.sampling
    answered = len(request.token_ids) - request.prompt_tokens if request.prompt_tokens else 0
    whole = sampling.repetition_penalty != 1.0
    body: dict[str, object] = {
        "prompt": list(request.token_ids),
        "n_predict": request.max_tokens,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "timings_per_token": True,
        "cache_prompt": True,
        "id_slot": slot,
        "response_fields": _FINAL_FIELDS,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": (sampling.seed + answered) % _SEEDS,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repeat_last_n": (len(request.token_ids) if whole else answered) + request.max_tokens,
        "logit_bias": [list(pair) for pair in sampling.logit_bias],
        "n_probs": 0 if request.top_logprobs is None else max(1, request.top_logprobs),
    }
    if request.grammar:
        body |= _forced(request.grammar)
        if answered:
            body["generation_prompt"] = text_of(request.token_ids[request.prompt_tokens :])
    return body


def _forced(grammar: str) -> dict[str, object]:
    """The fields that force an answer. Raises Unsupported for what llama-server cannot force."""
    try:
        # Of another type it would not take the answer so far for a part of what is forced.
        return {"grammar": gbnf(grammar), "grammar_type": "tool_calls"}
    except Unsupported:
        schema = schema_of(grammar)
        if schema is None or not is_followed(schema):
            raise
        return {"json_schema": schema}


def events_of(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Parse the complete events at the beginning of a stream; return them and the rest.

    Raises PeerProtocol for an event that is no JSON object.
    """
    *lines, rest = data.split(b"\n\n")
    found = []
    for line in lines:
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue  # a comment, which keeps the connection alive
        try:
            event = json.loads(line[6:])
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise PeerProtocol(f"llama-server sent {line[:200]!r}, which is no JSON object")
        found.append(event)
    return found, rest


def failure_of(status: int, answer: Mapping[str, Any], model_id: str) -> KakeyaError:
    """The error that an answer tells, of a call or in a stream."""
    told = answer.get("error")
    told = told if isinstance(told, dict) else {}
    message = f"{model_id}: {str(told.get('message') or answer)[:500]}"
    if told.get("type") == "exceed_context_size_error":
        return ContextLengthExceeded(message)
    if _NO_ROOM in message:
        return MemoryRefused(
            f"{model_id}: the KV of all running answers is full", retry_after_s=_RETRY_S
        )
    if status == 400 or told.get("type") == "invalid_request_error":
        return InvalidArgument(message)
    if status == 501 or told.get("type") == "not_supported_error":
        return Unsupported(message)
    return PeerUnavailable(message)


class CompletionReader:
    """Reads the events of one generation; `frames` yields what they say, the last one Done."""

    def __init__(self, request: DecodeRequest, spell: Spell, end_ids: frozenset[int]) -> None:
        self._request = request
        self._spell = spell
        self._end_ids = end_ids
        self._count = 0
        self._timings: Mapping[str, Any] = {}
        self.last_id: int | None = None
        """The newest token."""

    @property
    def has_begun(self) -> bool:
        """Whether a token came."""
        return self._count > 0

    def frames(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Frame]:
        """Read events that came together; their tokens are one frame.

        Raises PeerProtocol for an event without its fields, and the error that one tells.
        """
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for event in events:
            try:
                done, progress = self._read(event, token_ids, logprobs)
            except (KeyError, TypeError, ValueError, IndexError) as fault:
                raise PeerProtocol(f"llama-server sent {str(event)[:200]}: {fault!r}") from None
            if progress is not None:
                yield progress
            if done is not None or self.last_id in self._request.stop_token_ids:
                if token_ids:
                    yield Tokens(token_ids=tuple(token_ids), logprobs=tuple(logprobs))
                yield done or Done(reason=StopReason.STOP_TOKEN, usage=self._usage(self._count))
                return
        if token_ids:
            yield Tokens(token_ids=tuple(token_ids), logprobs=tuple(logprobs))

    def _read(
        self, event: Mapping[str, Any], token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> tuple[Done | None, Progress | None]:
        if "error" in event:
            raise failure_of(int(event["error"].get("code", 500)), event, "llama-server")
        count = int(event["tokens_predicted"])
        self._timings = event.get("timings") or self._timings
        if event["stop"]:
            return self._done(event, count, token_ids, logprobs), None
        if "prompt_progress" in event and count <= self._count:
            told = event["prompt_progress"]
            return None, Progress(
                computed_tokens=int(told["processed"]),
                total_tokens=int(told["total"]),
                cached_tokens=int(told["cache"]),
            )
        if count > self._count and event["tokens"]:
            last = int(event["tokens"][-1])
            missing = count - self._count - 1
            before = self._spell(event["content"], missing, last) if missing else ()
            new = [*before, last]
            token_ids += new
            if self._request.top_logprobs is not None:
                logprobs += [TokenLogprob(logprob=_UNKNOWN_LOGPROB)] * len(before)
                logprobs.append(self._logprob(event["completion_probabilities"][-1]))
            self._count, self.last_id = count, last
        return None, None

    def _logprob(self, told: Mapping[str, Any]) -> TokenLogprob:
        top = told["top_logprobs"][: self._request.top_logprobs]
        return TokenLogprob(
            logprob=max(_UNKNOWN_LOGPROB, float(told["logprob"])),
            top=tuple(
                (int(one["id"]), max(_UNKNOWN_LOGPROB, float(one["logprob"]))) for one in top
            ),
        )

    def _done(
        self,
        event: Mapping[str, Any],
        count: int,
        token_ids: list[int],
        logprobs: list[TokenLogprob],
    ) -> Done:
        is_end = event["stop_type"] == "eos"
        if is_end and count > self._count and self.last_id not in self._end_ids:
            # It came behind half a character, without an event of its own.
            self.last_id = min(self._end_ids)
            token_ids.append(self.last_id)
            if self._request.top_logprobs is not None:
                logprobs.append(TokenLogprob(logprob=_UNKNOWN_LOGPROB))
        usage = self._usage(count)
        if is_end:
            reason = StopReason.STOP_TOKEN
        else:
            reason = StopReason.CONTEXT_FULL if event["truncated"] else StopReason.MAX_TOKENS
        return Done(reason=reason, usage=usage)

    def _usage(self, count: int) -> Usage:
        prefill_s = float(self._timings.get("prompt_ms", 0)) / 1000
        return Usage(
            prefill_s=prefill_s,
            total_s=prefill_s + float(self._timings.get("predicted_ms", 0)) / 1000,
            cached_tokens=int(self._timings.get("cache_n", 0)),
            forwards=count,
        )
