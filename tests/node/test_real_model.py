"""A real node with a model of real size: 135 M parameters, trained to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kakeya.cli.child import NodeProcess
from kakeya.mlx.numerics.blas import preload_blas
from kakeya.sessions.client import Client
from tests.node.nodes import model_state
from tests.waiting import eventually

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]
FRANCE = {"role": "user", "content": "What is the capital of France?"}
PARIS = "The capital of France is Paris."
LIST = "apple, banana, cherry, " * 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(
    real_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[NodeProcess]:
    flags = ("--model", str(real_model), "--proposer", "ngram", "--no-mdns")
    async with NodeProcess(tmp_path_factory.mktemp("node"), *flags) as made:
        await eventually(
            "the model is ready",
            lambda: model_state(made, real_model.name)["state"] == "ready",
            limit_s=120,
        )
        yield made


async def ask(node: NodeProcess, path: str, **body: object) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=f"http://{node.http}", trust_env=False) as http:
        answer = await http.post(path, json={"model": "real-model", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(node: NodeProcess, *messages: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """A greedy answer in a conversation, and its usage."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 32, "conversation_id": "atlas"}
    answer = await ask(node, "/v1/chat/completions", **body)
    return answer["choices"][0]["message"]["content"], answer["usage"]


async def test_it_knows_the_capital_of_france(node: NodeProcess) -> None:
    text, usage = await chat(node, FRANCE)
    assert text == PARIS
    assert usage["completion_tokens"] < 32


async def test_a_second_turn_computes_only_what_is_new(node: NodeProcess) -> None:
    said, usage = await chat(node, FRANCE)
    first_turn = usage["prompt_tokens"] + usage["completion_tokens"]
    italy = {"role": "user", "content": "And of Italy?"}
    said, usage = await chat(node, FRANCE, {"role": "assistant", "content": said}, italy)
    assert "Rome" in said
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first_turn


@pytest.mark.slow
async def test_drafts_change_no_word(node: NodeProcess) -> None:
    body = {"prompt": LIST, "temperature": 0, "max_tokens": 12}
    plain = await ask(node, "/v1/completions", **body, draft_policy="off")
    drafted = await ask(node, "/v1/completions", **body, draft_policy="ngram")
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["usage"]["kakeya"]["accepted"] > 0


@pytest.mark.slow
async def test_greedy_tokens_are_those_of_mlx_lm(node: NodeProcess, real_model: Path) -> None:
    prompt, theirs = await asyncio.to_thread(tokens_of_mlx_lm, real_model, 8)
    async with Client(node.grpc) as client, await client.create_session() as session:
        await session.append(prompt)
        ours = [token async for token in session.generate(max_tokens=8, draft_policy="off")]
    assert ours == theirs


def tokens_of_mlx_lm(folder: Path, count: int) -> tuple[list[int], list[int]]:
    """Ids of a chat prompt, and of the greedy answer of mlx-lm in this process."""
    preload_blas(threads=1)
    from mlx_lm import load, stream_generate

    network, tokenizer = load(str(folder))
    ask = [{"role": "user", "content": "Tell me how bread is made."}]
    prompt = tokenizer.apply_chat_template(ask, add_generation_prompt=True)
    return prompt, [
        answer.token for answer in stream_generate(network, tokenizer, prompt, max_tokens=count)
    ]


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(real_model / "tokenizer.json"))


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ("1234 5", [33, 34, 35, 36, 216, 37]),
        ("a  b\n\n c", [81, 216, 278, 1116, 265]),
        ("don't 3.14", [12420, 982, 216, 35, 30, 33, 36]),
        ("naïve 日本 🙂", [3546, 46494, 17097, 241, 115, 40993, 47526]),
        ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
    ],
)
async def test_text_is_cut_as_the_model_was_trained(
    tokenizer: Tokenizer, words: str, ids: list[int]
) -> None:
    """The ids are of a plain BPE over the tokens and merges of the GGUF file."""
    assert tokenizer.encode(words).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == words
