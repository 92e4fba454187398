"""The canary of ring groups: what sums in another order change, what it costs, what it finds.

    order [FOLDER:RANKS ...]   in one process: answers with split sums against whole ones, right and
                               with faults in the sums behind the first piece, by type of weights
    wrong COUNT                so many groups of 2 ranks, in each of which rank 1 has sums that are
                               off behind the first piece; how many were refused
    cost [FOLDER:RANKS]        seconds of the canary of a real group, and of one process

Without a folder: kakeya-tiny over 2 ranks. One JSON line for each figure.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from benchmarks.models import EMBEDDED
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.ring import canary
from kakeya.backends.ring.canary import Answer, SaidToken
from kakeya.backends.ring.canary_answers import AnswerFiles
from kakeya.backends.ring.canary_check import GroupCheck
from kakeya.backends.ring.canary_node import end_leader
from kakeya.core.clock import SystemClock
from kakeya.core.errors import KakeyaError
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Frame, Tokens
from tests.mlx.ring.rig import ENGINE, alone, group

PIECE = 64
FAULTS = ("times=1.01", "times=1.03", "times=1.3", "lost=0.02", "lost=0.1", "own")
TYPES = (("float32", 0), ("float16", 0), ("bfloat16", 0), ("bfloat16", 4))
LOAD_S = 240.0
WRONG = ("tests.mlx.ring.child_wrong_sums",)


def tell(**figures: object) -> None:
    print(json.dumps({"benchmark": "ring_canary", **figures}), flush=True)


class SplitSum(nn.Module):
    """A linear layer whose sum over features is made of as many parts as there are ranks."""

    fault = ""
    is_behind = False

    def __init__(self, whole: nn.Module, ranks: int) -> None:
        super().__init__()
        self.whole: Any = whole
        self.ranks = ranks

    def __call__(self, x: mx.array) -> mx.array:
        """Shapes: [..., features in] -> [..., features out]."""
        weight = self.whole.weight
        if "scales" in self.whole:
            weight = mx.dequantize(
                weight,
                self.whole.scales,
                self.whole.biases,
                group_size=self.whole.group_size,
                bits=self.whole.bits,
            )
        size = x.shape[-1] // self.ranks
        parts = [
            x[..., at * size : (at + 1) * size] @ weight[:, at * size : (at + 1) * size].T
            for at in range(self.ranks)
        ]
        summed = parts[0]
        for part in parts[1:]:
            summed = summed + part
        return faulty(summed, parts[0]) if SplitSum.is_behind and SplitSum.fault else summed


def faulty(summed: mx.array, own: mx.array) -> mx.array:
    """As `tests.mlx.ring.child_wrong_sums` does it, at all ranks."""
    kind, _, size = SplitSum.fault.partition("=")
    if kind == "times":
        return summed * float(size)
    kept = 0 if kind == "own" else int(summed.shape[-1] * (1 - float(size)))
    return mx.where(mx.arange(summed.shape[-1]) < kept, summed, own)


def answer_of(network: nn.Module, vocab_size: int, wanted: Answer = ()) -> Answer:
    """The greedy answer, or what is said behind each token of another one."""
    cache = make_prompt_cache(network)
    ids, said = canary.prompt(vocab_size, 320), []
    SplitSum.is_behind = False
    for start in range(0, len(ids) - 1, PIECE):
        network(mx.array([ids[start : min(start + PIECE, len(ids) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
        SplitSum.is_behind = True
    token = ids[-1]
    for place in range(canary.ANSWER_TOKENS):
        logits = network(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)
        logs = logits - mx.logsumexp(logits)
        best: list[int] = mx.argsort(-logs)[: canary.TOP].tolist()  # type: ignore[assignment]
        top = tuple((one, float(logs[one].item())) for one in best)
        token = wanted[place].token if wanted else best[0]
        said.append(SaidToken(token=token, logprob=float(logs[token].item()), top=top))
    return tuple(said)


def order(folder: Path, ranks: int, dtype: str, bits: int) -> None:
    """Tell the distances of split sums, right and wrong, from whole ones."""
    network: Any
    network, config = load_model(folder)
    network.set_dtype(getattr(mx, dtype))
    if bits:
        nn.quantize(network, group_size=32, bits=bits)
    vocab_size = int(config["vocab_size"])
    wanted = answer_of(network, vocab_size)
    for layer in network.model.layers:
        layer.self_attn.o_proj = SplitSum(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = SplitSum(layer.mlp.down_proj, ranks)
    for fault in ("", *FAULTS):
        SplitSum.fault = fault
        said = answer_of(network, vocab_size, wanted)
        ties = [width(a, b) for a, b in zip(wanted, said, strict=True) if a.token != b.top[0][0]]
        tell(
            model=folder.name,
            ranks=ranks,
            type=f"{dtype}{f', {bits} bits' if bits else ''}",
            fault=fault or "none",
            distance=round(canary.distance(wanted, said), 7),
            other_tokens=len(ties),
            widest_tie=round(max(ties, default=0.0), 4),
        )
    SplitSum.fault = ""


def width(wanted: SaidToken, said: SaidToken) -> float:
    """By how much each side prefers its own token, where these differ; the larger one."""
    best, its = said.top[0]
    lead = wanted.lead_over(best)
    return max(float("inf") if lead is None else lead, its - said.logprob)


class Stored:
    """What one process said before."""

    def __init__(self, facts: ModelFacts, answer: Answer) -> None:
        self.found = facts, answer

    async def answer(
        self, tokens: int, hears: Callable[[Frame], None]
    ) -> tuple[ModelFacts, Answer]:
        """See `OneProcess`."""
        return self.found

    def weights(self) -> str:
        """See `OneProcess`."""
        return self.found[0].base_fingerprint


async def asked(folder: Path) -> tuple[Stored, float]:
    """What one process says, and in how many seconds."""
    with alone(folder) as one:
        async with adopted(one.socket, None) as backend:
            facts = await backend.ready(LOAD_S)
            began = time.perf_counter()
            ids = canary.prompt(facts.vocab_size, canary.PROMPT_TOKENS)
            answer: Answer = ()
            async for frame in backend.decode(canary.request(ids, canary.ANSWER_TOKENS)):
                answer += canary.said_by(frame) if isinstance(frame, Tokens) else ()
            return Stored(facts, answer), time.perf_counter() - began


def adopted(socket: Path, check: GroupCheck | None) -> EngineBackend:
    def command(link: Path) -> Sequence[str]:
        program = (sys.executable, "-m", "kakeya.backends.ring.adopt")
        return (*program, "--socket", str(link), "--group", str(socket))

    return EngineBackend("group", command, check=check)


async def checked(folder: Path, ranks: int, stored: Stored, *engine: str) -> tuple[str, object]:
    """The verdict on a group, and its status."""
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(group(ranks, folder, "--ring", "tensor", engine=engine))
        check = GroupCheck(
            "group",
            stored,
            AnswerFiles(data),
            end=lambda: end_leader(served.socket),
            is_idle=lambda: True,
            clock=SystemClock(),
        )
        async with adopted(served.socket, check) as backend:
            try:
                await backend.ready(LOAD_S)
            except KakeyaError as refused:
                if check.status()["state"] != "refused":
                    raise
                await asyncio.to_thread(served.process.wait, LOAD_S)  # the ranks ended too
                return "refused", refused.message
        return str(check.status()["state"]), check.status()


async def main() -> None:
    what, *named = sys.argv[1:]
    pairs = [one.rpartition(":") for one in named if ":" in one] or [(str(EMBEDDED), "", "2")]
    models = [(Path(folder), int(ranks)) for folder, _, ranks in pairs]
    if what == "order":
        for folder, ranks in models:
            for dtype, bits in TYPES:
                order(folder, ranks, dtype, bits)
        return
    folder, ranks = models[0]
    stored, alone_s = await asked(folder)
    if what == "cost":
        tell(model=folder.name, one_process_s=round(alone_s, 2))
        state, status = await checked(folder, ranks, stored, *ENGINE)
        tell(model=folder.name, ranks=ranks, state=state, status=status)
        return
    refused = 0
    for number in range(int(named[0])):
        fault = FAULTS[number % len(FAULTS)]
        state, said = await checked(folder, ranks, stored, *WRONG, fault)
        refused += state == "refused"
        tell(group=number + 1, fault=fault, state=state, said=said)
    tell(refused=refused, of=int(named[0]))


if __name__ == "__main__":
    asyncio.run(main())
