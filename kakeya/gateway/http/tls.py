"""HTTPS and plain HTTP at one port: the first byte of a connection tells them apart.

A program on this machine speaks plain HTTP as ever; a caller of another machine must speak TLS,
unless the owner opened the network, and is told so in plain HTTP if it does not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError
from kakeya.core.figures import Figure, counter
from kakeya.core.hosts import is_loopback_host
from kakeya.core.log import CountLog, event

_log = logging.getLogger(__name__)
_HANDSHAKE = b"\x16"
"""The first byte of TLS (RFC 8446, 5.1); no method of HTTP begins with it."""
_NO_ROOM_S = 0.1
MakeProtocol = Callable[[str], asyncio.Protocol]
"""Makes the protocol of a connection; it answers each request with the text, "" = serves it."""
SPEAK_TLS = "from another machine this port speaks HTTPS only: write https:// in the address"


class ServerTls:
    """The certificate that the server shows: two files in PEM, read again by `refresh`.

    `spare` is the certificate while the first file does not exist.
    """

    def __init__(
        self, certificate: Path, key: Path, *, spare: Path | None = None, is_plain_open: bool
    ) -> None:
        """`is_plain_open` lets other machines speak plain HTTP too. Raises ConfigError."""
        words = "connections ended in the handshake of HTTPS: does the caller trust the fleet's ca?"
        self._refused = CountLog(_log, words, SystemClock())
        self._certificate, self._spare, self._key = certificate, spare, key
        self.is_plain_open = is_plain_open
        self._shown: tuple[bytes, bytes] = (b"", b"")
        self._beginning: set[asyncio.Task[None]] = set()
        self.refresh()

    def figures(self) -> Iterator[Figure]:
        """The handshakes that failed."""
        words = "Connections that ended in the handshake of HTTPS"
        yield counter("kakeya_https_handshakes_failed", words, self._refused.total)

    def refresh(self) -> None:
        """Show what the files hold, from the next handshake on. Raises ConfigError."""
        is_there = self._spare is None or self._certificate.exists()
        certificate = self._certificate if is_there else self._spare
        assert certificate is not None
        try:
            found = (certificate.read_bytes(), self._key.read_bytes())
            if found != self._shown:
                # A new context: handshakes on the event loop may be reading the one of before.
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.set_alpn_protocols(["http/1.1"])
                context.load_cert_chain(certificate, self._key)
                self._context = context
        except (OSError, ssl.SSLError) as problem:
            raise ConfigError(
                f"the certificate {certificate} and the key {self._key} cannot be used for HTTPS: "
                f"{problem}; give a chain and its private key in PEM, without a password"
            ) from problem
        self._shown = found

    async def accept(self, sock: socket.socket, make: MakeProtocol, limit_s: float) -> None:
        """Accept connections until it is cancelled; those that were accepted begin all the same,
        until `end`. The first byte and the handshake may take `limit_s`."""
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        while True:
            try:
                connection, peer = await loop.sock_accept(sock)
            except OSError:  # no descriptor is free, or the caller has left already
                await asyncio.sleep(_NO_ROOM_S)
                continue
            begun = asyncio.create_task(self._begin(connection, str(peer[0]), make, limit_s))
            self._beginning.add(begun)
            begun.add_done_callback(self._beginning.discard)

    async def end(self) -> None:
        """Close the connections that have not begun."""
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)

    async def _begin(
        self, connection: socket.socket, host: str, make: MakeProtocol, limit_s: float
    ) -> None:
        is_tls = False
        try:
            first = await _first_byte(connection, limit_s)
            is_tls = first == _HANDSHAKE
            is_plain_fine = self.is_plain_open or is_loopback_host(host)
            # From here on the transport closes the socket.
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: make("" if is_tls or is_plain_fine else SPEAK_TLS),
                connection,
                ssl=self._context if is_tls else None,
                ssl_handshake_timeout=limit_s if is_tls else None,
            )
        except (OSError, TimeoutError) as left:  # an ssl.SSLError is an OSError
            _log.debug("a connection ended before its first request: %r", left)
            self._refused.add(is_tls)
        except Exception as fault:  # noqa: BLE001 - the HTTP edge: no fault may end the server
            event(_log, "connection failed", level=logging.ERROR, error=repr(fault))
            _log.debug("traceback", exc_info=fault)


async def _first_byte(connection: socket.socket, limit_s: float) -> bytes:
    """Look at the first byte without taking it; b"" when the caller has left.

    Raises TimeoutError, and closes the connection then.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    return connection.recv(1, socket.MSG_PEEK)
                except BlockingIOError:
                    await _readable(loop, connection)
    except BaseException:
        connection.close()
        raise


async def _readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    came = asyncio.Event()
    loop.add_reader(connection, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(connection)
