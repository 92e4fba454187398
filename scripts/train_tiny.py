"""Train the embedded models `kakeya-tiny` and `kakeya-tiny-draft` from nothing on a CPU.

Text: the running Python's own standard library (sources, docstrings, tests, language reference
topics), under the licence of the Python Software Foundation. Stages, each one a sub-command:

    corpus     read and split the text, build chats, train the tokenizer, write token streams
    verifier   train the verifier (Qwen3 architecture) on the token stream
    draft      distil the draft on the verifier's distribution and on its greedy continuations
    export     write the model folders that mlx_lm loads
    all        the four above, in this order

Every random choice comes from SEED and a counter, so a stopped stage resumes from its checkpoint
with the data it would have seen. Equal text, library versions and thread count give equal weights
up to the summation order of the CPU's matrix products. `scripts/evaluate_tiny.py` measures the
exported folders.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny.corpus import CHAT_TEMPLATE, END, PAD, SEED, SPECIAL, TURN_END, stage_corpus
from tiny.model import DRAFT, VERIFIER, Decoder, Shape
from tiny.training import (
    WORKERS,
    Batches,
    Plan,
    Windows,
    autocast,
    bytes_per_token,
    in_workers,
    text_batches,
    train,
)
from torch import Tensor

STAGES = ("corpus", "verifier", "draft", "export")
PROMPT, CONTINUED = 96, 161


def stage_verifier(work: Path, plan: Plan) -> None:
    """Train the verifier by next-token cross-entropy; runs in each worker."""
    model = Decoder(VERIFIER)
    model.initialise(1)
    batch_of = text_batches(np.load(work / "train.npy"), plan)

    def loss_of(batch: Tensor) -> Tensor:
        with autocast():
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    train("verifier", work, model, plan, batch_of, loss_of)
    if distributed.get_rank() == 0:
        print(f"verifier held out: {held_out_bits(work, model):.4f} bits/byte", flush=True)


@torch.no_grad()
def held_out_bits(work: Path, model: Decoder, length: int = 1024) -> float:
    """Bits per byte of the held-out stream in windows of `length` without overlap."""
    stream = np.load(work / "held_out.npy").astype(np.int64)
    count = (len(stream) - 1) // length
    total = 0.0
    for i in range(count):
        ids = torch.from_numpy(stream[i * length : (i + 1) * length + 1])
        with autocast():
            logits = model(ids[None, :-1])[0].float()
        total += F.cross_entropy(logits, ids[1:], reduction="sum").item()
    return total / (count * length) / math.log(2) / bytes_per_token(work, "held_out")


def load_decoder(path: Path, shape: Shape) -> Decoder:
    """A decoder with a checkpoint's weights."""
    model = Decoder(shape)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model


def stage_continuations(work: Path, rows: int) -> None:
    """Write `rows` greedy continuations of training text by the verifier; runs in each worker."""
    verifier = load_decoder(work / "verifier.pt", VERIFIER)
    prompts = Windows(np.load(work / "train.npy"), PROMPT, 4)
    rank, share, begun = distributed.get_rank(), rows // WORKERS, time.monotonic()
    parts = []
    for first in range(rank * share, (rank + 1) * share, 128):
        parts.append(continue_greedily(verifier, prompts.batch(first, 128)[:, :-1], CONTINUED))
        if rank == 0 and len(parts) % 8 == 0:
            done = len(parts) * 128 / share
            left = (time.monotonic() - begun) * (1 / done - 1) / 60
            print(f"continuations {done:.0%} ETA {left:.1f} min", flush=True)
    np.save(work / f"continued_{rank}.npy", torch.cat(parts).numpy().astype(np.uint16))


@torch.no_grad()
def continue_greedily(model: Decoder, prompts: Tensor, count: int) -> Tensor:
    """Prompts [rows, length] with `count` greedy tokens appended to each."""
    ids, past, start, pieces = prompts, None, 0, [prompts]
    for _ in range(count):
        with autocast():
            hidden, past = model.hidden(ids, past, start)
            logits = model.logits(hidden[:, -1:])
        start += ids.shape[1]
        ids = logits.argmax(-1)
        pieces.append(ids)
    return torch.cat(pieces, dim=1)


