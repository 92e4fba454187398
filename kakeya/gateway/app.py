"""The HTTP gateway of a node: one Starlette application over the models of a directory.

    GET  /v1/models, /v1/models/{id}     the served models
    POST /v1/chat/completions            OpenAI chat, streamed or not
    POST /v1/completions                 OpenAI completions, streamed or not
    GET  of these and of messages, /{id} the rest of a stream that was cut off
    POST /v1/embeddings                  OpenAI embeddings
    POST /v1/images/generations          OpenAI images
    GET  /v1/images/{id}.png             an image that the node keeps
    POST /v1/responses                   OpenAI Responses, streamed or not
    GET, DELETE /v1/responses/{id}; POST /v1/responses/{id}/cancel
                                         a response that the node keeps, or makes
    POST /v1/messages                    Anthropic messages, streamed or not
    POST /v1/messages/count_tokens       the tokens of such a request
    POST /api/chat, /api/generate, /api/embed
    GET  /api/version, /api/tags, /api/ps; POST /api/show
                                         Ollama
    POST /v1/precache                    warm a prefix before a request needs it
    GET  /, /page/{file}                 the page; two lines of text for a program
    GET  /api/v1/events                  the facts of the fleet as they change, for the page
    GET  /healthz, /health               200 while the process lives
    GET  /readyz                         200 when the default model serves (or, on a node that
                                         only drafts, all that draft), else 503 and why
    GET  /metrics                        Prometheus
    GET  /openapi.json                   these paths and their parameters, for programs
    GET  /api/v1/status, /api/v1/fleet   status of the node; fleet is its `fleet` entry
    GET  /api/v1/models; POST .../pull, stop, remove, load, unload
                                         the models on disk and in memory: see `owner`
    GET  /api/v1/adapters; POST .../add, remove
    GET, PUT /api/v1/config              tasks, and what else changes while the node runs
    GET  /api/v1/capabilities; POST .../{name}
    GET  /api/v1/jobs, /api/v1/jobs/{id}, and others: see `jobs`
    GET  /api/v1/requests/{id}           what of a recent request's prompt was cached, and why
    GET  /api/v1/ring/plan               the ring group that a model would have now

Parsing is in `openai`, `anthropic` and `ollama`, running in `generation`, admission and errors in
`edge`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kakeya.adapters.manager import AdapterManager
from kakeya.backends.relay.relays import Relays
from kakeya.core.clock import Clock
from kakeya.core.figures import Figure
from kakeya.dispatch.capabilities import Capabilities
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.jobs import JobQueue
from kakeya.dispatch.model_names import ModelNames, RelayDirectory
from kakeya.dispatch.peers.ring_survey import RingSurvey
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.routed.copied import AnswerCopies
from kakeya.dispatch.watch.fleet import FleetWatch
from kakeya.gateway.anthropic.count import CountRoute
from kakeya.gateway.anthropic.reply import MessageReply
from kakeya.gateway.anthropic.requests import MESSAGE, MESSAGE_NO_OPS, parse_message
from kakeya.gateway.coordinator_fields import COORDINATOR_FIELDS
from kakeya.gateway.dashboard.events import events_route
from kakeya.gateway.dashboard.page import page_routes
from kakeya.gateway.embeddings import Embeddings
from kakeya.gateway.explain import ExplainRoute, HeldTeller
from kakeya.gateway.figures import CONTENT_TYPE, HttpMetrics
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.callers import CallerCheck
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.http.edge import Edge, refuse_route
from kakeya.gateway.jobs import job_routes
from kakeya.gateway.ollama.routes import ollama_routes
from kakeya.gateway.openai.embeddings import EMBEDDING, EmbeddingRoute
from kakeya.gateway.openai.image_store import ImageStore
from kakeya.gateway.openai.images import IMAGE_NO_OPS, IMAGES, ImageRoute
from kakeya.gateway.openai.models import ModelRoutes, abilities
from kakeya.gateway.openai.reply import ChatReply, CompletionReply
from kakeya.gateway.openai.requests import (
    CHAT,
    CHAT_NO_OPS,
    COMPLETION,
    parse_chat,
    parse_completion,
)
from kakeya.gateway.openai.responses.background import BackgroundResponses
from kakeya.gateway.openai.responses.kept import StoredResponses
from kakeya.gateway.openai.responses.reply import ResponseReply
from kakeya.gateway.openai.responses.requests import RESPONSE, RESPONSE_NO_OPS, parse_response
from kakeya.gateway.openai.responses.store import ResponseStore
from kakeya.gateway.openapi import BodyRoute, document_route
from kakeya.gateway.owner.adapters import AdapterRoutes
from kakeya.gateway.owner.live_config import ConfigRoute
from kakeya.gateway.owner.model_files import ModelFilesRoute
from kakeya.gateway.owner.ring_plan import RingPlanRoute
from kakeya.gateway.precache import PRECACHE, PrecacheRoute
from kakeya.gateway.preparation import Preparation
from kakeya.gateway.resumable.address import AnswerAddress, ResumableRoute
from kakeya.gateway.resumable.answers import ResumableAnswers
from kakeya.gateway.route import GenerationRoute
from kakeya.generation.facts import DraftModelState, ModelState
from kakeya.generation.image import ImageModel
from kakeya.generation.model import DraftRouter, LoadableModel, ModelDirectory
from kakeya.prefix.seam import NoPrecache, Precache
from kakeya.text.text import Texts


def build_app(
    directory: ModelDirectory,
    router: DraftRouter,
    *,
    status: Callable[[], Mapping[str, object]],
    clock: Clock,
    rng: random.Random,
    jobs: JobQueue,
    limits: HttpLimits = HttpLimits(),  # noqa: B008 - frozen
    hosts: frozenset[str] = frozenset(),
    origins: frozenset[str] = frozenset(),
    keys: KeyCheck | None = None,
    figures: Callable[[], Iterable[Figure]] = tuple,
    proposers: Callable[[], Sequence[DraftModelState]] = tuple,
    unready: Callable[[], str] = str,
    precache: Precache = NoPrecache(),  # noqa: B008 - it has no state
    texts: Texts | None = None,
    store_bytes: int = 0,
    copies: AnswerCopies | None = None,
    clients: Clients | None = None,
    tasks: TaskRegistry | None = None,
    relays: Relays | None = None,
    routed: RelayDirectory | None = None,
    capabilities: Capabilities | None = None,
    ring: RingSurvey | None = None,
    watch: FleetWatch | None = None,
    files: ModelFilesRoute | None = None,
    adapters: AdapterManager | None = None,
    held: HeldTeller | None = None,
) -> Starlette:
    """Build the application.

    `status` gives the body of /api/v1/status; `hosts` are names and addresses, without ports, by
    which callers may reach the node, beside loopback and the connection's own address; `origins`
    are those of web pages that may call; `keys` say which callers need an API key, None = none;
    `figures` gives those of other floors per scrape; `proposers` are the configured models that
    only draft; `unready` says why the node as a whole does not serve now, "" while it does.
    `texts` are shared with other parts of the node; None = the application makes its own.
    So is the registry of `clients`.
    `store_bytes` are for responses that later requests can go on from; 0 = none is kept. `copies`
    are of streamed ones, with which any node goes on; None = there are none. `tasks` are names that
    stand for one of several models; None = there are none. `relays` are backends that answer whole
    requests in the place of an engine, None = there are none; `routed` finds those of peers too,
    None = there are only the own ones. `jobs` get the kinds of work that go on in the background,
    and are started later; `capabilities` None = there are none. `ring` None = no ring group is
    planned. `watch` None = the page shows no facts. `files` None = HTTP does not look after models,
    and without `adapters` not after these.
    `held` tells explanations where KV is now.
    """
    metrics = HttpMetrics(
        figures,
        lambda: [one.model_id for one in directory.verifiers()],
        most_running=limits.generations,
    )
    texts = texts or Texts(clock.wall)
    tasks = tasks or TaskRegistry()
    relays = relays or Relays({}, clock)
    preparation = Preparation(
        router, texts=texts, limits=limits, clock=clock, rng=rng, precache=precache
    )
    generations = Generations(
        ModelNames(directory, tasks, routed or relays),
        preparation,
        texts=texts,
        metrics=metrics,
        limits=limits,
        clock=clock,
        rng=rng,
        precache=precache,
        clients=clients or Clients(clock.mono),
    )
    if watch is not None:
        watch.facts.more["recent"] = generations.recent.brief
    gateway = Gateway(
        directory,
        status=status,
        proposers=proposers,
        unready=unready,
        metrics=metrics,
    )
    embeddings = Embeddings(directory, texts, metrics, limits, clock, tasks)
    images = ImageStore(mono=clock.mono)
    drawing = ImageRoute(directory, generations, jobs, images, clock=clock, rng=rng)
    routes = [
        *_dialects(
            generations,
            ResponseStore(most_bytes=store_bytes, mono=clock.mono),
            jobs,
            copies,
            rng,
        ),
        BodyRoute(
            "/v1/embeddings", EmbeddingRoute(embeddings, clock), EMBEDDING | COORDINATOR_FIELDS
        ),
        BodyRoute("/v1/images/generations", drawing, IMAGES | COORDINATOR_FIELDS, IMAGE_NO_OPS),
        images.route(),
        *ollama_routes(directory, generations, embeddings, clock, abilities),
        BodyRoute(
            "/v1/precache",
            PrecacheRoute(generations, precache, texts),
            PRECACHE | COORDINATOR_FIELDS,
        ),
        Route(
            "/api/v1/requests/{request_id}",
            ExplainRoute(generations.recent, generations.clients, texts, held).answer,
        ),
        *ConfigRoute(tasks, relays, limits).routes(),
        *job_routes(jobs, capabilities, generations),
        *ModelRoutes(directory, generations, created_at=int(clock.wall())).routes(),
        *gateway.routes(),
        *page_routes(),
        *([events_route(watch)] if watch else ()),
        *(files.routes(limits) if files else ()),
        *(AdapterRoutes(adapters).routes(limits) if adapters else ()),
        *([RingPlanRoute(ring).route()] if ring else ()),
    ]
    app = Starlette(
        routes=[*routes, document_route(routes, takes_more=limits.unknown == "warn")],
        middleware=[
            Middleware(
                Edge,
                admission=CallerCheck(
                    hosts=frozenset(host.lower() for host in hosts),
                    origins=frozenset(origin.lower() for origin in origins),
                ),
                metrics=metrics,
                mono=clock.mono,
                rng=rng,
                keys=keys,
            ),
        ],
        exception_handlers={HTTPException: refuse_route},
    )
    app.router.redirect_slashes = False
    return app


def _dialects(
    generations: Generations,
    store: ResponseStore,
    jobs: JobQueue,
    copies: AnswerCopies | None,
    rng: random.Random,
) -> list[Route]:
    """The routes of generations, but those of Ollama."""
    resumable = ResumableAnswers(generations, copies)
    background = BackgroundResponses(jobs, generations, store, rng, resumable)
    response = GenerationRoute(
        lambda body, share: parse_response(body, store, share),
        generations,
        background.take,
        background.begin,
    )
    begun = AnswerAddress(
        "/v1/responses",
        ResponseReply.id_prefix,
        lambda body, share: parse_response(body, store, share, earlier=()),
        resumable,
    )
    chats = AnswerAddress(
        "/v1/chat/completions", ChatReply.id_prefix, lambda body, _: parse_chat(body), resumable
    )
    completions = AnswerAddress(
        "/v1/completions",
        CompletionReply.id_prefix,
        lambda body, _: parse_completion(body),
        resumable,
    )
    messages = AnswerAddress(
        "/v1/messages", MessageReply.id_prefix, lambda body, _: parse_message(body), resumable
    )
    stored = StoredResponses(store, background, begun, resumable)
    both = ResumableRoute(response, begun)
    return [
        *chats.routes(CHAT, CHAT_NO_OPS),
        *completions.routes(COMPLETION, CHAT_NO_OPS),
        BodyRoute("/v1/responses", both, RESPONSE | COORDINATOR_FIELDS, RESPONSE_NO_OPS),
        Route("/v1/responses/{response_id}", stored, methods=["GET"]),
        Route("/v1/responses/{response_id}/cancel", stored.cancel, methods=["POST"]),
        Route("/v1/responses/{response_id}", stored.delete, methods=["DELETE"]),
        *messages.routes(MESSAGE, MESSAGE_NO_OPS),
        BodyRoute("/v1/messages/count_tokens", CountRoute(generations), MESSAGE, MESSAGE_NO_OPS),
    ]


class Gateway:
    """The endpoints that answer at once."""

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        status: Callable[[], Mapping[str, object]],
        proposers: Callable[[], Sequence[DraftModelState]],
        unready: Callable[[], str],
        metrics: HttpMetrics,
    ) -> None:
        self._directory = directory
        self._status = status
        self._proposers = proposers
        self._unready = unready
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """The served paths."""
        return [
            Route("/healthz", self.health),
            Route("/health", self.health),
            Route("/readyz", self.readiness),
            Route("/metrics", self.metrics),
            Route("/api/v1/status", self.node_status),
            Route("/api/v1/fleet", self.fleet),
        ]

    async def health(self, request: Request) -> Response:
        """GET /healthz, /health."""
        return _json({"status": "ok"})

    async def readiness(self, request: Request) -> Response:
        """GET /readyz."""
        model = self._decisive_model()
        if model is None:
            body = {"ready": False, "model": None, "state": None, "reason": "no model is served"}
            return _json(body, 503)
        reason = self._unready()
        if not reason and not _is_ready(model):
            reason = model.last_error or f"the model is {model.state}"
        body = {
            "ready": not reason,
            "model": model.model_id,
            "state": model.state.value,
            "reason": reason,
        }
        return _json(body, 503 if reason else 200)

    def _decisive_model(self) -> LoadableModel | ImageModel | DraftModelState | None:
        """The default model; on a draft-only node a model that is not ready yet, or else any."""
        served = self._directory
        if models := served.verifiers() or served.embedders() or served.image_models():
            return models[0]
        proposers = self._proposers()
        waited_for = (model for model in proposers if not _is_ready(model))
        return next(waited_for, proposers[0] if proposers else None)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(
            self._metrics.text(), media_type=None, headers={"content-type": CONTENT_TYPE}
        )

    async def node_status(self, request: Request) -> Response:
        """GET /api/v1/status."""
        return _json(self._status())

    async def fleet(self, request: Request) -> Response:
        """GET /api/v1/fleet."""
        return _json(self._status().get("fleet", {}))


def _is_ready(model: LoadableModel | ImageModel | DraftModelState) -> bool:
    """Whether a request at this moment finds the model, or has it loaded."""
    if model.state is ModelState.READY:
        return True
    return model.state is ModelState.UNLOADED and not isinstance(model, DraftModelState)


def _json(value: object, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    body = json.dumps(value, default=str)
    return Response(body, status, headers=headers, media_type="application/json")
