"""Measure the shipped models `kakeya-tiny` and `kakeya-tiny-draft` with mlx in float32.

Bits per byte: held-out texts of `scripts/train_tiny.py corpus` as one stream, in windows of 1024
tokens without overlap.
Acceptance: the verifier continues held-out prompts greedily; the draft proposes blocks for the
same text as a speculative decoder would, and a row counts as accepted up to the first difference.
Rows are drafted for whole blocks only, and every drafted row counts as verified.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=<libopenblas.so.0> python scripts/evaluate_tiny.py

(the preload is optional, it makes mlx on Linux several times faster).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

WINDOW = 1024
PROMPT, CONTINUED, BLOCKS = 96, 128, (1, 2, 4)
QUESTIONS = (
    "Write a Python function add: Return the sum of two numbers.",
    "What does the function join of os.path do?",
    "Explain the topic while of Python.",
)


@dataclass(frozen=True)
class Loaded:
    """A model in float32 with its tokenizer."""

    model: nn.Module
    tokenizer: Any


def load(folder: Path) -> Loaded:
    """Load a model folder as mlx_lm does, and widen the weights to float32."""
    model, tokenizer, *_ = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)
    return Loaded(model, tokenizer)


def bits_per_byte(loaded: Loaded, stream: np.ndarray, held_out_bytes: int) -> float:
    """Cross-entropy of the stream in bits, over the bytes that its scored tokens stand for."""
    total, scored = 0.0, 0
    for start in range(0, len(stream) - WINDOW, WINDOW):
        ids = mx.array(stream[start : start + WINDOW + 1].astype(np.int32))
        total += float(nn.losses.cross_entropy(loaded.model(ids[None, :-1])[0], ids[1:]).sum())
        scored += WINDOW
    return total / math.log(2) / (scored * held_out_bytes / len(stream))


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """The model's `count` most likely tokens after a prompt, ends of text included."""
    cache = make_prompt_cache(model)
    token = int(model(mx.array([prompt]), cache=cache)[0, -1].argmax())
    out = [token]
    while len(out) < count:
        token = int(model(mx.array([[token]]), cache=cache)[0, -1].argmax())
        out.append(token)
    return out


def accepted_rows(
    draft: nn.Module, prompt: list[int], wanted: list[int], block: int
) -> tuple[int, int]:
    """(accepted, verified) draft rows over a continuation that the verifier would choose."""
    cache = make_prompt_cache(draft)
    draft(mx.array([prompt[:-1]]), cache=cache)
    pending, place, accepted, verified = prompt[-1:], 0, 0, 0
    while place + block <= len(wanted):
        rows: list[int] = []
        feed = pending
        for _ in range(block):
            rows.append(int(draft(mx.array([feed]), cache=cache)[0, -1].argmax()))
            feed = rows[-1:]
        pairs = zip(rows, wanted[place : place + block], strict=True)
        good = next((i for i, (row, right) in enumerate(pairs) if row != right), block)
        accepted, verified = accepted + good, verified + block
        committed = wanted[place : place + good + 1]
        place += good + 1
        known = min(good, block - 1)
        trim_prompt_cache(cache, block - 1 - known)
        pending = committed[known:]
    return accepted, verified


def acceptance(
    verifier: Loaded, draft: Loaded, stream: np.ndarray, prompts: int
) -> dict[int, float]:
    """Accepted over verified rows of greedy drafting on held-out prompts, by block length."""
    starts = np.linspace(0, len(stream) - PROMPT - 1, prompts).astype(int)
    counts = dict.fromkeys(BLOCKS, (0, 0))
    for start in starts:
        prompt = stream[start : start + PROMPT].tolist()
        wanted = greedy(verifier.model, prompt, CONTINUED)
        for block, (accepted, verified) in counts.items():
            good, seen = accepted_rows(draft.model, prompt, wanted, block)
            counts[block] = accepted + good, verified + seen
    return {block: accepted / verified for block, (accepted, verified) in counts.items()}


def ended_chats(loaded: Loaded) -> list[str]:
    """Greedy answers to QUESTIONS, each with how it ended."""
    answers = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        *_, last = mlx_lm.stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=200)
        answers.append(f"{question} -> {last.finish_reason} after {last.generation_tokens} tokens")
    return answers


def round_trips(loaded: Loaded, texts: list[str]) -> bool:
    """Whether decoding gives back every text byte for byte."""
    plain = loaded.tokenizer
    extra = ["", " ", "\ttab\r\n", "\u00e9\u4e16\u754c\U0001f30d", "e\u0301 <|im_end|>", "  x"]
    return all(
        plain.decode(plain.encode(text, add_special_tokens=False)) == text for text in texts + extra
    )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="scratch folder")
    parser.add_argument("--models", type=Path, default=Path("kakeya/models"))
    parser.add_argument("--prompts", type=int, default=100)
    given = parser.parse_args()
    stream = np.load(given.work / "held_out.npy")
    sizes = json.loads((given.work / "split.json").read_text())
    texts = json.loads((given.work / "held_out.json").read_text())
    verifier, draft = (load(given.models / name) for name in ("kakeya-tiny", "kakeya-tiny-draft"))
    begun = time.monotonic()
    print(f"tokenizer round trip exact: {round_trips(verifier, texts)}", flush=True)
    for block, rate in acceptance(verifier, draft, stream, given.prompts).items():
        print(f"draft rows accepted of verified (blocks of {block}): {rate:.3f}", flush=True)
    for answer in ended_chats(verifier):
        print(answer, flush=True)
    for name, loaded in (("verifier", verifier), ("draft", draft)):
        bits = bits_per_byte(loaded, stream, sizes["held_out_bytes"])
        print(f"{name} held-out bits per byte: {bits:.4f}", flush=True)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
