"""What of a node that keeps prefixes must add up, seen from outside; and damage to its files.

`adds_up` holds at every moment, `unrest` when nobody asks for anything.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any


def adds_up(status: dict[str, Any]) -> list[str]:
    """What of a node's own figures cannot be."""
    pages, prefixes = status["adapters"]["pages"], status["prefixes"]
    total, parts = (
        pages["total"],
        [pages[name] for name in ("free", "pinned", "dirty", "evictable")],
    )
    disk = prefixes["disk"]
    checks = {
        f"pages {pages}": sum(parts) == total and min(parts) >= 0,
        f"prefixes {prefixes['pages']}": 0
        <= prefixes["pages"]["bytes"]
        <= prefixes["pages"]["budget_bytes"],
        f"blocks {prefixes['models']}": sum(one["blocks"] for one in prefixes["models"])
        == prefixes["pages"]["blocks"],
        f"disk {disk}": 0 <= disk["bytes"] <= disk["budget_bytes"] and not disk["problem"],
        f"tokens {prefixes['tokens']}": min(prefixes["tokens"].values()) >= 0,
    }
    memory = status["memory"]
    checks[f"ledger {memory['committed_bytes']}"] = (
        memory["committed_bytes"] <= memory["budget_bytes"]
    )
    return [what for what, is_so in checks.items() if not is_so]


def unrest(status: dict[str, Any]) -> list[str]:
    """What is held or under way, and must not be when nobody asks."""
    pages, prefixes = status["adapters"]["pages"], status["prefixes"]
    precache = status["precache"]
    held = (pages["total"] - pages["free"]) * pages["page_bytes"]
    kept, blocks = prefixes["pages"]["bytes"], prefixes["pages"]["blocks"]
    checks = {
        f"{pages['pinned']} pages are pinned": pages["pinned"] == 0,
        f"{held} bytes are held and blocks take {kept}": held == kept,
        # A block of the embedded model takes less than a page, and so one.
        f"{blocks} blocks take {kept} bytes": blocks * pages["page_bytes"] == kept,
        f"{prefixes['waiting']} wait for blocks": prefixes["waiting"] == 0,
        f"{prefixes['disk']['queued']} blocks are to be written": not prefixes["disk"]["queued"],
        f"prewarms {precache['queued']} {precache['running']}": not precache["queued"]
        and not precache["running"],
        f"waiting {status['memory']['waiting']}": not status["memory"]["waiting"],
    }
    found = [what for what, is_so in checks.items() if not is_so]
    found += [f"leases of {one}" for one in status["memory"]["residents"] if one["leases"]]
    found += [f"{one}" for one in status["models"] if one["state"] != "ready"]
    return found


def block_files(data: Path) -> list[Path]:
    return sorted((data / "precache").glob("??/*.kvb"))


def file_bytes(data: Path) -> int:
    size = 0
    for path in block_files(data):
        with suppress(OSError):
            size += path.stat().st_size
    return size


def spoil(data: Path, rng: random.Random) -> int:
    """Damage a file of a block, in one of the ways that files are damaged."""
    files = block_files(data)
    if not files:
        return 0
    path, other = rng.choice(files), rng.choice(files)
    with suppress(OSError):
        content = bytearray(path.read_bytes())
        match rng.randrange(5):
            case 0:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 1:
                del content[rng.randrange(len(content)) :]
            case 2:
                content = bytearray(other.read_bytes())[: len(content)]
            case 3:
                content = bytearray(len(content))
            case _:
                path.unlink()
                return 1
        with path.open("r+b") as file:  # one that was evicted meanwhile does not come back
            file.write(content)
            file.truncate()
        return 1
    return 0
