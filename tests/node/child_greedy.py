"""The real main of the engine child over a real model that takes memory which it never gives back.

Run as `python -m tests.node.child_greedy MODE FILE MIB --socket ...`.

    once      the first sequence, in the first child that finds no FILE, takes MIB for good
    endless   as `once`, and then 8 MIB more each 10 ms, in a thread of its own
    stubborn  as `once`, and the child does not hear that it is to end
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from kakeya.engine.model import Model, SequenceState
from kakeya.node.engine_main import load_model, main

_MORE_BYTES = 8 << 20
_MOST_BYTES = 2 << 30
"""The machine of the tests lives on, even where no guard ends this process."""


class Greedy:
    """A model that leaks on its first sequence."""

    def __init__(self, model: Model, file: Path, size: int, *, is_endless: bool) -> None:
        self._is_endless = is_endless
        self._model = model
        self._file = file
        self._size = size
        self._taken: list[mmap.mmap] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def open(self) -> SequenceState:
        if not self._file.exists():
            self._file.touch()
            block = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.write(b"x" * self._size)
            self._taken.append(block)
            if self._is_endless:
                threading.Thread(target=self._take_on, daemon=True).start()
        return self._model.open()

    def _take_on(self) -> None:
        while sum(map(len, self._taken)) < _MOST_BYTES:
            block = mmap.mmap(-1, _MORE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.write(b"x" * _MORE_BYTES)
            self._taken.append(block)
            time.sleep(0.01)


def load(file: Path, size: int, *, is_endless: bool) -> Callable[[Namespace], Model]:
    return lambda options: Greedy(  # type: ignore[return-value]
        load_model(options), file, size, is_endless=is_endless
    )


if __name__ == "__main__":
    mode, file, mib = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if mode == "stubborn" and not file.exists():
        # Threads of libraries run already and would hear the signal; after exec each one is deaf.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.execv(sys.executable, (sys.executable, "-m", __spec__.name, "once", *sys.argv[2:]))
    main(sys.argv[4:], load(file, mib << 20, is_endless=mode == "endless"))
