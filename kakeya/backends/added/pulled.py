"""The models that pulls brought, as models of the node: by the names under which they were pulled,
and loaded when a request asks for them.

The models folder says which there are: it is compared with what the node serves at the start, at
the end of each pull and removal, and when a ring group leaves its name free.
"""

from __future__ import annotations

import asyncio
import logging

from kakeya.backends.added.home import ModelHome
from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.ids import NGRAM
from kakeya.core.log import event
from kakeya.core.settings import Illegal
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import MAX_ID_BYTES
from kakeya.generation.spec import ModelRole, pulled_model
from kakeya.weights.found import FoundModel
from kakeya.weights.listed import uses
from kakeya.weights.weights import NodeWeights

_log = logging.getLogger(__name__)


class PulledModels:
    """See the module; lives on the event loop."""

    def __init__(self, home: ModelHome, weights: NodeWeights) -> None:
        self._home = home
        self._weights = weights
        self._lock = asyncio.Lock()
        self._poked = asyncio.Event()
        self._unserved: dict[str, str] = {}

    async def open(self) -> None:
        """Serve what earlier pulls brought, and from now on follow pulls and removals."""
        self._weights.changed, self._weights.leaves = self.compare, self._leave
        self._weights.unserved = lambda name: self._unserved.get(name, "")
        self._home.freed = self._poked.set
        await self.compare()

    def start(self, tasks: Supervisor) -> None:
        """Follow the names that become free."""
        tasks.start("pulled models", self._run)

    async def _run(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            await self.compare()

    async def compare(self) -> None:
        """Serve what is in the models folder, and nothing else of it."""
        async with self._lock:
            models = await self._weights.index.models(anew=True)
            found = {one.name: one for one in models if one.record is not None}
            for model in self._home.all_pulled():
                if model.model_id not in found:
                    await self._home.withdraw(model, is_forced=True)
            before, self._unserved = self._unserved, {}
            for name, one in found.items():
                if self._home.pulled(name) is None and (why := await self._serve(one)):
                    self._unserved[name] = why
                    if before.get(name) != why:
                        event(
                            _log, "a model that was pulled is not served", level=logging.WARNING,
                            model=name, why=why,
                        )  # fmt: skip

    async def _serve(self, found: FoundModel) -> str:
        """Serve a model; why it is not served, "" = it is."""
        if found.name == NGRAM or len(found.name.encode()) > MAX_ID_BYTES:
            return f"a model that is served has a name of at most {MAX_ID_BYTES} bytes, not {NGRAM}"
        try:
            if (await asyncio.to_thread(uses, found, self._home.lasting_sources, ()))[1]:
                return ""  # by its owner's configuration
            spec = await asyncio.to_thread(pulled_model, found.name, found.path)
            if spec.role is ModelRole.DIFFUSION:
                return f"it draws images: start the node with --model {found.name}"
            await self._home.add_pulled(spec)
        except (ConfigError, Conflict, Illegal) as problem:
            return str(problem)
        except Exception as fault:  # noqa: BLE001 - no file may keep a node from its start
            return f"its files are none that a node can read: {fault!r}"
        return ""

    async def _leave(self, found: FoundModel, *, is_forced: bool) -> None:
        """Serve a model no more that is going to be removed. Raises Conflict while it is in use."""
        async with self._lock:
            if (model := self._home.pulled(found.name)) is not None:
                await self._home.withdraw(model, is_forced=is_forced)
