"""Speculative decoding for a program that brings its own verifier.

`SpeculativeDecoder` is the loop over `Decoding`: ask for a draft, verify it, commit. The engine
has a loop of its own, which pipelines plain steps; both commit by the same rule, so both give the
tokens of plain decoding whatever the proposer says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Literal, Protocol, Self, runtime_checkable

import grpc

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.control.shadow import ShadowScorer
from kakeya.decoding.draft.decoder import Decoding
from kakeya.decoding.draft.proposer import (
    BlockProposer,
    Draft,
    Proposer,
    as_proposer,
    log_first_failure,
)
from kakeya.decoding.remote.remote import PROPOSAL_TIMEOUT_S, RemoteProposer
from kakeya.decoding.remote.vocabulary import VocabularyMismatch

BLOCK_SIZE = 8


@runtime_checkable
class Verifier(Protocol):
    """The model that decides each token; its `vocab_size`, if it has one, bounds the drafts."""

    def verify(self, history: Sequence[int], draft: Sequence[int]) -> Sequence[int]:
        """The model's own next token after `history + draft[:i]`, for i = 0..len(draft).

        Keeps its KV between calls and rolls it back by itself: the next history begins with
        this one and goes on as it was decided, which may differ from the draft. The same
        arguments give the same tokens.
        """
        ...


@runtime_checkable
class _Sized(Protocol):
    @property
    def vocab_size(self) -> int: ...


@runtime_checkable
class _Worded(Protocol):
    @property
    def vocabulary_digest(self) -> str: ...


class Placement(Protocol):
    """The place of a proposer; the fleet's plan is one."""

    @property
    def proposer_node(self) -> str:
        """The id of its node; asked for only with an identity."""
        ...

    @property
    def proposer_address(self) -> str:
        """HOST:PORT of its node."""
        ...

    @property
    def proposer_model(self) -> str:
        """The model id it is served under."""
        ...

    @property
    def proposer_is_extended(self) -> bool:
        """Whether its node understands our wire extensions."""
        ...


@dataclass(slots=True)
class SpecDecodingStats:
    """Counts over all generations of a decoder; tokens, unless said.

    `drafted` tokens were offered, `verified` ones had a row in a forward, `accepted` ones of these
    were right; `verified_at[i]` and `accepted_at[i]` count depth i of the drafts. `failures` are
    drafts that did not come or were not sound; `first_failure` says what the first one was.
    """

    forwards: int = 0
    committed: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    failures: int = 0
    first_failure: str = ""
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Accepted of the verified."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def tau(self) -> float:
        """Tokens committed per forward; 1 is plain decoding."""
        return self.committed / self.forwards if self.forwards else 0.0

    def count(self, verified: int, accepted: int, committed: int) -> None:
        """Add one forward."""
        self.forwards += 1
        self.committed += committed
        self.verified += verified
        self.accepted += accepted
        while len(self.verified_at) < verified:
            self.verified_at.append(0)
            self.accepted_at.append(0)
        for depth in range(verified):
            self.verified_at[depth] += 1
            self.accepted_at[depth] += depth < accepted


