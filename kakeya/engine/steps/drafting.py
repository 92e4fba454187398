"""Drafts for one sequence: asks its sources, lets the controller price them, keeps the score.

The n-gram index lives here and costs microseconds. Remote sources are shared by all sequences of
the engine (one channel and one breaker each); each sequence has its own book of drafts that are
under way. A draft that is not verified is scored once plain decoding has caught up with it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.core.ids import NGRAM
from kakeya.core.log import event
from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.control.shadow import ShadowScorer
from kakeya.decoding.draft.acceptance import agreeing
from kakeya.decoding.draft.proposer import Draft, SamplingNoise
from kakeya.decoding.ngram.source import NGramSource
from kakeya.decoding.processors.grammar import GRAMMAR, GrammarMatcher
from kakeya.decoding.remote.draft_book import RemoteDraftBook
from kakeya.decoding.remote.remote import RemoteProposer
from kakeya.decoding.remote.sender import PendingDraft
from kakeya.decoding.remote.stream import StatesFrom, StreamedDraft, StreamedPeer
from kakeya.generation.frames import SourceUsage
from kakeya.generation.request import DraftSource, Sampling
from kakeya.wire.security import TlsMaterial

_log = logging.getLogger(__name__)
RemoteBook: TypeAlias = "RemoteDraftBook[PendingDraft | StreamedDraft]"
KEPT_PEERS = 16
"""Peers' models that keep an open channel between generations; a placement names one or two."""
NOTHING = Draft(source="none")


@dataclass(slots=True)
class _Shared:
    proposer: RemoteProposer
    tls: TlsMaterial | None
    books: int = 0


class RemoteBooks:
    """One RemoteProposer for each peer's model, shared by all sequences.

    It outlives them, so that the next one finds an open channel; of those that no sequence uses,
    the last KEPT_PEERS stay. `identity` returns the keys that the node has at that moment, None
    while it has none: peers with a server name are then not asked at all, since a source that has
    to be encrypted never falls back to a plain connection.
    """

    def __init__(self, identity: Callable[[], TlsMaterial | None] = lambda: None) -> None:
        self._identity = identity
        self._shared: OrderedDict[DraftSource, _Shared] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shared)

    def open(
        self,
        spec: DraftSource,
        vocab_size: int,
        noise: SamplingNoise | None,
        states: StatesFrom | None = None,
    ) -> RemoteBook:
        """A new book of drafts from a peer, for one sequence, until `close`.

        `states` are those that the peer's drafter reads.

        Raises ConfigError when the peer must be asked over TLS and there are no usable keys.
        """
        tls = self._material(spec)
        shared = self._shared.get(spec)
        if shared is not None and shared.tls != tls and not shared.books:
            # The certificate was renewed; while a sequence drafts, its open channel still serves.
            self._shared.pop(spec).proposer.close()
            shared = None
        if shared is None:
            proposer = RemoteProposer(
                spec.address,
                spec.model_id,
                vocab_size=vocab_size,
                extended=spec.extended,
                tls=tls,
                server_name=spec.server_name,
            )
            shared = self._shared[spec] = _Shared(proposer, tls)
        shared.books += 1
        self._shared.move_to_end(spec)
        return RemoteDraftBook(StreamedPeer(shared.proposer, states), noise)

    def close(self, spec: DraftSource, book: RemoteBook) -> None:
        """End a book; once for each `open`."""
        book.close()
        self._shared[spec].books -= 1
        idle = [known for known, shared in self._shared.items() if not shared.books]
        for known in idle[:-KEPT_PEERS]:
            self._shared.pop(known).proposer.close()

    def _material(self, spec: DraftSource) -> TlsMaterial | None:
        if not spec.server_name:
            return None
        material = self._identity()
        if material is None:
            raise ConfigError(
                f"{spec.name} is asked for drafts over TLS and this engine has no identity; "
                "start it with --identity DIR"
            )
        return material


