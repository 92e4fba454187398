"""A real node with a real encoder, all-MiniLM-L6-v2."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from kakeya.cli.child import NodeProcess
from tests.mlx.encoder_reference import reference

pytestmark = pytest.mark.real
CLOSE = 1e-3
TEXTS = (
    "The capital of France is Paris.",
    "What is the capital of France?",
    "Bread is made of flour, water and yeast.",
    "naïve 日本 🙂 façade",
)
FIRST = (
    (0.10325692, 0.03042012, 0.02909584, -0.03732293, 0.07867621, -0.0547231),
    (0.0820481, 0.03605552, -0.00389291, -0.00488104, 0.02565109, -0.05714345),
    (-0.00969164, 0.03432875, 0.00298835, 0.00876162, -0.03453784, 0.03684669),
    (-0.00869225, 0.12554185, 0.07594111, -0.04386403, -0.03120505, -0.04384154),
)
"""The first numbers of the vectors that sentence-transformers makes with these weights."""


async def test_vectors_are_those_of_the_reference(real_embedder: Path, tmp_path: Path) -> None:
    flags = ("--model", f"minilm={real_embedder}:embedder", "--no-mdns")
    async with NodeProcess(tmp_path / "node", *flags) as node:
        async with httpx.AsyncClient(base_url=f"http://{node.http}", trust_env=False) as http:
            body = {"model": "minilm", "input": [*TEXTS, "word " * 300], "truncate": True}
            answer = await http.post("/v1/embeddings", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            refused = await http.post("/v1/embeddings", json={**body, "truncate": False})
            assert "minilm takes at most 256" in refused.json()["error"]["message"]
    found = np.array([one["embedding"] for one in answer.json()["data"]])
    wanted = await asyncio.to_thread(reference_vectors, real_embedder)
    assert np.abs(found[: len(TEXTS)] - wanted).max() < CLOSE
    assert np.abs(found[: len(TEXTS), :6] - np.array(FIRST)).max() < CLOSE
    assert answer.json()["usage"]["prompt_tokens"] == 9 + 9 + 12 + 7 + 256
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.7 > 0.3 > far


def reference_vectors(folder: Path) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return np.stack([reference(folder, tokenizer.encode(text).ids) for text in TEXTS])
