"""The decoder that both models are, in the Qwen3 architecture as mlx_lm computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny.corpus import SEED, VOCABULARY


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
