"""Watches one node's view of the fleet: a line `TIME {"NODE_ID": IS_SUSPECT, ...}` at each change.

    child_watch.py HTTP_ADDRESS FILE     prints `watching` once the file has its first line

The time is that of the monotonic clock, which all processes of a machine share. The own card is
left out. `null` stands for a node that does not answer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kakeya.cli.node_api import NodeApi
from kakeya.core.errors import KakeyaError

PAUSE_S = 0.05


def look(node: NodeApi) -> dict[str, bool] | None:
    try:
        status = node.get("/api/v1/status")
    except KakeyaError:
        return None
    return {
        card["node_id"]: card["is_suspect"]
        for card in status["fleet"]["nodes"]  # type: ignore[index]
        if not card["is_self"]
    }


def main(address: str, file: str) -> None:
    node, last = NodeApi(address=address), ""
    with Path(file).open("w", buffering=1) as lines:
        while True:
            seen = json.dumps(look(node), sort_keys=True)
            if seen != last:
                lines.write(f"{time.monotonic()} {seen}\n")
            if not last:
                print("watching", flush=True)
            last = seen
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
