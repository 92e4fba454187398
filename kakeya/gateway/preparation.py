"""What comes before a generation of an engine: its model serves, its request is in tokens of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import Scope

from kakeya.backends.request import ChatRequest, Request
from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.core.ids import draw_id
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.http.receipt import (
    defaults_of,
    moved_of,
    note_defaults,
    note_moved,
    note_record,
    task_of,
)
from kakeya.gateway.http.request_ids import answer_id
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.prompts import (
    WrittenPrompt,
    facts_ahead,
    frame_s,
    prompt_ids,
    prompts_of,
    room_of,
    sampling_of,
    under_manifest,
    write_prompt,
)
from kakeya.gateway.recent import RequestRecord
from kakeya.gateway.reply import AnswerHead, Reply
from kakeya.gateway.session_hint import cache_use
from kakeya.gateway.turn import HttpGeneration
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.model import DraftRouter, ServedModel
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import Retention
from kakeya.generation.waiting import WaitTeller
from kakeya.prefix.names.keys import resolve_key
from kakeya.prefix.seam import Precache, PrefixClaim
from kakeya.text.changing_lines import move_changing_lines
from kakeya.text.prompt import check_prompt
from kakeya.text.text import TextModel, Texts
from kakeya.wire import traces


class Preparation:
    """Makes generations of requests, once their models serve."""

    def __init__(
        self,
        router: DraftRouter,
        *,
        texts: Texts,
        limits: HttpLimits,
        clock: Clock,
        rng: random.Random,
        precache: Precache,
    ) -> None:
        self._router = router
        self._texts = texts
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._precache = precache

    def settled(self, asked: Request, session: str, scope: Scope) -> Request:
        """A request without lines that change each time at its front, and with the keys of its
        conversation; `session` is the one that its client named. Raises InvalidArgument."""
        use = cache_use(asked, Headers(scope=scope), session)
        asked = replace(asked, params=replace(asked.params, cache=use))
        if not isinstance(asked, ChatRequest):
            return asked
        chat, moved = move_changing_lines(asked.chat, self._precache.moved_kinds)
        note_moved(scope, moved)
        is_plain = self._limits.plain_tools == "write"
        return replace(asked, chat=replace(chat, plain_tools=is_plain))

    async def text_of(self, model: ServedModel) -> TextModel | None:
        """The tokenizer, templates and usual sampling of a model; None before its first load."""
        if model.facts is None:
            return None
        try:
            return await self._texts.get(model.facts.model_path, model.manifest.template)
        except KakeyaError:
            return None

    async def count(self, asked: Request, model: ServedModel, scope: Scope) -> int:
        """Count the tokens of a request's prompts. Loads the model only where its files do not tell
        enough. Raises as `jobs`."""
        facts = model.facts or await facts_ahead(model, self._texts)
        facts = facts or await model.ready(self._limits.ready_s)
        text = await self._texts.get(facts.model_path, model.manifest.template)
        asked, _ = under_manifest(self.settled(asked, "", scope), model.manifest)
        written = [await prompt_ids(asked, prompt, text, facts) for prompt in prompts_of(asked)]
        return sum(map(len, written))

    async def jobs(
        self,
        reply: Reply,
        asked: Request,
        model: ServedModel,
        scope: Scope,
        wait: WaitTeller,
    ) -> Sequence[HttpGeneration]:
        """Wait for the model, write the prompts in ids, check what only the model can tell, and
        set the head of the reply. Returns a generation for each answer to `asked`, the reply's
        request once it is settled."""
        began_mono = self._clock.mono()
        deadline_s = asked.params.deadline_s
        ready_s = self._limits.ready_s
        most_s = ready_s if deadline_s is None else min(ready_s, deadline_s)
        facts = None
        if isinstance(model, RoutedModel) and model.folder is None:
            # A peer tells its manifest beside the facts.
            facts = await model.ready(most_s, asked.params.priority)
        manifest = model.manifest
        asked, used = under_manifest(asked, manifest)
        note_defaults(scope, used, f"models.{model.model_id}")
        if model.state is not ModelState.READY:
            await self._check_ahead(asked, model)
        facts = facts or await model.ready(most_s, asked.params.priority)
        text = await self._texts.get(facts.model_path, manifest.template)
        claim = PrefixClaim(
            model_id=model.model_id, facts=facts, client=client_of(scope), use=asked.params.cache
        )
        record = RequestRecord(
            request_id=answer_id(scope, reply.id_prefix),
            owner=share_of(claim.client, scope),
            model_id=model.model_id,
            model_path=facts.model_path,
            block_tokens=facts.kv_block_tokens,
            conversation=resolve_key(claim.use.keys) or "",
            moved=moved_of(scope),
            task=task_of(scope),
            defaults=defaults_of(scope),
            ready_s=self._clock.mono() - began_mono,
        )
        note_record(scope, record)
        traces.note(record.request_id, {"gen_ai.request.model": record.model_id})
        jobs: list[HttpGeneration] = []
        prompt_tokens = 0
        for prompt in prompts_of(asked):
            written = await write_prompt(asked, prompt, text, facts)
            prompt_tokens += len(written.token_ids)
            for row in range(asked.params.rows):
                kv_key = "" if jobs else self._precache.kv_key(claim)
                request = self._decode_request(asked, written, text, claim, scope, row, kv_key)
                if not jobs:  # the others begin with it
                    request = replace(request, wait=wait)
                jobs.append(
                    HttpGeneration(
                        model=model,
                        counted_as=facts.model_id,
                        request=request.after(self._clock.mono() - began_mono),
                        answer=self._answer(
                            asked, written, text, request, len(jobs), record.request_id
                        ),
                        began_mono=began_mono,
                        asked=asked,
                        prompt=prompt,
                        claim=claim,
                        record=None if jobs else record,
                    )
                )
        record.prepared_s = self._clock.mono() - began_mono
        reply.head = AnswerHead(
            answer_id=record.request_id,
            created_at=int(self._clock.wall()),
            model=model.model_id,
            prompt_tokens=prompt_tokens,
            fingerprint=system_fingerprint(facts),
            moved=moved_of(scope),
            task=record.task,
        )
        return jobs

    async def _check_ahead(self, asked: Request, model: ServedModel) -> None:
        """Refuse what the files of a model tell to be wrong, before the model loads for it."""
        known = await facts_ahead(model, self._texts)
        if known is None:
            return
        text = await self._texts.get(known.model_path, model.manifest.template)
        for prompt in prompts_of(asked):
            # Ids only by their number: a model may have more of them than its tokenizer.
            if isinstance(prompt, str):
                ids = await prompt_ids(asked, prompt, text, known)
            else:
                ids = prompt
            check_prompt(len(ids), known)
            if isinstance(asked, ChatRequest):
                await text.grammar(ids, asked.chat, asked.shape)

    def _decode_request(
        self,
        asked: Request,
        written: WrittenPrompt,
        text: TextModel,
        claim: PrefixClaim,
        scope: Scope,
        row: int,
        kv_key: str,
    ) -> DecodeRequest:
        """The request for one of the answers to a prompt, `row` counted from 0. One generation
        continues KV that has a name; the other answers of a request share it by content."""
        params, facts = asked.params, claim.facts
        sampling = sampling_of(params.sampling, text.sampling, facts, self._rng.getrandbits(64))
        stops = text.stops(params.stop)
        return DecodeRequest(
            token_ids=written.token_ids,
            max_tokens=room_of(params, len(written.token_ids), facts),
            stop_token_ids=text.stop_token_ids
            | frozenset(facts.eos_token_ids)
            | (frozenset() if stops is None else stops.token_ids),
            sampling=replace(sampling, seed=(sampling.seed + row) % 2**64),
            draft_sources=self._router.sources(facts, params.draft_policy),
            draft_policy=params.draft_policy,
            deadline_s=params.deadline_s,
            kv_key=kv_key,
            client=share_of(claim.client, scope),
            user=params.user,
            priority=params.priority,
            kv_retention=params.cache.retention or Retention.LONG,
            frame_s=frame_s(params),
            cuts=written.cuts,
            grammar=written.grammar,
            top_logprobs=params.top_logprobs,
            stay_warm_s=params.stay_warm_s,
        )

    def _answer(
        self,
        asked: Request,
        written: WrittenPrompt,
        text: TextModel,
        request: DecodeRequest,
        row: int,
        answer_id: str,
    ) -> GeneratedAnswer:
        if isinstance(asked, ChatRequest):
            may_call = asked.tool_choice.mode != "none"
            reader = text.reader(written.token_ids, asked.chat, may_call=may_call)
            after: Sequence[int] = ()  # a chat's answer is a text of its own
        else:
            reader, after = None, written.token_ids
        shown: frozenset[int] = frozenset() if reader is None else reader.shown
        # The same ids at each node that goes on with the answer.
        calls = random.Random(f"{answer_id} {row}")
        return GeneratedAnswer(
            text.detokenizer(after=after, shown=shown),
            stops=text.stops(asked.params.stop, shown=shown),
            stop_token_ids=request.stop_token_ids - shown,
            reader=reader,
            draw_call_id=lambda: "call_" + draw_id("", calls, 24)[1:],
            has_one_call=isinstance(asked, ChatRequest) and not asked.tool_choice.is_parallel,
            bytes_of=text.bytes_of,
            row=row,
        )


def system_fingerprint(facts: ModelFacts) -> str:
    """Names what computes the tokens: the weights, their form and the arithmetic."""
    made_of = (facts.base_fingerprint, facts.weights_state, facts.kv_exactness, facts.mlx_version)
    return "fp_" + sha256(repr(made_of).encode()).hexdigest()[:12]
