"""The HTTP server: uvicorn with httptools on a socket that the node bound, as a context manager.

The server installs no signal handlers and writes no logs of its own. A request that the parser
refuses is answered in JSON like every other error; a connection with a request head that is late or
too large is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from email.utils import formatdate
from typing import cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kakeya.core.units import KIB
from kakeya.gateway.http.edge import error_body
from kakeya.gateway.http.tls import ServerTls

HEAD_S = 5.0
"""From the first byte of a request to the end of its head."""
HEAD_BYTES = 32 * KIB
IDLE_S = 75.0
"""A connection without a request, a new one too; longer than common proxies keep theirs."""
LAST_S = 1.0
"""How long an idle connection may bring another request once its port was left: its client may have
sent it before it knows."""
LINGER_S = 5.0
"""How long bytes are still read behind a refusal: the system resets a connection that is closed
before they are read, and the client loses the refusal."""
_FORCED_S = 2.0
_GOODBYE_S = 1.0
"""How long a stop waits until an idle client of TLS answers the end of its connection: a program
that keeps the connection for later reads nothing of it."""
_PROXIES = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
"""The proxies that are believed which client they speak for; no variable of the environment adds
one, since a client that passes for one on this machine needs no API key."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's connection with JSON refusals, limits on the request's head, and no other protocol.

    An offer to upgrade is ignored (RFC 9110, 7.8). The parser takes all behind the head of an offer
    for another protocol, so a new parser reads that head again without the offer, and the rest.
    """

    head_s = HEAD_S
    refusal = ""
    """The answer to whatever comes; "" = requests are served."""
    date_answers: Callable[[], None]
    """Renews the date of the server's answers; called at each request."""
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _goodbye: asyncio.TimerHandle | None = None
    _is_refused = False
    _is_leaving = False
    _is_parting = False

    @property
    def is_expected(self) -> bool:
        """Whether a POST request has no whole answer, or a request may be on its way."""
        if self.transport.is_closing():
            return False
        if self.cycle is None:
            return not self._is_refused
        if self.cycle.response_complete:
            return self._is_parting
        return bool(self.cycle.scope["method"] == "POST")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head(IDLE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_whole()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Close the connection once it is idle for a moment: a request may be on its way."""
        self._is_leaving = True
        if self.cycle is None:
            self._expect_head(self.head_s)
        elif self.cycle.response_complete:
            self._part()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_leaving:
            self._part()

    def _part(self) -> None:
        self._is_parting = True
        self.loop.call_later(LAST_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._is_parting = False
        if self.cycle is None or self.cycle.response_complete:
            self.shutdown()

    def shutdown(self) -> None:
        """Close the connection, now or behind the answer to its request."""
        if self._goodbye is not None:  # asyncio's TLS takes no second end of a connection
            return
        super().shutdown()
        if self.transport.is_closing() and self.transport.get_extra_info("ssl_object"):
            self._goodbye = self.loop.call_later(_GOODBYE_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self.refusal:
            self.send_400_response(self.refusal)
            return
        try:
            self._parse(data)
        except httptools.HttpParserError as fault:
            why = fault.__context__
            is_ours = isinstance(why, ValueError)
            self.send_400_response(str(why) if is_ours else "these bytes are no HTTP/1.1 request")

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                (read,) = offer.args
                data = self._head_without_offer() + data[read:]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            else:
                return

    def _head_without_offer(self) -> bytes:
        version = self.scope["http_version"].encode()
        lines = [b"%b %b HTTP/%b" % (self.scope["method"].encode(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._expect_head(self.head_s)

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name)
        self._count(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_is_whole()
        self.date_answers()
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            return
        method = self.parser.get_method()
        if method == b"CONNECT":  # the parser turns this into send_400_response
            raise ValueError("a node is no proxy")
        self.scope["method"] = method.decode()
        self.scope["http_version"] = self.parser.get_http_version()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP request."""
        body = error_body(msg, 400, code="invalid_http")
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # ends the request that is being answered, too
            return
        self._is_refused = True
        self.loop.call_later(LINGER_S, self.transport.close)

    def _count(self, piece: bytes) -> None:
        self._head_bytes += len(piece)
        if self._head_bytes > HEAD_BYTES:  # the parser turns this into send_400_response
            raise ValueError(f"the request's head is over {HEAD_BYTES} bytes")

    def _expect_head(self, within_s: float) -> None:
        self._head_is_whole()
        self._head_timer = self.loop.call_later(within_s, self.transport.close)

    def _head_is_whole(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, that tells when it accepts, and that can accept TLS."""

    def __init__(self, config: uvicorn.Config, tls: ServerTls | None, head_s: float) -> None:
        super().__init__(config)
        self.accepts, self.leaves = asyncio.Event(), asyncio.Event()
        self._tls, self._head_s = tls, head_s
        self._dated = 0
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets if self._tls is None else [])
        if self._tls is not None and sockets:
            (sock,) = sockets
            sock.listen(self.config.backlog)
            serving = self._tls.accept(sock, self._make_protocol, self._head_s)
            self._accepting = asyncio.create_task(serving)
            self._accepting.add_done_callback(lambda _: sock.close())
        self.accepts.set()

    async def main_loop(self) -> None:
        """Wait for the stop. uvicorn's own loop wakes ten times a second, to renew the date."""
        await self.leaves.wait()

    def date_answers(self) -> None:
        """Renew the date of the answers if it is not that of this second."""
        if (second := int(time.time())) != self._dated:
            self._dated = second
            date = (b"date", formatdate(second, usegmt=True).encode())
            self.server_state.default_headers = [date, *self.config.encoded_headers]

    def end_connections(self) -> None:
        """Have each connection closed behind its next answer, which says so."""
        closes = (b"connection", b"close")
        if closes not in self.config.encoded_headers:
            self.config.encoded_headers.append(closes)
            self.server_state.default_headers.append(closes)

    def close_port(self) -> None:
        """Accept nothing any more, and serve what was accepted."""
        self.end_connections()
        loop = asyncio.get_running_loop()
        if self._accepting is not None:
            self._accepting.cancel()
        for server in self.servers:
            for sock in server.sockets:
                loop.remove_reader(sock)
            # A server that is closed drops what it accepted in this turn of the loop.
            loop.call_soon(server.close)
        for connection in cast(set[_Protocol], self.server_state.connections).copy():
            connection.leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:  # before the socket is closed under it
            self._accepting.cancel()
            await asyncio.wait((self._accepting,))
        if self._tls is not None:
            await self._tls.end()
        await super().shutdown(sockets)

    def _make_protocol(self, refusal: str) -> asyncio.Protocol:
        make = cast(type[_Protocol], self.config.http_protocol_class)
        protocol = make(self.config, self.server_state, self.lifespan.state)
        protocol.refusal = refusal
        return protocol

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A running server. `stop` may be called more than once."""

    def __init__(self, server: _Server, serving: asyncio.Task[None]) -> None:
        self._server = server
        self._serving = serving

    @property
    def answering(self) -> int:
        """How many POST requests have no whole answer yet, or may be on their way here."""
        connections = cast(set[_Protocol], self._server.server_state.connections)
        return sum(one.is_expected for one in connections)

    def end_connections(self) -> None:
        """Close each connection behind its next answer: its client then makes a new one."""
        self._server.end_connections()

    def accept_no_more(self) -> None:
        """Leave the port and close idle connections; others are closed behind their answers. The
        port is closed where no other process has it."""
        self._server.close_port()

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let running requests end for `grace_s`, then cut them off."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        self._server.leaves.set()
        await asyncio.wait((self._serving,))
        state = self._server.server_state
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_FORCED_S)
        for connection in list(state.connections):
            connection.transport.abort()
        self._serving.result()


@asynccontextmanager
async def serve_http(
    app: ASGIApp,
    sock: socket.socket,
    *,
    tls: ServerTls | None = None,
    grace_s: float = 0.0,
    head_s: float = HEAD_S,
) -> AsyncIterator[HttpServer]:
    """Serve `app` on a bound socket until the context ends, with `grace_s` for what then runs.

    Takes the socket over and closes it. With `tls` its port speaks HTTPS too.
    """

    class Protocol(_Protocol):
        """A connection of this server."""

    Protocol.head_s = head_s
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # faults are logged by the edge
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(IDLE_S),
        forwarded_allow_ips=list(_PROXIES),
    )
    server = _Server(config, tls, head_s)
    Protocol.date_answers = server.date_answers
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    accepts = asyncio.create_task(server.accepts.wait())
    await asyncio.wait((serving, accepts), return_when=asyncio.FIRST_COMPLETED)
    accepts.cancel()
    if serving.done():
        serving.result()
    running = HttpServer(server, serving)
    try:
        yield running
    finally:
        await running.stop(grace_s)
