"""The real main of the engine child over a real model that takes memory which it never gives back.

Run as `python -m tests.node.child_greedy MODE FILE MIB --socket ...`.

    once      the first sequence, in the first child that finds no FILE, takes MIB for good
    stubborn  as `once`, and the child does not hear that it is to end
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from kakeya.engine.model import Model, SequenceState
from kakeya.node.engine_main import load_model, main


class Greedy:
    """A model that leaks on its first sequence."""

    def __init__(self, model: Model, file: Path, size: int) -> None:
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
        return self._model.open()


def load(file: Path, size: int) -> Callable[[Namespace], Model]:
    return lambda options: Greedy(load_model(options), file, size)  # type: ignore[return-value]


if __name__ == "__main__":
    mode, file, mib = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if mode == "stubborn" and not file.exists():
        # Threads of libraries run already and would hear the signal; after exec each one is deaf.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.execv(sys.executable, (sys.executable, "-m", __spec__.name, "once", *sys.argv[2:]))
    main(sys.argv[4:], load(file, mib << 20))
