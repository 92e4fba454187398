"""Train `kakeya-tiny-dlm`, the block-diffusion drafter of `kakeya-tiny`, with mlx on one core.

    texts    greedy continuations by the verifier of pieces of the corpus, with its hidden states
    train    fill masked blocks of them, with and without the states; goes on from its checkpoint
    export   write the model folder

Embedding and first layers begin as those of `kakeya-tiny-draft`. Half of the rows of each batch
have no states or only some, so that the drafter serves verifiers that send none too.

    python scripts/tiny/diffusion.py all [--work FOLDER] [--rows N] [--steps N]
"""

# ruff: noqa: E402 - a BLAS has to be there before mlx is.
from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(1)

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer

from kakeya.core.ids import BLOCK_DIFFUSION
from kakeya.mlx.diffusion.network import BlockDiffusion, BlockDiffusionConfig, joined
from kakeya.mlx.diffusion.tap import LayerTap
from kakeya.mlx.loader import load
from tiny.corpus import SEED, chats_of, library_documents

MODELS = HERE.parent.parent / "kakeya" / "models"
CONFIG = BlockDiffusionConfig(
    vocab_size=3072,
    hidden_size=128,
    num_hidden_layers=3,
    intermediate_size=352,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=100_000.0,
    max_position_embeddings=8192,
    mask_token_id=3,
    block_tokens=16,
    window_tokens=128,
    verifier_layers=(1, 3),
    verifier_hidden_size=256,
)
PROMPT, LENGTH, TOGETHER = 64, 256, 64
"""Tokens of a prompt, of a row, and rows that are continued together."""
SHORT_TEXT = 20_000
"""Characters of a document whose chats are made: it takes long for long ones."""
BLOCKS = ((4, 24), (8, 12), (8, 12), (16, 6))
"""(masks of a block, blocks in a row): one of them at each step."""
ROWS, RATE, WARM_UP, KEPT_EVERY = 8, 1.5e-3, 20, 20


def text_prompts(rows: int) -> np.ndarray:
    """Beginnings of texts to go on with: lines of documents, and of five one chat.

    Shape: [rows, PROMPT].
    """
    dice = np.random.default_rng([SEED, 6])
    tokenizer = Tokenizer.from_file(str(MODELS / "kakeya-tiny" / "tokenizer.json"))
    documents = [doc for doc in library_documents() if not doc.held_out]
    small = [doc for doc in documents if len(doc.text) < SHORT_TEXT]
    sizes = np.array([len(doc.text) for doc in documents], np.float64)
    found: list[list[int]] = []
    while len(found) < rows:
        if len(found) % 5 == 4:
            chats = list(chats_of(small[int(dice.integers(len(small)))]))
            text = chats[int(dice.integers(len(chats)))] if chats else ""
        else:
            doc = documents[int(dice.choice(len(documents), p=sizes / sizes.sum()))]
            at = doc.text.rfind("\n", 0, int(dice.integers(len(doc.text)))) + 1
            text = doc.text[at : at + 16 * PROMPT]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= PROMPT:
            found.append(ids[:PROMPT])
    return np.array(found, np.int32)


def stage_texts(work: Path, rows: int) -> None:
    """Write tokens.npy [rows, LENGTH] and states.npy [rows, LENGTH, joined layers] float16."""
    work.mkdir(parents=True, exist_ok=True)
    prompts = text_prompts(rows)
    verifier = load(str(MODELS / "kakeya-tiny"), "kakeya-tiny")
    tap = LayerTap(verifier.network, CONFIG.verifier_layers)
    width = CONFIG.verifier_hidden_size * len(CONFIG.verifier_layers)
    write = partial(np.lib.format.open_memmap, mode="w+")
    tokens = write(work / "tokens.npy", dtype=np.uint16, shape=(rows, LENGTH))
    states = write(work / "states.npy", dtype=np.float16, shape=(rows, LENGTH, width))
    begun = time.monotonic()
    for first in range(0, rows, TOGETHER):
        some = slice(first, first + TOGETHER)
        cache, seen = verifier.make_cache(), []
        parts = [mx.array(prompts[some])]
        while sum(part.shape[1] for part in parts) < LENGTH:
            with tap.open() as outputs:
                logits = verifier.forward(parts[-1], cache)
            seen.append(joined(outputs).astype(mx.float16))
            parts.append(mx.argmax(logits[:, -1:], axis=-1))
            mx.eval(seen[-1], parts[-1])
        # The last token is not computed, and has no state.
        states[some, : LENGTH - 1] = np.array(mx.concatenate(seen, axis=1))
        tokens[some] = np.array(mx.concatenate(parts, axis=1))
        left = (time.monotonic() - begun) / (first + TOGETHER) * (rows - first - TOGETHER) / 60
        print(f"texts {first + TOGETHER}/{rows} ETA {left:.1f} min", flush=True)


