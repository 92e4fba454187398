"""The caller of a request and its urgency, for fair shares and for the order of work.

A caller without a certificate is known by the name that it gives, and without a name by its
machine. The name counts for shares alone: `wire/server` decides what a caller may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kakeya.core.errors import InvalidArgument
from kakeya.generation.request import GenerationPriority

PRIORITY = "x-kakeya-priority"
"""Metadata of a gRPC call: 0 or urgent, 1 or normal, 2 or batch."""
ASKABLE = (GenerationPriority.URGENT, GenerationPriority.NORMAL, GenerationPriority.BATCH)
"""The priorities that a caller may ask for; speculative work is the node's own."""
_WORDS: Mapping[str, GenerationPriority] = {
    word: priority for priority in ASKABLE for word in (str(int(priority)), priority.name.lower())
}


def read_priority(metadata: Iterable[tuple[str, str | bytes]]) -> GenerationPriority:
    """Read the priority that a gRPC call asks for; absent is NORMAL. Raises InvalidArgument."""
    said = next((value for key, value in metadata if key == PRIORITY), "")
    if not said:
        return GenerationPriority.NORMAL
    if not isinstance(said, str) or said not in _WORDS:
        raise InvalidArgument(
            f"{PRIORITY} is {str(said)[:40]!r}; it must be one of {', '.join(_WORDS)}",
            param=PRIORITY,
        )
    return _WORDS[said]


def peer_host(peer: str) -> str:
    """The machine of a gRPC peer name such as ipv4:10.0.0.7:50312; of another name all of it."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