class SpeculativeDecoder:
    """Decodes with drafts of at most `block_size` tokens.

    `vocab_size` is how many ids the verifier has; without it, `verifier.vocab_size` counts. Many
    models end the process at an id that they lack, so no decoder is made while neither is known;
    a draft is cut at such an id, and a prompt with one is refused.

    Without a controller every drafted token is verified. With one, only those that pay, and the
    rest is scored in the shadow. A proposer that fails counts as one that abstains, unless
    `on_proposer_error` is "raise": then its error ends the generator, with `history` whole; the
    generation may go on from there with another proposer. The first failure is logged and stands
    in `stats`.

    A proposer may be one of the original engine, which has `propose_block` only;
    `num_diffusion_steps` are the steps that a proposer which refines its drafts takes for each.
    Otherwise than there, the verifier selects the tokens itself, so that sampled text can be
    drafted too; `generate` yields tokens as they are committed; a draft may be short.

    Raises InvalidArgument for arguments with which no draft could be taken.
    """

    def __init__(
        self,
        verifier: Verifier,
        proposer: Proposer | BlockProposer,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        context_tokens: int,
        vocab_size: int | None = None,
        block_size: int = BLOCK_SIZE,
        num_diffusion_steps: int = 1,
        controller: DraftController | None = None,
        on_proposer_error: Literal["plain", "raise"] = "plain",
        clock: Clock | None = None,
    ) -> None:
        _check_verifier(verifier, proposer)
        _check_positive(
            block_size=block_size,
            num_diffusion_steps=num_diffusion_steps,
            context_tokens=context_tokens,
        )
        if on_proposer_error not in ("plain", "raise"):
            raise InvalidArgument(
                f"on_proposer_error is {on_proposer_error!r}, it must be 'plain' or 'raise'",
                param="on_proposer_error",
            )
        self.stats = SpecDecodingStats()
        self.history: list[int] = []
        self.proposer = as_proposer(proposer)
        self._num_steps = num_diffusion_steps
        self._verifier = verifier
        self._stop_token_ids = stop_token_ids
        self._context_tokens = context_tokens
        self._vocab_size = _vocabulary(verifier, vocab_size)
        self._block_size = block_size
        self._controller = controller
        self._on_proposer_error = on_proposer_error
        self._clock = clock or SystemClock()
        self._is_vocabulary_checked = False

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield tokens until a stop token (yielded too), max_tokens or the end of the context.

        `history` holds the prompt and all committed tokens, also after an error. Raises
        InvalidArgument for a prompt that is empty or holds an id outside the vocabulary, and
        VocabularyMismatch for a remote proposer with ids that mean other text, by its node's card.
        """
        self._check_prompt(prompt)
        self._check_vocabularies()
        decoding = Decoding(
            prompt,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids,
            context_tokens=self._context_tokens,
        )
        self.history = decoding.history
        shadow = ShadowScorer(self._controller) if self._controller is not None else None
        while decoding.finish is None:
            draft = self._draft(decoding)
            block = draft.tokens[: self._rows(draft, decoding.room(), shadow)]
            yield from self._step(decoding, draft, block)
            if shadow is not None:
                shadow.settle(decoding.history)
        if shadow is not None:
            shadow.close(decoding.history)

    def _step(self, decoding: Decoding, draft: Draft, block: tuple[int, ...]) -> tuple[int, ...]:
        began = self._clock.mono()
        selected = self._verifier.verify(decoding.history, block)
        seconds = self._clock.mono() - began
        commit = decoding.commit(block, selected)
        self.stats.count(len(block), commit.accepted, len(commit.tokens))
        if self._controller is not None:
            self._controller.observe_forward(1 + len(block), seconds)
            if block:
                self._controller.observe_verified(draft, len(block), commit.accepted)
        return commit.tokens

    def _draft(self, decoding: Decoding) -> Draft:
        size = min(self._block_size, decoding.room())
        if size == 0 or (self._controller and not self._controller.wants(self.proposer.name)):
            return Draft(source=self.proposer.name)
        began = self._clock.mono()
        try:
            draft = self._sound(self.proposer.propose(decoding.history, size, self._num_steps))
        except Exception as failure:  # whatever a proposer does, decoding goes on
            self._count_failure(_words(failure))
            if self._on_proposer_error == "raise":
                raise
            draft = Draft(source=self.proposer.name)
        if self._controller is not None:
            self._controller.observe_wait(self.proposer.name, self._clock.mono() - began)
        return draft

    def _sound(self, draft: Draft) -> Draft:
        """The draft, cut at the first id that the verifier does not have."""
        if not isinstance(draft, Draft):
            raise InvalidArgument(
                f"{self.proposer.name} answered a {type(draft).__name__}, it must be a Draft"
            )
        tokens = tuple(map(index, draft.tokens))
        self.stats.drafted += len(tokens)
        valid = _known(tokens, self._vocab_size)
        if valid < len(tokens):
            self._count_failure(
                f"{self.proposer.name} drafted id {tokens[valid]}, outside the vocabulary of "
                f"{self._vocab_size} ids"
            )
        return replace(draft, tokens=tokens[:valid], confidence=draft.confidence[:valid])

    def _count_failure(self, problem: str) -> None:
        self.stats.failures += 1
        if self.stats.first_failure:
            return
        self.stats.first_failure = problem
        if not self.proposer.stats.first_failure:  # then the proposer has logged it
            log_first_failure(self.proposer.name, problem)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        known = _known(prompt, self._vocab_size)
        if known < len(prompt):
            raise InvalidArgument(
                f"the prompt's token {known} is {prompt[known]}, outside the vocabulary of "
                f"{self._vocab_size} ids",
                param="prompt",
            )

    def _check_vocabularies(self) -> None:
        verifier, proposer = self._verifier, self.proposer
        if self._is_vocabulary_checked or not isinstance(verifier, _Worded):
            return
        if not verifier.vocabulary_digest or not isinstance(proposer, RemoteProposer):
            return
        if proposer.vocabulary_digest() not in ("", verifier.vocabulary_digest):
            raise VocabularyMismatch(
                f"{proposer.name} has another vocabulary than the verifier: its token ids mean "
                "other text; take a proposer of the verifier's model family, or ngram",
                param="proposer",
            )
        self._is_vocabulary_checked = True

    def _rows(self, draft: Draft, room: int, shadow: ShadowScorer | None) -> int:
        most = min(len(draft.tokens), room, self._block_size)
        if self._controller is None or shadow is None:
            return most
        rows = min(self._controller.rows(draft), most)
        if rows == 0:
            shadow.hold(draft, len(self.history))
        return rows


class DistributedSpeculativeDecoder(SpeculativeDecoder):
    """A SpeculativeDecoder with the proposer of another node."""

    @classmethod
    def from_placement(
        cls,
        placement: Placement,
        *,
        verifier: Verifier,
        context_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        block_size: int = BLOCK_SIZE,
        num_diffusion_steps: int = 1,
        controller: DraftController | None = None,
        on_proposer_error: Literal["plain", "raise"] = "raise",
        channel: grpc.Channel | None = None,
        timeout_s: float = PROPOSAL_TIMEOUT_S,
        vocab_size: int | None = None,
        identity: Path | None = None,
    ) -> Self:
        """Connect to the placed proposer; by default its failures are raised.

        In a fleet with identities `identity` is the data directory of this machine's node, with
        the keys that the proposer's node wants to see. A RemoteProposerError leaves the verifier
        and `history` as they were committed: plan again and go on from there. Without a `channel`
        the decoder has its own; see `close`.
        """
        vocab_size = _vocabulary(verifier, vocab_size)
        proposer = RemoteProposer(
            placement.proposer_address,
            placement.proposer_model,
            channel=channel,
            timeout_s=timeout_s,
            vocab_size=vocab_size,
            extended=placement.proposer_is_extended,
            server_name=placement.proposer_node if identity is not None else "",
            identity=identity,
        )
        return cls(
            verifier,
            proposer,
            stop_token_ids=stop_token_ids,
            context_tokens=context_tokens,
            vocab_size=vocab_size,
            block_size=block_size,
            num_diffusion_steps=num_diffusion_steps,
            controller=controller,
            on_proposer_error=on_proposer_error,
        )

    def close(self) -> None:
        """Close the connection to the proposer, if it is the decoder's own."""
        if isinstance(self.proposer, RemoteProposer):
            self.proposer.close()


