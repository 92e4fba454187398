"""The prompts of a model's requests at this moment, and what another has in common with them.

A node that decides where a request goes knows its own ones; of those that others send, it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol
from weakref import WeakKeyDictionary

from kakeya.core.units import pack_ids
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import PromptsAlike
from kakeya.text.cuts_of_chat import common_tokens


class InFlight(Protocol):
    """A generation: `Attempt`."""

    job: Continuation
    is_held: bool


class _Prompt:
    """Packed when it is compared for the first time."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    @cached_property
    def packed(self) -> bytes:
        return pack_ids(self._token_ids)


class PromptsInFlight:
    """See the module; a generation that is gone is forgotten by itself."""

    def __init__(self) -> None:
        self._prompts: WeakKeyDictionary[InFlight, _Prompt] = WeakKeyDictionary()

    def add(self, generation: InFlight, token_ids: Sequence[int]) -> None:
        """Note the prompt of a generation without an adapter: with one it has other KV."""
        self._prompts[generation] = _Prompt(token_ids)

    def alike(self, token_ids: Sequence[int], block_tokens: int) -> PromptsAlike:
        """Compare a prompt; KV is kept in blocks of so many tokens, 0 = none is kept."""
        packed, requests, coming = pack_ids(token_ids), 0, 0
        for generation, prompt in list(self._prompts.items()):
            if not generation.is_held:
                continue
            common = common_tokens(packed, prompt.packed)
            requests += 2 * common > len(token_ids)
            if block_tokens and not generation.job.has_begun:
                coming = max(coming, common // block_tokens * block_tokens)
        return PromptsAlike(requests=requests, tokens=coming)
