"""The architectures that mlx-lm can share over ranks, by the `model_type` of a config.

The agent does not import mlx-lm, so they are listed here; a test compares the lists with the
installed mlx-lm.
"""

from __future__ import annotations

_BOTH = frozenset(
    [
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "deepseek_v41_text"),
        *("glm4_moe", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2", "ministral3", "mistral4"),
        *("qwen2", "qwen3_moe"),
    ]
)
TENSOR = _BOTH | {
    *("exaone_moe", "gpt_oss", "iquestcoder", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama"),
    *("longcat_flash", "longcat_flash_ngram", "minimax", "minimax_m2", "minimax_m3_vl", "mistral"),
    *("muse_spark", "qwen3", "qwen3_5", "step3p5", "xverse"),
}
PIPELINE = _BOTH | {"bailing_hybrid", "qwen3_next"}
