"""Answers that outlive the node that streams them to their client.

    begin    an answer is copied to the memory of one peer: the request before the first token is
             told, then the tokens as they come, some at a time
    find     the copy of an answer, from this node or its peers
    hold     an answer is copied before a model is asked for it
    decode   the frames of an answer from its first one on; of a copy that was found, its frames,
             and then what follows them

Which peer holds a copy follows from the answer's id. While the peer is lost another one is sent the
whole copy; where there is none, this node holds it, for a client that only lost its connection.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    Conflict,
    Denied,
    KakeyaError,
    NotFound,
    PeerUnavailable,
    UnknownMethod,
)
from kakeya.core.figures import Figure, counter
from kakeya.dispatch.peers.held_answers import KEEP_S, AnswerCopy, HeldAnswers
from kakeya.dispatch.peers.neighbours import LivePeer, ServingPeers
from kakeya.dispatch.peers.quote import AnswerOrigin, QuotedModel, origin_of
from kakeya.dispatch.peers.wire import copy_from_wire, copy_to_wire
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.generation.continuation import Continuation
from kakeya.generation.frames import Done, Frame, Progress, Tokens
from kakeya.generation.model import ServedModel
from kakeya.generation.request import DecodeRequest

BATCH_S = 0.1
BATCH_TOKENS = 16
"""Tokens are sent when so many are new, or so long after the first of them."""
FIRST_S = 0.5
"""How long the first token waits for the copy of its request."""
_MOST_TRIES = 3
"""Peers that are asked to hold a copy, before this node does."""
_MOST_WHOLE = 6
"""Times that peers are asked to hold one answer from its beginning; two nodes may go on with it at
once."""


_HOLDS_NONE = (NotFound, UnknownMethod, Denied)
_AGAIN_S = 1.0
"""A node that was just restarted is reached again by then."""


class AnswerCopies:
    """See the module; lives on the event loop."""

    def __init__(self, peers: ServingPeers, held: HeldAnswers, clock: Clock) -> None:
        self.peers = peers
        self.held = held
        self.clock = clock
        self.resumed = 0
        """Answers that this node went on with."""
        self._unable: set[str] = set()
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        """Whether answers are copied."""
        return self.held.is_on

    def begin(self, copy: AnswerCopy) -> CopiedAnswer:
        """The answer of a copy: without frames a new one, else one that was found."""
        self.resumed += bool(copy.frames)
        return CopiedAnswer(self, replace(copy, node_id=self.peers.own_id))

    async def find(self, answer_id: str, client: str) -> AnswerCopy:
        """The copy of a client's answer with the most tokens. Raises NotFound, which names the
        nodes that were asked, and PeerUnavailable while one of them does not answer."""
        here = self.held.find(answer_id, client)
        found = [] if here is None else [copy_from_wire(here)]
        told = await self._ask(answer_id, client)
        found += [one for one in told.values() if isinstance(one, AnswerCopy)]
        if not found:
            missing = self._missing(answer_id, told)
            if all(isinstance(one, _HOLDS_NONE) for one in told.values()):
                raise NotFound(missing)
            raise PeerUnavailable(missing, retry_after_s=_AGAIN_S)
        return max(found, key=lambda copy: (copy.is_complete, _tokens(copy)))

    async def forget(self, answer_id: str, client: str) -> bool:
        """Have the copies of a client's answer forgotten; False = there was none."""
        was_here = self.held.forget(answer_id, client)
        told = await self._ask(answer_id, client, forget=True)
        return was_here or any(isinstance(one, AnswerCopy) for one in told.values())

    def is_made(self, copy: AnswerCopy) -> bool:
        """Whether the node that made an answer last is still there."""
        return self.peers.is_live(copy.node_id)

    def holders(self, answer_id: str) -> Sequence[LivePeer]:
        """The peers that may hold a copy, in their order for this answer."""

        def order(peer: LivePeer) -> tuple[bool, bytes]:
            return peer.is_suspect, sha256(f"{answer_id} {peer.node_id}".encode()).digest()

        # A node that was just restarted offers no model yet, and may hold copies before and after.
        able = (peer for peer in self.peers.live() if peer.node_id not in self._unable)
        return sorted(able, key=order)

    def failed(self, peer: LivePeer, failure: KakeyaError) -> None:
        """Note the failure of a call. A node of an older build holds no copies, and serves."""
        if isinstance(failure, UnknownMethod | Denied):
            self._unable.add(peer.node_id)
        else:
            self.peers.failed(peer, failure)

    def start(self, sender: asyncio.Task[None]) -> None:
        """Keep a task until it ends."""
        self._sending.add(sender)
        sender.add_done_callback(self._sending.discard)

    async def aclose(self) -> None:
        """End what is under way."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def figures(self) -> Iterator[Figure]:
        """What is held here, and how often it was of use."""
        yield from self.held.figures()
        name = "kakeya_answers_resumed"
        yield counter(name, "Answers that were gone on with from a copy", self.resumed)

    async def _ask(
        self, answer_id: str, client: str, *, forget: bool = False
    ) -> Mapping[str, AnswerCopy | KakeyaError]:
        """What each peer that may hold a copy says, by its name."""

        async def ask(peer: LivePeer) -> AnswerCopy | KakeyaError:
            try:
                return await self.peers.calls(peer).find_answer(answer_id, client, forget=forget)
            except NotFound as missing:
                return missing
            except KakeyaError as failure:
                self.failed(peer, failure)
                return failure

        peers = self.holders(answer_id)
        answers = await asyncio.gather(*map(ask, peers))
        return dict(zip((peer.label for peer in peers), answers, strict=True))

    def _missing(self, answer_id: str, told: Mapping[str, AnswerCopy | KakeyaError]) -> str:
        asked = [name for name, one in told.items() if isinstance(one, NotFound)]
        silent = [f"{name} ({one})" for name, one in told.items() if not isinstance(one, NotFound)]
        said = f"no copy of {answer_id[:80]!r} is held for this client by this node"
        said += f", nor by {', '.join(asked)}" if asked else "; no peer that holds copies is known"
        said += f"; not asked with success: {', '.join(silent)}" if silent else ""
        return (
            f"{said}. Copies are kept for {KEEP_S / 60:.0f} minutes behind the last token, of "
            "streamed answers and of responses in the background, unless resumable is false"
        )


class CopiedAnswer:
    """One answer that is copied as it is made."""

    def __init__(self, copies: AnswerCopies, copy: AnswerCopy) -> None:
        self._copies = copies
        self._copy = copy
        self._frames = list(copy.frames)
        self._new: list[Frame] = []
        self._new_tokens = 0
        self._progress: Progress | None = None
        """What the first token found cached, which the beginning of an answer may tell."""
        self._is_over = False
        self._holder: LivePeer | None = None
        self._held: int | None = None
        """Frames that the holder has; None = it has nothing."""
        self._whole_left = _MOST_WHOLE
        self._again_mono = -math.inf
        """When peers are asked again after none of them took the answer."""
        self._is_forgotten = False
        self._changed = asyncio.Event()
        self._full = asyncio.Event()
        self._tried = asyncio.Event()

    def complete(self) -> None:
        """Note that the answer is whole: nothing follows."""
        self._copy = replace(self._copy, is_complete=True)

    def hold(self) -> None:
        """Have the copy held as it is, before a model is asked or without one."""

        async def send() -> None:
            await self._push()
            self._tried.set()

        self._copies.start(asyncio.create_task(send(), name=f"copy of {self._copy.answer_id}"))

    async def held(self) -> None:
        """Wait until the copy's first way to a node was tried, at most FIRST_S."""
        if not self._tried.is_set():
            await self._copies.clock.sleep(FIRST_S, self._tried)
            self._tried.set()

    async def decode(
        self, model: ServedModel, request: DecodeRequest
    ) -> AsyncGenerator[Frame, None]:
        """The frames of the answer from its first one on. Raises as `ServedModel.decode`, and
        Conflict where the model has other weights than those that began the answer."""
        clock = self._copies.clock
        job = Continuation(request, clock.mono())
        if not self._copy.is_complete:
            name = f"copy of {self._copy.answer_id}"
            self._copies.start(asyncio.create_task(self._send(), name=name))
        try:
            for frame in self._copy.frames:
                if (told := job.take(frame, clock.mono())) is not None:
                    yield told
                if isinstance(frame, Done):
                    return
            if job.has_begun:
                job.interrupt()
                context = model.facts.context_tokens if model.facts else sys.maxsize
                if (done := job.finish(context, clock.mono())) is not None:
                    self._add(done, model)
                    yield done
                    return
            async with aclosing(self._rest(model, job)) as frames:
                async for frame in frames:
                    taken = job.take(frame, clock.mono())
                    if isinstance(taken, Progress):
                        self._progress = taken
                    elif taken is not None:
                        # Nothing is told of an answer that its client could not find again.
                        await self.held()
                        self._add(taken, model)
                    if taken is not None:
                        yield taken
        finally:
            self._is_over = True
            self._changed.set()
            self._full.set()

    def _rest(self, model: ServedModel, job: Continuation) -> AsyncGenerator[Frame, None]:
        """What follows, by the weights alone that began the answer."""
        rest, origin = job.rest(self._copies.clock.mono()), self._copy.origin
        if not job.has_begun:
            return model.decode(rest)
        if isinstance(model, RoutedModel) and origin.weights:
            return model.decode(rest, origin)
        if isinstance(model, RoutedModel) or _origin(model).weights != origin.weights:
            raise Conflict(
                f"the weights of {model.model_id} on this node are not those that began "
                f"{self._copy.answer_id}; ask a node that has them"
            )
        return model.decode(rest)

    def _add(self, frame: Tokens | Done, model: ServedModel) -> None:
        if not self._copy.origin.weights:
            self._copy = replace(self._copy, origin=_origin(model))
        if self._progress is not None:
            self._new.append(self._progress)
            self._progress = None
        if isinstance(frame, Done):
            self.complete()
        last = self._new[-1] if self._new else None
        if isinstance(frame, Tokens) and isinstance(last, Tokens):
            self._new[-1] = Tokens(
                token_ids=(*last.token_ids, *frame.token_ids),
                logprobs=(*last.logprobs, *frame.logprobs),
            )
        else:
            self._new.append(frame)
        if isinstance(frame, Tokens):
            self._new_tokens += len(frame.token_ids)
        self._changed.set()
        if self._new_tokens >= BATCH_TOKENS:
            self._full.set()

    async def _send(self) -> None:
        await self._push()
        self._tried.set()
        while True:
            await self._changed.wait()
            await self._copies.clock.sleep(BATCH_S, self._full)
            self._changed.clear()
            self._full.clear()
            is_last = self._is_over
            await self._push()
            if is_last:
                return

    async def _push(self) -> None:
        """Have what is new held, by another node where the holder is lost, and by this one until
        another does."""
        self._frames += self._new
        self._new, self._new_tokens = [], 0
        if self._held is not None and not self._is_forgotten:
            await self._is_held_by(self._holder, self._held)
        if self._is_forgotten or (self._held is not None and self._holder is not None):
            return
        here, now = self._held, self._copies.clock.mono()
        if self._whole_left > 0 and now >= self._again_mono:
            self._whole_left -= 1
            for peer in self._copies.holders(self._copy.answer_id)[:_MOST_TRIES]:
                if await self._is_held_by(peer, 0):
                    return
            self._again_mono = now + 2.0 ** (_MOST_WHOLE - self._whole_left - 1)
        self._holder, self._held = None, here
        if here is None:
            await self._is_held_by(None, 0)

    async def _is_held_by(self, peer: LivePeer | None, before: int) -> bool:
        """Send the frames behind the first `before` to a peer, None = this node."""
        copy = replace(self._copy, frames=self._frames[before:])
        try:
            if peer is None:
                self._copies.held.hold(copy_to_wire(copy, before), before)
            else:
                await self._copies.peers.calls(peer).hold_answer(copy, before)
        except Conflict:  # its client had it forgotten
            self._held, self._is_forgotten = None, True
            return True
        except KakeyaError as failure:
            self._held = None
            if peer is not None:
                self._copies.failed(peer, failure)
            return False
        self._holder, self._held = peer, before + len(copy.frames)
        return True


def _origin(model: ServedModel) -> AnswerOrigin:
    if isinstance(model, RoutedModel):
        return model.began_with
    return origin_of(model.facts, model.adapter_digest if isinstance(model, QuotedModel) else "")


def _tokens(copy: AnswerCopy) -> int:
    return sum(len(frame.token_ids) for frame in copy.frames if isinstance(frame, Tokens))
