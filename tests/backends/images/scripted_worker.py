"""A real image worker without torch: the prompt says what it does, and its image says how it was
asked. Its folder may hold a file `megabytes`: so many it allocates; and a file `holds`: while it is
there, no image is done.

Run as `python -m tests.backends.images.scripted_worker --socket PATH --model FOLDER ...`.
"""

from __future__ import annotations

import os
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from kakeya.backends.images.frames import MAX_BODY_BYTES
from kakeya.backends.images.worker import main

SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ScriptedPipeline:
    device, dtype = "none", "none"

    def __init__(self, folder: Path) -> None:
        if (folder / "broken").exists():
            raise ValueError("its weights are broken")
        if (folder / "dies").exists():
            sys.exit("no memory for it")
        self.holds = folder / "holds"
        file = folder / "megabytes"
        self.ballast = [os.urandom(int(file.read_text()) << 20)] if file.exists() else []

    def draw(
        self,
        prompt: str,
        seed: int,
        size: tuple[int, int] | None,
        steps: int | None,
        on_step: Callable[[int, int], None],
    ) -> bytes:
        total = steps or (10**6 if prompt == "slow" else 3)
        for step in range(1, total + 1):
            on_step(step, total)
            match prompt:
                case "slow":
                    time.sleep(0.005)
                case "hang":
                    time.sleep(3600)
                case "die":
                    os._exit(7)
                case "short":
                    raise MemoryError("out of memory for 9 GB")
                case "fault":
                    raise ValueError("half of a pixel")
                case "swell":
                    for _ in range(100):
                        self.ballast.append(os.urandom(2 << 20))
                        time.sleep(0.005)
                case "flood":
                    os.write(1, b"words\n" * 20_000)
                case "large":
                    return bytes(MAX_BODY_BYTES)
        while self.holds.exists():
            time.sleep(0.005)
        return png(*(size or (64, 64)), f"{prompt} {seed}".encode())


def png(width: int, height: int, text: bytes = b"") -> bytes:
    """A grey PNG file with a comment."""
    rows = zlib.compress(b"".join(b"\0" + bytes([128]) * width for _ in range(height)))
    header = struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"tEXt", b"said\0" + text), (b"IDAT", rows), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )


def png_size(file: bytes) -> tuple[int, int]:
    """The size of an image, by its header."""
    assert file.startswith(SIGNATURE)
    width, height = struct.unpack(">2I", file[16:24])
    return width, height


if __name__ == "__main__":
    main(load=ScriptedPipeline)
