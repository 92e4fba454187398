"""Drain the node of a data directory: it takes nothing new, ends what runs, and stops."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # gRPC takes longer to import than `kakeya status` to answer
    from kakeya.v1.fleet_pb2 import DrainProgress
    from kakeya.v1.fleet_pb2_grpc import ControlServiceStub

PATIENCE_S, MOST_PATIENCE_S = 60.0, 86_400.0
_ANSWER_S = 10.0


def drain(
    folder: Path, patience_s: float, *, until_replaced: bool, tell: Callable[[str], None]
) -> DrainProgress:
    """Drain, and return the last step; `tell` hears what still runs. Raises the node's refusal."""
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.fleet_pb2 import DrainProgress, DrainRequest
    from kakeya.v1.fleet_pb2_grpc import ControlServiceStub

    def follow(stub: ControlServiceStub) -> DrainProgress:
        last = DrainProgress()
        asked = DrainRequest(patience_seconds=patience_s, until_replaced=until_replaced)
        for last in stub.Drain(asked, timeout=patience_s + _ANSWER_S):
            if last.requests:
                tell(f"{last.requests} requests run, {last.seconds:.0f} s")
        return last

    return ask_node(folder, ControlServiceStub, follow, timeout_s=_ANSWER_S)


@contextlib.contextmanager
def ctrl_c_told(text: str) -> Iterator[list[int]]:
    """Have Ctrl-C say a text and be kept in the list, in place of ending this process: a drain has
    no way back, and whatever begins one has to start the node again."""
    pressed: list[int] = []

    def keep(number: int, _: object) -> None:
        pressed.append(number)
        print(text, file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield pressed  # no other thread gets signals
        return
    before = signal.signal(signal.SIGINT, keep)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def hangup_ignored() -> Iterator[None]:
    """Have this process, and the programs that it starts, go on without their terminal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
