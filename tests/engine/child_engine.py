"""The real main of the engine child over a toy model that is slow, hangs or breaks on demand.

Run as `python -m tests.engine.child_engine MODE --socket PATH --model FILE --model-id toy`.

    slow    each chunk of a prompt takes a second
    hangs   the third token never comes, while FILE does not exist; the process answers on
    steady  each token takes a millisecond, and the 2000th of a generation never comes
    breaks  the device fails, and the model thread with it
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.core.errors import InvalidArgument
from kakeya.core.units import pack_ids, unpack_ids
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.engine.model import DeviceLost, KvView, LoadedFacts, MemoryUse
from kakeya.generation.frames import TokenLogprob
from kakeya.generation.request import Sampling
from kakeya.node.engine_main import main

CHUNK_S = 1.0
TOKEN_S = 0.001
STEADY_TOKENS = 2000
BLOCK_TOKENS = 64
"""The toy's KV is its text: 4 bytes a token."""


@dataclass
class ToyState:
    """Selects the token after the last one; counts what it holds."""

    mode: str
    file: Path
    tokens: list[int] = field(default_factory=list)
    flight: list[int] = field(default_factory=list)
    collected: int = 0
    grid_tokens: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.length

    def take_logprobs(self, count: int) -> list[TokenLogprob]:
        return []

    def select_with(
        self, sampling: Sampling, processors: object = None, top_logprobs: int | None = None
    ) -> None:
        return None

    def adapt(self, slot: int) -> None:
        return None

    def prefill(self, tokens: Sequence[int]) -> None:
        if self.mode == "slow":
            time.sleep(CHUNK_S)
        self.tokens += tokens

    def take_logits(self) -> bytes:
        return b""

    def selected_from(self, logits: bytes) -> int:
        raise AssertionError("no logits of this model were ever told")

    def launch(self, token: int | None, *, keeps_logits: bool = False) -> None:
        self.tokens.append(self.flight[-1] if token is None else token)
        self.flight.append((self.tokens[-1] + 1) % 100)

    def collect(self) -> int:
        self.collected += 1
        if self.mode == "hangs" and self.collected == 3 and not self.file.exists():
            self.file.touch()
            time.sleep(3600)
        if self.mode == "steady":
            time.sleep(TOKEN_S if self.collected < STEADY_TOKENS else 3600)
        return self.flight.pop(0)

    def in_flight(self) -> int:
        return len(self.flight)

    def verify(self, tokens: Sequence[int]) -> list[int]:
        self.tokens += tokens
        return [(token + 1) % 100 for token in tokens]

    def verifiable_rows(self) -> int:
        return 100

    def trim(self, count: int) -> bool:
        del self.tokens[len(self.tokens) - count :]
        return True

    def export_block(self, first: int, tokens: int, into: KvView, *, with_state: bool) -> bool:
        packed = pack_ids(self.tokens[first : first + tokens])
        at = 4 * (first % BLOCK_TOKENS)
        into.data[at : at + len(packed)] = packed
        return True

    def import_blocks(self, blocks: Sequence[KvView], tokens: int) -> None:
        ids = [i for block in blocks for i in unpack_ids(bytes(block.data[: 4 * block.tokens]))]
        if len(ids) < tokens:
            raise InvalidArgument(f"blocks of {len(ids)} tokens for {tokens}")
        self.tokens = ids[:tokens]

    def stow(self, blocks: Sequence[KvView]) -> bool:
        for index, block in enumerate(blocks):
            first = index * BLOCK_TOKENS
            self.export_block(first, block.tokens, block, with_state=False)
        self.tokens = [-1] * self.length
        return True

    def restore(self, blocks: Sequence[KvView]) -> None:
        self.import_blocks(blocks, self.length)

    def hidden_states(self, first: int, end: int) -> HiddenStates | None:
        return None

    def layer_length(self) -> int:
        return self.length


@dataclass
class ToyForward:
    """Does all of its work in the last part."""

    members: list[tuple[ToyState, Sequence[int]]]
    parts: int

    def advance(self) -> bool:
        self.parts -= 1
        for state, piece in self.members if not self.parts else ():
            state.prefill(piece)
        return not self.parts

    def leave(self, state: object) -> None:
        self.members = [member for member in self.members if member[0] is not state]


class ToyModel:
    adapters = None

    def __init__(self, mode: str, file: Path) -> None:
        self._mode = mode
        self._file = file
        self.facts = LoadedFacts(
            model_id="toy",
            model_path="/toy",
            vocab_size=100,
            context_tokens=4096,
            eos_token_ids=(),
            quantization="",
            dtype="",
            weight_bytes=0,
            kv_bytes_per_token=1,
            mlx_version="",
            tokens_per_second=1000.0,
            prefill_tokens_per_second=1000.0,
            load_s=0.0,
            prefill_chunk_tokens=32,
            vocabulary_digest="",
            device="cpu",
            blas_accelerated=True,
            forward_costs_s={1: 0.001},
            kv_block_tokens=BLOCK_TOKENS,
            kv_block_bytes=4 * BLOCK_TOKENS,
            kv_layout="ids",
            kv_exactness="exact",
        )

    def open(self) -> ToyState:
        return ToyState(self._mode, self._file)

    def begin_prompts(
        self, states: Sequence[ToyState], pieces: Sequence[Sequence[int]], parts: int
    ) -> ToyForward:
        return ToyForward(list(zip(states, pieces, strict=True)), parts)

    def launch_together(self, states: Sequence[ToyState], tokens: Sequence[int | None]) -> None:
        for state, token in zip(states, tokens, strict=True):
            state.launch(token)

    def draft(
        self,
        prefix: Sequence[int],
        size: int,
        seed: int | None,
        temperature: float,
        steps: int = 1,
        states: HiddenStates | None = None,
    ) -> Draft:
        return Draft(source="none")

    def chores(self) -> Iterator[float]:
        return iter(())

    def memory(self) -> MemoryUse:
        return MemoryUse(active_bytes=0, peak_bytes=0)

    def tidy(self) -> None:
        if self._mode == "breaks":
            raise DeviceLost("the device is gone")

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        return None

    def idle_bytes(self) -> int:
        return 0

    def shed(self, size: int) -> None:
        return None


def load(mode: str) -> Callable[[Namespace], ToyModel]:
    return lambda options: ToyModel(mode, Path(options.model))


if __name__ == "__main__":
    main(sys.argv[2:], load(sys.argv[1]))
