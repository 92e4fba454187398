"""Responses with background=true: jobs, which go on without the connection that asked for them.

A job keeps the request as it came, so that the response is made again from it after a restart, by
the same route as every other one; a seed is drawn for it, so that it then says the same. One that
was asked for with stream=true keeps its events in memory, in their order; their numbers are their
places, so that a reader may come back at any of them.

A copy of it is held as of a streamed answer, from before its client is told its id. After the loss
of its node the next one that is asked for it takes its job over, and goes on with its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.core.units import MIB
from kakeya.dispatch.job import Job, JobState
from kakeya.dispatch.jobs import JobKind, JobNotFound, JobQueue, Tell
from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.dispatch.profiles import ClientProfile
from kakeya.gateway.generation import GenerationJob, Generations
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.http.request_ids import answer_id, scope_of
from kakeya.gateway.openai.generation_params import SEED_BITS
from kakeya.gateway.openai.reply import comment, compact
from kakeya.gateway.openai.responses.event_log import JobExchange, ResponseLog, data_of
from kakeya.gateway.openai.responses.output import numbered_event
from kakeya.gateway.openai.responses.reply import ResponseReply
from kakeya.gateway.openai.responses.requests import parse_response
from kakeya.gateway.openai.responses.store import ResponseStore
from kakeya.gateway.reply import EVENT_STREAM, Reply
from kakeya.gateway.resumable.answers import ResumableAnswers, holder_of
from kakeya.gateway.route import GenerationRoute, Keep
from kakeya.gateway.session_hint import SESSION_HEADERS
from kakeya.generation.waiting import WaitTeller
from kakeya.wire.security import CLIENT_NAME

KIND = "response"
_MOST_RUNNING = 64
"""At a time; what their models have no place for waits as other requests do."""
MOST_EVENT_BYTES = 16 * MIB
"""Of the events of responses that have ended."""
_FOREVER_S = 1e9
_STATUS = {
    JobState.QUEUED: "queued",
    JobState.RUNNING: "in_progress",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}


class _Following:
    """The form of a stream that follows a job."""

    content_type = EVENT_STREAM

    def keepalive(self, waits_for: str) -> bytes:
        """A comment."""
        return comment(waits_for)


class BackgroundResponses:
    """Makes responses in the background, and shows, streams and cancels them."""

    def __init__(
        self,
        jobs: JobQueue,
        generations: Generations,
        store: ResponseStore,
        rng: random.Random,
        resumable: ResumableAnswers,
    ) -> None:
        self._jobs = jobs
        self._generations = generations
        self._store = store
        self._rng = rng
        self._resumable = resumable
        self._logs: dict[str, ResponseLog] = {}
        kind = JobKind(name=KIND, run=self._work, concurrency=_MOST_RUNNING, ended=self._ended)
        jobs.add_kind(kind)
        store.elsewhere = self._items

    async def take(
        self,
        reply: Reply,
        whole: Mapping[str, object],
        share: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> bool:
        """Make a job of a request for the background; False = it is none. Raises QueueFull."""
        if not isinstance(reply, ResponseReply) or not reply.is_background:
            return False
        client, params = client_of(scope), reply.asked.params
        asked, profile = self._generations.for_client(reply.asked, client, scope)
        self._generations.names.choose(asked.params.model, client)
        response_id = answer_id(scope, reply.id_prefix)
        previous_id = whole.get("previous_response_id")
        request: dict[str, Any] = {
            "body": {"seed": self._rng.getrandbits(SEED_BITS - 1), **whole},
            "earlier": previous_id and self._store.items(str(previous_id), share),
            "headers": _kept_headers(Headers(scope=scope)),
            "host": (scope.get("client") or ("",))[0],
            "response": reply.begun(response_id, int(self._generations.wall())),
            "is_copied": params.is_resumable and profile.spec.resumable,
        }
        job = self._submit(response_id, request, share)
        if request["is_copied"]:
            body = {**request["body"], "input": reply.body["input"]}
            copied = self._resumable.hold(_copy_of(job, body, holder_of(scope), asked.params.model))
            if copied is not None:
                await copied.held()
        await self._jobs.kept()
        if params.stream:
            await self.follow(job, -1, receive, send)
        else:
            await send_json(send, 200, body_of(job))
        return True

    def find(self, response_id: str, owner: str | None) -> Job | None:
        """The job of a response; None = it is none of a job's, or not of this owner."""
        try:
            job = self._jobs.find(response_id, owner)
        except JobNotFound:
            return None
        return job if job.kind == KIND else None

    async def cancel(self, job: Job) -> Job:
        """End the work for a response, unless it has ended."""
        ended = self._jobs.cancel(job.job_id, None)
        await self._jobs.kept()
        return ended

    async def forget(self, job: Job) -> None:
        """End the work for a response, and drop it."""
        self._jobs.forget(job.job_id, None)
        self._logs.pop(job.job_id, None)
        await self._jobs.kept()

    def begin(
        self,
        reply: Reply,
        body: Mapping[str, object],
        jobs: Sequence[GenerationJob],
        profile: ClientProfile,
    ) -> Sequence[GenerationJob]:
        """Have a response copied that is streamed, or made in the background, unless its client or
        its owner says no."""
        if not isinstance(reply, ResponseReply):
            return jobs
        if reply.is_background and reply.asked.params.is_resumable:
            return self._resumable.begun(reply, reply.body, jobs, profile)
        return self._resumable.begin(reply, reply.body, jobs, profile)

    async def adopt(self, copy: AnswerCopy) -> Job | None:
        """Take over the job of a response after the loss of its node; None = that node is there,
        or nothing is left to do. Raises QueueFull."""
        if copy.is_complete or copy.ended or self._resumable.is_made(copy):
            return None
        if (known := self.find(copy.answer_id, None)) is not None:
            return known
        body: dict[str, object] = json.loads(copy.body) | {"model": copy.model_id}
        reply = parse_response(body, self._store, earlier=())
        request = {
            "body": body,
            "earlier": [],
            "headers": [(CLIENT_NAME, copy.client)],
            "host": "",
            "is_copied": True,
            "response": reply.begun(copy.answer_id, copy.created_at),
        }
        job = self._submit(copy.answer_id, request, copy.client)
        await self._jobs.kept()
        return job

    def _submit(self, response_id: str, request: Mapping[str, Any], owner: str) -> Job:
        job = self._jobs.submit(KIND, request, owner=owner, job_id=response_id)
        if request["body"].get("stream"):
            self._forget_logs()
            self._logs[response_id] = ResponseLog()
        return job

    async def follow(self, job: Job, after: int, receive: Receive, send: Send) -> None:
        """Stream the events of a response behind the number `after`, -1 = all, to their end.

        Raises InvalidArgument where none are kept.
        """
        log = self._logs.get(job.job_id)
        if log is None:
            raise InvalidArgument(
                "stream=true: the events of this response are not kept; they are for a while, of "
                "responses that were created with stream=true. Get it without stream",
                param="stream",
            )
        over = asyncio.ensure_future(self._jobs.ended(job.job_id, None, _FOREVER_S))
        try:
            async with self._generations.connection(receive, send, stream=_Following()) as client:
                sent = after + 1
                while True:
                    grown = asyncio.ensure_future(log.grown.wait())
                    if new := log.events[sent:]:
                        await client.send_event(b"".join(new))
                        sent += len(new)
                    elif over.done():
                        break
                    await asyncio.wait((grown, over), return_when=asyncio.FIRST_COMPLETED)
                    grown.cancel()
                await client.end(_last_event(over.result(), log, sent))
        finally:
            over.cancel()

    async def _work(self, job: Job, tell: Tell, wait: WaitTeller) -> object:
        wait.ask = lambda: self._generations.clients.wait_of(job.job_id)
        request = json.loads(job.request)
        log = self._logs.get(job.job_id)
        is_stream = bool(request["body"].get("stream"))
        if is_stream:
            log = self._logs[job.job_id] = log or ResponseLog()
            log.clear()  # of a try that the node cut off
        earlier = request["earlier"]
        # In ASCII: a client's text may hold halves of characters.
        exchange = JobExchange(json.dumps(request["body"]).encode(), log)
        headers = [(name.encode(), value.encode()) for name, value in request["headers"]]
        scope = scope_of(job.job_id) | {
            "type": "http",
            "method": "POST",
            "path": "/v1/responses",
            "headers": headers,
            "client": (request["host"], 0),
        }
        kept: Keep | None = None
        if request.get("is_copied"):
            kept = self.begin
            with contextlib.suppress(NotFound):
                # Of another try, here or at a node that was lost.
                copy = await self._resumable.find(job.job_id, holder_of(scope))
                kept = partial(self._resumable.go_on, copy)
        created_at = request["response"]["created_at"]

        def keep(
            reply: Reply,
            body: Mapping[str, object],
            jobs: Sequence[GenerationJob],
            profile: ClientProfile,
        ) -> Sequence[GenerationJob]:
            # As its client was told, however long the work waited.
            reply.head = replace(reply.head, created_at=created_at)
            return jobs if kept is None else kept(reply, body, jobs, profile)

        route = GenerationRoute(
            lambda body, share: parse_response(body, self._store, share, earlier=earlier),
            self._generations,
            keep=keep,
        )
        await route(scope, exchange.receive, exchange.send)
        return exchange.response()

    def _ended(self, job: Job) -> None:
        """Have other nodes tell of a response that failed or was cancelled."""
        request = json.loads(job.request)
        if job.state is JobState.DONE or not request.get("is_copied"):
            return  # of an answer its copy tells
        client = dict(request["headers"]).get(CLIENT_NAME) or request["host"]
        copy = _copy_of(job, request["body"], client, request["body"]["model"])
        self._resumable.hold(replace(copy, is_complete=True, ended=body_of(job)))

    def _items(self, response_id: str, client: str) -> list[object] | None:
        """What a request that goes on from a response begins with; None = it is no job's, or not
        there yet."""
        job = self.find(response_id, client)
        if job is None or job.result is None:
            return None
        request = json.loads(job.request)
        given = request["body"]["input"]
        items = given if isinstance(given, list) else [{"role": "user", "content": given}]
        return [*(request["earlier"] or ()), *items, *json.loads(job.result)["output"]]

    def _forget_logs(self) -> None:
        """Drop the events of responses that are forgotten, and the oldest of too many."""
        size = 0
        for response_id in reversed(tuple(self._logs)):
            job = self.find(response_id, None)
            if job is not None and job.state.is_end:
                size += self._logs[response_id].size_bytes
            if job is None or (job.state.is_end and size > MOST_EVENT_BYTES):
                del self._logs[response_id]


