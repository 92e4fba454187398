"""POST /v1/chat/completions and /v1/completions: from a body to an answer.

parse -> find the model -> wait until it serves -> text to ids -> checks that need the model ->
decode -> text as it settles. The frames of the decode iterator are the only thing waited for per
token; the iterator is closed before the last byte is sent, or as soon as the client leaves.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument, KakeyaError, NotFound
from kakeya.core.ids import draw_id
from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.figures import HttpMetrics
from kakeya.gateway.http.body import parse_body
from kakeya.gateway.http.connection import Connection, HttpLimits, read_body
from kakeya.gateway.http.edge import envelope, send_json, stopping
from kakeya.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    ModelNotFound,
)
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.openai.stream import (
    DONE,
    ChunkWriter,
    Dialect,
    compact,
    usage_body,
    whole_answer,
)
from kakeya.generation.cuts import marked
from kakeya.generation.facts import ModelFacts
from kakeya.generation.fair_bound import FairBound
from kakeya.generation.frames import Tokens
from kakeya.generation.model import DraftRouter, ModelDirectory, ServedModel
from kakeya.generation.request import DecodeRequest, Sampling
from kakeya.generation.retention import Retention
from kakeya.prefix.seam import Precache, PrefixClaim
from kakeya.text.bound import TooManyTokens
from kakeya.text.prefix import encode_ahead
from kakeya.text.prompt import chat_ids, check_prompt, most_prompt_tokens, raw_ids
from kakeya.text.text import TextModel, Texts
from kakeya.wire.security import CLIENT_NAME

Request = ChatRequest | CompletionRequest
_WHOLE_FRAME_S = 0.25
"""Between two messages of an answer that is sent whole; a dying engine loses as much work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGeneration:
    """One generation, ready to run."""

    model: ServedModel
    counted_as: str  # the base of an adapter: metrics have no label for each adapter
    request: DecodeRequest
    answer: GeneratedAnswer
    answer_id: str
    created_at: int
    began_mono: float
    asked: Request
    claim: PrefixClaim
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The answer so far: as tokens, and as text."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)


