"""The gateway's own counts, and the text that Prometheus reads of them and of all other figures.

Labels have few values by construction: routes come from a fixed table, models from the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import Scope

from kakeya.core.figures import Durations, Figure
from kakeya.generation.frames import Usage
from kakeya.generation.place_rate import LEAST_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ROUTES = frozenset(
    {"/v1/models", "/v1/chat/completions", "/v1/completions", "/healthz", "/readyz", "/metrics"}
    | {"/", "/health", "/openapi.json"}
    | {"/v1/embeddings", "/v1/precache", "/api/v1/fleet", "/api/v1/status"}
)
_ONE_MODEL, _OTHER = "/v1/models/{id}", "other"
STATUSES = tuple(
    map(str, (200, 204, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 499, 500, 502, 503, 504))
)
"""The statuses of answers, and 499."""
_SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)


class FigureCollector(Collector):
    """Figures of other floors, asked for at each scrape."""

    def __init__(self, figures: Callable[[], Iterable[Figure]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Make the family of each figure."""
        return map(_family, self._figures())


class HttpMetrics:
    """The gateway's own registry."""

    def __init__(
        self,
        figures: Callable[[], Iterable[Figure]],
        models: Callable[[], Iterable[str]] = tuple,
        most_running: int = 0,
    ) -> None:
        """`models` are the ids of the models that are served, per scrape; `most_running` is the
        limit on generations at a time."""
        self._models = models
        self._most_running = most_running
        registry = CollectorRegistry(auto_describe=False)
        self._registry = registry
        self._requests = Counter(
            "kakeya_http_requests",
            "Requests by route and status; 499: the client left first",
            ("route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "kakeya_http_request_seconds",
            "Time from the request's head to the end of its answer",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_text = Histogram(
            "kakeya_http_first_token_seconds",
            "Time from the request's head to the first token",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "kakeya_http_tokens",
            "Tokens of prompts and completions",
            ("model", "kind"),
            registry=registry,
        )
        self._drafts = Counter(
            "kakeya_http_draft_tokens",
            "Draft tokens of generations: verified by the model, and accepted of these",
            ("model", "outcome"),
            registry=registry,
        )
        self._abandoned = Counter(
            "kakeya_http_abandoned",
            "Generations that were stopped because the client left",
            ("model",),
            registry=registry,
        )
        self.running = Gauge(
            "kakeya_http_generations_running", "Generations at this moment", registry=registry
        )
        registry.register(FigureCollector(figures))
        for label in product((*_ROUTES, _ONE_MODEL, _OTHER), STATUSES):
            self._requests.labels(*label)
            self._seconds.labels(label[0])

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one request."""
        route = _route(scope["path"])
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def rate_headers(self) -> dict[str, str]:
        """The places for generations, in the headers that OpenAI's clients read."""
        (running,) = (sample.value for one in self.running.collect() for sample in one.samples)
        left = max(0, self._most_running - int(running))
        return {
            "x-ratelimit-limit-requests": str(self._most_running),
            "x-ratelimit-remaining-requests": str(left),
            "x-ratelimit-reset-requests": "0s" if left else f"{LEAST_S:g}s",
        }

    def generation_began(self, model: str, prompt_tokens: int) -> None:
        """Count a prompt."""
        self._tokens.labels(model, "prompt").inc(prompt_tokens)

    def first_token(self, model: str, seconds: float) -> None:
        """Count the delay to the first token."""
        self._first_text.labels(model).observe(seconds)

    def generation_ended(
        self, model: str, completion_tokens: int, *, is_abandoned: bool, usage: Usage | None = None
    ) -> None:
        """Count an output, whole or abandoned; `usage` None = its drafts are not known."""
        self._tokens.labels(model, "completion").inc(completion_tokens)
        if usage is not None:
            self._drafts.labels(model, "verified").inc(usage.verified)
            self._drafts.labels(model, "accepted").inc(usage.accepted)
        if is_abandoned:
            self._abandoned.labels(model).inc()

    def text(self) -> bytes:
        """Write everything in the Prometheus text format; counts begin at 0 for each label."""
        for model in self._models():
            self._tokens.labels(model, "prompt")
            self._tokens.labels(model, "completion")
            self._drafts.labels(model, "verified")
            self._drafts.labels(model, "accepted")
            self._abandoned.labels(model)
            self._first_text.labels(model)
        return generate_latest(self._registry)


def _family(figure: Figure) -> Metric:
    if figure.kind == "histogram":
        times = HistogramMetricFamily(figure.name, figure.help, labels=figure.by)
        for labels, value in figure.values.items():
            assert isinstance(value, Durations)
            times.add_metric(labels, value.buckets(), value.sum_s)
        return times
    make = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
    numbers = make(figure.name, figure.help, labels=figure.by)
    for labels, value in figure.values.items():
        assert not isinstance(value, Durations)
        numbers.add_metric(labels, value)
    return numbers


def _route(path: str) -> str:
    if path in _ROUTES:
        return path
    return _ONE_MODEL if path.startswith("/v1/models/") else _OTHER
