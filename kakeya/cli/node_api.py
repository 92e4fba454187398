"""The client of the command line: the address of a node, and HTTP calls with readable errors.

Standard library only, so that `kakeya status` answers at once.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kakeya.core.errors import ConfigError, KakeyaError, PeerProtocol, PeerUnavailable
from kakeya.core.settings import Illegal, peer_address, split_address
from kakeya.node.datadir import find_running, is_held

_ANSWER_S = 10.0
_STREAM_S = 600.0
_QUIET_S = 60.0
"""A stream of facts is never silent for so long."""
_WAITS = b": waiting: "
KEY_VARIABLE = "KAKEYA_API_KEY"
"""The API key that the command line sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeApi:
    """The HTTP interface of one node at HOST:PORT; over TLS, SSL_CERT_FILE names the authority."""

    address: str
    key: str = field(default="", repr=False)
    is_encrypted: bool = False

    def get(self, path: str) -> dict[str, object]:
        """Fetch a JSON object. Raises PeerError with the node's message."""
        connection = self._connect(_ANSWER_S)
        try:
            answer = self._ask(connection, "GET", path, b"")
            return _object(self.address, self._read(answer))
        finally:
            connection.close()

    def post(self, path: str) -> dict[str, object]:
        """Post nothing to a path and fetch a JSON object. Raises PeerError as `get`."""
        connection = self._connect(_ANSWER_S)
        try:
            answer = self._ask(connection, "POST", path, b"")
            return _object(self.address, self._read(answer))
        finally:
            connection.close()

    def put(self, path: str, body: Mapping[str, object]) -> dict[str, object]:
        """Put a JSON object to a path and fetch one. Raises PeerError as `get`."""
        connection = self._connect(_ANSWER_S)
        try:
            answer = self._ask(connection, "PUT", path, json.dumps(body).encode())
            return _object(self.address, self._read(answer))
        finally:
            connection.close()

    def stream(
        self,
        path: str,
        body: Mapping[str, object],
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> Iterator[dict[str, object]]:
        """Post a request and yield the JSON objects of the streamed events. Raises PeerError.

        `on_wait` hears of the load that the answer waits for.
        """
        connection = self._connect(_STREAM_S)
        try:
            answer = self._ask(connection, "POST", path, json.dumps(body).encode())
            while line := self._read_line(answer):
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data.startswith(_WAITS):
                    on_wait(data.removeprefix(_WAITS).decode("utf-8", "replace"))
                if line.startswith(b"data: "):
                    yield _checked(self.address, _object(self.address, data))
            raise PeerUnavailable(f"the node at {self.address} ended in the middle of its answer")
        finally:
            connection.close()

    def facts(self, for_s: float | None) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield what the node tells of itself and its peers, by node id and section, each time that
        it changes: for so many seconds, None = without end. Raises PeerError."""
        connection = self._connect(_QUIET_S if for_s is None else for_s)
        ends_mono = math.inf if for_s is None else time.monotonic() + for_s
        facts: dict[str, dict[str, Any]] = {}
        try:
            answer = self._ask(connection, "GET", "/api/v1/events", b"")
            while time.monotonic() < ends_mono and (line := answer.readline()):
                if not line.startswith(b"data: "):
                    continue
                changed = _object(self.address, line.removeprefix(b"data: "))
                for node_id, sections in dict(changed.get("nodes") or {}).items():  # type: ignore[call-overload]
                    facts.setdefault(node_id, {}).update(sections)
                yield facts
            if for_s is None:
                raise PeerUnavailable(f"the node at {self.address} ended")
        except (OSError, http.client.HTTPException) as problem:
            if for_s is None:  # else the time is over
                raise self._gone(problem) from problem
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = split_address(self.address)
        if self.is_encrypted:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s)
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"} if body else {}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as problem:
            raise self._gone(problem) from problem
        if answer.status != http.client.OK:
            raise KakeyaError(_refusal(self.address, answer.status, self._read(answer)))
        return answer

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.read()
        except (OSError, http.client.HTTPException) as problem:
            raise self._gone(problem) from problem

    def _read_line(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.readline()
        except (OSError, http.client.HTTPException) as problem:
            raise self._gone(problem) from problem

    def _gone(self, problem: Exception) -> PeerUnavailable:
        reason = str(problem) or repr(problem)
        if isinstance(problem, OSError) and problem.strerror:
            reason = problem.strerror
        elif isinstance(
            problem, http.client.BadStatusLine
        ):  # its text holds the bytes of the other side
            reason = "the port there speaks no HTTP, like the gRPC port of a node"
        return PeerUnavailable(
            f"no node answers HTTP at {self.address}: {reason}; "
            "start one with kakeya-node, or give the address of one with --node"
        )


def find_node(address: str, folder: Path, key: str = "") -> NodeApi:
    """Return the node at an address, or the node that runs in `folder` if none is given.

    `key` is the API key for it, "" = none.

    Raises ConfigError for a malformed address, PeerUnavailable when no node runs.
    """
    if address:
        scheme, _, bare = address.rstrip("/").rpartition("://")
        try:
            where = peer_address(address if scheme not in ("", "http", "https") else bare)
            return NodeApi(address=where, key=key, is_encrypted=scheme == "https")
        except Illegal as problem:
            raise ConfigError(f"--node: {problem}") from problem
    running = find_running(folder)
    if running is None:
        raise PeerUnavailable(_why_none(folder))
    return NodeApi(address=running.http, key=key)


def _why_none(folder: Path) -> str:
    if is_held(folder):
        return f"the node in {folder} starts, or ends; ask again in a moment, or see kakeya logs"
    killed = find_running(folder, or_killed=True)
    if killed is not None and killed.service:
        return (
            f"the node in {folder} was killed; its service starts it again within 30 s: "
            f"kakeya service status --as {killed.service}"
        )
    return (
        f"no node runs in {folder}; start one with kakeya-node (from a clone: "
        "./scripts/kakeya-node), or name one with --node HOST:PORT or --data-dir DIR"
    )


def _object(address: str, data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except ValueError as problem:
        raise PeerProtocol(f"{address} answered no JSON; is it a Kakeya node?") from problem
    if not isinstance(found, dict):
        raise PeerProtocol(f"{address} answered JSON that is not an object; is it a Kakeya node?")
    return found


def _checked(address: str, event: dict[str, object]) -> dict[str, object]:
    error = event.get("error")
    if isinstance(error, dict):
        raise KakeyaError(f"{address}: {error.get('message')}")
    return event


def _refusal(address: str, status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace") or "no reason given"
    return f"{address} answered {status}: {message}"