class Generations:
    """Runs generations for HTTP clients, of both routes."""

    def __init__(
        self,
        directory: ModelDirectory,
        router: DraftRouter,
        *,
        texts: Texts,
        metrics: HttpMetrics,
        limits: HttpLimits,
        clock: Clock,
        rng: random.Random,
        precache: Precache,
    ) -> None:
        self._directory = directory
        self._router = router
        self._texts = texts
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._precache = precache
        self._crowd = FairBound(limits.generations)
        self.limits = limits

    def connection(
        self, receive: Receive, send: Send, waits_for: Callable[[], str], *, is_stream: bool
    ) -> Connection:
        """Watch over one client; `waits_for` as `ServedModel.waits_for`."""
        return Connection(
            receive,
            send,
            is_stream=is_stream,
            clock=self._clock,
            limits=self.limits,
            waits_for=waits_for,
        )

    def find(self, model_id: str, client: str = "") -> ServedModel:
        """Find a served model for a client. Raises ModelNotFound with the ids that are served, and
        Denied for an adapter of another client."""
        try:
            if model_id:  # the directory takes "" for its default
                return self._directory.get(model_id, client)
        except NotFound as unknown:
            if self._is_served(model_id.rpartition(":")[0]):
                raise ModelNotFound(unknown.message) from None
        served = ", ".join(model.model_id for model in self._directory.verifiers())
        raise ModelNotFound(
            f"the model {model_id[:80]!r} is not served here; served: {served or 'none'}"
        )

    def _is_served(self, base: str) -> bool:
        return any(model.model_id == base for model in self._directory.verifiers())

    async def text_of(self, model: ServedModel) -> TextModel | None:
        """The tokenizer, templates and usual sampling of a model; None before its first load."""
        if model.facts is None:
            return None
        try:
            return await self._texts.get(model.facts.model_path)
        except KakeyaError:
            return None

    @contextmanager
    def admitted(self, share: str, user: str = "") -> Iterator[None]:
        """Hold a place for a request of this share. Raises QueueFull when all are taken."""
        full = f"{self._crowd.total} generations are running, which is the limit"
        try:
            with self._crowd.member(share, user, full):
                self._metrics.running.set(self._crowd.total)
                yield
        finally:
            self._metrics.running.set(self._crowd.total)

    async def prepare(
        self, dialect: Dialect, asked: Request, model: ServedModel, scope: Scope
    ) -> HttpGeneration:
        """Wait for the model, write the prompt in ids, check what only the model can tell."""
        began_mono = self._clock.mono()
        deadline_s = asked.params.deadline_s
        ready_s = self.limits.ready_s
        facts = await model.ready(ready_s if deadline_s is None else min(ready_s, deadline_s))
        text = await self._texts.get(facts.model_path)
        token_ids = await _prompt_ids(asked, text, facts)
        cuts = await _cuts(asked, token_ids, text, facts)
        params = asked.params
        client = client_of(scope)
        claim = PrefixClaim(model_id=model.model_id, facts=facts, client=client, use=params.cache)
        stops = text.stops(params.stop)
        stop_token_ids = text.stop_token_ids | frozenset(facts.eos_token_ids)
        if stops is not None:
            stop_token_ids |= stops.token_ids
        request = DecodeRequest(
            token_ids=token_ids,
            max_tokens=_room(params, len(token_ids), facts),
            stop_token_ids=stop_token_ids,
            sampling=self._sampling(params, text.sampling, facts),
            draft_sources=self._router.sources(facts, params.draft_policy),
            deadline_s=deadline_s,
            kv_key=self._precache.kv_key(claim),
            client=share_of(client, scope),
            user=params.user,
            priority=params.priority,
            kv_retention=params.cache.retention or Retention.LONG,
            frame_s=_frame_s(params),
            cuts=cuts,
        ).after(self._clock.mono() - began_mono)
        # A chat's answer is a text of its own.
        is_raw = isinstance(asked, CompletionRequest)
        detokenizer = text.detokenizer(after=token_ids if is_raw else ())
        return HttpGeneration(
            model=model,
            counted_as=facts.model_id,
            request=request,
            answer=GeneratedAnswer(detokenizer, stops=stops, stop_token_ids=stop_token_ids),
            answer_id=draw_id("chatcmpl" if dialect == "chat" else "cmpl", self._rng, 24),
            created_at=int(self._clock.wall()),
            began_mono=began_mono,
            asked=asked,
            claim=claim,
        )

    async def run(self, job: HttpGeneration) -> AsyncGenerator[str, None]:
        """Decode; yields text as it settles, never empty. The caller closes this iterator."""
        model_id, answer = job.counted_as, job.answer
        self._metrics.generation_began(model_id, job.prompt_tokens)
        try:
            async with aclosing(job.model.decode(job.request)) as frames:
                async for frame in frames:
                    if isinstance(frame, Tokens):
                        if answer.completion_tokens == 0:
                            waited_s = self._clock.mono() - job.began_mono
                            self._metrics.first_token(model_id, waited_s)
                        job.token_ids.extend(frame.token_ids)
                    text = answer.take(frame)
                    if text:
                        job.pieces.append(text)
                        yield text
                    if answer.finish_reason is not None:
                        break
            self._turn_ended(job)
        finally:
            self._metrics.generation_ended(
                model_id, answer.completion_tokens, is_abandoned=answer.finish_reason is None
            )

    def _turn_ended(self, job: HttpGeneration) -> None:
        """Have what the next request begins with warm, if this one says what it continues."""
        if not job.claim.use.is_empty:
            self._precache.turn_ended(job.claim, functools.partial(self._next_tokens, job))

    async def _next_tokens(self, job: HttpGeneration) -> Sequence[int]:
        """The tokens that the next turn of a conversation begins with; without a conversation the
        prompt, since it may be repeated.

        The tokens are marked with their cuts; () where the context has no room for another turn.
        Raises as rendering does.
        """
        if not job.claim.use.keys.conversation_id:
            return marked(job.request.token_ids, job.request.cuts)
        at_most = most_prompt_tokens(job.claim.facts)
        text = await self._texts.get(job.claim.facts.model_path)
        try:
            token_ids = await self._continued(job, text, at_most)
        except TooManyTokens:
            return ()
        return token_ids if len(token_ids) <= at_most else ()

    async def _continued(self, job: HttpGeneration, text: TextModel, at_most: int) -> Sequence[int]:
        said = "".join(job.pieces)
        match job.asked:
            case ChatRequest(chat=chat):
                turn = chat.followed_by({"role": "assistant", "content": said})
                return await encode_ahead(text, turn, at_most=at_most)
            case CompletionRequest(prompt=str() as prompt):
                return await text.encode(prompt + said, at_most=at_most)
            case CompletionRequest():
                return (*job.request.token_ids, *job.token_ids)

    def _sampling(
        self, params: GenerationParams, defaults: Sampling, facts: ModelFacts
    ) -> Sampling:
        wish = params.sampling
        if (wish.top_k or 0) > facts.vocab_size:
            raise InvalidArgument(
                f"top_k is {wish.top_k}; {facts.model_id} has {facts.vocab_size} tokens",
                param="top_k",
            )
        top_k = min(defaults.top_k, facts.vocab_size)
        return wish.over(replace(defaults, top_k=top_k, seed=self._rng.getrandbits(64)))


