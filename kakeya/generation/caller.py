"""The caller of a request and its urgency, for fair shares and for the order of work.

A caller without a certificate is known by the name that it gives, and without a name by its
machine. The name counts for shares alone: `wire/server` decides what a caller may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kakeya.core.errors import InvalidArgument
from kakeya.generation.request import GenerationPriority

PRIORITY = "x-kakeya-priority"
"""Metadata of a gRPC call and header of an HTTP request: a word of `PRIORITIES`."""
PRIORITIES: Mapping[str, GenerationPriority] = {
    one.name.lower(): one for one in GenerationPriority if one is not GenerationPriority.SPECULATIVE
}
"""The priorities that a caller may ask for; speculative work is the node's own."""
PRIORITY_NUMBERS = (
    GenerationPriority.URGENT,
    GenerationPriority.NORMAL,
    GenerationPriority.BATCH,
)
"""The priorities that have a number, which is their place here."""
_WORDS = {str(at): one for at, one in enumerate(PRIORITY_NUMBERS)} | dict(PRIORITIES)


def read_priority(metadata: Iterable[tuple[str, str | bytes]]) -> GenerationPriority:
    """Read the priority that a gRPC call asks for; absent is NORMAL. Raises InvalidArgument."""
    said = next((value for key, value in metadata if key == PRIORITY), "")
    return priority_of(said, PRIORITY) if said else GenerationPriority.NORMAL


def priority_of(said: object, param: str) -> GenerationPriority:
    """Read a priority, by its name or its number. Raises InvalidArgument naming the parameter."""
    word = str(said) if type(said) is int else said
    if not isinstance(word, str) or word not in _WORDS:
        raise InvalidArgument(
            f"{param} is {str(said)[:40]!r}; it must be one of {', '.join(PRIORITIES)}, or "
            f"{', '.join(map(str, range(len(PRIORITY_NUMBERS))))}",
            param=param,
        )
    return _WORDS[word]


def peer_host(peer: str) -> str:
    """The machine of a gRPC peer name such as ipv4:10.0.0.7:50312; of another name all of it."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