def body_of(job: Job) -> bytes:
    """A response as it is now, as JSON."""
    if job.result is not None:
        return job.result
    body = json.loads(job.request)["response"] | {"status": _STATUS[job.state]}
    if job.error is not None:
        body["error"] = {"code": job.error.code, "message": job.error.message}
    return compact(body)


def is_background(copy: AnswerCopy) -> bool:
    """Whether a copy is of a response that was asked for in the background."""
    return json.loads(copy.body).get("background") is True


def _copy_of(job: Job, body: Mapping[str, object], client: str, model: str) -> AnswerCopy:
    """The copy of a response before a model is asked for it."""
    return AnswerCopy(
        answer_id=job.job_id,
        client=client,
        model_id=model,
        # In ASCII: a client's text may hold halves of characters.
        body=json.dumps(body).encode(),
        created_at=json.loads(job.request)["response"]["created_at"],
    )


def _last_event(job: Job, log: ResponseLog, sent: int) -> bytes:
    """The end of a stream, where its job ended without telling one."""
    is_told = bool(log.events) and data_of(log.events[-1])["type"] in _LAST
    if is_told or not job.state.is_end:  # the latter where this node stops
        return b""
    return numbered_event(sent, "response.failed", response=json.loads(body_of(job)))


_LAST = ("response.completed", "response.incomplete", "response.failed")


def _kept_headers(headers: Headers) -> Sequence[tuple[str, str]]:
    """The headers that say something of a generation, and no secret."""
    return [
        (name, value)
        for name, value in headers.items()
        if name in (*SESSION_HEADERS, "x-priority", "user-agent") or name.startswith("x-kakeya-")
    ]
