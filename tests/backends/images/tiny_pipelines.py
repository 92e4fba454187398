"""Pipelines of each kind with a few thousand random parameters, saved as folders.

To save one by hand: `python -m tests.backends.images.tiny_pipelines sdxl FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import load_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

_START, _END = "<|startoftext|>", "<|endoftext|>"


def _clip_tokenizer() -> CLIPTokenizer:
    letters = [chr(at) for at in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(one + "</w>" for one in letters), _START, _END]
    return CLIPTokenizer(
        vocab={word: at for at, word in enumerate(words)}, merges=[], model_max_length=77
    )


def _clip(*, projects: bool) -> CLIPTextModel | CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        hidden_size=8,
        intermediate_size=8,
        projection_dim=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=54,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)


def _t5() -> tuple[T5Tokenizer, T5EncoderModel]:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581fox", -1.0)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=16)
    config = T5Config(
        vocab_size=8, d_model=16, d_kv=8, d_ff=8, num_layers=1, num_heads=2, pad_token_id=0
    )
    return tokenizer, T5EncoderModel(config)


def _vae(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=2,
        sample_size=32,
        scaling_factor=0.4,
        shift_factor=0.1,
    )


def sdxl() -> StableDiffusionXLPipeline:
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(4, 8),
        layers_per_block=1,
        norm_num_groups=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=4 * 6 + 8,
        cross_attention_dim=16,
    )
    return StableDiffusionXLPipeline(
        vae=_vae(4),
        text_encoder=_clip(projects=False),
        text_encoder_2=_clip(projects=True),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(),
        force_zeros_for_empty_prompt=True,
    )


def flux() -> FluxPipeline:
    tokenizer, encoder = _t5()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=True,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(4),
        text_encoder=_clip(projects=False),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=encoder,
        tokenizer_2=tokenizer,
        transformer=transformer,
    )


def sd3() -> StableDiffusion3Pipeline:
    tokenizer, encoder = _t5()
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=8,
        pooled_projection_dim=16,
        pos_embed_max_size=32,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(4),
        text_encoder=_clip(projects=True),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(projects=True),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=encoder,
        tokenizer_3=tokenizer,
    )


def save(kind: str, folder: Path) -> None:
    """Build the pipeline of a kind, and save it."""
    torch.manual_seed(0)
    {"sdxl": sdxl, "flux": flux, "sd3": sd3}[kind]().save_pretrained(folder)


def parameters(folder: Path) -> int:
    """The numbers in a saved pipeline, buffers included."""
    return sum(
        tensor.numel()
        for file in folder.rglob("*.safetensors")
        for tensor in load_file(file).values()
    )


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
