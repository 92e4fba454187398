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
import ast
import functools
import hashlib
import itertools
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

SEED = 20260521
WORKERS = 2
STAGES = ("corpus", "verifier", "draft", "export")
PROMPT, CONTINUED = 96, 161
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MASK, PAD = "<|mask|>", "<|pad|>"
SPECIAL = [END, TURN, TURN_END, MASK, PAD]
VOCABULARY = 3072
HELD_OUT_PER_MILLE = 25
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_LINE = "You are a helpful assistant."
SKIPPED = ("site-packages/", "lib2to3/tests/data/", "encodings/", "pydoc_data/", "test/badsyntax")
LARGEST_FILE = 320_000


# ---------------------------------------------------------------- text


@dataclass(frozen=True)
class Document:
    """One text with the name that decides on its side of the split."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the text is kept for evaluation: a hash of its name decides."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def library_documents() -> list[Document]:
    """The standard library's Python files and its language reference topics, ordered by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [doc for path in sorted(root.rglob("*.py")) if (doc := _read(root, path)) is not None]
    from pydoc_data.topics import topics

    found += [Document(f"pydoc_data/topics/{key}", topics[key]) for key in sorted(topics)]
    return found


def _read(root: Path, path: Path) -> Document | None:
    name = path.relative_to(root).as_posix()
    if any(part in name for part in SKIPPED) or path.stat().st_size > LARGEST_FILE:
        return None
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return None
    return Document(name, text) if text.strip() else None


def chat(user: str, answer: str, system: bool) -> str:
    """One exchange in the form that CHAT_TEMPLATE renders, ended as a completion should end."""
    head = f"{TURN}system\n{SYSTEM_LINE}{TURN_END}\n" if system else ""
    return f"{head}{TURN}user\n{user}{TURN_END}\n{TURN}assistant\n{answer}{TURN_END}\n"


def chats_of(doc: Document) -> Iterator[str]:
    """Questions and answers made from a file's documented functions, or from a topic."""
    if doc.name.startswith("pydoc_data/"):
        paragraphs = doc.text.strip().split("\n\n")
        topic = doc.name.rsplit("/", 1)[1]
        yield chat(f"Explain the topic {topic} of Python.", "\n\n".join(paragraphs[:3]), False)
        return
    try:
        tree = ast.parse(doc.text)
    except (SyntaxError, ValueError):
        return
    module = doc.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _chats_of_node(doc.text, module, node)


