"""POST /v1/precache: warm a prefix before a request needs it.

    model               as for /v1/chat/completions
    messages | prompt   the beginning of later requests; messages that end with the user's are a
                        whole request, other messages end where the user's next message begins;
                        neither, with a key: what is known of it, as where a person begins to speak
    tools               tools that a chat template shows the model beside the messages
    conversation_id, prompt_segments, prefix_hash, prompt_cache_key
                        the requests that it is for, as these will name themselves
    retention           "short" (default) | "long" | "extended" (default with pin): for how long
                        the prefix is kept
    pin                 true: nothing takes its place for that time, unless it is sent again without

The answer tells the outcome. A prefix that could not be warmed is no error: the requests that begin
with it compute it. A field that cannot be meant is a 400 that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.types import Receive, Scope, Send

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.coordinator_fields import read_with_fields
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.http.fields import flag_field, refuse_unknown, table
from kakeya.gateway.openai.cache_params import KEY_PARAMS, read_keys, retention_field
from kakeya.gateway.openai.generation_params import MODEL
from kakeya.gateway.openai.messages import MESSAGES
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.requests import PROMPTS
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.openai.tools import TOOLS
from kakeya.generation.facts import ModelFacts
from kakeya.generation.manifest import GivenTemplate, thinking_args
from kakeya.generation.model import ServedModel
from kakeya.generation.waiting import WaitTeller
from kakeya.prefix.names.keys import CacheKeys, PromptSegment, hash_stable_prefix, resolve_key
from kakeya.prefix.seam import (
    CacheUse,
    Precache,
    PrefixClaim,
    WarmOutcome,
    WarmReport,
    facts_at_hand,
    warmed_for,
)
from kakeya.text.bound import TooManyTokens
from kakeya.text.changing_lines import move_changing_lines
from kakeya.text.chat import Chat, Message, Tool
from kakeya.text.prefix import encode_ahead
from kakeya.text.prompt import check_prompt, most_prompt_tokens, raw_ids, too_long
from kakeya.text.text import Texts

_RETENTION, _IS_PINNED = retention_field("retention"), flag_field("pin")
PRECACHE = KEY_PARAMS | table(MODEL, TOOLS, _RETENTION, _IS_PINNED)
PRECACHE |= table(*(replace(one, is_required=False) for one in (MESSAGES, PROMPTS)))
_UNKNOWN = WarmReport(
    outcome=WarmOutcome.FAILED,
    reason="nothing is known of this key here; send the messages or the prompt to be warmed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecacheRequest:
    """A body of POST /v1/precache: either messages, with tools, or a prompt, or a key alone."""

    model: str
    use: CacheUse
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    prompt: str | tuple[int, ...] = ""
    is_pinned: bool = False


def parse_precache(body: Mapping[str, object]) -> PrecacheRequest:
    """Read a request. Raises InvalidArgument or Unsupported naming the field."""
    refuse_unknown(body, PRECACHE, {})
    use = CacheUse(keys=read_keys(body), retention=_RETENTION.read(body))
    is_chat = body.get("messages") is not None
    has_prompt = body.get("prompt") is not None
    is_pinned = _IS_PINNED.read(body)
    if is_chat and has_prompt:
        raise InvalidArgument(
            "give messages or a prompt, one of them: both were given", param="messages"
        )
    if not is_chat and not has_prompt and (use.keys == CacheKeys() or is_pinned):
        raise InvalidArgument(
            "give messages or a prompt; or a key alone, without pin, for what is known of it",
            param="messages",
        )
    tools = TOOLS.read(body)
    if tools and not is_chat:
        raise InvalidArgument("tools need messages; a prompt carries its own", param="tools")
    return PrecacheRequest(
        model=MODEL.read(body),
        use=use,
        messages=MESSAGES.read(body)[0] if is_chat else (),
        tools=tools,
        prompt=_prompt(body) if has_prompt else "",
        is_pinned=is_pinned,
    )


def _prompt(body: Mapping[str, object]) -> str | tuple[int, ...]:
    prompts = PROMPTS.read(body)
    if len(prompts) > 1:
        raise Unsupported(
            f"prompt holds {len(prompts)} prompts; send one request for each", param="prompt"
        )
    return prompts[0]


def segments_of(messages: Sequence[Message], tools: Sequence[Tool]) -> list[PromptSegment]:
    """The pieces of a prefix, all stable: they name a prefix without a key."""
    pieces = [_json(list(tools))] if tools else []
    pieces += [_json(dict(message)) for message in messages]
    return [PromptSegment(content=piece, stable=True) for piece in pieces]


class PrecacheRoute:
    """The ASGI application behind the path."""

    def __init__(self, generations: Generations, precache: Precache, texts: Texts) -> None:
        self._generations = generations
        self._precache = precache
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        generations = self._generations

        asked, fields = await read_with_fields(scope, receive, generations.limits, parse_precache)
        client = fields.named(scope)
        name, profile = generations.meant(asked.model, client, scope)
        model = generations.names.find(name, client)
        thinks = {**model.manifest.template_args, **thinking_args(profile.spec.thinking)}
        with generations.admitted(share_of(client, scope)):
            async with generations.connection(
                receive, send, WaitTeller(model.waits_for)
            ) as connection:
                report = await self._warm(asked, model, client, thinks)
                connection.finish()
        await send_json(send, 200, compact(_answer(asked, model, report)))

    async def _warm(
        self,
        asked: PrecacheRequest,
        model: ServedModel,
        client: str,
        thinks: Mapping[str, object],
    ) -> WarmReport:
        facts = await facts_at_hand(model)
        if isinstance(facts, WarmReport):
            return facts
        claim = PrefixClaim(model_id=model.model_id, facts=facts, client=client, use=_filed(asked))
        if not asked.messages and not asked.prompt:
            known = self._precache.opened(claim)
            return _UNKNOWN if known is None else await known
        token_ids = await self._encode(asked, facts, model.manifest.template, thinks)

        async def tokens() -> Sequence[int]:
            return token_ids

        return await self._precache.warm(claim, tokens, is_pinned=asked.is_pinned)

    async def _encode(
        self,
        asked: PrecacheRequest,
        facts: ModelFacts,
        template: GivenTemplate | None,
        thinks: Mapping[str, object],
    ) -> Sequence[int]:
        """The prefix in ids, as its requests will have it written: `thinks` says to the template
        whether the model thinks."""
        text = await self._texts.get(facts.model_path, template)
        at_most = most_prompt_tokens(facts)
        if asked.messages:
            try:
                chat, _ = move_changing_lines(
                    Chat(messages=asked.messages, tools=asked.tools, kwargs=thinks),
                    self._precache.moved_kinds,
                    is_prefix=True,
                )
                token_ids: Sequence[int] = await encode_ahead(text, chat, at_most=at_most)
            except TooManyTokens as fault:
                raise too_long(f"at least {fault.least_tokens}", facts) from None
        else:
            token_ids = await raw_ids(asked.prompt, text, facts)
        check_prompt(len(token_ids), facts)
        return token_ids


def _filed(asked: PrecacheRequest) -> CacheUse:
    """The keys of a prefix: the sender's, or else a digest of its content."""
    if asked.use.keys != CacheKeys():
        return asked.use
    segments = (
        segments_of(asked.messages, asked.tools)
        if asked.messages
        else [PromptSegment(content=_json(asked.prompt), stable=True)]
    )
    own = CacheKeys(segment_hash=hash_stable_prefix(segments) or "")
    return CacheUse(keys=own, retention=asked.use.retention)


def _answer(asked: PrecacheRequest, model: ServedModel, report: WarmReport) -> dict[str, object]:
    return {
        "object": "precache",
        "model": model.model_id,
        "status": report.outcome.value,
        "reason": report.reason,
        "key": resolve_key(_filed(asked).keys),
        "retention": warmed_for(asked.use, is_pinned=asked.is_pinned).label,
        "pinned": report.is_pinned,
        "usage": {
            "prompt_tokens": report.warmed.tokens,
            "prompt_tokens_details": {"cached_tokens": report.warmed.cached},
            "computed_tokens": report.warmed.computed,
        },
    }


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
