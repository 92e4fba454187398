"""A real engine child without a model: EngineService on a unix socket, over the hash model.

Run as `python -m tests.backends.engine.toy_engine --socket PATH ...`. It ends when its stdin
does, as every engine child must. What happens to its calls is appended to `--record`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc.aio

from kakeya.core.units import unpack_ids
from kakeya.generation.frames import StopReason
from kakeya.generation.request import Sampling
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1.engine_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from tests.sessions.toy import EOS, VOCAB, expected, next_token

_REASONS = {
    StopReason.MAX_TOKENS: pb.DecodeDone.REASON_MAX_TOKENS,
    StopReason.STOP_TOKEN: pb.DecodeDone.REASON_STOP_TOKEN,
    StopReason.CONTEXT_FULL: pb.DecodeDone.REASON_CONTEXT_FULL,
}


class ToyEngine(EngineServiceServicer):
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._described = 0

    def record(self, line: str) -> None:
        if self._options.record:
            with Path(self._options.record).open("a") as file:
                file.write(line + "\n")

    async def Describe(self, request, context):
        self._described += 1
        is_measured = 0 < self._options.measured_at <= self._described
        return pb.DescribeResponse(
            model_id=self._options.model_id,
            model_path=self._options.model_path,
            vocab_size=VOCAB,
            context_tokens=self._options.context,
            eos_token_ids=[EOS],
            load_seconds=0.1,
            tokens_per_second=50.0 if is_measured else 0.0,
        )

    async def Decode(self, request, context):
        history = unpack_ids(request.token_ids_le32)
        self.record(f"decode {len(history)} {request.max_tokens} {request.kv_key}")
        finished = False
        try:
            yield pb.DecodeResponse(
                progress=pb.PrefillProgress(computed_tokens=len(history), total_tokens=len(history))
            )
            async for response in self._steps(request, history):
                yield response
            finished = True
        finally:
            if not finished:
                self.record("cancelled")

    async def _steps(self, request, history):
        sampling = Sampling(temperature=request.temperature, seed=request.seed)
        count, reason = 0, StopReason.MAX_TOKENS
        hangs = [length for length in self._options.hang_at if length > len(history)]
        while count < request.max_tokens:
            if len(history) >= self._options.context:
                reason = StopReason.CONTEXT_FULL
                break
            await asyncio.sleep(self._options.delay_s)
            history.append(next_token(history, sampling))
            count += 1
            yield pb.DecodeResponse(tokens=pb.CommittedTokens(token_ids=history[-1:]))
            if len(history) in hangs:
                await asyncio.Event().wait()
            if history[-1] in request.stop_token_ids:
                reason = StopReason.STOP_TOKEN
                break
        yield pb.DecodeResponse(
            done=pb.DecodeDone(reason=_REASONS[reason], forwards=count, total_seconds=0.5)
        )

    async def Draft(self, request, context):
        history = unpack_ids(request.token_ids_le32)
        sampling = Sampling(temperature=request.temperature, seed=request.seed)
        tokens, _ = expected(history, request.size, sampling=sampling)
        return pb.DraftResponse(
            token_ids=tokens, confidence=[0.5] * len(tokens), forward_passes=len(tokens)
        )

    async def Release(self, request, context):
        self.record(f"release {request.kv_key}")
        return pb.ReleaseResponse()

    async def SetLimits(self, request, context):
        self.record(f"limits {request.max_running}")
        return pb.Footprint()

    async def Stats(self, request, context):
        return pb.StatsResponse(kv_live_bytes=11, kv_bytes_by_key={"a": 11})


async def serve(options: argparse.Namespace) -> None:
    await asyncio.sleep(options.load_s)
    server = grpc.aio.server()
    add_EngineServiceServicer_to_server(ToyEngine(options), server)
    server.add_insecure_port(f"unix:{options.socket}")
    await server.start()
    print(f"toy engine serves, pid {os.getpid()}", file=sys.stderr, flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if not options.ignore_term:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await asyncio.wait(
        (asyncio.ensure_future(stop.wait()), loop.run_in_executor(None, wait_for_end)),
        return_when=asyncio.FIRST_COMPLETED,
    )
    await server.stop(0)
    os._exit(0)


def wait_for_end() -> None:
    while os.read(0, 1024):
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model-id", default="toy")
    parser.add_argument("--model-path", default="/toy")
    parser.add_argument("--record", default="")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--measured-at", type=int, default=0, help="the call of Describe")
    parser.add_argument("--context", type=int, default=10_000)
    parser.add_argument(
        "--hang-at",
        type=int,
        nargs="*",
        default=[],
        help="lengths of a history at which a decode that began with a shorter one tells no more",
    )
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--say", default="")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--ignore-term", action="store_true")
    options = parser.parse_args()
    if options.say:
        print(options.say, file=sys.stderr, flush=True)
    if options.exit_code:
        sys.exit(options.exit_code)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
