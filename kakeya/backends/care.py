"""The care that a node takes with its models after panics of its machine.

profile   of the whole node: the reserve, and the sequences of each engine (`machine/panics`)
step      of one model that was in memory at several of them (`machine/suspects`)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engine.process import Command
from kakeya.backends.engines import EngineCommand
from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.generation.spec import ModelSpec
from kakeya.memory.machine.panics import NORMAL, Profile, find_profile, recent_incidents
from kakeya.memory.machine.suspects import LoadStep, StayFile, load_step, refusal, series_of

_log = logging.getLogger(__name__)
LEAST_KV_SHARE = 0.5


class PanicCare:
    """See the module. `options` are those of engines without care, `allowed` the models that are
    loaded in any case, `reports` the folders of the system's reports."""

    def __init__(
        self,
        reports: Sequence[Path],
        data_dir: Path,
        *,
        options: EngineOptions,
        allowed: Collection[str],
        clock: Clock,
    ) -> None:
        """Blocks."""
        self._reports = reports
        self._usual = options
        self._allowed = allowed
        self._clock = clock
        self._writing = asyncio.Lock()
        self._begun: set[str] = set()
        """Models whose stay has no end yet."""
        self._file = StayFile(data_dir)
        self._steps: Mapping[str, LoadStep] = MappingProxyType({})
        self.profile: Profile = NORMAL
        self.refusals: Mapping[str, str] = MappingProxyType({})
        """The reasons of models that are not loaded."""
        self.read()

    def read(self) -> None:
        """Read the system's reports, and choose. Blocks; raises nothing."""
        now = self._clock.wall()
        self.profile, reports = find_profile(self._reports, now=now)
        incidents = recent_incidents(reports, now=now)
        stays = self._file.stays
        steps, refusals = {}, {}
        for model_id in {stay.model_id for stay in stays}:
            series = series_of(model_id, stays, incidents)
            step = load_step(series, is_allowed=model_id in self._allowed)
            if step is LoadStep.REFUSED:
                refusals[model_id] = refusal(model_id, series)
            if step is not LoadStep.USUAL:
                what = "a model was in memory at several panics of the machine"
                told = {"model": model_id, "panics": len(series), "it is now": step.name.lower()}
                event(_log, what, level=logging.WARNING, **told)
                steps[model_id] = step
        self._steps, self.refusals = steps, refusals
        self._file.tidy(incidents, now)

    def options(self, model_id: str = "") -> EngineOptions:
        """Return the options of a model's engine; of a model of which nothing is known for ""."""
        most = self._usual.max_running
        if self.profile.max_running is not None:
            most = min(most, self.profile.max_running)
        return replace(self._usual, max_running=1 if self._is_least(model_id) else most)

    def own_options(self) -> dict[str, EngineOptions]:
        """Return the options of single models by id."""
        return {model_id: self.options(model_id) for model_id in self._steps}

    def flags(self, model_id: str) -> tuple[str, ...]:
        """Return the flags of an engine that starts now."""
        most = str(self.options(model_id).max_running)
        drafts = ("--draft-rows", "0") if self._is_least(model_id) else ()
        return (*drafts, "--max-running", most)

    def with_flags(self, command: EngineCommand) -> EngineCommand:
        """Return a command that gives an engine these flags."""

        def for_model(spec: ModelSpec, resolved: str) -> Command:
            on_socket = command(spec, resolved)

            def with_flags(socket: Path) -> Sequence[str]:
                return (*on_socket(socket), *self.flags(spec.model_id))

            return with_flags

        return for_model

    def kv_share(self, model_id: str) -> float:
        """Return the share of the KV that a model could have which it may have."""
        return LEAST_KV_SHARE if self._is_least(model_id) else 1.0

    async def begin(self, model_id: str) -> None:
        """Write down that a model is about to be loaded."""
        async with self._writing:
            self._begun.add(model_id)
            await asyncio.to_thread(self._file.begin, model_id, self._clock.wall())

    async def end(self, model_id: str) -> None:
        """Write down that a model has left memory."""
        async with self._writing:
            await asyncio.to_thread(self._file.end, model_id, self._clock.wall())
            self._begun.discard(model_id)

    async def aclose(self) -> None:
        """Write down that all models have left memory, those that were ended by force too."""
        for model_id in sorted(self._begun):
            await self.end(model_id)

    async def read_again(self) -> None:
        """Read off the event loop, while no stay is written."""
        async with self._writing:
            await asyncio.to_thread(self.read)

    def _is_least(self, model_id: str) -> bool:
        return self._steps.get(model_id, LoadStep.USUAL) is not LoadStep.USUAL
