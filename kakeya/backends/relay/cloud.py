"""A cloud: a service with an API like OpenAI's, asked for one streamed answer at a time.

The client of the answer leaves, and the connection to the service is closed with it. The key is
read anew for each request, is sent in one header to the one URL of the settings (redirects are not
followed), and is struck out of whatever the service says.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import httpx2

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.cloud_body import chat_body, completion_body, model_of, not_sent
from kakeya.backends.relay.cloud_stream import CloudStream
from kakeya.backends.relay.faults import UpstreamDenied, fault_of
from kakeya.backends.request import ChatRequest, Request
from kakeya.core.errors import DeadlineExceeded, PeerError, Unsupported
from kakeya.core.hosts import is_loopback_host
from kakeya.core.units import KIB
from kakeya.text.tools.answer import Part

_CONNECT_S = 10.0
_MOST_REFUSAL_BYTES = 64 * KIB
_KEPT = 8
"""Idle connections, for later requests."""


class Cloud:
    """The backend of [clouds.NAME]."""

    def __init__(
        self, name: str, *, url: str, key_env: str, key_file: Path | None, timeout_s: float
    ) -> None:
        """The values are those of `CloudSettings`."""
        self._name = name
        self._who = f"the cloud {name}"
        self._url = url
        self._key_env = key_env
        self._key_file = key_file
        self._timeout_s = timeout_s
        self._host = urlsplit(url).hostname or ""
        self._http: httpx2.AsyncClient | None = None

    async def start(self) -> None:
        """As `Backend`. Connects to nothing yet."""
        # In a thread, since it reads the certificates that are trusted.
        self._http = await asyncio.to_thread(self._client)

    def _client(self) -> httpx2.AsyncClient:
        timeout_s = self._timeout_s
        return httpx2.AsyncClient(
            timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=_KEPT),
            # The internet may be behind a proxy of the environment; this machine is not.
            trust_env=not is_loopback_host(self._host),
        )

    async def stop(self) -> None:
        """As `Backend`."""
        if self._http is not None:
            await self._http.aclose()

    def health(self) -> str:
        """As `Backend`: whether its key is there."""
        variable = self._key_env
        if variable and not os.environ.get(variable):
            return f"the variable {variable}, which holds the key of {self._who}, is not set"
        return ""

    def check(self, asked: Request) -> list[str]:
        """As `Backend`."""
        if asked.params.top_logprobs is not None:
            raise Unsupported(
                f"logprobs are not supported of {self._who}; leave them out", param="logprobs"
            )
        return not_sent(asked)

    async def handle(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        """As `Backend`. Raises the errors of `fault_of`, DeadlineExceeded where the service is
        silent for too long, and PeerError where no connection is had or it breaks."""
        path, body = self._request(asked)
        key = await self._key()
        try:
            async with aclosing(self._answer(path, body, key)) as parts:
                async for part in parts:
                    yield part
        except httpx2.TimeoutException as late:
            raise DeadlineExceeded(f"{self._who} was silent for {self._timeout_s:g} s") from late
        except httpx2.HTTPError as broken:
            reason = str(broken) or type(broken).__name__
            raise PeerError(f"{self._who} ({self._host}) does not answer: {reason}") from broken

    def _request(self, asked: Request) -> tuple[str, Mapping[str, object]]:
        model = model_of(self._name, asked.params.model)
        if isinstance(asked, ChatRequest):
            # OpenAI's own models that think refuse the name that all other services know.
            is_openai = self._host == "api.openai.com"
            limit = "max_completion_tokens" if is_openai else "max_tokens"
            return "/chat/completions", chat_body(asked, model, limit)
        return "/completions", completion_body(asked, model)

    async def _key(self) -> str:
        """The key; "" = the service needs none. Raises UpstreamDenied where it cannot be had."""
        if problem := self.health():
            raise UpstreamDenied(problem)
        file = self._key_file
        if file is None:
            return os.environ.get(self._key_env, "").strip()
        try:
            return (await asyncio.to_thread(file.read_text, "utf-8")).strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise UpstreamDenied(f"the key of {self._who} cannot be read: {problem}") from None

    async def _answer(
        self, path: str, body: Mapping[str, object], key: str
    ) -> AsyncGenerator[Part | Finished, None]:
        assert self._http is not None, "a request before the start"
        # Packed bytes would be held back until a block of them is full.
        headers = {"accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        url = self._url + path
        async with self._http.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                await self._refuse(response, key)
            kind = response.headers.get("content-type", "")
            stream = CloudStream(self._who, is_stream="json" not in kind)
            async for data in response.aiter_bytes():
                for part in stream.feed(data):
                    yield part
            for last in stream.finish():
                yield last

    async def _refuse(self, response: httpx2.Response, key: str) -> NoReturn:
        said = b""
        async for data in response.aiter_bytes():
            said += data
            if len(said) > _MOST_REFUSAL_BYTES:
                break
        if key:
            said = said.replace(key.encode(), b"[key]")
        raise fault_of(self._who, response.status_code, response.headers, said, now=time.time())
