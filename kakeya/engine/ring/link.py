"""One control connection of a ring group: JSON messages over TCP, each behind its length.

A peer that says nothing for SILENT_S is lost, as one that closes the connection is.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading

from kakeya.core.errors import PeerProtocol, PeerUnavailable
from kakeya.engine.ring.progress import SILENT_S

_LENGTH = struct.Struct(">I")
_MOST_BYTES = 16 << 20
"""The longest command names the token ids of one piece of a prompt."""
_LOOKS = 12
"""Silence is as many looks in vain: a machine that stood still makes one look long, and no more."""


class RingLink:
    """One end of a connection; several threads may send, one receives."""

    def __init__(self, connection: socket.socket, silent_s: float = SILENT_S) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silent_s)
        self._connection = connection
        self._silent_s = silent_s
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message. Raises PeerUnavailable."""
        data = json.dumps(message, separators=(",", ":")).encode()
        try:
            with self._sending:
                self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as failure:
            raise PeerUnavailable(f"it takes no message: {failure}") from failure

    def receive(self) -> object:
        """Wait for a message. Raises PeerUnavailable, PeerProtocol."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MOST_BYTES:
            raise PeerProtocol(f"a message of {length} bytes; at most {_MOST_BYTES} are sent")
        try:
            message: object = json.loads(self._read(length))
        except (ValueError, RecursionError) as failure:
            raise PeerProtocol(f"a message is no JSON: {failure}") from failure
        return message

    def close(self) -> None:
        """Close the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):  # the peer closed it before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            look_ms = 1000 * self._silent_s / _LOOKS
            if not any(self._arrivals.poll(look_ms) for _ in range(_LOOKS)):
                raise PeerUnavailable(f"it said nothing for {self._silent_s:.0f} s")
            try:
                part = self._connection.recv(size - len(parts))
            except OSError as failure:
                raise PeerUnavailable(f"its connection failed: {failure}") from failure
            if not part:
                raise PeerUnavailable("it ended")
            parts += part
        return bytes(parts)
