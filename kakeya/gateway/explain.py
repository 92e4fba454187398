"""GET /api/v1/requests/{id}: why so much, or so little, of a prompt was found in the cache.

The prompt is compared with that of the conversation's turn before, or with the one that is most
alike. The first token at which it left what was cached is named, with the text around it; then what
was moved, the waits, and the nodes that have KV of it now. Of a request that has not ended, it is
told for what it waits. A record is shown to the client that sent the request, to keys of role
admin, and to callers on the node's own machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from kakeya.core.errors import KakeyaError, NotFound
from kakeya.core.figures import Json
from kakeya.core.units import unpack_ids
from kakeya.dispatch.clients import Clients
from kakeya.gateway.http.authorization import client_of, sees_all
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.recent import TOKEN_BYTES, RecentRequests, RequestRecord
from kakeya.text.text import TextModel, Texts

HeldTeller = Callable[[str, str, Sequence[int], Sequence[int]], Awaitable[Mapping[str, int]]]
"""Of a model, a client and a history with its cuts: how many leading tokens have KV, by node id."""
AROUND_CHARS = 60
"""As many tokens are decoded: nearly each stands for a character at least."""


class RequestUnknown(NotFound):
    """No record of the request is kept, or none that this caller may see."""

    code = "request_not_found"


class ExplainRoute:
    """The endpoint."""

    def __init__(
        self, recent: RecentRequests, clients: Clients, texts: Texts, held: HeldTeller | None
    ) -> None:
        """`held` tells where KV is now; None = that is not told."""
        self._held = held
        self._recent = recent
        self._clients = clients
        self._texts = texts

    async def answer(self, request: Request) -> Response:
        """Explain one request. Raises RequestUnknown."""
        request_id = request.path_params["request_id"]
        here = self._clients.find(request_id)
        if here is not None and _may_see(request.scope, here[0]):
            return JSONResponse({"object": "request", **here[1]})
        record = self._recent.find(request_id)
        if record is None or not _may_see(request.scope, record.owner):
            raise RequestUnknown(
                f"no request {request_id[:80]!r} of this client has ended here lately; its id is "
                "the header x-request-id of its answer"
            )
        nearest = None if record.relay else self._recent.nearest(record)
        body = explained(record, nearest)
        body["warm"] = [] if record.relay else await self._warm(record)
        parted = body["parted_at_token"]
        if isinstance(parted, int):
            try:
                text = await self._texts.get(record.model_path)
                around = await asyncio.to_thread(_around, text, record, nearest, parted)
            except KakeyaError:  # its folder is gone
                around = {}
            body["text"] = around
        return JSONResponse(body)

    async def _warm(self, record: RequestRecord) -> list[Json]:
        """The nodes that have KV of the request and its answer now, the one with the most first."""
        if self._held is None:
            return []
        history, prompt = unpack_ids(record.history), unpack_ids(record.prompt)
        cuts = (*record.cuts, len(prompt))
        # A prompt's KV is kept with its end, so it is not found as a part of what follows it.
        held, began = await asyncio.gather(
            self._held(record.model_id, record.owner, history, cuts),
            self._held(record.model_id, record.owner, prompt, record.cuts),
        )
        most = {node: max(n, began.get(node, 0)) for node, n in held.items()}
        found = sorted(most.items(), key=lambda one: -one[1])
        return [{"node": node, "tokens": n, "of": len(history)} for node, n in found if n]


def explained(
    record: RequestRecord, nearest: tuple[RequestRecord, int] | None
) -> dict[str, object]:
    """All but the text around the token. Pure."""
    parted, reason = _reason(record, nearest)
    first = record.first_token_s
    prefill = record.prefill_s
    queue = None
    if first is not None and prefill is not None:
        queue = max(0.0, first - record.prepared_s - prefill)
    other, common = nearest or (None, 0)
    return {
        "object": "request",
        "id": record.request_id,
        "model": record.model_id,
        "task": record.task and record.task.describe(),
        "defaults": dict(record.defaults),
        "finish_reason": record.finish_reason or None,
        "conversation": record.conversation or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "computed_tokens": record.prompt_tokens - record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "backend": record.relay or None,
        "parted_at_token": parted,
        "reason": reason,
        "compared_with": other
        and {
            "id": other.request_id,
            "is_same_conversation": bool(record.conversation)
            and other.conversation == record.conversation,
            "common_tokens": common,
        },
        "moved": list(record.moved),
        "routes": [route.describe() for route in record.routes],
        "waits_s": {
            "load": _rounded(record.ready_s),
            "render": _rounded(record.prepared_s - record.ready_s),
            "queue": _rounded(queue),
            "prefill": _rounded(prefill),
            "decode": _rounded(None if first is None else record.ended_s - first),
            "total": _rounded(record.ended_s),
        },
    }


def _reason(
    record: RequestRecord, nearest: tuple[RequestRecord, int] | None
) -> tuple[int | None, str]:
    """The first token that was not cached, None = all were but the last; and why it was not."""
    cached, prompt = record.cached_tokens, record.prompt_tokens
    if record.relay:
        return None, f"the backend {record.relay} answered; what it keeps of prompts is its own"
    if cached >= prompt - 1:
        return None, "all of it was cached but the last token, which is always computed"
    if nearest is None:
        if cached:
            return cached, "what was cached is of other clients, of files or of earlier requests"
        return 0, "no earlier request of this client to this model is known, and nothing was kept"
    other, common = nearest
    goes_on = common * TOKEN_BYTES == len(other.history)
    if common > cached:
        missing = common - cached
        if record.block_tokens and missing < record.block_tokens:
            why = (
                f"KV is kept in pieces, which end each {record.block_tokens} tokens and where "
                f"messages begin, so the last {missing} of the common tokens were computed"
            )
        else:
            why = (
                f"the KV of {missing} tokens that both have was no longer kept, or not yet: it was "
                "evicted, or another generation went on from it"
            )
        return cached, f"the prompt shares {common} tokens with {other.request_id}; {why}"
    if goes_on:
        return cached, f"the prompt goes on from {other.request_id}: only what is new was computed"
    if cached > common:
        return cached, (
            f"the prompt left {other.request_id} at token {common}, and {cached} tokens were "
            "cached: the next turn was computed ahead, or other requests have them"
        )
    return (
        common,
        f"the prompt left {other.request_id} at token {common}: another text stands there",
    )


def _around(
    text: TextModel,
    record: RequestRecord,
    nearest: tuple[RequestRecord, int] | None,
    parted: int,
) -> dict[str, object]:
    """The text before and behind a token, and what the other prompt has there. Blocks."""

    def decoded(packed: bytes, start: int, end: int) -> str:
        ids = unpack_ids(packed[start * TOKEN_BYTES : end * TOKEN_BYTES])
        found: str = text.tokenizer.decode(ids, skip_special_tokens=False)
        return found

    start, end = max(0, parted - AROUND_CHARS), parted + AROUND_CHARS
    found: dict[str, object] = {
        "before": decoded(record.prompt, start, parted)[-AROUND_CHARS:],
        "behind": decoded(record.prompt, parted, end)[:AROUND_CHARS],
    }
    if nearest is not None and nearest[1] == parted:
        found["earlier_behind"] = decoded(nearest[0].history, parted, end)[:AROUND_CHARS]
    return found


def _may_see(scope: Scope, owner: str) -> bool:
    return sees_all(scope) or share_of(client_of(scope), scope) == owner


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
