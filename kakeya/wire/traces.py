"""Traces: the spans of one request over all nodes that work on it, sent by OpenTelemetry.

    the node that was asked     POST /v1/...     the whole request, below the caller's traceparent
      its parts                 load, wait, prefill, decode
    a node that it goes on to   Decode, DescribeModel, with the same parts

Off unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set and the extra `otel` is installed; off, each call
here is one comparison. The variables of OpenTelemetry's SDK are its settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.core.log import event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PARENT, _REQUEST = "traceparent", "x-kakeya-request-id"
_NS = 1_000_000_000
_SEND_S = 2.0
"""A receiver that is away holds up the end of a node for so long."""
Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(slots=True)
class _Trace:
    span: Span
    request_id: str


_provider: TracerProvider | None = None
"""None = off. One for the process, as its exporter is."""
_current: ContextVar[_Trace | None] = ContextVar("kakeya trace", default=None)


def is_on() -> bool:
    """Whether spans are sent."""
    return _provider is not None


def begin(node_id: str, label: str) -> None:
    """Send spans from now on, where the environment names a receiver."""
    global _provider
    if not any(map(os.environ.get, _ENDPOINTS)):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        why = "no traces are sent: install the extra, pip install 'kakeya[otel]'"
        event(_log, why, level=logging.WARNING, missing=missing.name)
        return
    facts = {"service.name": "kakeya", "service.instance.id": node_id, "kakeya.node": label}
    _provider = TracerProvider(resource=Resource.create(facts))
    limit_s = None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else _SEND_S
    exporter = OTLPSpanExporter(timeout=limit_s)
    _provider.add_span_processor(BatchSpanProcessor(exporter))


async def end() -> None:
    """Send what is left, and be off."""
    global _provider
    if _provider is not None:
        last, _provider = _provider, None
        await asyncio.to_thread(last.shutdown)


@contextmanager
def request(
    name: str, told: Mapping[str, str | bytes], facts: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Make the `with` a span; `told` are the headers of a request, or the metadata of a call, whose
    `traceparent` names the span above it."""
    if _provider is None:
        yield
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers = {key: value for key, value in told.items() if isinstance(value, str)}
    above = TraceContextTextMapPropagator().extract(headers)
    span = _provider.get_tracer(__name__).start_span(name, above, attributes=facts)
    before = _current.set(_Trace(span, headers.get(_REQUEST, "")))
    try:
        if _REQUEST in headers:
            note(headers[_REQUEST], {})
        yield
    except BaseException as failure:
        _fail(span, failure)
        raise
    finally:
        span.end()
        _current.reset(before)


def note(request_id: str, facts: Mapping[str, str | int]) -> None:
    """Say the id of the request whose span this is, and facts of it."""
    if (here := _current.get()) is not None:
        here.request_id = request_id
        here.span.set_attributes({"kakeya.request_id": request_id, **facts})


def metadata() -> Metadata | None:
    """The metadata of a call that is part of the present span; None = there is none."""
    if (here := _current.get()) is None:
        return None
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    told: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(told, set_span_in_context(here.span))
    return (*told.items(), (_REQUEST, here.request_id))


def parts(
    *,
    ended_s: float,
    ready_s: float = 0.0,
    prepared_s: float = 0.0,
    first_token_s: float | None,
    prefill_s: float | None,
    facts: Mapping[str, str | int],
) -> None:
    """Add the parts of a generation that ends at this moment, in seconds since it began: its model
    was there, its prompt was written, its first token came (None = none did) after `prefill_s` of
    work on the prompt (None = not known)."""
    if _provider is None or (here := _current.get()) is None:
        return
    from opentelemetry.trace import set_span_in_context

    here.span.set_attributes(dict(facts))
    began_ns = time.time_ns() - int(ended_s * _NS)
    tracer, above = _provider.get_tracer(__name__), set_span_in_context(here.span)
    first_s = ended_s if first_token_s is None else first_token_s
    prefill_from_s = max(prepared_s, first_s - (prefill_s or 0.0))
    for name, since_s, until_s in (
        ("load", 0.0, ready_s),
        ("wait", max(ready_s, prepared_s), prefill_from_s),
        ("prefill", prefill_from_s, first_s),
        ("decode", first_s, ended_s),
    ):
        if until_s > since_s:
            at_ns = began_ns + int(since_s * _NS)
            span = tracer.start_span(name, above, start_time=at_ns, attributes=dict(facts))
            span.end(began_ns + int(until_s * _NS))


def _fail(span: Span, failure: BaseException) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, f"{type(failure).__name__}: {failure}"[:200])