class Drafting:
    """The draft sources of one sequence."""

    def __init__(
        self,
        specs: Sequence[DraftSource],
        controller: DraftController,
        books: RemoteBooks,
        vocab_size: int,
        sampling: Sampling,
        timer: Callable[[], float] = time.perf_counter,
        grammar: GrammarMatcher | None = None,
        states: tuple[str, StatesFrom] | None = None,
    ) -> None:
        """`states` are those of the sequence, for the drafter of this name."""
        self._controller = controller
        self._vocab_size = vocab_size
        self._timer = timer
        self._history: list[int] = []
        self._own = NGramSource() if any(spec.kind == "ngram" for spec in specs) else None
        self._shared_books = books
        self._remote = {spec.name: spec for spec in specs if spec.kind == "remote"}
        self._grammar = grammar
        self._tallies = {spec.name: SourceUsage(source=spec.name) for spec in specs}
        self._forces = grammar is not None and bool(specs)
        if self._forces:
            self._tallies[GRAMMAR] = SourceUsage(source=GRAMMAR)
        self._waited_s = dict.fromkeys(self._tallies, 0.0)
        self._books = self._open(_noise(sampling), *(states or ("", None)))
        self._unasked = set(self._books)
        self._shadows = ShadowScorer(self)

    def _open(
        self, noise: SamplingNoise | None, drafter: str, states: StatesFrom | None
    ) -> dict[str, RemoteBook]:
        """A book for each peer; one that cannot be asked costs its drafts, not the generation."""
        opened = {}
        for name, spec in list(self._remote.items()):
            try:
                read = states if spec.model_id == drafter else None
                opened[name] = self._shared_books.open(spec, self._vocab_size, noise, read)
            except (ConfigError, InvalidArgument) as problem:
                del self._remote[name]
                self._tallies[name].failed += 1
                event(
                    _log,
                    "a peer cannot be asked for drafts",
                    level=logging.WARNING,
                    source=name,
                    problem=problem.message,
                )
        return opened

    def prepare(self, history: Sequence[int]) -> None:
        """Tell peers of a prompt that is about to be computed.

        Not where n-grams draft too: peers may then not be needed.
        """
        if self._own is None:
            for book in self._books.values():
                book.prepare(history)

    def begin(self, history: list[int]) -> None:
        """Take the history, which the caller goes on extending."""
        self._history = history
        if self._own is not None:
            self._own.extend(history)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that joined the history."""
        if not self._tallies:
            return
        if self._own is not None:
            self._own.extend(tokens)
        for book in self._books.values():
            book.follow(self._history)
            for base, late in book.take_late():
                self._shadows.hold(late, base)
        self._shadows.settle(self._history)

    def has_offer(self) -> bool:
        """Whether a draft may be had now; asked at each token, and nearly free where not."""
        if self._books or self._forced():
            return True
        if self._own is None:
            return False
        if not self._own.has_offer:
            self._tallies[NGRAM].abstained += 1
        return self._own.has_offer

    def choose(self, history: list[int], room: int) -> tuple[Draft, int]:
        """The draft that is worth most now and how many of its tokens to verify; 0 = none.

        Tokens that the grammar forces come before any guess.
        """
        best, best_rows = NOTHING, 0
        if room > 0 and (forced := self._forced()):
            draft = Draft(source=GRAMMAR, tokens=forced[:room], is_certain=True)
            self._count(draft)
            return draft, self._controller.rows(draft)
        if self._own is not None:
            # Also without room, which does not come back: it is silent from then on.
            best, best_rows = self._look_up(self._own, room)
        if room < 1:
            return NOTHING, 0
        for name, book in self._books.items():
            patience_s = None if best_rows > 0 else self._patience_s(name)
            if patience_s is None:
                continue
            draft, rows = self._ask(name, book, history, room, patience_s)
            if rows > best_rows or not best.tokens:
                best, best_rows = draft, rows
        return best, min(best_rows, room)

    def ahead(self, history: list[int], block: Sequence[int]) -> None:
        """Let peers draft on as if all of `block`, which is about to be verified, were accepted."""
        for book in self._books.values():
            book.ahead(history, block)

    def verified(self, draft: Draft, offered: int, accepted: int) -> None:
        """Score a draft of which `offered` leading tokens met the verifier's own."""
        self._controller.observe_verified(draft, offered, accepted)
        tally = self._tallies[draft.source]
        tally.verified += offered
        tally.accepted += accepted

    def shadow(self, draft: Draft) -> None:
        """Hold a draft that is not verified until the history has judged it."""
        if draft.tokens:
            self._shadows.hold(draft, len(self._history))

    def observe_shadow(self, draft: Draft, actual: Sequence[int]) -> None:
        """Count a draft that the history has judged, and let the controller learn from it."""
        self._controller.observe_shadow(draft, actual)
        hits = agreeing(draft.tokens, actual)
        tally = self._tallies[draft.source]
        tally.shadowed += min(hits + 1, len(actual), len(draft.tokens))
        tally.shadow_hits += hits

    def tallies(self) -> tuple[SourceUsage, ...]:
        """Counts of each source."""
        for name, book in self._books.items():
            tally, counts = self._tallies[name], book.counts
            tally.late = counts.late + counts.stale
            tally.failed = counts.failed + counts.malformed
            tally.mean_wait_ms = 1000 * self._waited_s[name] / max(1, tally.drafts)
        return tuple(self._tallies.values())

    def close(self) -> None:
        """Cancel drafts that are under way; the generation is over."""
        self._shadows.close(self._history)
        while self._remote:
            name, spec = self._remote.popitem()
            self._shared_books.close(spec, self._books[name])

    def _forced(self) -> tuple[int, ...]:
        """Tokens that the grammar forces."""
        return self._grammar.forced() if self._forces and self._grammar is not None else ()

    def _following(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The leading tokens that the vocabulary has, and that the grammar has at their places."""
        known = _within(tokens, self._vocab_size)
        return known if self._grammar is None else known[: self._grammar.allowed(known)]

    def _look_up(self, own: NGramSource, room: int) -> tuple[Draft, int]:
        """The draft of the text itself, and how many of its tokens to verify."""
        draft = own.draft(room) or Draft(source=NGRAM)
        if self._grammar is not None:
            draft = replace(draft, tokens=self._following(draft.tokens))
        self._count(draft)
        rows = self._controller.rows(draft)
        if rows == 0:
            own.pass_over()
        return draft, rows

    def _patience_s(self, name: str) -> float | None:
        """How long to wait for a peer now; None = do not ask it.

        Each generation asks once, and waits for nothing where that does not pay: its text may be
        one that the peer is good at, and its speed may have changed.
        """
        patience_s = self._controller.patience_s(name)
        if name not in self._unasked:
            return patience_s
        self._unasked.discard(name)
        return patience_s or 0.0

    def _ask(
        self, name: str, book: RemoteBook, history: list[int], room: int, patience_s: float
    ) -> tuple[Draft, int]:
        started = self._timer()
        draft = book.poll(history, room, wait_s=patience_s)
        waited = self._timer() - started
        self._controller.observe_wait(
            name, waited, patience_s=patience_s, has_draft=bool(draft.tokens)
        )
        self._waited_s[name] += waited
        draft = Draft(
            source=name,
            tokens=self._following(draft.tokens),
            confidence=draft.confidence,
            match_length=draft.match_length,
        )
        self._count(draft)
        return draft, self._controller.rows(draft)

    def _count(self, draft: Draft) -> None:
        tally = self._tallies[draft.source]
        if draft.tokens:
            tally.drafts += 1
            tally.drafted += len(draft.tokens)
        else:
            tally.abstained += 1


def _noise(sampling: Sampling) -> SamplingNoise | None:
    """The sampling noise that a draft model shares; None for greedy sampling."""
    if sampling.is_greedy:
        return None
    return SamplingNoise(seed=sampling.seed, temperature=sampling.temperature)


def _within(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The leading tokens that the vocabulary has."""
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tuple(tokens[:index])
    return tuple(tokens)
