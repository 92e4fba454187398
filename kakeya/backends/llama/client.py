"""The agent's end of the socket to a llama-server: `ChildClient` over HTTP.

A generation is one POST; its connection is closed to cancel it. What llama-server lacks is refused
with a typed error, and the facts say so: no adapters, no blocks of KV for others, no drafts, no
vectors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from tokenizers import Tokenizer

from kakeya.backends.engine.child import Child
from kakeya.backends.engine.client import EngineMemoryLimits
from kakeya.backends.llama.archive import SlotArchive
from kakeya.backends.llama.http import call
from kakeya.backends.llama.keeper import SlotKeeper
from kakeya.backends.llama.parts import goes_on, rest_of, total
from kakeya.backends.llama.plan import LlamaPlan, gguf_metadata, kv_bytes_per_token
from kakeya.backends.llama.slots import SlotTable
from kakeya.backends.llama.spell import TokenSpelling
from kakeya.backends.llama.wire import CompletionReader, completion_body, events_of, failure_of
from kakeya.core.errors import (
    DeadlineExceeded,
    MemoryRefused,
    PeerProtocol,
    PeerUnavailable,
    UnknownMethod,
)
from kakeya.core.gguf import gguf_fingerprint, gguf_shards, read_gguf
from kakeya.core.process import resident_bytes
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import Done, Frame, Tokens, Usage
from kakeya.generation.kv import NO_KV, KvOffer, PageRef
from kakeya.generation.progress import LoadPhase, LoadProgress
from kakeya.generation.request import DecodeJob, DecodeRequest
from kakeya.prefix.names.weights import weights_state
from kakeya.text.gguf import end_ids, make_text_folder

_SOCKET_S = 0.05
"""Seconds between two looks for the socket of a child that has just started."""
_MOST_REFUSED, _CROWDED_S = 60, 0.5
"""How often a sequence is begun again for want of room, and the seconds between two tries."""
_TOLD_TOKENS, _TOLD_PROMPT_TOKENS = 16, 128
"""Fewer tokens of an answer, or of a prompt, tell no speed."""
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}
"""Names of `general.file_type`."""


class LlamaClient:
    """Calls one llama-server. A new child gets a new socket and a new client."""

    def __init__(self, child: Child, plan: LlamaPlan, archive: SlotArchive) -> None:
        self._child = child
        self._plan = plan
        self._weights_state: str | None = None
        table = SlotTable(plan.slots, plan.kv_tokens)
        self._keeper = SlotKeeper(child, table, archive, lambda: self._facts)
        self._name = child.model_id
        self._running = 0
        self._crowded = asyncio.Lock()
        self._facts: ModelFacts | None = None
        self._spelling: TokenSpelling | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._pulse_mono = 0.0
        self._began_mono = child.clock.mono()

    async def describe(self, timeout_s: float) -> ModelFacts:
        """See `ChildClient`. The first call that finds the model loaded makes its text folder.

        Raises Unsupported if the file has a tokenizer that is not known.
        """
        if self._facts is not None:
            return self._facts
        if self._weights_state is None:  # the child has hardly begun, and opens the file later
            self._weights_state = await asyncio.to_thread(weights_state, self._plan.model)
        with self._told(f"no answer within {timeout_s:g} s"):
            async with asyncio.timeout(timeout_s):
                if await self._is_loading():
                    await asyncio.to_thread(self._note_progress)
                    raise PeerUnavailable(f"{self._name} is loading")
                async with call(self._child.socket, "/props") as answer:
                    props = await answer.whole()
                    if answer.status != 200:
                        raise failure_of(answer.status, props, self._name)
        facts, self._spelling, state = await asyncio.to_thread(self._read, props)
        self._facts = facts
        build = str(props.get("build_info", ""))
        if build and state == self._weights_state:
            self._keeper.name(self._plan.model, state, (build, *self._plan.traits))
        return facts

    async def decode(
        self, request: DecodeRequest, timeout_s: float, offer: KvOffer = NO_KV
    ) -> AsyncGenerator[Frame, None]:
        """See `ChildClient`; `offer` is left aside, since no KV is taken over.

        Raises PeerUnavailable if the server is lost, InvalidArgument and Unsupported for a request
        that it cannot take, MemoryRefused when the KV of all running sequences is full.
        """
        facts, spelling = self._facts, self._spelling
        if facts is None or spelling is None:
            raise PeerUnavailable(f"{self._name} is not described yet")
        given = {one.name: getattr(request, one.name) for one in fields(DecodeRequest)}
        DecodeJob(**given).check(facts.vocab_size, facts.context_tokens)
        ends = frozenset(facts.eos_token_ids)
        latest_mono = self._mono() + timeout_s
        first_mono = latest_mono
        if request.deadline_s is not None:
            first_mono = min(latest_mono, self._mono() + request.deadline_s)
        committed: list[int] = []
        parts: list[Done] = []
        self._running += 1
        try:
            async with contextlib.AsyncExitStack() as turn:
                with self._told():
                    async with asyncio.timeout(first_mono - self._mono()):
                        held = self._keeper.turn(request, committed)
                        slot = await turn.enter_async_context(held)
                refused = 0
                while True:
                    rest = rest_of(request, committed)
                    body = completion_body(rest, spelling.text_of, slot)
                    reader = CompletionReader(rest, spelling.before, ends)
                    done: Done | None = None
                    until_mono = latest_mono if committed else first_mono
                    events = self._events(body, reader, latest_mono, until_mono)
                    try:
                        async with contextlib.aclosing(events):
                            async for frame in events:
                                if isinstance(frame, Done):
                                    done = frame
                                    break
                                if isinstance(frame, Tokens):
                                    committed += frame.token_ids
                                if isinstance(frame, Tokens) or not committed:
                                    yield frame
                    except MemoryRefused:
                        refused += 1
                        await self._take_turn(turn, refused)
                        continue
                    if done is None:
                        # So a server that is asked to end leaves its streams.
                        raise PeerUnavailable(f"{self._name}: the stream ended before its end")
                    parts.append(done)
                    self._note_speed(done.usage, len(rest.token_ids))
                    if not goes_on(request, committed, ends, facts.context_tokens):
                        break
        finally:
            self._running -= 1
        yield total(parts, request, committed)

    async def _take_turn(self, turn: contextlib.AsyncExitStack, refused: int) -> None:
        """Let a sequence go on whose KV had no room beside the others', which the server ends all
        at once: these go on one after the other, the first one at once.

        Raises MemoryRefused if there was no room too often.
        """
        if refused > _MOST_REFUSED:
            raise MemoryRefused(f"{self._name}: no room for KV beside that of other answers")
        if refused == 1:
            await turn.enter_async_context(self._crowded)
        else:
            await self._child.clock.sleep(_CROWDED_S)

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None,
        temperature: float | None,
        num_steps: int = 1,
        states: HiddenStates | None = None,
        timeout_s: float,
    ) -> Draft:
        """Raises UnknownMethod."""
        raise self._cannot("draft for others")

    async def embed(self, texts: Sequence[Sequence[int]], size: int, timeout_s: float) -> bytes:
        """Raises UnknownMethod."""
        raise self._cannot("embed texts")

    async def load_adapter(
        self,
        adapter_id: str,
        ref: PageRef,
        timeout_s: float,
        instead_of: str = "",
        sent: Callable[[], None] | None = None,
    ) -> int:
        """Raises UnknownMethod."""
        raise self._cannot("take adapters")

    async def unload_adapter(self, adapter_id: str, timeout_s: float) -> bool:
        """Raises UnknownMethod."""
        raise self._cannot("take adapters")

    async def release(self, kv_key: str, timeout_s: float) -> None:
        """Do nothing: a slot keeps its KV until another prompt takes it."""

    async def keep(self, timeout_s: float) -> None:
        """See `ChildClient`: save the conversations in the slots."""
        await self._keeper.keep(timeout_s)

    async def stats(self, timeout_s: float) -> EngineStats:
        """Return the memory of the child, and how many sequences it was asked for."""
        footprint = await self._footprint()
        return EngineStats(
            running=self._running, resident_bytes=footprint.resident_bytes, footprint=footprint
        )

    async def set_limits(
        self, limits: EngineMemoryLimits, timeout_s: float, free_bytes: int | None = None
    ) -> Footprint:
        """Change nothing: the memory of KV is taken at the start, and bounded by that."""
        return await self._footprint()

    async def shrink(self, size: int, timeout_s: float) -> Footprint:
        """Change nothing: KV that no sequence uses stays taken."""
        return await self._footprint()

    async def answers(self, timeout_s: float) -> bool:
        """See `ChildClient`."""
        return await self.look(timeout_s) is not None

    async def look(self, timeout_s: float) -> tuple[ModelFacts, float] | None:
        """See `ChildClient`. A question that the model's thread must answer is always under way:
        its age is the time of the current step."""
        try:
            facts = await self.describe(timeout_s)
            async with asyncio.timeout(timeout_s):
                async with call(self._child.socket, "/health") as answer:
                    if answer.status != 200:
                        return None
        except (OSError, TimeoutError, PeerUnavailable, PeerProtocol, DeadlineExceeded):
            return None
        silent_s = 0.0
        if self._pulse is None or self._pulse.done():
            self._pulse_mono = self._mono()
            self._pulse = asyncio.create_task(self._ask_model(), name=f"pulse of {self._name}")
        else:
            silent_s = self._mono() - self._pulse_mono
        return facts, silent_s

    async def aclose(self) -> None:
        """Give up the question that is under way; streams end with their sockets."""
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        await self._keeper.aclose()

    async def _ask_model(self) -> None:
        with contextlib.suppress(OSError, PeerProtocol):
            async with call(self._child.socket, "/slots") as answer:
                await answer.whole()

    async def _events(
        self,
        body: dict[str, object],
        reader: CompletionReader,
        latest_mono: float,
        first_mono: float,
    ) -> AsyncGenerator[Frame, None]:
        """The frames of one POST. Raises DeadlineExceeded at `latest_mono`, or without a token at
        `first_mono`."""
        async with contextlib.AsyncExitStack() as held:
            with self._told():
                async with asyncio.timeout(first_mono - self._mono()):
                    answer = await held.enter_async_context(
                        call(self._child.socket, "/completion", body)
                    )
                    if answer.status != 200:
                        raise failure_of(answer.status, await answer.whole(), self._name)
            parts = await held.enter_async_context(contextlib.aclosing(answer.body()))
            rest = b""
            while True:
                until = latest_mono if reader.has_begun else first_mono
                with self._told():
                    async with asyncio.timeout(until - self._mono()):
                        part = await anext(parts, None)
                if part is None:
                    return
                events, rest = events_of(rest + part)
                for frame in reader.frames(events):
                    yield frame

    def _note_speed(self, usage: Usage, prompt_tokens: int) -> None:
        """Keep the speeds of a generation that was long enough to tell them."""
        if (facts := self._facts) is None:
            return
        decode_s, computed = usage.total_s - usage.prefill_s, prompt_tokens - usage.cached_tokens
        if usage.forwards >= _TOLD_TOKENS and decode_s > 0:
            rate = _steady(facts.tokens_per_second, (usage.forwards - 1) / decode_s)
            facts = replace(facts, tokens_per_second=rate)
        if computed >= _TOLD_PROMPT_TOKENS and usage.prefill_s > 0:
            rate = _steady(facts.prefill_tokens_per_second, computed / usage.prefill_s)
            facts = replace(facts, prefill_tokens_per_second=rate)
        self._facts = facts

    async def _is_loading(self) -> bool:
        """Wait for the socket of a child that has just started, and ask it."""
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                async with call(self._child.socket, "/health") as answer:
                    return answer.status == 503
            await self._child.clock.sleep(_SOCKET_S)

    def _note_progress(self) -> None:
        """Tell how much of the file is in memory: it is mapped, and read as it is touched."""
        total = sum(shard.stat().st_size for shard in gguf_shards(self._plan.model))
        done = min(total, resident_bytes(self._child.pid) or 0)
        self._child.on_progress(
            LoadProgress(phase=LoadPhase.READ, done_bytes=done, total_bytes=total)
        )

    def _read(self, props: dict[str, Any]) -> tuple[ModelFacts, TokenSpelling, str]:
        """Read the facts from the file and from what the server tells, and its state. Blocks."""
        path = self._plan.model
        meta = read_gguf(path)
        folder = make_text_folder(path)
        settings = props.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        if not isinstance(context, int) or context < 1:
            raise PeerProtocol(f"{self._name}: llama-server tells no n_ctx: {str(props)[:200]}")
        facts = ModelFacts(
            model_id=self._name,
            model_path=str(folder),
            vocab_size=len(meta["tokenizer.ggml.tokens"]),
            context_tokens=context,
            longest_tokens=context,
            eos_token_ids=tuple(end_ids(meta)),
            quantization=_FILE_TYPES.get(meta.get("general.file_type", -1), ""),
            base_fingerprint=gguf_fingerprint(path),
            weight_bytes=sum(shard.stat().st_size for shard in gguf_shards(path)),
            kv_bytes_per_token=kv_bytes_per_token(gguf_metadata(path)),
            load_s=self._mono() - self._began_mono,
            device="llama.cpp",
            blas_accelerated=True,
            batch_rows=self._plan.slots,
        )
        spelling = TokenSpelling(Tokenizer.from_file(str(folder / "tokenizer.json")))
        return facts, spelling, weights_state(path)

    async def _footprint(self) -> Footprint:
        occupied = await asyncio.to_thread(resident_bytes, self._child.pid)
        if occupied is None:
            raise PeerUnavailable(f"{self._name}: its process has ended")
        return Footprint(resident_bytes=occupied)

    def _mono(self) -> float:
        return self._child.clock.mono()

    def _cannot(self, what: str) -> UnknownMethod:
        return UnknownMethod(f"{self._name} is a GGUF model: llama-server does not {what}")

    @contextlib.contextmanager
    def _told(self, late: str = "no token within the time of the caller") -> Iterator[None]:
        """Translate the failure of a call; `late` says what its time was too short for."""
        try:
            yield
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name}: {late}") from None
        except OSError as fault:
            raise PeerUnavailable(f"{self._name}: {fault.strerror or fault}") from None


def llama_client(plan: LlamaPlan, archive: SlotArchive) -> Callable[[Child], LlamaClient]:
    """What makes the clients of a model's children."""
    return lambda child: LlamaClient(child, plan, archive)


def _steady(known: float, new: float) -> float:
    """The new speed, unless it is about the known one: a card that changes goes to all nodes."""
    return known if abs(new - known) < known / 5 else round(new, 1)
