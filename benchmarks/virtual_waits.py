"""How well requests for memory are told when their answers begin, in virtual time.

Clients in closed loops ask three models on a budget for one or two, as in `wait_estimates`. Models
of a node, their generations and the memory arbiter are the product's own; a toy stands for their
engines: it computes prompts one after the other, the shortest first, and between two of them a step
of all answers. One seed, one history, on any machine.

.venv/bin/python -m benchmarks.virtual_waits [--clients 6 16 32] [--rooms 1 2] [--waits 200]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.report import emit, median
from benchmarks.virtual_time import NodeClock, run_virtual
from benchmarks.wait_estimates import GOAL, LEAST_S, MODELS, POLL_S, PROMPT_TOKENS, WITHIN
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.gate import Gate
from kakeya.backends.model_life import TEXT
from kakeya.backends.resident import ResidentModel
from kakeya.backends.terms import decode_terms
from kakeya.core.errors import KakeyaError
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Done, Frame, StopReason, Tokens, Usage
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeRequest
from kakeya.generation.spec import parse_model
from kakeya.generation.waiting import WaitReason, WaitTeller
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.resident import TEXT_TARGET, Warmth

SPECS = [parse_model(f"m{number}=kakeya-tiny") for number in range(MODELS)]
ANSWERS = {"short": (50, 400), "long": (100, 1500)}
LOAD_S, UNLOAD_S, JITTER = 2.0, 0.3, 0.2
PROMPT_TOKEN_S = 0.002
STEP_S, ROW_S = 0.02, 0.003
"""Of a step, and of each answer in it beside that."""
STRIDE = 5
"""So many steps are taken at once."""


@dataclass(slots=True, eq=False)
class Row:
    """A generation of an engine."""

    prompt: int
    tokens: int
    most: int
    frames: asyncio.Queue[Frame] = field(default_factory=asyncio.Queue)
    came_mono: float = 0.0
    begun_mono: float | None = None
    made: int = 0


class ToyEngine:
    """What an `Attempt` needs of an engine, and of its life."""

    pid = 1
    options = EngineOptions()

    def __init__(self, clock: NodeClock, rng: random.Random, mean_tokens: float) -> None:
        self._clock, self._rng = clock, rng
        self._mean_tokens = mean_tokens
        self._rows: list[Row] = []
        self._some = asyncio.Event()
        self.gate = Gate("toy", max_running=64, max_waiting=512, mono=clock.mono)

    async def serving(self, timeout_s: float, *, other_than: object = None) -> ToyEngine:
        """It never dies."""
        return self

    def reason(self, failure: Exception) -> Exception:
        """The failure itself."""
        return failure

    async def run(self) -> None:
        """Compute prompts and steps, until it is cancelled."""
        while True:
            self._some.clear()
            if not self._rows:
                await self._some.wait()
            prompts = [row for row in self._rows if row.begun_mono is None]
            for row in sorted(prompts, key=lambda one: one.prompt)[:1]:
                await self._clock.sleep(row.prompt * PROMPT_TOKEN_S)
                self._give(row, 1)
            answers = [row for row in self._rows if row.begun_mono is not None]
            steps = 1 if prompts else STRIDE
            await self._clock.sleep(steps * (STEP_S + ROW_S * len(answers)))
            for row in answers:
                self._give(row, min(steps, row.tokens - row.made))

    def _give(self, row: Row, tokens: int) -> None:
        now = self._clock.mono()
        if row.begun_mono is None:
            row.begun_mono = now
        if tokens:
            row.made += tokens
            row.frames.put_nowait(Tokens(token_ids=(1,) * tokens))
        if row.made >= row.tokens and row in self._rows:
            self._rows.remove(row)
            usage = Usage(
                prefill_s=row.begun_mono - row.came_mono,
                total_s=now - row.came_mono,
                forwards=row.made - 1,
            )
            ended = StopReason.MAX_TOKENS if row.made >= row.most else StopReason.STOP_TOKEN
            row.frames.put_nowait(Done(reason=ended, usage=usage))

    async def decode(self, request: DecodeRequest, _: KvOffer) -> AsyncGenerator[Frame, None]:
        """Stream the frames of a generation."""
        own = 1 + int(self._rng.expovariate(1 / self._mean_tokens))
        row = Row(len(request.token_ids), min(own, request.max_tokens), request.max_tokens)
        row.came_mono = self._clock.mono()
        self._rows.append(row)
        self._some.set()
        while True:
            yield (frame := await row.frames.get())
            if isinstance(frame, Done):
                return


class ToyModel(ResidentModel):
    """A model of the node with such an engine."""

    @asynccontextmanager
    async def lend_for(self, request: DecodeRequest) -> AsyncIterator[ToyEngine]:
        """Hold it in memory for a request."""
        async with self._memory.acquire(
            self.capability, self.model_id, decode_terms(request)
        ) as handle:
            yield handle.backend


class World:
    """The node: its models, and their handler."""

    def __init__(self, seed: int, rooms: int, answers: tuple[int, int], mean_tokens: float) -> None:
        self.mean_tokens = mean_tokens
        self.clock = NodeClock()
        self.rng = random.Random(seed)
        self.answers = answers
        self.memory = MemoryArbiter(budget=rooms * 100 + 10, clock=self.clock, grace_s=0.0)
        self.models = {
            spec.model_id: ToyModel(spec, self.memory, clock=self.clock, on_change=lambda _: None)
            for spec in SPECS
        }
        self.engines: dict[str, asyncio.Task[None]] = {}
        self.told: dict[WaitTeller, tuple[float, float, str]] = {}
        self.waiting: set[WaitTeller] = set()
        self.pairs: list[tuple[float, float]] = []
        self.notes: list[str] = []
        self.lost = 0
        self.memory.register(
            Capability(
                name=TEXT,
                role=TEXT_TARGET,
                handler=self,
                estimate=lambda _: 100,
                use_s=lambda name, *requests: self.models[name].use_s(*requests),
                asks_per_s=lambda name: self.models[name].load.prompts_per_s,
                warmth=Warmth(stay_warm_s=300.0),
                concurrency=64,
                max_waiting=512,
            )
        )

    def _about(self, seconds: float) -> float:
        return seconds * self.rng.uniform(1 - JITTER, 1 + JITTER)

    async def load(self, name: str) -> Loaded:
        """Load a model in about LOAD_S."""
        await self.clock.sleep(self._about(LOAD_S))
        engine = ToyEngine(self.clock, self.rng, self.mean_tokens)
        self.engines[name] = asyncio.create_task(engine.run())
        facts = ModelFacts(
            model_id=name,
            model_path="",
            vocab_size=99,
            context_tokens=4096,
            eos_token_ids=(),
            batch_rows=256,
            tokens_per_second=1 / (STEP_S + ROW_S),
            prefill_tokens_per_second=1 / PROMPT_TOKEN_S,
        )
        self.models[name].settled(facts)
        return Loaded(backend=engine)

    async def unload(self, name: str, backend: object) -> None:
        """Unload a model in about UNLOAD_S."""
        self.engines.pop(name).cancel()
        await self.clock.sleep(self._about(UNLOAD_S))

    async def run(self, backend: object, payload: object) -> object:
        """No request goes through the handler."""
        raise NotImplementedError

    async def client(self, number: int) -> None:
        """Ask again and again."""
        draw = random.Random(f"{self.rng.random()} {number}")
        while True:
            model = self.models[draw.choice(sorted(self.models))]
            teller = WaitTeller(model.waits_for)
            request = DecodeRequest(
                token_ids=[1] * draw.randint(*PROMPT_TOKENS),
                max_tokens=draw.randint(*self.answers),
                deadline_s=120.0,
                wait=teller,
            )
            self.waiting.add(teller)
            has_begun = False
            try:
                async for frame in model.decode(request):
                    if not has_begun and isinstance(frame, Tokens):
                        has_begun = True
                        self.waiting.discard(teller)
                        self._began(teller)
            except KakeyaError:
                self.lost += 1
                self.told.pop(teller, None)
            self.waiting.discard(teller)
            await self.clock.sleep(draw.uniform(0, 2))

    def _began(self, teller: WaitTeller) -> None:
        told = self.told.pop(teller, None)
        if told is not None and (took_s := self.clock.mono() - told[1]) >= LEAST_S:
            self.pairs.append((told[0], took_s))
            self.notes.append(f"{told[1]:7.1f} {told[2]} told {told[0]:6.1f} took {took_s:6.1f}")

    async def watch(self, wanted: int, limit_s: float) -> None:
        """Read what each waiting request is told, until enough have waited."""
        while len(self.pairs) < wanted and self.clock.mono() < limit_s:
            for teller in self.waiting:
                wait = teller.ask()
                if wait and wait.reason is WaitReason.MEMORY and wait.seconds:
                    note = f"{wait.model_id} place {wait.position}"
                    self.told.setdefault(teller, (wait.seconds, self.clock.mono(), note))
            await self.clock.sleep(POLL_S)


async def measure(world: World, clients: int, wanted: int) -> None:
    async with world.memory:
        tasks = [asyncio.create_task(world.client(number)) for number in range(clients)]
        await world.watch(wanted, 20_000.0)
        for task in (*tasks, *world.engines.values()):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[6, 16, 32])
    parser.add_argument("--rooms", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--answers", choices=ANSWERS, nargs="*", default=[*ANSWERS])
    parser.add_argument("--waits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mean-tokens", type=float, default=600.0)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    for kind in options.answers:
        for rooms in options.rooms:
            for clients in options.clients:
                show(options, kind, rooms, clients)


def show(options: argparse.Namespace, kind: str, rooms: int, clients: int) -> None:
    async def run() -> World:
        world = World(options.seed, rooms, ANSWERS[kind], options.mean_tokens)
        await measure(world, clients, options.waits)
        return world

    world = run_virtual(run())
    if options.show:
        print("\n".join(world.notes), file=sys.stderr)
    pairs = world.pairs
    share = sum(abs(told - took) <= WITHIN * took for told, took in pairs) / len(pairs)
    emit(
        f"{len(pairs)} waits of {clients} clients for {MODELS} models in the memory of {rooms}, "
        f"answers of {ANSWERS[kind][0]} to {ANSWERS[kind][1]} tokens: told within 30 % at first",
        ours=share,
        baseline=GOAL,
        ratio=share / GOAL,
        goal=f">= {GOAL}",
        met=share >= GOAL,
        bias=round(median([told / took for told, took in pairs]), 3),
        median_wait_s=round(median([took for _, took in pairs]), 2),
        lost=world.lost,
    )


if __name__ == "__main__":
    main()