def _check_verifier(verifier: Verifier, proposer: Proposer | BlockProposer) -> None:
    if isinstance(verifier, Verifier) and not isinstance(verifier, type):
        return
    swapped = "; the verifier comes first" if isinstance(proposer, Verifier) else ""
    raise InvalidArgument(
        f"{type(verifier).__name__} is no verifier: it has no verify(history, draft){swapped}",
        param="verifier",
    )


def _check_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidArgument(f"{name} is {count}, it must be at least 1", param=name)


def _words(failure: Exception) -> str:
    """A failure in words; faults of a program are named by their type too."""
    return failure.message if isinstance(failure, KakeyaError) else repr(failure)


def _vocabulary(verifier: Verifier, given: int | None) -> int:
    """How many ids the verifier has. Raises InvalidArgument if that is not known."""
    size = verifier.vocab_size if given is None and isinstance(verifier, _Sized) else given
    if size is None:
        raise InvalidArgument(
            f"the vocabulary of {type(verifier).__name__} is not known, so drafts cannot be "
            "checked and none is taken; pass vocab_size, or give the verifier that attribute",
            param="vocab_size",
        )
    if size < 1:
        raise InvalidArgument(f"vocab_size is {size}, it must be at least 1", param="vocab_size")
    return size


def _known(tokens: Sequence[int], vocab_size: int) -> int:
    """Count the leading ids that the vocabulary has."""
    outside = (at for at, token in enumerate(tokens) if not 0 <= token < vocab_size)
    return next(outside, len(tokens))
