"""The contract of everything that drafts, and the statistics that every proposer keeps.

A draft is a guess at the tokens that the verifier will select next. It may be empty, it may be
wrong; it never changes the generated tokens, only the speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A guess at the next tokens after a prefix; empty = the proposer abstains.

    `confidence`, if given, has one value in 0..1 per token: the proposer's own probability that
    the token is accepted, given that those before it were. `match_length` is how many tokens of
    the prefix supported it (n-gram sources), and buckets the acceptance statistics.
    """

    source: str
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    match_length: int = 0
    forward_passes: int = 0
    diffusion_steps: int = 0
    peak_activation_bytes: int = 0
    draft_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNoise:
    """Seed and temperature of a sampled decode: a draft model draws with the verifier's noise."""

    seed: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProposal:
    """A draft in the form of the wire: exactly as many ids as were asked for.

    The first `num_valid` are meant, the rest is padding that no verifier should look at.
    """

    token_ids: tuple[int, ...]
    num_valid: int
    forward_passes: int = 0
    diffusion_steps: int = 0
    peak_activation_bytes: int = 0


@dataclass(slots=True)
class ProposerStats:
    """Counts over a proposer's life; `drafted` and later are tokens, the others are calls."""

    calls: int = 0
    abstained: int = 0
    failures: int = 0
    drafted: int = 0
    forward_passes: int = 0
    diffusion_steps: int = 0
    wait_s: float = 0.0


@runtime_checkable
class Proposer(Protocol):
    """Drafts for a prefix. Idempotent: the same prefix may be asked about again."""

    @property
    def name(self) -> str:
        """The model id it is served and advertised under."""
        ...

    @property
    def stats(self) -> ProposerStats:
        """Live counts; only the proposer writes them."""
        ...

    def propose(self, prefix: Sequence[int], size: int) -> Draft:
        """Draft at most `size` tokens after `prefix` (ids of the verifier's vocabulary).

        Blocking; callers with an event loop run it off the loop. Raises InvalidArgument for an
        empty prefix or a size below 1; remote proposers raise RemoteProposerError.
        """
        ...
