"""Traces that are off: they cost nothing and need nothing."""

from __future__ import annotations

import logging
import sys

import pytest

from kakeya.wire import traces


def test_off_is_the_default_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    traces.begin("node", "label")
    with traces.request("POST /v1/completions", {"traceparent": "00-1-2-3"}):
        traces.note("req_1", {})
        traces.parts(ended_s=1.0, first_token_s=0.5, prefill_s=0.1, facts={})
        assert traces.metadata() is None
    assert not traces.is_on()


def test_a_receiver_without_the_extra_is_told_of_and_ends_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        traces.begin("node", "label")
    assert not traces.is_on()
    assert "pip install 'kakeya[otel]'" in caplog.text
