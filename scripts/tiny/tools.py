"""Train `kakeya-tiny-tools` on a CPU: it calls the tool that a user's message names.

It begins with the weights of a model of `train_tiny.py` and learns the chats of `tool_chats`, first
short ones in which positions jump as if long texts stood between, then long ones.

    pip install torch tokenizers safetensors numpy jinja2
    python scripts/tiny/tools.py [--base FOLDER] [--out FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny.corpus import SEED
from tiny.model import Decoder, Shape, rotation
from tiny.tool_chats import CHAT_TEMPLATE, Chats, Row
from tiny.training import Optimisers, Plan, autocast

MODELS = Path(__file__).resolve().parent.parent.parent / "kakeya" / "models"
POSITIONS = 65_536
TOKENS = 2048
"""Tokens of a step."""
LENGTHS = ((0.0, 60, 1), (0.25, 300, 2), (0.45, 1500, 3), (0.75, 12_000, 4))
"""(share of the steps done, greatest length of other text in a chat, most exchanges in it)."""


def read_shape(folder: Path) -> Shape:
    """The shape of a model folder, with the longer table of positions."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: config[name] for name in Shape.__dataclass_fields__}
    return replace(Shape(**sizes), max_position_embeddings=POSITIONS)


def stage_of(done: float) -> tuple[int, int]:
    """Length and exchanges of chats when this share of the steps is done."""
    return next((length, turns) for at, length, turns in reversed(LENGTHS) if done >= at)


def positions_of(row: Row, rng: random.Random) -> np.ndarray:
    """The positions of a row's tokens: they jump at its gaps, and stay in the table."""
    steps = np.ones(len(row.ids), np.int64)
    steps[0] = 0
    for at, most in row.gaps:
        room = POSITIONS - int(steps.sum()) - 1
        if rng.random() < 0.7 and at < len(steps):
            steps[at] += rng.randrange(max(1, min(most, room)))
    return np.cumsum(steps)


def answer_loss(
    model: Decoder, rows: list[Row], rng: random.Random, table: tuple[Tensor, Tensor]
) -> tuple[Tensor, float]:
    """Cross-entropy of the answers' tokens, and the share of them that come first."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    places = torch.zeros(len(rows), longest, dtype=torch.long)
    wanted = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        places[i, : len(row.ids)] = torch.from_numpy(positions_of(row, rng))
        wanted[i, : len(row.ids)] = torch.tensor(row.is_answer)
    cos, sin = (part[places][:, None] for part in table)
    with autocast():
        x = model.model.embed_tokens(ids)
        for layer in model.model.layers:
            x, _ = layer(x, cos, sin, None)
        logits = model.logits(model.model.norm(x[:, :-1][wanted[:, 1:]])).float()
    targets = ids[:, 1:][wanted[:, 1:]]
    share = (logits.argmax(-1) == targets).float().mean().item()
    return F.cross_entropy(logits, targets), share


def main() -> None:
    """Train, print the loss now and then, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, default=MODELS / "kakeya-tiny-draft")
    parser.add_argument("--out", type=Path, default=MODELS / "kakeya-tiny-tools")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--start", type=float, default=0.0, help="share of the steps to skip")
    given = parser.parse_args()
    shape = read_shape(given.base)
    chats = Chats(Tokenizer.from_file(str(given.base / "tokenizer.json")))
    model = Decoder(shape)
    weights = load_file(given.base / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    table = rotation(shape, POSITIONS)
    optimisers = Optimisers(model, Plan(given.steps, matrix_rate=given.rate, other_rate=2e-3))
    mean, right, begun = float("nan"), 0.0, time.monotonic()
    for step in range(int(given.start * given.steps), given.steps):
        done = step / given.steps
        length, turns = stage_of(done)
        rng = random.Random(f"{SEED} tools {step}")
        rows = []
        while sum(len(row.ids) for row in rows) < TOKENS:
            rows.append(chats.row(rng, int(30 * (length / 30) ** rng.random()), turns))
        rows.sort(key=lambda row: len(row.ids))
        total = sum(sum(row.is_answer) for row in rows)
        loss = share = 0.0
        while rows:
            part = [rows.pop()]
            while rows and len(part[0].ids) * (len(part) + 1) <= 4096:
                part.append(rows.pop())
            weight = sum(sum(row.is_answer) for row in part) / total
            found, first = answer_loss(model, part, rng, table)
            torch.autograd.backward(found * weight)
            loss, share = loss + found.item() * weight, share + first * weight
        optimisers.step(min(1.0, (step + 1) / 30, 0.02 + (1 - done) / 0.3))
        mean = loss if mean != mean else 0.95 * mean + 0.05 * loss
        right = 0.95 * right + 0.05 * share
        if (step + 1) % 10 == 0 or step + 1 == given.steps:
            minutes = (time.monotonic() - begun) / 60
            print(
                f"step {step + 1}/{given.steps} length {length} loss {mean:.4f} "
                f"right {right:.4f} {minutes:.1f} min",
                flush=True,
            )
        if (step + 1) % 30 == 0 or step + 1 == given.steps:
            write(model, given.base, given.out)


def write(model: Decoder, base: Path, out: Path) -> None:
    """Write the model folder, weights in float16."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    for name, changed in (
        ("generation_config.json", {"do_sample": False}),
        ("config.json", {"max_position_embeddings": POSITIONS}),
        ("tokenizer_config.json", {"model_max_length": POSITIONS, "chat_template": CHAT_TEMPLATE}),
    ):
        settings = {**json.loads((base / name).read_text()), **changed}
        (out / name).write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
