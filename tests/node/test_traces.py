"""One request over two nodes as a receiver of OpenTelemetry sees it."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.node.nodes import QUICK, VERIFIER, NodeProcess, offers, seen_by, verifier_node
from tests.waiting import eventually

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="needs the extra otel: pip install -e '.[otel]'",
)
pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel: pip install -e '.[otel]'")
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver:
    """Takes spans over HTTP as a collector would."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.address = ""

    def take(self, body: bytes) -> None:
        for sent in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
            facts = {one.key: one.value.string_value for one in sent.resource.attributes}
            for scope in sent.scope_spans:
                self.spans += [
                    {
                        "node": facts["service.instance.id"],
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "above": span.parent_span_id.hex(),
                        "from": span.start_time_unix_nano,
                        "to": span.end_time_unix_nano,
                        "facts": {one.key: one.value.string_value for one in span.attributes},
                    }
                    for span in scope.spans
                ]

    def of(self, node: str) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.spans if one["node"] == node}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # else spans of a busy node are lost
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield receiver
        server.shutdown()


async def test_one_trace_holds_the_work_of_both_nodes(tmp_path: Path, receiver: Receiver) -> None:
    async with verifier_node(tmp_path / "serves") as verifier:
        flags = ("--node-id", "front", "--proposer", "ngram", "--peer", verifier.grpc, *QUICK)
        async with NodeProcess(tmp_path / "front", *flags) as front:
            await eventually(
                "the front hears of the model",
                lambda: any(VERIFIER in offers(card) for card in seen_by(front).values()),
            )
            async with httpx.AsyncClient(timeout=100) as client:
                answer = await client.post(
                    f"http://{front.http}/v1/completions",
                    json={"model": VERIFIER, "prompt": "one two", "max_tokens": 8},
                    headers={"traceparent": f"00-{TRACE}-{ABOVE}-01"},
                )
                assert answer.status_code == 200, answer.text
            wanted = {"POST /v1/completions", "Decode"}
            await eventually(
                "the spans are there", lambda: wanted <= {one["name"] for one in receiver.spans}
            )
            await eventually("all parts are there", lambda: "decode" in receiver.of("verifier"))
    assert {one["trace"] for one in receiver.spans} == {TRACE}
    whole, served = receiver.of("front")["POST /v1/completions"], receiver.of("verifier")["Decode"]
    assert whole["above"] == ABOVE
    assert served["above"] == whole["id"]
    for node, above in (("front", whole), ("verifier", served)):
        assert above["facts"]["gen_ai.request.model"] == VERIFIER
        assert above["facts"]["kakeya.request_id"] == answer.json()["id"]
        told = receiver.of(node)
        for part in ("prefill", "decode"):
            assert told[part]["above"] == above["id"]
            assert above["from"] <= told[part]["from"] <= told[part]["to"] <= above["to"]
