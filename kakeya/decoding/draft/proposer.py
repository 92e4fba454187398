"""The contract of everything that drafts, and the statistics that every proposer keeps.

A draft is a guess at the tokens that the verifier will select next. It may be empty, it may be
wrong; it never changes the generated tokens, only the speed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kakeya.core.errors import InvalidArgument
from kakeya.core.log import event

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A guess at the next tokens after a prefix; empty = the proposer abstains.

    `confidence`, if given, has one value in 0..1 per token: the proposer's own probability that
    the token is accepted, given that those before it were. `match_length` is how many tokens of
    the prefix supported it (n-gram sources), and buckets the acceptance statistics. Of a draft that
    `is_certain` no other token can come.
    """

    source: str
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    match_length: int = 0
    forward_passes: int = 0
    diffusion_steps: int = 0
    peak_activation_bytes: int = 0
    draft_us: int = 0
    is_certain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNoise:
    """Seed and temperature of a sampled decode: a draft model draws with the verifier's noise."""

    seed: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProposal:
    """A draft in the form of the wire: exactly as many ids as were asked for.

    The first `num_valid` are meant, the rest is padding that no verifier should look at. (The
    original engine has no `num_valid` and verifies the padding.)
    """

    tokens: tuple[int, ...]
    num_valid: int
    forward_passes: int = 0
    diffusion_steps: int = 0
    peak_activation_bytes: int = 0


@dataclass(slots=True)
class ProposerStats:
    """Counts over a proposer's life, with the names that the original engine has for its five.

    `calls`, `total_blocks` (calls that were answered), `abstained` and `failures` count calls;
    `drafted` counts tokens, without padding. `first_failure` says what the first failure was.
    """

    calls: int = 0
    total_blocks: int = 0
    abstained: int = 0
    failures: int = 0
    drafted: int = 0
    total_diffusion_steps: int = 0
    total_forward_passes: int = 0
    peak_activation_bytes: int = 0
    weight_bytes: int = 0
    wait_s: float = 0.0
    first_failure: str = ""

    def count(self, draft: Draft) -> None:
        """Add an answer; a look-up that has no passes of a model counts as one."""
        self.total_blocks += 1
        self.abstained += not draft.tokens
        self.drafted += len(draft.tokens)
        self.total_diffusion_steps += draft.diffusion_steps
        self.total_forward_passes += max(1, draft.forward_passes)
        self.peak_activation_bytes = max(self.peak_activation_bytes, draft.peak_activation_bytes)

    def count_failure(self, source: str, problem: str) -> None:
        """Add a failure; the first one is kept, and logged."""
        self.failures += 1
        if not self.first_failure:
            self.first_failure = problem
            log_first_failure(source, problem)


def log_first_failure(source: str, problem: str) -> None:
    """Log it with its reason in the line itself, since a program has a log format of its own."""
    message = f"the proposer {source} failed: {problem}; further failures are only counted"
    event(_log, message, level=logging.WARNING)


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

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        """Draft at most `size` tokens after `prefix` (ids of the verifier's vocabulary).

        `num_steps` is how often a proposer that refines its drafts does so; others ignore it.
        Blocking; callers with an event loop run it off the loop. Raises InvalidArgument for an
        empty prefix or a size below 1; remote proposers raise RemoteProposerError.
        """
        ...


@runtime_checkable
class BlockProposer(Protocol):
    """A proposer of the original engine: a whole block at a time."""

    def propose_block(
        self, committed_token_ids: list[int], block_size: int, num_steps: int
    ) -> OfferedBlock:
        """Draft exactly `block_size` tokens."""
        ...


class OfferedBlock(Protocol):
    """A block as a BlockProposer gives it; of a `BlockProposal`, `num_valid` tokens are meant."""

    @property
    def tokens(self) -> Sequence[int]:
        """The drafted ids."""
        ...

    @property
    def diffusion_steps(self) -> int:
        """How often the block was refined."""
        ...

    @property
    def forward_passes(self) -> int:
        """Forwards of the proposer's model."""
        ...

    @property
    def peak_activation_bytes(self) -> int:
        """The most memory that its activations took."""
        ...


class BlockDrafter:
    """A BlockProposer under the contract of Proposer."""

    def __init__(self, blocks: BlockProposer) -> None:
        self.name = type(blocks).__name__
        self.stats = ProposerStats()
        self._blocks = blocks

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        """Draft at most `size` tokens."""
        self.stats.calls += 1
        block = self._blocks.propose_block(list(prefix), size, num_steps)
        meant = block.num_valid if isinstance(block, BlockProposal) else len(block.tokens)
        draft = Draft(
            source=self.name,
            tokens=tuple(block.tokens[: min(size, meant)]),
            forward_passes=block.forward_passes,
            diffusion_steps=block.diffusion_steps,
            peak_activation_bytes=block.peak_activation_bytes,
        )
        self.stats.count(draft)
        return draft


def as_proposer(given: Proposer | BlockProposer) -> Proposer:
    """Give whatever drafts the form of a Proposer. Raises InvalidArgument if it does not draft."""
    is_class = isinstance(given, type)
    if isinstance(given, Proposer) and not is_class:
        return given
    if isinstance(given, BlockProposer) and not is_class:
        return BlockDrafter(given)
    raise InvalidArgument(
        f"{given if is_class else type(given).__name__} is no proposer: a proposer has a name, "
        "stats and propose(prefix, size, num_steps), or it has "
        "propose_block(committed, block_size, num_steps)"
    )