class GenerationRoute:
    """The ASGI application behind one of the two paths."""

    def __init__(
        self,
        dialect: Dialect,
        parse: Callable[[Mapping[str, object]], Request],
        generations: Generations,
    ) -> None:
        self._dialect = dialect
        self._parse = parse
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        generations = self._generations
        body = await read_body(scope, receive, generations.limits)
        asked = await parse_body(body, self._parse)
        caller = client_of(scope)
        model = generations.find(asked.params.model, caller)
        is_stream = asked.params.stream
        with generations.admitted(share_of(caller, scope), asked.params.user):
            async with generations.connection(
                receive, send, model.waits_for, is_stream=is_stream
            ) as client:
                prepared = generations.prepare(self._dialect, asked, model, scope)
                if is_stream:
                    await self._stream(prepared, client)
                else:
                    await self._whole(prepared, client, send)

    async def _whole(
        self, prepared: Awaitable[HttpGeneration], client: Connection, send: Send
    ) -> None:
        job = await prepared
        async with aclosing(self._generations.run(job)) as texts:
            text = "".join([piece async for piece in texts])
        body = whole_answer(
            self._dialect,
            job.answer,
            text,
            answer_id=job.answer_id,
            created_at=job.created_at,
            model=job.model.model_id,
            prompt_tokens=job.prompt_tokens,
        )
        client.finish()
        await send_json(send, 200, compact(body))

    async def _stream(self, prepared: Awaitable[HttpGeneration], client: Connection) -> None:
        try:
            job = await prepared
            writer = ChunkWriter(
                self._dialect,
                answer_id=job.answer_id,
                created_at=job.created_at,
                model=job.model.model_id,
                include_usage=job.asked.params.include_usage,
            )
            opening = writer.first()
            async with aclosing(self._generations.run(job)) as texts:
                async for text in texts:
                    await client.send_event(opening + writer.text(text))
                    opening = b""
        except KakeyaError as error:
            if not client.is_started:
                raise
            await client.end(b"data: " + envelope(error) + b"\n\n")
            return
        except asyncio.CancelledError:
            if client.is_started and not client.has_left:
                await client.end(b"data: " + envelope(stopping()) + b"\n\n")
            raise
        reason = job.answer.finish_reason or "length"
        last = opening + writer.last(reason)
        if job.asked.params.include_usage:
            last += writer.usage(usage_body(job.answer, job.prompt_tokens))
        await client.end(last + DONE)


def client_of(scope: Scope) -> str:
    """The name that a caller gives, "" = none; HTTP has no certificates here to prove it."""
    return Headers(scope=scope).get(CLIENT_NAME, "")


async def _prompt_ids(asked: Request, text: TextModel, facts: ModelFacts) -> tuple[int, ...]:
    if isinstance(asked, ChatRequest):
        return await chat_ids(asked.chat, text, facts)
    return await raw_ids(asked.prompt, text, facts)


async def _cuts(
    asked: Request, token_ids: Sequence[int], text: TextModel, facts: ModelFacts
) -> tuple[int, ...]:
    """The places where other prompts are likely to part from a prompt of messages; else ()."""
    if not isinstance(asked, ChatRequest):
        return ()
    at_most = most_prompt_tokens(facts)
    return await text.cuts_of(token_ids, asked.chat, at_most=at_most)


def _frame_s(params: GenerationParams) -> float:
    """An answer that is sent whole needs its tokens seldom, unless a stop string may end it."""
    return 0.0 if params.stream or params.stop else _WHOLE_FRAME_S


def _room(params: GenerationParams, prompt_tokens: int, facts: ModelFacts) -> int:
    """How many tokens may be generated: as many as asked, and at most the rest of the context.

    If none are asked for, as many as memory can ever hold.
    """
    check_prompt(prompt_tokens, facts)
    room = facts.context_tokens - prompt_tokens
    if params.max_tokens is not None:
        return min(params.max_tokens, room)
    longest = facts.longest_tokens or facts.context_tokens
    return max(1, min(room, longest - prompt_tokens))
