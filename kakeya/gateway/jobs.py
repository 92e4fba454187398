"""Jobs and the capabilities of plug-ins over HTTP.

    GET  /api/v1/capabilities          those that plug-ins bring
    POST /api/v1/capabilities/{name}   run one: "model", "payload" (any JSON), and "timeout_s";
                                       "background": true makes a job of it, 202
    GET  /api/v1/jobs                  the caller's jobs, the newest first, without their results
    GET  /api/v1/jobs/{id}             one, with its result; ?wait_s=30 waits for its end
    POST /api/v1/jobs/{id}/cancel      end it
    DELETE /api/v1/jobs/{id}           end it, and forget it

A job is shown to the client that submitted it, to keys of role admin, and to callers on the node's
own machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kakeya.core.errors import InvalidArgument
from kakeya.dispatch.capabilities import Capabilities, CapabilityCall
from kakeya.dispatch.job import Job
from kakeya.dispatch.jobs import JobQueue
from kakeya.gateway.coordinator_fields import COORDINATOR_FIELDS, CoordinatorFields, take_fields
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.authorization import client_of, sees_all
from kakeya.gateway.http.connection import read_request
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.http.fields import flag_field, number_field, opaque, refuse_unknown, table
from kakeya.gateway.http.receipt import note_ignored
from kakeya.gateway.openai.generation_params import MODEL
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.openapi import BodyRoute
from kakeya.generation.waiting import WaitTeller

MOST_WAIT_S = 300.0
MOST_TIMEOUT_S = 86400.0
_BACKGROUND = flag_field("background")
_TIMEOUT = number_field("timeout_s", 0, MOST_TIMEOUT_S)
FIELDS = table(MODEL, _BACKGROUND, _TIMEOUT) | opaque("payload")
JOBS, _CAPABILITIES = "/api/v1/jobs", "/api/v1/capabilities"


@dataclass(frozen=True, slots=True)
class _Asked:
    call: CapabilityCall
    is_background: bool
    fields: CoordinatorFields


class JobRoute:
    """GET /api/v1/jobs/{id}: the ASGI application behind the path."""

    def __init__(self, jobs: JobQueue, generations: Generations) -> None:
        self._jobs = jobs
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises JobNotFound."""
        job_id, owner = scope["path_params"]["job_id"], viewer_of(scope)
        wait_s = wait_of(Request(scope))
        job = self._jobs.find(job_id, owner)
        if wait_s and not job.state.is_end:
            # Watched: for a client that leaves, nothing is waited for.
            async with self._generations.connection(receive, send) as connection:
                job = await self._jobs.ended(job_id, owner, wait_s)
                connection.finish()
        await send_json(send, 200, job_body(job))


class CapabilityRoute:
    """POST /api/v1/capabilities/{name}: the ASGI application behind the path."""

    def __init__(
        self, capabilities: Capabilities, jobs: JobQueue, generations: Generations
    ) -> None:
        self._capabilities = capabilities
        self._jobs = jobs
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises as `Capabilities.run` and `submit`."""
        limits = self._generations.limits
        asked = await read_request(scope, receive, limits, partial(_parse, scope))
        call = asked.call
        client = client_of(scope) or asked.fields.client
        share = share_of(client, scope)
        cooldown_s = asked.fields.cooldown_s if client else 0.0
        with self._generations.clients.request(share, cooldown_s=cooldown_s) as use:
            if asked.is_background:
                job = self._capabilities.submit(call, share)
                await self._jobs.kept()
                await send_json(send, 202, job_body(job), {"location": f"{JOBS}/{job.job_id}"})
                return
            wait = WaitTeller(lambda: None)
            async with self._generations.connection(receive, send, wait) as connection:
                use.begin()
                result = await self._capabilities.run(call, wait)
                connection.finish()
        head = {"object": "capability.result", "capability": call.capability, "model": call.model}
        await send_json(send, 200, compact(head)[:-1] + b',"result":' + result + b"}")


def job_routes(
    jobs: JobQueue, capabilities: Capabilities | None, generations: Generations
) -> list[Route]:
    """The paths of jobs, and of capabilities where there may be some."""

    async def list_jobs(request: Request) -> Response:
        """GET: the caller's jobs."""
        found = jobs.list_jobs(viewer_of(request.scope))
        return JSONResponse({"object": "list", "data": [job.describe() for job in found]})

    async def cancel(request: Request) -> Response:
        """POST: end a job. Raises JobNotFound."""
        job = jobs.cancel(request.path_params["job_id"], viewer_of(request.scope))
        await jobs.kept()
        return Response(job_body(job), media_type="application/json")

    async def forget(request: Request) -> Response:
        """DELETE: end and forget a job. Raises JobNotFound."""
        job_id = request.path_params["job_id"]
        jobs.forget(job_id, viewer_of(request.scope))
        await jobs.kept()
        return JSONResponse({"id": job_id, "object": "job", "deleted": True})

    one = JOBS + "/{job_id}"
    routes = [
        Route(JOBS, list_jobs),
        Route(one, JobRoute(jobs, generations), methods=["GET"]),
        Route(one, forget, methods=["DELETE"]),
        Route(one + "/cancel", cancel, methods=["POST"]),
    ]
    if capabilities is None:
        return routes
    offered = capabilities

    async def list_capabilities(request: Request) -> Response:
        """GET: the capabilities of plug-ins."""
        return JSONResponse({"object": "list", "data": offered.describe()})

    serve = CapabilityRoute(offered, jobs, generations)
    return [
        *routes,
        Route(_CAPABILITIES, list_capabilities),
        BodyRoute(_CAPABILITIES + "/{capability}", serve, FIELDS | COORDINATOR_FIELDS),
    ]


def viewer_of(scope: Scope) -> str | None:
    """The owner of the jobs that a caller sees; None = all jobs."""
    return None if sees_all(scope) else share_of(client_of(scope), scope)


def wait_of(request: Request) -> float:
    """Read ?wait_s. Raises InvalidArgument."""
    said = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(said)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MOST_WAIT_S:
        raise InvalidArgument(
            f"wait_s is {said[:20]!r}; it must be seconds from 0 to {MOST_WAIT_S:g}",
            param="wait_s",
        )
    return wait_s


def job_body(job: Job) -> bytes:
    """A job as JSON, with its result once it is done."""
    told = compact(job.describe())
    return told if job.result is None else told[:-1] + b',"result":' + job.result + b"}"


def _parse(scope: Scope, whole: Mapping[str, object]) -> _Asked:
    body, fields = take_fields(whole)
    refuse_unknown(body, FIELDS, {})
    priority = fields.urgency(scope)
    if fields.ignored:
        note_ignored(scope, fields.ignored)
    call = CapabilityCall(
        capability=scope["path_params"]["capability"],
        model=MODEL.read(body),
        payload=body.get("payload"),
        priority="normal" if priority is None else priority.name.lower(),
        timeout_s=_TIMEOUT.read(body),
    )
    return _Asked(call, _BACKGROUND.read(body), fields)
