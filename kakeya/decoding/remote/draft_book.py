"""Drafts of a peer kept ahead of need, so that the round trip costs nothing where drafts hold.

The book asks for more tokens than one block takes, hands the draft out piece by piece while the
history follows it, and asks for tokens behind a block while the verifier still works on it.

    history    ... h h h | b b b b          `ahead`: b is being verified, ask as if all stood
    held             b b b b r r r r r      handed out b; r follows without a call
    pending                  ? ? ? ? ? ...  begins after b, arrives during the verification

An answer says which prefix it continues; where the history took another turn it is stale, and
dropped. Nothing here blocks for longer than the caller allows, and nothing raises for a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kakeya.core.clock import Clock
from kakeya.core.errors import PeerError, PeerProtocol
from kakeya.decoding.draft.proposer import Draft, SamplingNoise

LEAST_ASKED = 16
MOST_ASKED = 64
"""Tokens per request: doubled while drafts hold, back to the least when one does not."""
MOST_PADDED = 16
"""Most tokens for a peer that pads its blocks: its padding looks like drafts."""
CONTEXT = 8
"""Tokens before an assumption that are compared besides it."""
LONGEST_PAUSE = 32
"""Tokens until a peer that abstained several times is asked again."""
OVERDUE = 4
"""Times the usual round trip after which an answer is no longer waited for."""
KEPT_LATE = 8


class Pending(Protocol):
    """A request under way."""

    @property
    def began_mono(self) -> float:
        """When it was sent."""
        ...

    @property
    def arrived_mono(self) -> float | None:
        """When it ended, if it has."""
        ...

    def wait(self, seconds: float) -> bool:
        """Block until it has ended, at most so long; whether it has."""
        ...


Sent = TypeVar("Sent", bound=Pending)


class DraftPeer(Protocol[Sent]):
    """A peer as the book asks it; RemoteProposer is one."""

    @property
    def name(self) -> str:
        """The source of its drafts."""
        ...

    @property
    def extended(self) -> bool:
        """Whether it tells padding from drafts."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock of `Pending`."""
        ...

    def begin(
        self, prefix: Sequence[int], size: int, *, noise: SamplingNoise | None
    ) -> Sent | None:
        """Send a request; None while the peer is not to be asked."""
        ...

    def finish(self, pending: Sent) -> Draft:
        """Read an ended request. Raises PeerError, of that PeerProtocol for a malformed answer."""
        ...

    def abandon(self, pending: Sent) -> None:
        """Give a request up."""
        ...

    def prepare(self, prefix: Sequence[int], *, noise: SamplingNoise | None) -> None:
        """Learn the text that the first request will begin with."""
        ...

    def leave(self) -> None:
        """Learn that no request follows."""
        ...


@dataclass(slots=True)
class BookCounts:
    """Requests by their outcome, and tokens handed out.

    `stale`: the prefix that was assumed did not come true. `late`: the history had passed or
    contradicted the draft before it was handed out.
    """

    asked: int = 0
    abstained: int = 0
    stale: int = 0
    late: int = 0
    failed: int = 0
    malformed: int = 0
    handed_out: int = 0


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Sent]):
    call: Sent
    base: int
    context: tuple[int, ...]


@dataclass(slots=True)
class _Held:
    """A draft of the tokens behind the first `base`, of which the last are `context`."""

    base: int
    context: tuple[int, ...]
    draft: Draft
    handed_out: bool = False


