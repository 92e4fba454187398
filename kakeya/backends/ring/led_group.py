"""A ring group that this node leads: its ranks, its model, its state, and what is told of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.formation import Formation
from kakeya.backends.ring.spec import RingSpec
from kakeya.backends.ring.state import GroupPhase, GroupState
from kakeya.backends.sizes import LeaseSize
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.core.units import MIB
from kakeya.generation.facts import ModelState

_log = logging.getLogger(__name__)
BACKEND = "ring"
"""Of mlx.distributed: TCP."""


class LedGroup:
    """One group, from its wish on."""

    def __init__(self, spec: RingSpec, formation: Formation) -> None:
        self.spec = spec
        self.formation = formation
        self.state = GroupState()
        self.model: ResidentModel | None = None
        """None until the weights were found here."""
        self.size: LeaseSize | None = None
        self.wake = asyncio.Event()
        self.are_members_live = True
        self.trying: asyncio.Task[None] | None = None
        """The first try, while `raise_group` tells of it."""
        self.keeping: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Those that bring it up."""
        return [task for task in (self.trying, self.keeping) if task is not None]

    def look(self, now: float) -> None:
        """Follow the state of the model."""
        if self.model is None:
            return
        before = self.state.phase
        match self.model.state:
            case ModelState.READY:
                self.state = self.state.up(now)
            case ModelState.FAILED | ModelState.UNLOADED if before is GroupPhase.UP:
                self.state = self.state.failed(self.model.last_error or "it left memory", now)
            case ModelState.LOADING | ModelState.RESTARTING if before is GroupPhase.UP:
                self.state = replace(self.state.began(now), reason=self.model.last_error)
            case ModelState.FAILED if before is GroupPhase.STARTING:
                self.state = self.state.failed(self.model.last_error, now)
            case _:
                pass
        if self.state.phase is not before:
            self.wake.set()
            event(
                _log,
                f"ring group {self.state.phase}",
                group=self.spec.name,
                reason=self.state.reason or "-",
            )

    def describe(self, label_of: Callable[[str], str], now: float) -> Json:
        """For people and programs; `label_of` gives the name of a node for people."""
        state, spec, formation, model = self.state, self.spec, self.formation, self.model
        check = model.check if model else None
        retry_s = state.retry_mono - now if state.phase is GroupPhase.WAITING else None
        return {
            "name": spec.name,
            "model": spec.source,
            "split": spec.split,
            "backend": BACKEND,
            "id": formation.group_id,
            "leader": spec.seats[0].node,
            "state": state.phase.value,
            "seconds": round(now - state.since_mono, 1),
            "reason": "; ".join(filter(None, (state.reason, *formation.faults))),
            "retry_s": None if retry_s is None else round(max(0.0, retry_s), 1),
            "answers": str(check.status()["state"]) if check else "",
            "canary": check.status() if check else None,
            "restarts": model.restarts if model else 0,
            "ranks": [self._rank(rank, label_of) for rank in range(len(spec.seats))],
        }

    def _rank(self, rank: int, label_of: Callable[[str], str]) -> Json:
        seat, formation, model = self.spec.seats[rank], self.formation, self.model
        lent = formation.ranks[rank - 1] if 0 < rank <= len(formation.ranks) else None
        size = lent.bytes if lent else self.size.bytes if self.size and not rank else 0
        is_there = lent is not None if rank else model is not None and model.resident is not None
        is_up = is_there and self.state.phase is GroupPhase.UP
        # While a group starts, each member is asked for memory; that is no sign of its absence.
        absent = "asked" if self.state.phase is GroupPhase.STARTING else "away"
        load = ""
        if rank and lent and lent.progress:
            load = lent.progress.describe()
        elif not rank and model and model.backend and model.backend.progress:
            load = model.backend.progress.describe()
        return {
            "rank": rank,
            "node_id": seat.node,
            "node": label_of(seat.node),
            "layers": seat.layers,
            "memory_mb": (size or seat.lend_bytes) // MIB,
            "state": "up" if is_up else "loading" if load else "leased" if is_there else absent,
            "load": "" if is_up else load,
        }
