"""The canaries of one node: its ring groups, and one process of their weights beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kakeya.adapters.files.base import base_fingerprint
from kakeya.backends.engines import GROUP, Engines
from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring import canary
from kakeya.backends.ring.canary import Answer
from kakeya.backends.ring.canary_answers import AnswerFiles
from kakeya.backends.ring.canary_check import ANSWER_S, GroupCheck, collected
from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, InvalidArgument, KakeyaError, NotFound
from kakeya.core.log import event
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Frame
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.events import Event, ModelUnload
from kakeya.memory.arbiter.resident import RequestPriority, ResidentKey

_log = logging.getLogger(__name__)


class EngineAlone:
    """One process of this node, in the room that the arbiter finds for it."""

    def __init__(self, model: ResidentModel, memory: MemoryArbiter) -> None:
        self._model = model
        self._memory = memory
        self._key = ResidentKey(model.capability, model.model_id)

    async def answer(
        self, tokens: int, hears: Callable[[Frame], None]
    ) -> tuple[ModelFacts, Answer] | None:
        """See `OneProcess`."""
        terms = Terms(priority=RequestPriority.LOW, timeout_s=ANSWER_S)
        try:
            if not self._memory.would_grant(*self._key, terms):
                return None
        except KakeyaError:  # it exceeds the budget by itself, and has no size
            return None
        gone = asyncio.Event()

        def happened(told: Event) -> None:
            if isinstance(told, ModelUnload) and told.key == self._key:
                gone.set()

        forget = self._memory.on_event(happened)
        try:
            try:
                async with self._model.lend(terms) as backend:
                    facts = await backend.ready(ANSWER_S)
                    ids = canary.prompt(facts.vocab_size, tokens)
                    asked = canary.request(ids, canary.ANSWER_TOKENS)
                    answer = await collected(backend.decode(asked), hears)
            finally:
                self._leave()
            async with asyncio.timeout(ANSWER_S):
                while self._model.resident is not None:
                    gone.clear()
                    await gone.wait()
        finally:
            forget()
        return facts, answer

    def weights(self) -> str:
        """See `OneProcess`."""
        folder = self._model.folder
        with contextlib.suppress(InvalidArgument):
            return "" if folder is None else base_fingerprint(folder)
        return ""

    def _leave(self) -> None:
        with contextlib.suppress(NotFound, Conflict):  # it did not load, or still does
            self._memory.unload(*self._key)


class GroupChecks:
    """The checks of a node's ring groups: of those that it adopts, and of those that it leads."""

    def __init__(
        self, engines: Engines, memory: MemoryArbiter, *, data_dir: Path, clock: Clock
    ) -> None:
        self._engines = engines
        self._memory = memory
        self._answers = AnswerFiles(data_dir)
        self._clock = clock
        for spec, model in engines.models():
            if model is not None and spec.model_id in engines.alone:
                path = Path(str(dict(spec.manifest.options)[GROUP]))
                self.add(model, end=partial(end_leader, path))

    def add(self, model: ResidentModel, end: Callable[[], None] = lambda: None) -> None:
        """Check the groups of a model; `end` ends one whose rank 0 is no child of this node."""
        model.check = GroupCheck(
            model.model_id,
            EngineAlone(self._engines.alone[model.model_id], self._memory),
            self._answers,
            end=end,
            is_idle=self._is_idle,
            clock=self._clock,
        )

    def _is_idle(self) -> bool:
        """Whether nothing runs here. A rank of another node's group is held as long as it lasts,
        so it does not count."""
        return all(one.is_idle or one.role.is_lent for one in self._memory.status().residents)


def end_leader(path: Path) -> None:
    """End the process that serves at a unix socket, rank 0: the others end with it."""
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(str(path))
            os.kill(_peer(link), signal.SIGTERM)
        except OSError as gone:
            event(_log, "a refused ring group was not ended", path=path, reason=gone)


def _peer(link: socket.socket) -> int:
    if sys.platform == "darwin":
        (pid,) = struct.unpack("i", link.getsockopt(0, 2, 4))  # SOL_LOCAL, LOCAL_PEERPID
    else:
        pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)
