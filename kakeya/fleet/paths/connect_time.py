"""The round trip to an address, by the time that TCP takes to connect: the other machine's kernel
answers, so no program's work or waiting is in it.
"""

from __future__ import annotations

import socket
import time

from kakeya.core.settings import split_address

_TRIES = 3
_LONGEST_S = 1.0


def connect_rtt_s(address: str) -> float | None:
    """The least of some round trips to HOST:PORT, in seconds; None = it does not answer. Blocks."""
    found = []
    for _ in range(_TRIES):
        began_s = time.perf_counter()
        try:
            with socket.create_connection(split_address(address), timeout=_LONGEST_S):
                found.append(time.perf_counter() - began_s)
        except OSError:
            break
    return min(found, default=None)
