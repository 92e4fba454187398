"""Generations for HTTP clients, whatever their dialect: from a body to an answer.

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
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import replace
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kakeya.backends.relay.relays import RelayedModel, Relays
from kakeya.backends.request import (
    ChatRequest,
    ModelNotFound,
    Request,
)
from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound, Unsupported
from kakeya.core.ids import draw_id
from kakeya.core.settings import nearest
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.profiles import ClientProfile
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.dispatch.tasks import TaskChoice
from kakeya.gateway.answer import Answer, GeneratedAnswer
from kakeya.gateway.figures import HttpMetrics
from kakeya.gateway.http.connection import Connection, HttpLimits, StreamForm
from kakeya.gateway.http.receipt import defaults_of, moved_of, note_defaults, note_moved, task_of
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
from kakeya.gateway.recent import RecentRequests, RequestRecord
from kakeya.gateway.relayed import RelayedGenerations, RelayedJob
from kakeya.gateway.reply import AnswerHead, Reply
from kakeya.gateway.session_hint import cache_use
from kakeya.gateway.turn import HttpGeneration, next_tokens
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.fair_bound import FairBound
from kakeya.generation.frames import Tokens
from kakeya.generation.model import DraftRouter, ModelDirectory, ServedModel
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import Retention
from kakeya.generation.waiting import WaitTeller
from kakeya.prefix.names.keys import resolve_key
from kakeya.prefix.seam import Precache, PrefixClaim
from kakeya.text.changing_lines import move_changing_lines
from kakeya.text.prompt import check_prompt
from kakeya.text.text import TextModel, Texts
from kakeya.text.tools.answer import Part
from kakeya.wire.security import CLIENT_NAME

GenerationJob = HttpGeneration | RelayedJob
"""One answer to a request, ready to be generated."""


class Generations:
    """Runs generations for HTTP clients, of all routes."""

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
        clients: Clients,
        tasks: TaskRegistry,
        relays: Relays,
    ) -> None:
        self._directory = directory
        self._router = router
        self._texts = texts
        self._metrics = metrics
        self._clock = clock
        self.wall = clock.wall
        self._rng = rng
        self._precache = precache
        self._crowd = FairBound(limits.generations, clock.mono)
        self.recent = RecentRequests()
        self._relayed = RelayedGenerations(metrics, self.recent, clock, rng)
        self.clients = clients
        self.tasks = tasks
        self.relays = relays
        self.limits = limits

    def connection(
        self,
        receive: Receive,
        send: Send,
        wait: WaitTeller | None = None,
        stream: StreamForm | None = None,
    ) -> Connection:
        """Watch over one client; `wait` tells for what it waits, `stream` as for a `Connection`."""
        return Connection(
            receive,
            send,
            stream=stream,
            clock=self._clock,
            limits=self.limits,
            waits_for=wait.describe if wait else lambda: "",
        )

    def find(self, model_id: str, client: str = "") -> ServedModel:
        """Find the model of a name for a client. Raises as `choose`, and Unsupported for a model
        of a backend, as its tokens are not known here."""
        found = self.choose(model_id, client)[0]
        if isinstance(found, RelayedModel):
            raise Unsupported(
                f"{found.model_id} is answered by the backend {found.relay.name}, and its tokens "
                "are not known here; name a model of this node",
                param="model",
            )
        return found

    def for_client(
        self, asked: Request, client: str, scope: Scope
    ) -> tuple[Request, ClientProfile]:
        """A request, for the model of its client's profile where it names none that there is; and
        the profile."""
        name, profile = self.meant(asked.params.model, client, scope)
        return replace(asked, params=replace(asked.params, model=name)), profile

    def meant(self, name: str, client: str, scope: Scope) -> tuple[str, ClientProfile]:
        """The name of the model that a client means: its profile's, where there is none of the
        name that it gives; and the profile."""
        profile = profile_of(self.tasks, client, scope)
        other = profile.spec.model
        is_known = name in self._names() or self.relays.find(name) is not None
        if not other or is_known or self._is_served(name.rpartition(":")[0]):
            return name, profile
        note_defaults(scope, {"model": other}, f"profiles.{profile.name}")
        return other, profile

    def choose(
        self, name: str, client: str = ""
    ) -> tuple[ServedModel | RelayedModel, TaskChoice | None]:
        """Find a model for a client, by its own name or that of a task, which then chooses.

        Raises ModelNotFound with the names that are served, and Denied for an adapter of another
        client.
        """
        own = {model.model_id: model for model in self._directory.verifiers()}
        choice = self.tasks.choose(name, lambda one: own.get(one) or self.relays.find(one))
        return self._served(name if choice is None else choice.model_id, client), choice

    def _served(self, model_id: str, client: str) -> ServedModel | RelayedModel:
        if relayed := self.relays.find(model_id):
            return relayed
        try:
            if model_id:  # the directory takes "" for its default
                return self._directory.get(model_id, client)
        except NotFound as unknown:
            if self._is_served(model_id.rpartition(":")[0]):
                raise ModelNotFound(unknown.message) from None
        names = self._names()
        served = ", ".join(names)
        raise ModelNotFound(
            f"the model {model_id[:80]!r} is not served here; served: {served or 'none'}"
            f"{nearest(model_id[:80], names)}"
        )

    def _names(self) -> list[str]:
        names = [model.model_id for model in self._directory.verifiers()]
        return [*names, *(model.model_id for model in self.relays.models()), *self.tasks.tasks]

    def _is_served(self, base: str) -> bool:
        return any(model.model_id == base for model in self._directory.verifiers())

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
        enough. Raises as `prepare`."""
        facts = model.facts or await facts_ahead(model, self._texts)
        facts = facts or await model.ready(self.limits.ready_s)
        text = await self._texts.get(facts.model_path, model.manifest.template)
        asked, _ = under_manifest(self.settled(asked, "", scope), model.manifest)
        written = [await prompt_ids(asked, prompt, text, facts) for prompt in prompts_of(asked)]
        return sum(map(len, written))

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

    def settled(self, asked: Request, session: str, scope: Scope) -> Request:
        """A request without lines that change each time at its front, and with the keys of its
        conversation; `session` is the one that its client named. Raises InvalidArgument."""
        use = cache_use(asked, Headers(scope=scope), session)
        asked = replace(asked, params=replace(asked.params, cache=use))
        if not isinstance(asked, ChatRequest):
            return asked
        chat, moved = move_changing_lines(asked.chat, self._precache.moved_kinds)
        note_moved(scope, moved)
        is_plain = self.limits.plain_tools == "write"
        return replace(asked, chat=replace(chat, plain_tools=is_plain))

    async def prepare(
        self,
        reply: Reply,
        asked: Request,
        model: ServedModel | RelayedModel,
        scope: Scope,
        wait: WaitTeller,
    ) -> Sequence[GenerationJob]:
        """Wait for the model, write the prompts in ids, check what only the model can tell, and
        set the head of the reply. Returns a generation for each answer to `asked`, the reply's
        request once it is settled."""
        if isinstance(model, RelayedModel):
            owner = share_of(client_of(scope), scope)
            return self._relayed.prepare(reply, asked, model, scope, owner)
        began_mono = self._clock.mono()
        deadline_s = asked.params.deadline_s
        ready_s = self.limits.ready_s
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
                        answer=self._answer(asked, written, text, request, len(jobs)),
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
    ) -> GeneratedAnswer:
        if isinstance(asked, ChatRequest):
            may_call = asked.tool_choice.mode != "none"
            reader = text.reader(written.token_ids, asked.chat, may_call=may_call)
            after: Sequence[int] = ()  # a chat's answer is a text of its own
        else:
            reader, after = None, written.token_ids
        shown: frozenset[int] = frozenset() if reader is None else reader.shown
        return GeneratedAnswer(
            text.detokenizer(after=after, shown=shown),
            stops=text.stops(asked.params.stop, shown=shown),
            stop_token_ids=request.stop_token_ids - shown,
            reader=reader,
            draw_call_id=lambda: "call_" + draw_id("", self._rng, 24)[1:],
            has_one_call=isinstance(asked, ChatRequest) and not asked.tool_choice.is_parallel,
            bytes_of=text.bytes_of,
            row=row,
        )

    def run(self, job: GenerationJob) -> AsyncGenerator[tuple[Answer, Part], None]:
        """Generate; yields each part of the answer as it settles. The caller closes this
        iterator."""
        return self._relayed.run(job) if isinstance(job, RelayedJob) else self._decode(job)

    async def _decode(self, job: HttpGeneration) -> AsyncGenerator[tuple[Answer, Part], None]:
        model_id, answer = job.counted_as, job.answer
        self._metrics.generation_began(model_id, len(job.request.token_ids))
        try:
            async with aclosing(job.model.decode(job.request)) as frames:
                async for frame in frames:
                    if isinstance(frame, Tokens):
                        if answer.completion_tokens == 0:
                            waited_s = self._clock.mono() - job.began_mono
                            self._metrics.first_token(model_id, waited_s)
                            if job.record is not None:
                                job.record.first_token_s = waited_s
                        job.token_ids.extend(frame.token_ids)
                    for part in answer.take(frame):
                        yield answer, part
                    if answer.finish_reason is not None:
                        break
            self._turn_ended(job)
        finally:
            self._metrics.generation_ended(
                model_id, answer.completion_tokens, is_abandoned=answer.finish_reason is None
            )
            self._remember(job)

    def _remember(self, job: HttpGeneration) -> None:
        record, answer = job.record, job.answer
        if record is None:
            return
        record.ended_s = self._clock.mono() - job.began_mono
        record.prefill_s = None if answer.usage is None else answer.usage.prefill_s
        record.cached_tokens = answer.cached_tokens
        record.finish_reason = answer.finish_reason or ""
        if isinstance(job.model, RoutedModel):
            record.routes = tuple(job.model.decisions)
        self.recent.add(record, job.request.token_ids, job.token_ids)

    async def run_all(
        self, jobs: Sequence[GenerationJob]
    ) -> AsyncGenerator[tuple[Answer, Part], None]:
        """Generate several answers at once; yields as `run`. The first failure ends all."""
        found: asyncio.Queue[tuple[Answer, Part] | Exception | None] = asyncio.Queue()

        async def feed(job: GenerationJob) -> None:
            end: Exception | None = None
            try:
                async with aclosing(self.run(job)) as parts:
                    async for one in parts:
                        found.put_nowait(one)
            except Exception as fault:  # noqa: BLE001 - raised where the answers are read
                end = fault
            found.put_nowait(end)

        tasks = [asyncio.create_task(feed(job)) for job in jobs]
        try:
            running = len(tasks)
            while running:
                one = await found.get()
                if isinstance(one, Exception):
                    raise one
                if one is None:
                    running -= 1
                else:
                    yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _turn_ended(self, job: HttpGeneration) -> None:
        """Have what the next request begins with warm, if this one says what it continues."""
        if not job.claim.use.is_empty:
            self._precache.turn_ended(job.claim, functools.partial(next_tokens, job, self._texts))


def profile_of(tasks: TaskRegistry, client: str, scope: Scope) -> ClientProfile:
    """The profile of a request's client."""
    return tasks.profile_of(client, Headers(scope=scope).get("user-agent", ""))


def client_of(scope: Scope) -> str:
    """The name of a caller: that of its API key, else one that it gives itself; "" = none."""
    return Headers(scope=scope).get(CLIENT_NAME, "")


def system_fingerprint(facts: ModelFacts) -> str:
    """Names what computes the tokens: the weights, their form and the arithmetic."""
    made_of = (facts.base_fingerprint, facts.weights_state, facts.kv_exactness, facts.mlx_version)
    return "fp_" + sha256(repr(made_of).encode()).hexdigest()[:12]
