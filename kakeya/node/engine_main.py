"""The engine child's main: one model, one model thread, EngineService on a unix socket.

The parent holds the other end of this process's standard input: at end of file the parent has
ended, and this process ends at once too, even in the middle of a step. It leaves by `os._exit`,
since a normal interpreter exit beside a thread that used mlx can abort or hang.

With `--ring` the process is one of the ranks that mlx.launch started: rank 0 serves, the others
repeat its calls, and all of them end when one is lost.

Exit status: 0 stopped, 1 fault, 2 the model cannot be loaded as configured.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kakeya.core.errors import ConfigError, KakeyaError, PeerError
from kakeya.core.log import configure, event
from kakeya.core.process import bound_heap, compute_in_bulk
from kakeya.generation.progress import LoadPhase, LoadTeller

if TYPE_CHECKING:
    from kakeya.engine.embedding.service import EncoderServicer
    from kakeya.engine.model import Model
    from kakeya.engine.service import EngineServicer

_log = logging.getLogger(__name__)
_STOP_GRACE_S = 2.0


def main(argv: list[str] | None = None, load: Callable[[Namespace], Model] | None = None) -> None:
    """Run the engine until SIGTERM, the parent's death or a fault.

    `load` makes the model on the thread that computes later; the default loads with mlx.
    """
    options = _parse(argv)
    configure(options.log_format, options.log_level)
    bound_heap()  # an engine's memory is measured as resident bytes, so freed blocks must leave
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    engine: Future[_Engine | _EncoderEngine] = Future()
    thread = threading.Thread(
        target=_model_thread, args=(options, load or load_model, engine), name="model", daemon=True
    )
    thread.start()
    service = "embedding.service" if options.encodes else "service"
    import_module(f"kakeya.engine.{service}")  # a tenth of a second, while weights are read
    try:
        made = engine.result()
    except KakeyaError as failure:
        status = 1 if isinstance(failure, PeerError) else 2
        _leave(status, f"kakeya engine: {failure.message}")
    except BaseException as failure:  # noqa: BLE001 - the last word of this process
        _log.exception("the model could not be started")
        _leave(1, f"kakeya engine: {failure!r}")
    asyncio.run(_serve(options.socket, made, thread))
    _leave(0, "")


class _Engine:
    """Objects that the model thread made and both threads use."""

    def __init__(self, model: Model, options: Namespace) -> None:
        from kakeya.decoding.control.controller import DraftController
        from kakeya.decoding.processors.grammar import Grammars
        from kakeya.engine.adapters.slots import EngineAdapters
        from kakeya.engine.kv.slots import KvSlots
        from kakeya.engine.queue.room import usual_kv_bytes
        from kakeya.engine.steps.drafting import RemoteBooks
        from kakeya.engine.steps.scheduler import Scheduler
        from kakeya.engine.steps.sequence import SequenceTools, Violations
        from kakeya.wire.tls import MaterialFolder

        controller = DraftController()
        if model.facts.forward_costs_s:
            controller.seed_costs(model.facts.forward_costs_s)
        adapters = None
        if model.adapters is not None:
            adapters = EngineAdapters(
                model.adapters,
                lambda keeps_kv: self.scheduler.limits.slot_room_bytes(keeps_kv),
                lambda: self.scheduler.limits.fit_kv(),
            )
        self.model = model
        self.tools = SequenceTools(
            slots=KvSlots(options.kv_bytes or usual_kv_bytes(model.facts)),
            controller=controller,
            books=RemoteBooks(MaterialFolder(options.identity).current)
            if options.identity
            else RemoteBooks(),
            violations=Violations(),
            max_draft_rows=options.draft_rows,
            adapters=adapters,
            grammars=Grammars(
                Path(model.facts.model_path) / "tokenizer.json",
                vocab_size=model.facts.vocab_size,
                end_ids=model.facts.eos_token_ids,
                model_id=model.facts.model_id,
            ),
        )
        self.thread = self.scheduler = Scheduler(model, self.tools, max_running=options.max_running)

    def servicer(self) -> EngineServicer:
        """The service of the engine."""
        from kakeya.engine.service import EngineServicer

        # The base refuses what an engine lacks: UNIMPLEMENTED.
        return EngineServicer(self.model, self.scheduler, self.tools)  # type: ignore[abstract]


class _EncoderEngine:
    """The same of an encoder, whose model is loaded here."""

    def __init__(self, options: Namespace) -> None:
        accelerated, told = _before_mlx(options)
        from kakeya.engine.embedding.worker import EncoderWorker
        from kakeya.mlx.embedder import MlxEncoder

        self.model = MlxEncoder(
            options.model,
            options.model_id,
            blas_threads=options.blas_threads,
            blas_accelerated=accelerated,
            told=told,
        )
        self.thread = EncoderWorker(self.model)

    def servicer(self) -> EncoderServicer:
        """The service of the engine."""
        from kakeya.engine.embedding.service import EncoderServicer

        return EncoderServicer(self.model, self.thread)  # type: ignore[abstract]


def _parse(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(prog="kakeya-engine", description=__doc__)
    parser.add_argument("--socket", required=True, help="path of the unix socket to serve on")
    parser.add_argument("--model", required=True, help="local folder or Hugging Face id")
    parser.add_argument("--model-id", required=True, help="the name it is served under")
    parser.add_argument(
        "--kv-bytes", type=int, default=0, help="KV of running and kept sequences; 0 = as usual"
    )
    parser.add_argument(
        "--max-running", type=int, default=64, help="most sequences at the same time"
    )
    parser.add_argument("--draft-rows", type=int, default=16, help="most rows in one draft block")
    parser.add_argument("--adapter-slots", type=int, default=0, help="adapters loaded at a time")
    parser.add_argument("--adapter-rank", type=int, default=16, help="largest rank of an adapter")
    parser.add_argument("--encodes", action="store_true", help="the model makes embeddings")
    parser.add_argument("--identity", type=Path, help="folder of the identity for calls to peers")
    parser.add_argument("--ring", choices=("tensor", "pipeline"), help="be a rank of mlx.launch")
    layers = "layers of each rank of a pipeline, from rank 0 on: 20,12"
    parser.add_argument("--memory-bytes", type=int, default=0, help="bound of mlx in a rank")
    parser.add_argument("--layers", type=_numbers, default=(), help=layers)
    states = "keep hidden states for this drafter: the name it is served under, and its folder"
    parser.add_argument("--states-for", type=_named_folder, metavar="NAME=FOLDER", help=states)
    parser.add_argument("--findings", type=Path, help="folder of what is known of models")
    parser.add_argument(
        "--blas-threads",
        type=int,
        default=0,
        help="threads of OpenBLAS; 0 = as many as the machine and the model's size suggest",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    if options.ring and (options.encodes or options.adapter_slots):
        parser.error("the ranks of a ring share text models, and no encoders and no adapters")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _named_folder(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    return name, Path(folder)


def _model_thread(
    options: Namespace,
    load: Callable[[Namespace], Model],
    engine: Future[_Engine | _EncoderEngine],
) -> None:
    """Load on the thread that computes later: mlx keeps streams per thread."""
    compute_in_bulk()
    try:
        event(_log, "loading", model=options.model_id, source=options.model)
        made = _EncoderEngine(options) if options.encodes else _Engine(load(options), options)
    except BaseException as failure:  # noqa: BLE001 - reported by the main thread
        engine.set_exception(failure)
        return
    engine.set_result(made)
    try:
        made.thread.run()
    except BaseException as failure:  # noqa: BLE001 - without this thread the process is of no use
        _log.exception("the model thread failed")
        _leave(1, f"kakeya engine: {failure!r}")


def load_model(options: Namespace) -> Model:
    """Load a model with mlx by the options."""
    accelerated, told = _before_mlx(options)
    started = time.perf_counter()
    if options.ring:
        return _load_rank(options, accelerated, told)
    from kakeya.mlx.diffusion.model import DiffusionModel, is_block_diffusion
    from kakeya.mlx.loader import load, resolve_folder
    from kakeya.mlx.model import MlxModel

    if is_block_diffusion(resolve_folder(options.model, told)):
        threads = options.blas_threads
        return DiffusionModel(
            options.model,
            options.model_id,
            blas_threads=threads,
            blas_accelerated=accelerated,
            told=told,
        )
    loaded = load(
        options.model,
        options.model_id,
        adapter_slots=options.adapter_slots,
        adapter_rank=options.adapter_rank,
        blas_threads=options.blas_threads,
        told=told,
        states_for=options.states_for,
    )
    told(LoadPhase.CHECK)
    load_s = time.perf_counter() - started
    return MlxModel(loaded, load_s, accelerated, findings=options.findings)


def _load_rank(options: Namespace, accelerated: bool, told: LoadTeller) -> Model:
    """Load as rank 0 of a ring group; any other rank computes until the group ends."""
    from kakeya.fleet.placement.ring import probe_ring_environment
    from kakeya.mlx.ring.rank import RingRank

    ring = probe_ring_environment()
    if not ring.is_available:
        raise ConfigError(f"--ring is for ranks: {ring.failure_reason}")
    rank = RingRank(ring, options, lambda reason: _leave(1, f"kakeya engine: {reason}"))
    if not rank.leads:
        rank.follow(accelerated, told)
    return rank.lead(accelerated, told)


def _before_mlx(options: Namespace) -> tuple[bool, LoadTeller]:
    """Load a fast BLAS, whether there is one, and mlx-lm; begin to say how far the load is."""
    from kakeya.mlx.numerics.blas import preload_blas

    told = LoadTeller(_say)
    told(LoadPhase.START)
    accelerated = preload_blas(max(1, options.blas_threads))
    from kakeya.mlx.imports import import_without_tokenizers

    import_without_tokenizers()
    return accelerated, told


def _say(line: str) -> None:
    """Write a line that the parent reads."""
    sys.stdout.write(line)
    sys.stdout.flush()


async def _serve(
    socket_path: str, engine: _Engine | _EncoderEngine, model_thread: threading.Thread
) -> None:
    import grpc.aio

    from kakeya.v1 import engine_pb2_grpc
    from kakeya.wire.channels import engine_options

    server = grpc.aio.server(options=engine_options())
    servicer = engine.servicer()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # before the parent can reach it
        loop.add_signal_handler(number, stopped.set)
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    event(_log, "serving", socket=socket_path)
    await stopped.wait()
    servicer.end_streams()  # an idle stream would use up the grace
    await server.stop(_STOP_GRACE_S)
    engine.thread.stop()
    # While the event loop still runs: the last step of the thread may send frames to it.
    await asyncio.to_thread(model_thread.join, _STOP_GRACE_S)


def _die_with_parent() -> None:
    """Wait for end of file on standard input."""
    descriptor = sys.stdin.fileno()
    while True:
        try:
            if not os.read(descriptor, 4096):
                break
        except OSError:
            break
    os._exit(0)


def _leave(status: int, message: str) -> NoReturn:
    """Flush and end without the interpreter's teardown."""
    if message:
        print(message, file=sys.stderr)  # noqa: T201 - the parent reads the last line
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
