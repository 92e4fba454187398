"""The network of a block-diffusion drafter.

Two streams run through the same layers. The context is causal, so its keys and values are kept as
a text grows; to the embedding of each of its tokens the verifier's projected hidden state is added
where there is one. A block begins with the last token of the text, whose state no verifier has yet,
and goes on with masks; its positions attend to the whole context and to each other, in both
directions. As in a causal model, the logits at a position are of the token behind it, so that a
block which is filled from left to right, a token a pass, is drafted as by a causal model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from kakeya.core.errors import ConfigError
from kakeya.core.weight_files import weight_files

Rotation = tuple[mx.array, mx.array]
"""Cosines and sines of positions; each [positions, head_dim / 2]."""
LayerKv = tuple[mx.array, mx.array]
"""Keys, turned, and values of a layer; each [B, kv heads, tokens, head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDiffusionConfig:
    """config.json of such a model."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    mask_token_id: int
    block_tokens: int
    """The most tokens of a block that it was trained on."""
    window_tokens: int
    """Tokens of context that it reads at least, where there are so many; at most twice as many."""
    verifier_layers: tuple[int, ...]
    """Layers of the verifier, from 0, whose outputs are the hidden states."""
    verifier_hidden_size: int

    @classmethod
    def read(cls, folder: Path) -> BlockDiffusionConfig:
        """Read that of a folder. Raises ConfigError."""
        try:
            found = json.loads((folder / "config.json").read_text("utf-8"))
            sizes = {name: found[name] for name in cls.__dataclass_fields__}
            sizes["verifier_layers"] = tuple(sizes["verifier_layers"])
            return cls(**sizes)
        except (OSError, ValueError, KeyError, TypeError) as failure:
            raise ConfigError(
                f"{str(folder)!r} is no folder of a block-diffusion drafter: {failure!r}"
            ) from failure

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of a token of context, in float32."""
        return 2 * 4 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


class BlockAttention(nn.Module):
    """Attention with grouped keys and values and norms of heads; the mask says what sees what."""

    def __init__(self, config: BlockDiffusionConfig) -> None:
        super().__init__()
        wide = config.num_attention_heads * config.head_dim
        narrow = config.num_key_value_heads * config.head_dim
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def __call__(
        self, x: mx.array, turned: Rotation, past: LayerKv | None, mask: mx.array | str | None
    ) -> tuple[mx.array, LayerKv]:
        """Attend over `past` and x [B, L, hidden]; also the keys and values of x."""
        rows, length, _ = x.shape
        q = self.q_proj(x).reshape(rows, length, self.heads, -1).transpose(0, 2, 1, 3)
        k = self.k_proj(x).reshape(rows, length, self.groups, -1).transpose(0, 2, 1, 3)
        v = self.v_proj(x).reshape(rows, length, self.groups, -1).transpose(0, 2, 1, 3)
        q, k = _rotate(self.q_norm(q), turned), _rotate(self.k_norm(k), turned)
        own = k, v
        if past is not None:
            k, v = mx.concatenate([past[0], k], axis=2), mx.concatenate([past[1], v], axis=2)
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(rows, length, -1)), own


class BlockFeedForward(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: BlockDiffusionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Shapes: [.., hidden] -> [.., hidden]."""
        out: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class BlockLayer(nn.Module):
    """One layer, for context and blocks."""

    def __init__(self, config: BlockDiffusionConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = BlockFeedForward(config)

    def __call__(
        self, x: mx.array, turned: Rotation, past: LayerKv | None, mask: mx.array | str | None
    ) -> tuple[mx.array, LayerKv]:
        """Shapes: x [B, L, hidden] -> the same, and its keys and values."""
        mixed, own = self.self_attn(self.input_layernorm(x), turned, past, mask)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), own


class BlockStack(nn.Module):
    """The embedding, the layers and the last norm."""

    def __init__(self, config: BlockDiffusionConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [BlockLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class StateProjection(nn.Module):
    """What becomes of the verifier's hidden states before they travel: as few values as fit."""

    def __init__(self, config: BlockDiffusionConfig) -> None:
        super().__init__()
        wide = len(config.verifier_layers) * config.verifier_hidden_size
        self.fc = nn.Linear(wide, config.hidden_size, bias=False)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, outputs: mx.array) -> mx.array:
        """Shapes: outputs of the layers, joined [.., layers * H] -> [.., hidden]."""
        projected: mx.array = self.norm(self.fc(outputs))
        return projected


class BlockDiffusion(nn.Module):
    """The whole network; the output layer is the embedding."""

    def __init__(self, config: BlockDiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.model = BlockStack(config)
        self.states = StateProjection(config)

    def context(
        self,
        ids: mx.array,
        start: int,
        past: Sequence[LayerKv] | None = None,
        states: mx.array | None = None,
    ) -> list[LayerKv]:
        """Keys and values of tokens of context, behind those of `past`.

        Shapes: ids [B, T]; states [B, T, hidden], projected, zero where there is none.
        """
        x = self.model.embed_tokens(ids)
        if states is not None:
            x = x + states
        turned = self.turned(mx.arange(start, start + ids.shape[1]))
        kept = []
        for place, layer in enumerate(self.model.layers):
            x, own = layer(x, turned, past[place] if past else None, "causal")
            kept.append(own)
        return kept

    def block(
        self,
        ids: mx.array,
        positions: mx.array,
        past: Sequence[LayerKv] | None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Logits of blocks behind a context. Shapes: ids [B, L], positions [L] -> [B, L, V].

        Without a mask the positions are of one block, and see all.
        """
        x, turned = self.model.embed_tokens(ids), self.turned(positions)
        for place, layer in enumerate(self.model.layers):
            x, _ = layer(x, turned, past[place] if past else None, mask)
        logits: mx.array = self.model.embed_tokens.as_linear(self.model.norm(x))
        return logits

    def turned(self, positions: mx.array) -> Rotation:
        """Cosines and sines of positions. Shape: [.., L] -> twice [.., L, head_dim / 2]."""
        half = mx.arange(0, self.config.head_dim, 2, dtype=mx.float32) / self.config.head_dim
        angles = positions[..., None].astype(mx.float32) * self.config.rope_theta**-half
        return mx.cos(angles), mx.sin(angles)


def _rotate(x: mx.array, turned: Rotation) -> mx.array:
    """Turn x [B, heads, L, head_dim], first half paired with second half."""
    cos, sin = turned
    if cos.ndim == 3:  # positions of each row
        cos, sin = cos[:, None], sin[:, None]
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def joined(outputs: Sequence[Any]) -> mx.array:
    """Outputs of layers beside each other. Shapes: each [.., H] -> [.., layers * H]."""
    return mx.concatenate(list(outputs), axis=-1)


def read_network(folder: Path) -> BlockDiffusion:
    """Make the network of a folder, with its weights unread, in float32 on a CPU.

    Raises ConfigError.
    """
    network = BlockDiffusion(BlockDiffusionConfig.read(folder))
    try:
        read = [cast("dict[str, mx.array]", mx.load(str(file))) for file in weight_files(folder)]
        network.load_weights([part for weights in read for part in weights.items()], strict=True)
    except (ValueError, RuntimeError, OSError) as failure:
        raise ConfigError(f"weights in {str(folder)!r} cannot be read: {failure}") from failure
    if mx.default_device().type == mx.DeviceType.cpu:
        network.set_dtype(mx.float32)
    return network