def _chats_of_node(
    text: str, module: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    first = docstring.split("\n\n")[0].replace("\n", " ")
    forms = int.from_bytes(hashlib.sha256(f"{module}.{node.name}".encode()).digest()[:2], "big")
    asked = (
        f"What does the {kind} {node.name} of {module} do?",
        f"Explain {module}.{node.name}.",
        f"What is {node.name}?",
    )[forms % 3]
    yield chat(asked, docstring, forms % 5 == 0)
    source = ast.get_source_segment(text, node, padded=False)
    if kind == "function" and source and len(source) < 1500:
        code = _dedent_tail(source, node.col_offset)
        wanted = (
            f"Write a Python function {node.name}: {first}",
            f"Write {node.name} in Python. {first}",
            f"{first} Show me the code of {node.name}.",
        )[forms % 3]
        yield chat(wanted, f"```python\n{code}\n```", forms % 7 == 0)


def _dedent_tail(source: str, columns: int) -> str:
    """Source of a nested definition with its indentation taken from the lines after the first."""
    first, *rest = source.split("\n")
    margin = " " * columns
    return "\n".join([first, *(line.removeprefix(margin) for line in rest)])


def split_texts(documents: list[Document]) -> tuple[list[str], list[str]]:
    """(training texts with chats, in shuffled order; held-out texts, in order of their names)."""
    training = [doc.text for doc in documents if not doc.held_out]
    single = [turn for doc in documents if not doc.held_out for turn in chats_of(doc)]
    shuffler = np.random.default_rng([SEED, 1])
    order = shuffler.permutation(len(single))[: len(single) * 2 // 5]
    groups = ["".join(single[i] for i in part) for part in np.array_split(order, len(order) // 8)]
    mixed = training + groups
    shuffled = [mixed[i] for i in shuffler.permutation(len(mixed))]
    return shuffled, [doc.text for doc in documents if doc.held_out]


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE without normalisation: decoding an encoding gives back the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of token ids, each text closed by END."""
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.fromiter(itertools.chain.from_iterable((*e.ids, end) for e in encoded), np.uint16)


def stage_corpus(work: Path) -> None:
    """Write tokenizer.json, train.npy, held_out.npy and split.json."""
    work.mkdir(parents=True, exist_ok=True)
    documents = library_documents()
    training, held_out = split_texts(documents)
    tokenizer = train_tokenizer(training)
    tokenizer.save(str(work / "tokenizer.json"))
    sizes: dict[str, int] = {"vocabulary": tokenizer.get_vocab_size()}
    for name, texts in (("train", training), ("held_out", held_out)):
        stream = token_stream(tokenizer, texts)
        np.save(work / f"{name}.npy", stream)
        sizes[f"{name}_texts"] = len(texts)
        sizes[f"{name}_bytes"] = sum(len(text.encode()) for text in texts)
        sizes[f"{name}_tokens"] = len(stream)
    (work / "split.json").write_text(json.dumps(sizes, indent=1))
    (work / "held_out.json").write_text(json.dumps(held_out))
    print(json.dumps(sizes))


class Windows:
    """Windows of a token stream without replacement; number n is the same in every run."""

    def __init__(self, stream: np.ndarray, length: int, salt: int) -> None:
        self.stream, self.length, self.salt = stream, length, salt
        self.per_epoch = (len(stream) - 1) // length - 1
        self._epoch, self._order, self._shift = -1, np.empty(0, np.int64), 0

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            generator = np.random.default_rng([SEED, self.salt, epoch])
            self._order = generator.permutation(self.per_epoch)
            self._shift = int(generator.integers(self.length))
            self._epoch = epoch

    def batch(self, first: int, count: int) -> Tensor:
        """Windows first .. first+count-1 as int64 [count, length + 1]: inputs and one target."""
        rows = []
        for number in range(first, first + count):
            self._enter(number // self.per_epoch)
            start = int(self._order[number % self.per_epoch]) * self.length + self._shift
            rows.append(self.stream[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def text_batches(stream: np.ndarray, plan: Plan) -> Batches:
    """Batches of a plan's steps: short windows, then long ones."""
    short, long = Windows(stream, plan.length, 2), Windows(stream, plan.long_length, 3)

    def batch_of(step: int) -> Tensor:
        windows = long if plan.is_long(step) else short
        rows = plan.batch_tokens // windows.length
        return windows.batch(step * rows, rows)

    return batch_of


# ---------------------------------------------------------------- model


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model with tied embeddings; names as in its config.json."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int = VOCABULARY
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100_000.0


VERIFIER = Shape(256, 4, 704, 4, 2, 64)
DRAFT = Shape(128, 2, 352, 4, 2, 32)


def rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [length, head_dim / 2]."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [.., length, head_dim], first half paired with second half."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Norm(nn.Module):
    """Root-mean-square norm with a gain, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale the last axis to a root mean square of one, times the gain; float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide * scale * self.weight


Cache = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention with grouped keys and values and per-head norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = (n * shape.head_dim for n in _heads(shape))
        self.q_proj = nn.Linear(shape.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Cache | None
    ) -> tuple[Tensor, Cache]:
        """Attend over `past` and x [rows, length, hidden]; also the keys and values so far."""
        rows, length, _ = x.shape
        heads, groups = _heads(self.shape)
        q = self.q_proj(x).view(rows, length, heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, groups, -1).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, groups, -1).transpose(1, 2)
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        if length == 1:
            mixed = attend_once(q, k, v)
        else:
            wide = [part.repeat_interleave(heads // groups, dim=1) for part in (k, v)]
            mixed = attend(q, wide[0], wide[1])
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1)), (k, v)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [rows, heads, length, size].

    Written out for short rows, where it is faster on a CPU than the fused kernel in bfloat16.
    """
    length = q.shape[2]
    if length > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + later
    return torch.matmul(scores.softmax(-1), v)


def attend_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query [rows, heads, 1, size] over all keys of its group."""
    rows, heads, _, size = q.shape
    groups = k.shape[1]
    grouped = q.view(rows, groups, heads // groups, size)
    scores = torch.matmul(grouped, k.transpose(-1, -2)) * size**-0.5
    return torch.matmul(scores.softmax(-1), v).view(rows, heads, 1, size)


def _heads(shape: Shape) -> tuple[int, int]:
    return shape.num_attention_heads, shape.num_key_value_heads


class FeedForward(nn.Module):
    """The gated feed-forward layer (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, widen and narrow each position by itself."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Cache | None
    ) -> tuple[Tensor, Cache]:
        """Add attention and feed-forward to the residual stream x."""
        mixed, cache = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Stack(nn.Module):
    """The embedding, the layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Decoder(nn.Module):
    """A Qwen3 decoder whose parameter names are those of its safetensors file."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)

    def initialise(self, salt: int) -> None:
        """Draw the weights; the projections into the residual stream start near nothing."""
        generator = torch.Generator().manual_seed(SEED + salt)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                small = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                spread = 0.02 if "embed" in name else small * weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=spread, generator=generator)

    def hidden(
        self, ids: Tensor, past: list[Cache] | None = None, start: int = 0
    ) -> tuple[Tensor, list[Cache]]:
        """The normed last layer [rows, length, hidden], and the keys and values so far."""
        x = self.model.embed_tokens(ids)
        cos, sin = rotation(self.shape, start + ids.shape[1])
        caches = []
        for i, layer in enumerate(self.model.layers):
            x, cache = layer(x, cos[start:], sin[start:], past[i] if past else None)
            caches.append(cache)
        hidden: Tensor = self.model.norm(x)
        return hidden, caches

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states, by the tied embedding."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [rows, length, vocabulary] of token ids [rows, length]."""
        return self.logits(self.hidden(ids)[0])


# ---------------------------------------------------------------- optimisation


def orthogonal(gradient: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, by five quintic Newton-Schulz steps."""
    x = gradient.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    out: Tensor = (x.T if tall else x).float()
    return out


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for the matrices inside the layers."""

    def __init__(self, weights: list[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(weights, {"lr": lr, "decay": decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move each matrix along its orthogonalised momentum."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                kept = state.setdefault("momentum", torch.zeros_like(weight))
                kept.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(kept, group["momentum"]))
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


@dataclass(frozen=True)
class Plan:
    """One training run: sizes in tokens, rates at the plateau."""

    steps: int
    batch_tokens: int = 8192
    micro_tokens: int = 2048
    length: int = 256
    long_length: int = 2048
    long_steps: int = 0
    warmup: int = 50
    cooldown: float = 0.35
    matrix_rate: float = 0.03
    other_rate: float = 4e-3
    decay: float = 0.02

    def rate(self, step: int) -> float:
        """The fraction of the full rates at a step: warm-up, plateau, linear fall to 2 %."""
        fall = max(1, int(self.steps * self.cooldown))
        left = (self.steps - step) / fall
        return min(1.0, (step + 1) / self.warmup, 0.02 + 0.98 * left)

    def is_long(self, step: int) -> bool:
        """Whether the step trains on long windows: the last `long_steps` do."""
        return step >= self.steps - self.long_steps


class Optimisers:
    """Muon for matrices, Adam for the embedding and the gains, with one rate schedule."""

    def __init__(self, model: Decoder, plan: Plan) -> None:
        inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
        outer = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.muon = Muon(inner, plan.matrix_rate, plan.decay)
        self.adam = torch.optim.AdamW(
            outer, plan.other_rate, betas=(0.9, 0.97), weight_decay=0.0, fused=True
        )
        self.rates = (plan.matrix_rate, plan.other_rate)
        self.outer = outer

    def step(self, fraction: float) -> None:
        """Apply the collected gradients at a fraction of the full rates, and clear them."""
        torch.nn.utils.clip_grad_norm_(self.outer, 1.0)
        for optimiser, rate in zip((self.muon, self.adam), self.rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * fraction
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps of both optimisers."""
        return [self.muon.state_dict(), self.adam.state_dict()]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Take over a checkpoint's state."""
        self.muon.load_state_dict(state[0])
        self.adam.load_state_dict(state[1])


Loss = Callable[[Tensor], Tensor]
Batches = Callable[[int], Tensor]


class Progress:
    """Lines with step, tokens, speed, loss and time left; `unit` turns nats into bits per byte."""

    def __init__(self, name: str, plan: Plan, start: int, unit: float) -> None:
        self.name, self.plan, self.start, self.unit = name, plan, start, unit
        self.begun, self.mean = time.monotonic(), math.nan

    def add(self, step: int, loss: float, every: int = 25) -> None:
        """Note a step's loss (nats per token) and print now and then."""
        self.mean = loss if math.isnan(self.mean) else 0.96 * self.mean + 0.04 * loss
        done = step + 1 - self.start
        if (step + 1) % every == 0 or step + 1 == self.plan.steps:
            seconds = time.monotonic() - self.begun
            speed = done * self.plan.batch_tokens / seconds
            left = (self.plan.steps - step - 1) * seconds / done
            print(
                f"{self.name} step {step + 1}/{self.plan.steps} "
                f"tokens {(step + 1) * self.plan.batch_tokens / 1e6:.2f} M "
                f"{speed:.0f} tokens/s loss {self.mean * self.unit:.4f} bits/byte "
                f"ETA {left / 60:.1f} min",
                flush=True,
            )


def train(
    name: str, work: Path, model: Decoder, plan: Plan, batch_of: Batches, loss_of: Loss
) -> None:
    """Run a plan, from the checkpoint `name`.pt when there is one, and leave the last one there.

    Each worker of the process group takes its share of a batch's windows.
    """
    optimisers = Optimisers(model, plan)
    checkpoint = work / f"{name}.pt"
    start = restore(checkpoint, model, optimisers)
    progress = Progress(name, plan, start, 1 / (math.log(2) * bytes_per_token(work)))
    workers, rank = distributed.get_world_size(), distributed.get_rank()
    for step in range(start, plan.steps):
        batch = batch_of(step)
        rows, length = batch.shape
        loss = 0.0
        micro = max(1, plan.micro_tokens // (length - 1))
        for part in torch.split(batch.tensor_split(workers)[rank], micro):
            share = loss_of(part) * (part.shape[0] / rows)
            torch.autograd.backward(share)
            loss += share.item()
        sum_gradients(model)
        optimisers.step(plan.rate(step))
        if rank == 0:
            progress.add(step, loss * workers)
            if (step + 1) % 250 == 0 or step + 1 == plan.steps:
                save(checkpoint, model, optimisers, step + 1)


def sum_gradients(model: Decoder) -> None:
    """Add up the workers' gradients, so that all take the same step."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def in_workers(stage: Callable[..., None], work: Path, *rest: object) -> None:
    """Run a stage in WORKERS processes of one thread each: faster here than two threads."""
    meeting = work / "meeting"
    meeting.unlink(missing_ok=True)
    arguments = (stage, meeting, work, *rest)
    spawn(_worker, arguments, nprocs=WORKERS)  # type: ignore[no-untyped-call]


def _worker(rank: int, stage: Callable[..., None], meeting: Path, *rest: object) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORKERS
    )
    stage(*rest)
    distributed.destroy_process_group()


def save(path: Path, model: Decoder, optimisers: Optimisers, step: int) -> None:
    """Write a checkpoint in one move."""
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optim": optimisers.state(), "step": step}, part)
    part.replace(path)


def restore(path: Path, model: Decoder, optimisers: Optimisers) -> int:
    """Load a checkpoint if there is one; the number of steps already done."""
    if not path.exists():
        return 0
    found = torch.load(path, weights_only=True)
    model.load_state_dict(found["model"])
    optimisers.load(found["optim"])
    return int(found["step"])


def bytes_per_token(work: Path, name: str = "train") -> float:
    """Mean bytes that a token of a stream stands for."""
    sizes = json.loads((work / "split.json").read_text())
    return float(sizes[f"{name}_bytes"] / sizes[f"{name}_tokens"])


@functools.cache
def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (6 times float32's speed)."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "avx512_bf16" in flags.read_text()


def autocast() -> torch.autocast:
    """Matrix products in bfloat16 where the CPU has instructions for it, else float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16())


# ---------------------------------------------------------------- verifier


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


# ---------------------------------------------------------------- draft


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


# ---------------------------------------------------------------- export


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


# ---------------------------------------------------------------- command line


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