class RemoteDraftBook(Generic[Sent]):
    """The drafts of one peer for one generation; used by the thread that decodes it.

    `noise` is the generation's; None when it decodes greedily.
    """

    def __init__(self, peer: DraftPeer[Sent], noise: SamplingNoise | None = None) -> None:
        self.counts = BookCounts()
        self._peer = peer
        self._noise = noise
        self._most = MOST_ASKED if peer.extended else MOST_PADDED
        self._ask_tokens = min(LEAST_ASKED, self._most)
        self._asked: _Asked[Sent] | None = None
        self._held: _Held | None = None
        self._in_use = False
        self._late: list[tuple[int, Draft]] = []
        self._round_trip_s: float | None = None
        self._pause = 1
        self._silent_until = 0

    def prepare(self, history: Sequence[int]) -> None:
        """Ask for a draft after the history that the generation will begin with."""
        self._peer.prepare(history, noise=self._noise)
        if self._asked is None and self._held is None:
            self._ask(list(history), len(history))

    def poll(self, history: Sequence[int], size: int, *, wait_s: float) -> Draft:
        """At most `size` tokens after `history`, empty when there are none in time.

        Waits, at most `wait_s`, only for an answer that is expected within that.
        """
        self._collect(history)
        draft = self._remainder(history, size)
        if draft is None:
            if self._asked is None:
                self._ask(list(history), len(history))
            if self._asked is not None and self._await(self._asked, wait_s):
                self._collect(history)
                draft = self._remainder(history, size)
        self._in_use = draft is not None and self._held is not None
        if draft is None or self._held is None:
            return Draft(source=self._peer.name)
        self._held.handed_out = True
        self.counts.handed_out += len(draft.tokens)
        return draft

    def follow(self, history: Sequence[int]) -> None:
        """Ask at once, not at `poll`, if the held draft does not follow the grown history.

        Call it as soon as the tokens are known. While drafts are not in use it asks for nothing,
        but still takes answers in, so that one that came too late for its step is judged.
        """
        if not self._in_use and self._asked is None and self._held is None:
            return
        self._collect(history)
        remainder = self._remainder(history, 1)
        if self._in_use and self._asked is None and remainder is None:
            self._ask(list(history), len(history))

    def ahead(self, history: Sequence[int], block: Sequence[int]) -> None:
        """Ask for a draft after `history` and `block`, which is about to be verified."""
        if self._asked is not None:
            return
        rest = self._rest_after(history, block)
        if rest >= max(LEAST_ASKED, 2 * len(block)):
            return
        if self._held is not None:
            self._ask_tokens = min(2 * self._ask_tokens, self._most)
        self._ask([*history, *block], len(history))

    def take_late(self) -> list[tuple[int, Draft]]:
        """Drafts that came too late to be handed out, with the length they continued.

        They can still be scored against the history from there on.
        """
        taken, self._late = self._late, []
        return taken

    def close(self) -> None:
        """Give up requests under way; the generation is over."""
        if self._asked is not None:
            self._peer.abandon(self._asked.call)
            self._asked = None
        self._held = None
        self._peer.leave()

    def _ask(self, prefix: list[int], committed: int) -> None:
        if committed < self._silent_until:
            return
        call = self._peer.begin(prefix, self._ask_tokens, noise=self._noise)
        if call is not None:
            self.counts.asked += 1
            context = tuple(prefix[max(0, committed - CONTEXT) :])
            self._asked = _Asked(call, len(prefix), context)

    def _await(self, asked: _Asked[Sent], wait_s: float) -> bool:
        """Wait for an answer if it is expected in time; not for one that is long overdue."""
        if asked.call.arrived_mono is not None:
            return True
        if wait_s <= 0:
            return False
        elapsed = self._peer.clock.mono() - asked.call.began_mono
        usual = wait_s if self._round_trip_s is None else self._round_trip_s
        overdue_s = OVERDUE * usual - elapsed
        if usual - elapsed > wait_s or overdue_s <= 0:
            return False
        return asked.call.wait(min(wait_s, overdue_s))

    def _collect(self, history: Sequence[int]) -> None:
        """Take in an answer that has arrived; give up a request that assumed other tokens."""
        asked = self._asked
        if asked is None:
            return
        agrees = _agrees(history, asked.base, asked.context)
        if asked.call.arrived_mono is None:
            if not agrees:
                self.counts.stale += 1
                self._asked = None
                self._peer.abandon(asked.call)
            return
        self._asked = None
        draft = self._finish(asked.call, len(history))
        if draft is None:
            return
        if agrees:
            self._held = _Held(asked.base, asked.context, draft)
        else:
            self.counts.stale += 1

    def _finish(self, call: Sent, committed: int) -> Draft | None:
        try:
            draft = self._peer.finish(call)
        except PeerProtocol:
            self.counts.malformed += 1
            return None
        except PeerError:
            self.counts.failed += 1
            return None
        if call.arrived_mono is not None:
            taken_s = call.arrived_mono - call.began_mono
            known_s = taken_s if self._round_trip_s is None else self._round_trip_s
            weight = 0.5 if taken_s > known_s else 0.2
            self._round_trip_s = known_s + weight * (taken_s - known_s)
        if draft.tokens:
            self._pause = 1
            if draft.match_length:
                # A look-up costs the peer as much for one token as for many.
                self._ask_tokens = self._most
            return draft
        self.counts.abstained += 1
        self._silent_until = committed + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return None

    def _remainder(self, history: Sequence[int], size: int) -> Draft | None:
        """The part of the held draft that follows the history; drops a draft that failed."""
        held = self._held
        if held is None or len(history) < held.base:
            return None
        draft, done = held.draft, len(history) - held.base
        came = tuple(history[held.base : held.base + len(draft.tokens)])
        wrong = not _agrees(history, held.base, held.context) or came != draft.tokens[: len(came)]
        if wrong or done >= len(draft.tokens):
            self._drop(held, wrong=wrong)
            return None
        return Draft(
            source=self._peer.name,
            tokens=draft.tokens[done : done + size],
            confidence=draft.confidence[done : done + size],
            # What was copied so far came true: so much more of the text now supports the rest.
            match_length=draft.match_length + done if draft.match_length else 0,
            forward_passes=draft.forward_passes,
            diffusion_steps=draft.diffusion_steps,
            peak_activation_bytes=draft.peak_activation_bytes,
            draft_us=draft.draft_us,
        )

    def _drop(self, held: _Held, *, wrong: bool) -> None:
        self._held = None
        if not held.handed_out:
            self.counts.late += 1
            self._late = [*self._late, (held.base, held.draft)][-KEPT_LATE:]
        if wrong and not held.draft.match_length:
            self._ask_tokens = min(LEAST_ASKED, self._most)

    def _rest_after(self, history: Sequence[int], block: Sequence[int]) -> int:
        """How many held tokens would be left if `block` after `history` came true."""
        held = self._held
        if held is None:
            return 0
        done = len(history) - held.base
        if done < 0 or held.draft.tokens[done : done + len(block)] != tuple(block):
            return 0
        return len(held.draft.tokens) - done - len(block)


def _agrees(history: Sequence[int], base: int, context: tuple[int, ...]) -> bool:
    """Whether the tokens before position `base` are `context`, as far as the history goes."""
    start = base - len(context)
    known = tuple(history[start:base])
    return known == context[: len(known)] and len(history) >= start
