"""gRPC sessions of a drill: turn after turn, while their nodes are drained and replaced."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from benchmarks.failover import MODEL
from benchmarks.shelf_drill.clients import Tally
from kakeya.core.errors import KakeyaError, NotFound, PeerUnavailable, Refused
from kakeya.sessions.client import Client, ClientSession

KIND = "session turn"
_TURNS = tuple([20 + number] * (30 + number) for number in range(8))
_TOKENS = 60
_PAUSE_S = 0.5
_AGAIN_S = 0.5


async def _turn(session: ClientSession, more: Sequence[int]) -> list[int]:
    await session.append(more)
    return [token async for token in session.generate(_TOKENS, seed=7, temperature=0.8)]


async def undisturbed_turns(address: str) -> list[list[int]]:
    """The answers of a session that nothing happens to."""
    async with Client(address) as client:
        session = await client.create_session(model_id=MODEL)
        return [await _turn(session, more) for more in _TURNS]


class SessionLoop:
    """Sessions one after the other, at the first address that takes their calls."""

    def __init__(self, addresses: Sequence[str], known: Sequence[list[int]], tally: Tally) -> None:
        self._addresses = itertools.cycle(addresses)
        self._client = Client(next(self._addresses))
        self._known = known
        self._tally = tally

    async def run(self, over: asyncio.Event) -> None:
        """Open sessions and end them, until it is over."""
        while not over.is_set():
            session = await self._open()
            for more, known in zip(_TURNS, self._known, strict=True):
                if over.is_set():
                    break
                session = await self._turn(session, more, known)
                await asyncio.sleep(_PAUSE_S)
        await self._client.aclose()

    async def _open(self) -> ClientSession:
        while True:
            try:
                return await self._client.create_session(model_id=MODEL)
            except (PeerUnavailable, Refused, NotFound) as refused:
                await self._refused("session", refused)

    async def _turn(
        self, session: ClientSession, more: Sequence[int], known: list[int]
    ) -> ClientSession:
        """One turn; a refused one comes again, at the next address."""
        is_appended, got = False, list[int]()
        while True:
            try:
                if not is_appended:
                    await session.append(more)
                    is_appended = True
                async for token in session.generate(_TOKENS, seed=7, temperature=0.8):
                    got.append(token)
            except PeerUnavailable as lost:
                if got:
                    self._tally.note(KIND, "broken", lost.message)
                    return session
                await self._refused(KIND, lost)
                session = await self._client.resume_session(session.session_id)
            except KakeyaError as failure:
                self._tally.note(KIND, "wrong", f"{session.session_id} {failure!r}")
                return session
            else:
                self._tally.note(KIND, "same" if got == known else "wrong", str(got))
                return session

    async def _refused(self, kind: str, why: KakeyaError) -> None:
        self._tally.note(kind, "refused")
        self._tally.refusals[f"gRPC {why.code}"] += 1
        await self._client.aclose()
        await asyncio.sleep(_AGAIN_S)
        told = why.moved_to if isinstance(why, PeerUnavailable) else ""
        self._client = Client(told or next(self._addresses))
