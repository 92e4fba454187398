"""The main of an image worker: one pipeline, one request at a time, frames on a unix socket.

The socket is the agent's, and this process connects to it. At its end the agent has ended, or wants
this process no more: it ends at once, even in the middle of a step.

Exit status: 0 stopped, 1 fault, 2 the pipeline cannot be loaded as configured.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from kakeya.backends.images.frames import WorkerFrame, packed, read_frame
from kakeya.core.errors import ConfigError, KakeyaError, PeerProtocol
from kakeya.core.log import configure, event
from kakeya.generation.progress import LoadPhase, LoadTeller

_log = logging.getLogger(__name__)
_ENVIRONMENT = {
    # A model is its folder: no file of it is looked for elsewhere.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    # On a CPU: threads that wait leave it to the node's other processes.
    "OMP_WAIT_POLICY": "passive",
}
_MESSAGE_CHARS = 500


class Drawer(Protocol):
    """A loaded pipeline; see `pipeline.Pipeline`."""

    device: str
    dtype: str

    def draw(
        self,
        prompt: str,
        seed: int,
        size: tuple[int, int] | None,
        steps: int | None,
        on_step: Callable[[int, int], None],
    ) -> bytes:
        """Draw one image as a PNG file."""
        ...


class _Stopped(Exception):
    """The agent cancelled the request."""


def main(argv: list[str] | None = None, load: Callable[[Path], Drawer] | None = None) -> None:
    """Serve until the socket ends. `load` makes the pipeline of a folder; the default is that of
    diffusers."""
    options = _parse(argv)
    configure(options.log_format, options.log_level)
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(options.socket))
    worker = Worker(link)
    tell = LoadTeller(lambda line: print(line, end="", flush=True))  # noqa: T201 - read by the agent
    try:
        tell(LoadPhase.START)
        load = load or _loader()
        tell(LoadPhase.READ)
        drawer = load(options.model)
    except Exception as fault:  # noqa: BLE001 - the end of this process, whatever it is
        worker.say("failed", {"message": _sentence(fault)})
        sys.exit(2 if isinstance(fault, KakeyaError) else 1)
    worker.run(drawer)


class Worker:
    """The link to the agent, and the work on its requests."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._asked: queue.SimpleQueue[WorkerFrame] = queue.SimpleQueue()
        self._cancelled = 0  # the last request that was cancelled
        threading.Thread(
            target=self._listen, args=(link.makefile("rb"),), name="link", daemon=True
        ).start()

    def run(self, drawer: Drawer) -> None:
        """Serve requests on this thread, for ever."""
        self.say("ready", {"device": drawer.device, "dtype": drawer.dtype})
        while True:
            frame = self._asked.get()
            request = frame.number("request")
            try:
                self._draw(drawer, request, frame)
            except _Stopped:
                pass
            except Exception as fault:  # noqa: BLE001 - it is the request's, and the next may do
                event(_log, "image failed", level=logging.ERROR, error=repr(fault))
                _log.debug("traceback", exc_info=fault)
                is_short = isinstance(fault, MemoryError) or "out of memory" in str(fault).lower()
                code = "memory" if is_short else "fault"
                told = {"request": request, "code": code, "message": _sentence(fault)}
                self.say("error", told)
                continue
            self.say("done", {"request": request})

    def _draw(self, drawer: Drawer, request: int, frame: WorkerFrame) -> None:
        wish = frame.head
        size, steps = wish.get("size"), wish.get("steps")
        for image in range(frame.number("count")):
            seed = frame.number("seed") + image

            def stepped(step: int, of: int, at: int = image) -> None:
                if self._cancelled >= request:
                    raise _Stopped
                self.say("step", {"request": request, "image": at, "step": step, "steps": of})

            png = drawer.draw(
                str(wish.get("prompt")),
                seed,
                (int(size[0]), int(size[1])) if isinstance(size, list) else None,
                steps if isinstance(steps, int) else None,
                stepped,
            )
            self.say("image", {"request": request, "seed": seed}, png)

    def say(self, kind: str, fields: Mapping[str, object], body: bytes = b"") -> None:
        """Send a frame."""
        try:
            self._link.sendall(packed(kind, fields, body))
        except OSError:  # the agent closed it
            os._exit(0)

    def _listen(self, file: BinaryIO) -> None:
        """Hear of requests while one is worked on, and of the end."""
        with contextlib.suppress(PeerProtocol, OSError):
            while frame := read_frame(file):
                if frame.kind == "cancel":
                    self._cancelled = frame.number("request")
                else:
                    self._asked.put(frame)
        os._exit(0)  # a thread that computes cannot be told to end


def _loader() -> Callable[[Path], Drawer]:
    os.environ.update(_ENVIRONMENT)
    try:
        module = import_module("kakeya.backends.images.pipeline")
    except ImportError as missing:
        raise ConfigError(
            f"images need torch and diffusers ({missing}): pip install 'kakeya[images]'"
        ) from missing
    return cast("Callable[[Path], Drawer]", module.Pipeline)


def _sentence(fault: Exception) -> str:
    return (str(fault) or repr(fault))[:_MESSAGE_CHARS]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kakeya-images", allow_abbrev=False)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--model-id", required=True)
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