def draft_batches(work: Path, plan: Plan) -> Batches:
    """Text batches with three of four rows of a short batch a greedy continuation."""
    text = text_batches(np.load(work / "train.npy"), plan)
    parts = [np.load(work / f"continued_{rank}.npy") for rank in range(WORKERS)]
    continued = torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def batch_of(step: int) -> Tensor:
        batch = text(step)
        if plan.is_long(step):
            return batch
        taken = torch.arange(batch.shape[0]) % 4 != 0
        count = int(taken.sum())
        epoch, place = divmod(step, len(continued) // count)
        order = np.random.default_rng([SEED, 5, epoch]).permutation(len(continued))
        batch[taken] = continued[torch.from_numpy(order[place * count : (place + 1) * count])]
        return batch

    return batch_of


def narrowed(embedding: Tensor, size: int) -> Tensor:
    """The best rank-`size` coordinates of an embedding, at the spread of a fresh one."""
    u, s, _ = torch.linalg.svd(embedding, full_matrices=False)
    narrow = u[:, :size] * s[:size].sqrt()
    out: Tensor = narrow * (0.03 / narrow.std())
    return out


def stage_draft(work: Path, plan: Plan) -> None:
    """Distil the draft: the verifier's distribution and its greedy choice; runs in each worker."""
    verifier = load_decoder(work / "verifier.pt", VERIFIER).eval()
    model = Decoder(DRAFT)
    model.initialise(2)
    wide = verifier.model.embed_tokens.weight.data
    model.model.embed_tokens.weight.data = narrowed(wide, DRAFT.hidden_size)

    def loss_of(batch: Tensor) -> Tensor:
        with autocast():
            with torch.no_grad():
                wanted = verifier(batch[:, :-1]).flatten(0, 1).float()
            logits = model(batch[:, :-1]).flatten(0, 1).float()
        soft = F.cross_entropy(logits, wanted.softmax(-1))
        return 0.5 * soft + 0.5 * F.cross_entropy(logits, wanted.argmax(-1))

    train("draft", work, model, plan, draft_batches(work, plan), loss_of)
    if distributed.get_rank() == 0:
        print(f"draft held out: {held_out_bits(work, model):.4f} bits/byte", flush=True)


def stage_export(work: Path, out: Path) -> None:
    """Write the two model folders under `out`, weights in float16; READMEs are left alone."""
    for name, checkpoint, shape in (
        ("kakeya-tiny", "verifier.pt", VERIFIER),
        ("kakeya-tiny-draft", "draft.pt", DRAFT),
    ):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        model = load_decoder(work / checkpoint, shape)
        weights = {key: value.half().contiguous() for key, value in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
        for file, content in folder_settings(shape).items():
            (folder / file).write_text(json.dumps(content, indent=2) + "\n")
        size = sum(part.stat().st_size for part in folder.iterdir())
        count = sum(weight.numel() for weight in weights.values())
        print(f"{folder}: {count} parameters, {size / 1e6:.2f} MB")


def folder_settings(shape: Shape) -> dict[str, dict[str, Any]]:
    """The JSON files of a model folder by name."""
    ends = [SPECIAL.index(TURN_END), SPECIAL.index(END)]
    pad = SPECIAL.index(PAD)
    return {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(shape),
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "torch_dtype": "float16",
            "bos_token_id": None,
            "eos_token_id": ends,
            "pad_token_id": pad,
        },
        "generation_config.json": {"eos_token_id": ends, "pad_token_id": pad},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": PAD,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position_embeddings,
        },
    }


VERIFIER_PLAN = Plan(steps=2150, long_steps=60, cooldown=0.186)
DRAFT_PLAN = Plan(steps=1150, long_steps=20, cooldown=0.347)
CONTINUATIONS = 6_144


def run_stage(stage: str, work: Path, out: Path, steps: int | None) -> None:
    """Run one stage in this process or in the workers."""
    begun = time.monotonic()
    if stage == "corpus":
        stage_corpus(work)
    elif stage == "verifier":
        plan = replace(VERIFIER_PLAN, steps=steps or VERIFIER_PLAN.steps)
        in_workers(stage_verifier, work, plan)
    elif stage == "draft":
        if not (work / "continued_0.npy").exists():
            in_workers(stage_continuations, work, CONTINUATIONS)
        in_workers(stage_draft, work, replace(DRAFT_PLAN, steps=steps or DRAFT_PLAN.steps))
    else:
        stage_export(work, out)
    print(f"{stage}: {(time.monotonic() - begun) / 60:.1f} min", flush=True)


def main() -> None:
    """Read the command line and run the stage or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="scratch folder")
    parser.add_argument("--out", type=Path, default=Path("kakeya/models"), help="models' folder")
    parser.add_argument("--steps", type=int, help="training steps instead of the shipped run's")
    given = parser.parse_args()
    for stage in STAGES if given.stage == "all" else [given.stage]:
        run_stage(stage, given.work, given.out, given.steps)


if __name__ == "__main__":
    main()