def fresh(work: Path) -> tuple[BlockDiffusion, int]:
    """The network to train, and the steps done: those of a checkpoint, if there is one."""
    mx.random.seed(SEED)
    network = BlockDiffusion(CONFIG)
    if (work / "checkpoint.safetensors").exists():
        network.load_weights(str(work / "checkpoint.safetensors"))
        return network, int((work / "steps.txt").read_text())
    begun = mx.load(str(MODELS / "kakeya-tiny-draft" / "model.safetensors"))
    small = {
        name: weight * 0.1
        for name, weight in tree_flatten(network.parameters())
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    taken = {name: weight.astype(mx.float32) for name, weight in begun.items()}
    network.load_weights([*(small | taken).items()], strict=False)
    # States begin as a whisper beside the embedding, and grow as they prove of use.
    network.states.norm.weight = mx.full((CONFIG.hidden_size,), 0.05)
    return network, 0


class Lesson:
    """What a step learns from: blocks at the same places of all its rows."""

    def __init__(self, step: int, tokens: np.ndarray, states: np.ndarray) -> None:
        dice = np.random.default_rng([SEED, 7, step])
        size, blocks = BLOCKS[step % len(BLOCKS)]
        per_epoch = len(tokens) // ROWS
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([SEED, 8, epoch]).permutation(len(tokens))
        rows = np.sort(order[place * ROWS : (place + 1) * ROWS])
        ids = tokens[rows].astype(np.int32)
        places = np.arange(PROMPT // 2, LENGTH - size - 1)
        last = np.sort(dice.choice(places, blocks, replace=False))
        at = last[:, None] + np.arange(size + 1)
        """[blocks, size + 1]: the last token of the text before, and those to fill in."""
        block = ids[:, at]
        hidden = np.ones((ROWS, blocks, size + 1), bool)
        known = dice.integers(0, size, (ROWS, blocks)) * (dice.random((ROWS, blocks)) < 0.5)
        hidden[:] = np.arange(size + 1) > known[..., None]
        scattered = dice.random((ROWS, blocks)) < 0.2
        hidden[scattered] &= dice.random((int(scattered.sum()), size + 1)) < 0.7
        distance = np.maximum(0, np.arange(size + 1) - known[..., None] - 1)
        weights = np.where(hidden, np.exp(-distance / (size / 2)), 0.0)
        weights = (weights / weights.sum()).astype(np.float32)
        self.weights = mx.array(weights[..., 1:].reshape(ROWS, -1))
        self.wanted = mx.array(block[..., 1:].reshape(ROWS, -1))
        shown = np.where(hidden, CONFIG.mask_token_id, block)[..., :-1]
        self.shown = mx.array(shown.reshape(ROWS, -1))
        self.positions = mx.array(at[:, :-1].reshape(-1))
        owner = np.repeat(np.arange(blocks), size)
        before = np.arange(LENGTH)[None] < last[owner][:, None]
        self.mask = mx.array(np.concatenate((before, owner[:, None] == owner[None]), axis=1))
        self.ids = mx.array(ids)
        cut = np.where(dice.random(ROWS) < 0.5, LENGTH, dice.integers(0, LENGTH, ROWS))
        cut[dice.random(ROWS) < 0.35] = 0
        late = dice.integers(0, LENGTH, ROWS) * (dice.random(ROWS) < 0.2)
        places = np.arange(LENGTH)[None]
        given = (late[:, None] <= places) & (places < cut[:, None])
        self.given = mx.array(given)[..., None]
        self.states = mx.array(states[rows])


def loss_of(network: BlockDiffusion, lesson: Lesson) -> mx.array:
    """Weighted cross-entropy of the masked positions, in nats."""
    projected = network.states(lesson.states.astype(mx.float32)) * lesson.given
    past = network.context(lesson.ids, 0, None, projected)
    logits = network.block(lesson.shown, lesson.positions, past, lesson.mask)
    losses = nn.losses.cross_entropy(logits, lesson.wanted)
    return (losses * lesson.weights).sum()


def rate_at(step: int, steps: int) -> float:
    """The learning rate: a warm-up, then half a cosine down to 2 %."""
    fall = 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps))
    return RATE * min(1.0, (step + 1) / WARM_UP, fall)


