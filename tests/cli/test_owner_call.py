from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kakeya.cli import owner_call
from kakeya.core.errors import DeadlineExceeded, KakeyaError, PeerUnavailable
from kakeya.v1 import weights_pb2 as pb
from kakeya.v1.weights_pb2_grpc import (
    ModelFilesServiceServicer,
    ModelFilesServiceStub,
    add_ModelFilesServiceServicer_to_server,
)
from kakeya.wire.status import metadata_of, status_of


class Refuses(ModelFilesServiceServicer):
    error: KakeyaError

    def RemoveModel(self, request: Any, context: Any) -> Any:
        context.set_trailing_metadata(metadata_of(self.error))
        context.abort(status_of(self.error), self.error.message)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuses]:
    socket = tmp_path / "s"
    monkeypatch.setattr(owner_call, "find_running", lambda _: SimpleNamespace(pid=1))
    monkeypatch.setattr(owner_call, "control_socket", lambda _: socket)
    service = Refuses()
    server = grpc.server(ThreadPoolExecutor(1))
    add_ModelFilesServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    yield service
    server.stop(None).wait()


def ask(folder: Path) -> None:
    owner_call.ask_node(
        folder,
        ModelFilesServiceStub,
        lambda stub: stub.RemoveModel(pb.RemoveModelRequest(), timeout=60),
        timeout_s=60,
    )


@pytest.mark.parametrize("kind", [PeerUnavailable, DeadlineExceeded])
def test_what_a_node_says_of_others_is_not_taken_for_its_own_silence(
    tmp_path: Path, node: Refuses, kind: type[KakeyaError]
) -> None:
    node.error = kind("the hub cannot be reached")
    with pytest.raises(kind, match=r"^the hub cannot be reached$"):
        ask(tmp_path)


def test_a_node_that_does_not_answer_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_call, "find_running", lambda _: SimpleNamespace(pid=1))
    with pytest.raises(PeerUnavailable, match="does not answer on unix:"):
        ask(tmp_path)
