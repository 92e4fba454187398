"""The capabilities of plug-ins, for clients of the node: JSON in, JSON out, at once or as a job.

The node's own engines are capabilities too, and are none here: their payloads are no JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Protocol

from kakeya.backends.terms import REQUEST_PRIORITIES
from kakeya.core.errors import Cancelled, KakeyaError, NotFound
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.core.settings import nearest
from kakeya.core.tasks import is_cancelled
from kakeya.dispatch.job import Job, fault_text, json_bytes
from kakeya.dispatch.jobs import JobKind, JobQueue, Tell
from kakeya.generation.caller import PRIORITIES
from kakeya.generation.waiting import WaitTeller
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.capability import progress_to
from kakeya.memory.arbiter.plan import FOREVER
from kakeya.memory.plugins import PluginReport

_log = logging.getLogger(__name__)
KIND = "capability"
_MOST_JOBS = 16
"""At a time; the runs of one capability take turns in the arbiter."""


class CapabilityNotFound(NotFound):
    """No installed plug-in brings a capability of this name."""

    code = "capability_not_found"


class CapabilityFailed(KakeyaError):
    """A plug-in raised something that is no error of ours."""

    code = "capability_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityCall:
    """A request to a capability. `payload` is JSON; `priority` is a word of `PRIORITIES`;
    `timeout_s` None = without a deadline."""

    capability: str
    model: str
    payload: object
    priority: str = "normal"
    timeout_s: float | None = None

    def to_json(self) -> Json:
        """The request of a job."""
        return {
            "capability": self.capability,
            "model": self.model,
            "payload": self.payload,
            "priority": self.priority,
            "timeout_s": self.timeout_s,
        }


class PluginHost(Protocol):
    """Where plug-ins are registered."""

    arbiter: MemoryArbiter
    plugins: tuple[PluginReport, ...]


class Capabilities:
    """Runs capabilities through the arbiter."""

    def __init__(self, host: PluginHost, jobs: JobQueue) -> None:
        self._host = host
        self._arbiter = host.arbiter
        self._jobs = jobs
        jobs.add_kind(JobKind(name=KIND, run=self._work, concurrency=_MOST_JOBS))

    def describe(self) -> list[Json]:
        """The capabilities as JSON; `loaded` are their models in memory."""
        residents = [one.key for one in self._arbiter.status().residents]
        found = []
        for name in self._names():
            capability = self._arbiter.capability(name)
            loaded = [key.model_key for key in residents if key.capability == name]
            found.append(
                {
                    "id": name,
                    "object": "capability",
                    "role": capability.role.name,
                    "concurrency": capability.concurrency,
                    "may_repeat": capability.may_repeat,
                    "loaded": loaded,
                }
            )
        return found

    async def run(self, call: CapabilityCall, wait: WaitTeller) -> bytes:
        """Run a request; returns its result as JSON. `wait` tells for what it waits.

        Raises CapabilityNotFound, the errors of `MemoryArbiter.request`, CapabilityFailed for what
        else a plug-in raises, and ResultNotJson.
        """
        return await asyncio.to_thread(json_bytes, await self._result(call, wait))

    def submit(self, call: CapabilityCall, owner: str) -> Job:
        """Make a job of a request. Raises CapabilityNotFound, NotFound for a model that the
        capability does not know, QueueFull."""
        self._check(call)
        capability = self._arbiter.capability(call.capability)
        capability.estimate(call.model)
        return self._jobs.submit(
            KIND, call.to_json(), owner=owner, may_repeat=capability.may_repeat
        )

    async def _result(self, call: CapabilityCall, wait: WaitTeller) -> object:
        self._check(call)
        terms = Terms(
            priority=REQUEST_PRIORITIES[PRIORITIES[call.priority]],
            timeout_s=FOREVER if call.timeout_s is None else call.timeout_s,
            wait=wait,
        )
        try:
            return await self._arbiter.request(call.capability, call.model, call.payload, terms)
        except (Exception, asyncio.CancelledError) as fault:  # foreign code
            if is_cancelled():
                raise
            if isinstance(fault, KakeyaError) and not isinstance(fault, Cancelled):
                raise
            name = f"{call.capability}:{call.model}"
            event(_log, "capability failed", level=logging.WARNING, name=name, error=repr(fault))
            _log.debug("traceback", exc_info=fault)
            raise CapabilityFailed(f"{call.capability} failed: {fault_text(fault)}") from fault

    async def _work(self, job: Job, tell: Tell, wait: WaitTeller) -> object:
        with progress_to(tell):
            return await self._result(CapabilityCall(**json.loads(job.request)), wait)

    def _names(self) -> list[str]:
        return [report.capability for report in self._host.plugins if report.capability]

    def _check(self, call: CapabilityCall) -> None:
        names = self._names()
        if call.capability not in names:
            raise CapabilityNotFound(
                f"no capability {call.capability[:80]!r} is installed here; there are "
                f"{', '.join(names) or 'none'}{nearest(call.capability[:80], names)}"
            )