def stage_train(work: Path, steps: int) -> None:
    """Train, and keep a checkpoint every KEPT_EVERY steps."""
    tokens = np.load(work / "tokens.npy")
    states = np.load(work / "states.npy", mmap_mode="r")
    network, done = fresh(work)
    mx.eval(network.parameters())
    learner = optim.AdamW(RATE, betas=[0.9, 0.97], weight_decay=0.01, bias_correction=True)
    graded = nn.value_and_grad(network, loss_of)
    begun, mean = time.monotonic(), math.nan
    for step in range(done, steps):
        learner.learning_rate = rate_at(step, steps)
        loss, slopes = graded(network, Lesson(step, tokens, states))
        slopes, _ = optim.clip_grad_norm(slopes, 1.0)
        learner.update(network, slopes)
        mx.eval(network.parameters(), learner.state, loss)
        mean = loss.item() if math.isnan(mean) else 0.97 * mean + 0.03 * loss.item()
        if (step + 1) % 20 == 0 or step + 1 == steps:
            left = (time.monotonic() - begun) / (step + 1 - done) * (steps - step - 1) / 60
            print(f"train {step + 1}/{steps} loss {mean:.4f} ETA {left:.1f} min", flush=True)
        if (step + 1) % KEPT_EVERY == 0 or step + 1 == steps:
            network.save_weights(str(work / "checkpoint.safetensors"))
            (work / "steps.txt").write_text(str(step + 1))


def stage_export(work: Path, out: Path) -> None:
    """Write the folder, weights in float16; its README is left alone."""
    network = BlockDiffusion(CONFIG)
    network.load_weights(str(work / "checkpoint.safetensors"))
    network.update(tree_map(lambda weight: weight.astype(mx.float16), network.parameters()))
    out.mkdir(parents=True, exist_ok=True)
    network.save_weights(str(out / "model.safetensors"))
    settings = {"model_type": BLOCK_DIFFUSION, **asdict(CONFIG)}
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "kakeya-tiny" / name, out / name)
    count = sum(weight.size for _, weight in tree_flatten(network.parameters()))
    print(f"{out}: {count} parameters")


def main() -> None:
    """Read the command line and run the stage or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=["texts", "train", "export", "all"])
    parser.add_argument("--work", type=Path, default=Path("build/dlm"), help="scratch folder")
    parser.add_argument("--out", type=Path, default=MODELS / "kakeya-tiny-dlm")
    parser.add_argument("--rows", type=int, default=768, help="texts of 256 tokens")
    parser.add_argument("--steps", type=int, default=125, help="steps of 8 texts")
    given = parser.parse_args()
    if given.stage in ("texts", "all"):
        stage_texts(given.work, given.rows)
    if given.stage in ("train", "all"):
        stage_train(given.work, given.steps)
    if given.stage in ("export", "all"):
        stage_export(given.work, given.out)


if __name__ == "__main__":
    main()
