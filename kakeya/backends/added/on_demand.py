"""Pulls that requests ask for: a model comes from a peer's disk, then loads as one of this node.

The pull goes on when its request does not wait any longer, as a load does, and each request for
the model meanwhile waits for the same pull.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from kakeya.backends.added.home import ModelHome
from kakeya.backends.resident import ResidentModel
from kakeya.core.errors import LoadFailed, ModelLoading, PeerUnavailable, Refused
from kakeya.core.log import event
from kakeya.core.units import MIB, format_bytes
from kakeya.fleet.paths.link_rates import fetch_seconds
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.weights.config import WeightsConfig
from kakeya.weights.progress import PullState
from kakeya.weights.weights import NodeWeights

_log = logging.getLogger(__name__)


class OnDemandPulls:
    """See the module; lives on the event loop."""

    def __init__(
        self, home: ModelHome, weights: NodeWeights, config: WeightsConfig, *, most_s: float
    ) -> None:
        """A pull that is expected to take longer than `most_s` is not begun."""
        self._home = home
        self._weights = weights
        self._most_s = most_s
        self._bound = config.pull_mb_per_s * MIB
        self.is_on = config.pull_on_demand and config.serve
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, PullState] = {}
        self._is_closed = False

    async def aclose(self) -> None:
        """End the pulls, and what waits for them; what came is kept for the next ones."""
        self._is_closed = True
        tasks = tuple(self._pulls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refusal(self, model_id: str, size_bytes: int, bytes_per_s: float) -> str:
        """Why a model with so many bytes of files, which come that fast, is not pulled for a
        request now; "" = it may be."""
        if model_id in self._pulls:
            return ""
        if any(one.name == model_id for one in self._weights.index.last_found):
            if why := self._weights.unserved(model_id):
                return f"it was pulled before, and is not served here: {why}"
            return (
                "its files are on this node's disk, and no pull brought them: start the node with "
                f"--model {model_id}"
            )
        seconds = fetch_seconds(size_bytes, min(bytes_per_s, self._bound or bytes_per_s))
        if seconds > self._most_s:
            return (
                f"its {format_bytes(size_bytes)} would take about {seconds:.0f} s, and a request "
                f"waits {self._most_s:.0f} s; bring it with `kakeya models pull {model_id}`"
            )
        if not self._home.has_room(size_bytes):
            return f"this node has no memory for its {format_bytes(size_bytes)} now"
        return ""

    async def bring(self, model_id: str, timeout_s: float) -> ResidentModel:
        """Pull a model. Raises ModelLoading where that takes longer, the errors of the pull,
        LoadFailed where the disk has no room, or this node does not serve it once it is here, and
        PeerUnavailable where this node stops."""
        task = self._pulls.get(model_id)
        if task is None:
            if self._is_closed:
                raise self._stopping(model_id)
            event(_log, "a request has a model pulled", model=model_id)
            task = asyncio.create_task(self._pull(model_id), name=f"pull {model_id} on demand")
            self._pulls[model_id] = task
            task.add_done_callback(lambda ended: self._ended(model_id, ended))
        await asyncio.wait((task,), timeout=timeout_s)
        if not task.done():
            wait = self.waits_for(model_id)
            raise ModelLoading(
                f"{model_id} is not here yet" + (f" ({wait.describe()})" if wait else ""),
                retry_after_s=max(1.0, (wait and wait.seconds) or 1.0),
            )
        if task.cancelled():
            raise self._stopping(model_id)
        try:
            task.result()
        except Refused as no:
            raise LoadFailed(f"{model_id} was not pulled: {no.message}") from no
        model = self._home.pulled(model_id)
        if model is None:
            why = self._weights.unserved(model_id) or "it was removed again"
            raise LoadFailed(f"{model_id} was pulled, and is not served here: {why}")
        return model

    def waits_for(self, model_id: str) -> RequestWait | None:
        """How far the pull of a model is; None = there is none."""
        state = self._states.get(model_id)
        if state is None:
            return None
        left = state.bytes - state.done_bytes
        came = f"{format_bytes(state.done_bytes)} of {format_bytes(state.bytes)}"
        said = f"from {', '.join(state.sources)}, {came}" if state.sources else state.phase
        return RequestWait(
            reason=WaitReason.PULL,
            model_id=model_id,
            seconds=left / state.bytes_per_s if state.bytes_per_s else None,
            progress=said,
        )

    def _stopping(self, model_id: str) -> PeerUnavailable:
        return PeerUnavailable(
            f"{model_id} is not here yet, and this node is stopping; what came of it is kept"
        )

    async def _pull(self, model_id: str) -> None:
        pull = self._weights.pull(model_id, from_node="", keep=False, may_use_hub=False)
        async with aclosing(pull) as states:
            async for state in states:
                self._states[model_id] = state

    def _ended(self, model_id: str, task: asyncio.Task[None]) -> None:
        self._pulls.pop(model_id, None)
        self._states.pop(model_id, None)
        if not task.cancelled() and (fault := task.exception()):
            event(
                _log, "a pull for a request failed", level=logging.WARNING, model=model_id,
                why=str(fault),
            )  # fmt: skip
