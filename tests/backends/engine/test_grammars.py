"""Grammars over a real engine child: refused beside others, and replayed after a death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import aclosing
from dataclasses import replace

import jsonschema
import pytest
from tokenizers import Tokenizer

from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.errors import InvalidArgument
from kakeya.generation.frames import Done, Tokens
from kakeya.generation.request import DecodeRequest, DraftSource, Sampling
from tests.decoding.processors.schemas import grammar_of
from tests.decoding.processors.test_grammar import TOKENIZER, wide
from tests.gateway.test_real_engine import command
from tests.waiting import until

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 100, "maxLength": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SAMPLING = Sampling(temperature=1.0, seed=3, presence_penalty=1.0, repetition_penalty=1.2)
REQUEST = DecodeRequest(token_ids=[5, 300, 301], max_tokens=450, sampling=SAMPLING)
FOLLOWED = replace(REQUEST, grammar=grammar_of(SCHEMA), draft_sources=(DraftSource(kind="ngram"),))


async def answer(model: EngineBackend, request: DecodeRequest, kill_at: int = 0):
    tokens: list[int] = []
    async with aclosing(model.decode(request)) as frames:
        async for frame in frames:
            if isinstance(frame, Tokens):
                tokens += frame.token_ids
                if 0 < kill_at <= len(tokens):
                    os.kill(model.pid, signal.SIGKILL)
                    kill_at = 0
            elif isinstance(frame, Done):
                return tokens, frame
    raise AssertionError("no end")


@pytest.mark.slow
async def test_a_grammar_is_followed_over_a_death_and_a_refused_one_hurts_no_other():
    async with EngineBackend("tiny", command) as model:
        tokens, done = await answer(model, FOLLOWED)
        text = Tokenizer.from_file(str(TOKENIZER)).decode(tokens[:-1])
        jsonschema.validate(json.loads(text), SCHEMA)
        assert done.usage.sources[-1].source == "grammar"
        assert done.usage.sources[-1].accepted > 0
        for deaths in range(1, 4):
            assert (await answer(model, FOLLOWED, kill_at=1))[0] == tokens
            if model.restarts == deaths:
                break  # else the engine had answered whole before it was killed
            await until(lambda deaths=deaths: model.restarts == deaths)
        else:
            pytest.fail("no answer was still under way when its engine was killed")
        free = replace(REQUEST, sampling=Sampling())
        alone = await answer(model, free)
        exploding = replace(FOLLOWED, grammar=grammar_of({"anyOf": [wide(900)] * 4}))
        beside = asyncio.create_task(answer(model, free))
        with pytest.raises(InvalidArgument, match="the grammar cannot be followed"):
            await answer(model, exploding)
        assert (await beside)[0] == alone[0]
