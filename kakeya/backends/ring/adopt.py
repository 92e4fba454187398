"""The child that stands for a ring group which was started by hand: the group serves, not this.

It waits until rank 0 serves on its socket, links the socket that the node asks on to it, and ends
when rank 0 does. So the life of any engine holds for the group: its model serves while the group is
there, a request is resumed where the group ends, and the next child waits for the group's return.
Ending this child ends no rank.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
from pathlib import Path
from typing import NoReturn

import grpc

from kakeya.wire.channels import Option, open_sync_channel

_READY = grpc.ChannelConnectivity.READY
_OPTIONS: tuple[Option, ...] = (
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # no call is ever made, and the channel stays
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def main(argv: list[str] | None = None) -> NoReturn:
    """Wait for the group, stand for it, and end with it."""
    parser = argparse.ArgumentParser(prog="kakeya.backends.ring.adopt", description=__doc__)
    parser.add_argument("--group", type=Path, required=True, help="the socket of rank 0")
    parser.add_argument("--socket", type=Path, required=True, help="the socket to link to it")
    options, _ = parser.parse_known_args(argv)  # flags of engines were given to the ranks
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    channel = open_sync_channel(f"unix:{options.group}", _OPTIONS)
    channel.subscribe(states.put, try_to_connect=True)
    _say(f"waiting for the ring group at {options.group}")
    while states.get() is not _READY:
        pass
    options.socket.symlink_to(options.group)
    _say("the ring group serves")
    while states.get() is _READY:
        pass
    _say(f"the ring group at {options.group} ended")
    os._exit(1)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """Wait for end of file on standard input."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
