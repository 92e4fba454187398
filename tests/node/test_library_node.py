"""The programs of docs/library.md, as they are printed, against a real node."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kakeya.mlx.library import mlx_verifier
from tests.node.nodes import DRAFTER, PATIENT, QUICK, VERIFIER, NodeProcess, model_state
from tests.test_docs import programs
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
PRINTED = "127.0.0.1:50051"
DECODE, _PAIR, WATCH, PLAN, GENERATE = programs("library.md")
LONG = "timeout_s=60"
"""A draft that comes later than after two seconds counts as a failure: here it is waited for."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory) -> AsyncIterator[NodeProcess]:
    flags = ("--node-id", "left", "--model", VERIFIER, "--proposer", "ngram", *QUICK)
    async with NodeProcess(tmp_path_factory.mktemp("node"), *flags) as made:
        await eventually(
            "the model is ready", lambda: model_state(made, VERIFIER)["state"] == "ready"
        )
        yield made


@asynccontextmanager
async def running(program: str, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    assert PRINTED in program
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-c", program.replace(PRINTED, address)),
        env=os.environ | {"PYTHONWARNINGS": "error::ResourceWarning"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def output(program: str, node: NodeProcess) -> str:
    async with running(program, node.grpc) as child:
        said, problems = await child.communicate()
        assert child.returncode == 0, problems.decode()
        return said.decode()


def plainly(prompt: str, count: int) -> str:
    """What a model in this process continues, token by token, as the page's program prints it."""
    verifier = mlx_verifier(VERIFIER)
    text = Tokenizer.from_file(verifier.tokenizer_file)
    history = list(text.encode(prompt).ids)
    answer = []
    while len(answer) < count and not verifier.eos_token_ids.intersection(answer):
        answer += verifier.verify([*history, *answer], [])
    return "".join(text.decode([token]) for token in answer)


async def test_a_program_decodes_and_a_node_drafts(node: NodeProcess) -> None:
    said = await output(DECODE.replace('"ngram")', f'"ngram", {LONG})'), node)
    answer, _, told = said.rstrip("\n").rpartition("\n")
    assert answer == await asyncio.to_thread(
        plainly, "class Point:\n    def __init__(self, x, y):\n", 64
    )
    rate, _, rest = told.partition(" ")
    assert float(rate) > 1.2
    assert rest == "tokens a forward; no failure"


@pytest.mark.slow
async def test_a_program_decodes_with_the_planned_proposer(node: NodeProcess) -> None:
    program = PLAN.replace("identity=identity", f"identity=identity, {LONG}")
    plan, tokens = (await output(program, node)).splitlines()
    assert plan.startswith(f"verify {VERIFIER} on left")
    assert len(tokens.split(",")) == 32


async def test_a_program_generates_without_a_loop(node: NodeProcess) -> None:
    said = await output(GENERATE, node)
    assert "generated_tokens=16" in said


async def test_a_program_watches_nodes_come_and_go(node: NodeProcess, tmp_path: Path) -> None:
    async with running(WATCH, node.grpc) as child:
        assert child.stdout is not None

        async def line_with(*words: str) -> str:
            async with asyncio.timeout(120):
                while line := (await child.stdout.readline()).decode():
                    if all(word in line for word in words):
                        return line
            raise AssertionError("the watch ended")

        assert VERIFIER in await line_with("+ left", node.grpc)
        flags = ("--node-id", "right", "--proposer", DRAFTER, "--peer", node.grpc, *QUICK)
        async with NodeProcess(tmp_path, *flags, program=PATIENT) as right:
            await line_with("+ right", right.grpc, DRAFTER)
        await line_with("+ right", "[]")  # its last card
        await line_with("- right")
