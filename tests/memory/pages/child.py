"""A process that maps slabs as an engine does; run by test_arena_processes.

Reads requests as JSON lines on stdin. In between it reads what it watches, over and over, and
looks at what is pinned for it. It answers `fill` and `report`.
"""

from __future__ import annotations

import json
import os
import select
from collections import deque
from collections.abc import Iterator

from kakeya.core.errors import PageFreed
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.reader import PageReader


class Child:
    def __init__(self) -> None:
        self.reader = PageReader()
        self.watched: deque[tuple[PageRef, int]] = deque(maxlen=24)
        self.pinned: list[tuple[memoryview, bytes]] = []
        self.counts = {"whole": 0, "stale": 0, "torn": 0, "changed": 0}

    def obey(self, request: dict[str, object]) -> None:
        ref = PageRef(**request["ref"]) if "ref" in request else None
        byte = request.get("byte", 0)
        match request["do"]:
            case "watch":
                self.watched.append((ref, byte))
            case "pin":
                self.pinned.append((self.reader.view(ref), bytes([byte]) * ref.length))
            case "fill":
                with self.reader.fill(ref) as view:
                    view[:] = bytes([byte]) * len(view)
                print(json.dumps({"filled": byte}), flush=True)
            case "report":
                print(json.dumps(self.counts), flush=True)

    def look(self) -> None:
        for ref, byte in tuple(self.watched):
            try:
                read = self.reader.read(ref)
            except PageFreed:
                self.counts["stale"] += 1
                continue
            self.counts["whole" if read == bytes([byte]) * ref.length else "torn"] += 1
        for view, expected in self.pinned:
            if view != expected:
                self.counts["changed"] += 1


def requests(child: Child) -> Iterator[dict[str, object]]:
    pending = b""
    while True:
        while not select.select([0], [], [], 0)[0] and child.watched:
            child.look()
        got = os.read(0, 1 << 16)
        if not got:
            return
        *lines, pending = (pending + got).split(b"\n")
        yield from map(json.loads, lines)


if __name__ == "__main__":
    only = Child()
    print(json.dumps({"ready": True}), flush=True)
    for asked in requests(only):
        only.obey(asked)
