"""The engine children of a node: one backend per configured model, started and ended together."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.mlx.blas import HINT
from kakeya.node.models import ModelSpec, Role, resolve
from kakeya.runtime.generation import ModelFacts, ModelState, ServedModel
from kakeya.serving.backends.engine_backend import EngineBackend, EngineOptions
from kakeya.serving.backends.engine_process import MAX_SOCKET_PATH_BYTES, Command
from kakeya.serving.gateway import Standing

_log = logging.getLogger(__name__)
_SOCKET_NAME_BYTES = 32
"""Of a folder and a socket below the folder of all sockets."""
EngineCommand = Callable[[ModelSpec, str], Command]
"""Builds the command of the child that serves a model, given what the model was resolved to."""


def engine_command(log_format: str, identity: Path | None = None) -> EngineCommand:
    """Return the command of the engine that is part of this package.

    `identity` is the folder of the node's keys, which need not exist yet: engines dial the peers
    that draft for them by themselves.
    """
    keys = ("--identity", str(identity)) if identity else ()

    def for_model(spec: ModelSpec, resolved: str) -> Command:
        def on_socket(socket: Path) -> Sequence[str]:
            return (
                *(sys.executable, "-m", "kakeya.node.engine_main"),
                *("--socket", str(socket)),
                *("--model", resolved),
                *("--model-id", spec.model_id),
                *("--log-format", log_format),
                *keys,
            )

        return on_socket

    return for_model


def sockets_folder(data_dir: Path) -> Path | None:
    """Where a node's engine sockets lie; None where their paths would be too long to bind."""
    folder = data_dir / "run"
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(folder))
    return folder if room >= _SOCKET_NAME_BYTES else None


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)


class Engines:
    """Backends by model; an `async with` that starts all and ends all.

    Models that need no engine (n-grams) have a spec here and no backend. `on_change` is called
    after each change of a model's state.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        command: EngineCommand,
        *,
        clock: Clock,
        options: EngineOptions,
        on_change: Callable[[], None],
        sockets: Path | None = None,
    ) -> None:
        """Sockets lie in `sockets`, or in the system's temporary folder.

        Raises ConfigError for a model that cannot be found.
        """
        self._sockets = sockets
        self._specs = tuple(specs)
        self._on_change = on_change
        self._has_hinted = False
        self._backends = {
            spec.model_id: EngineBackend(
                spec.model_id,
                command(spec, resolve(spec)),
                options=options,
                clock=clock,
                on_change=self._changed,
                runtime_dir=sockets,
            )
            for spec in specs
            if not spec.is_ngram
        }

    async def __aenter__(self) -> Self:
        if self._sockets is not None:
            # The node holds its data directory, so what lies there was left by a killed one.
            await asyncio.to_thread(_make_anew, self._sockets)
        for backend in self._backends.values():
            await backend.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(backend.aclose() for backend in self._backends.values()))

    def models(self) -> tuple[tuple[ModelSpec, EngineBackend | None], ...]:
        """Every configured model, with its backend if it has one."""
        return tuple((spec, self._backends.get(spec.model_id)) for spec in self._specs)

    def of_role(self, role: Role) -> tuple[EngineBackend, ...]:
        """The backends of a role, in the order they were configured."""
        return tuple(
            backend for spec, backend in self.models() if backend is not None and spec.role is role
        )

    def proposers(self) -> tuple[Standing, ...]:
        """Every configured model that only drafts; n-grams always can."""
        return tuple(
            Standing(model_id=spec.model_id, state=ModelState.READY)
            if backend is None
            else Standing(
                model_id=spec.model_id, state=backend.state, last_error=backend.last_error
            )
            for spec, backend in self.models()
            if spec.role is Role.PROPOSER
        )

    def ready(self) -> tuple[tuple[Role, ModelFacts], ...]:
        """What is loaded now, with the facts of each model."""
        return tuple(
            (spec.role, backend.facts)
            for spec, backend in self.models()
            if backend is not None and backend.state is ModelState.READY and backend.facts
        )

    def _changed(self, model: ServedModel) -> None:
        facts = self._backends[model.model_id].facts
        is_slow = model.state is ModelState.READY and facts and not facts.blas_accelerated
        if is_slow and not self._has_hinted:
            self._has_hinted = True  # it is about the machine: once is enough
            event(
                _log,
                "OpenBLAS is missing: prompts are read 10 to 40 times slower than they could be; "
                f"{HINT}, then start the node again",
                level=logging.WARNING,
                model=model.model_id,
            )
        self._on_change()
