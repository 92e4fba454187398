"""The law of speculation with everything on that changes logits.

The tokens of an answer are the same with and without drafts, alone and in a batch, and where
another engine goes on in the middle.
"""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kakeya.decoding.processors.grammar import Grammars
from kakeya.engine.steps.sequence import SequenceRun
from kakeya.generation.frames import EngineFrame, HistoryLogits, StopReason, Tokens
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeJob, DraftSource, Sampling
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.mlx.loader import load
from kakeya.mlx.model import MlxModel
from tests.arithmetic import own_arithmetic
from tests.decoding.processors.schemas import SCHEMAS, Schema, grammar_of
from tests.engine.rig import Rig, logprobs_in, matcher_of, tools
from tests.engine.test_batch import run_together
from tests.laws import law

NGRAM = (DraftSource(kind="ngram"),)
PENALTY = st.sampled_from([0.0, 0.0, -1.0, 0.4, 1.5])
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
    logit_bias=st.dictionaries(st.integers(1, 600), st.floats(-30, 8), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
)
PROMPTS = st.lists(st.sampled_from([1, 5, 90, 91, 300, 301, 302, 900]), min_size=1, max_size=40)
JOBS = st.builds(DecodeJob, token_ids=PROMPTS, max_tokens=st.just(16), sampling=SAMPLINGS)
FOLDER = EMBEDDED_FOLDER / "kakeya-tiny"
TEXTS = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def rig() -> Rig:
    model = MlxModel(load(str(FOLDER), "tiny"), 0.0, False)
    grammars = Grammars(
        FOLDER / "tokenizer.json",
        vocab_size=model.facts.vocab_size,
        end_ids=model.facts.eos_token_ids,
        model_id="tiny",
    )
    return Rig(model, replace(tools(), grammars=grammars))


def continued(job: DecodeJob, head: list[int]) -> DecodeJob:
    """What the next engine is asked for after these tokens."""
    return replace(
        job,
        token_ids=[*job.token_ids, *head],
        prompt_tokens=len(job.token_ids),
        max_tokens=job.max_tokens - len(head),
    )


@given(job=JOBS, cut=st.integers(1, 15))
@law(120)
def test_tokens_are_the_same_with_drafts_and_after_a_restart(rig: Rig, job: DecodeJob, cut: int):
    tokens, done = rig.run(job)
    assert done.usage.drafted == 0
    assert rig.run(replace(job, draft_sources=NGRAM))[0] == tokens
    head, _ = rig.run(replace(job, max_tokens=cut))
    rest = replace(continued(job, head), draft_sources=NGRAM)
    assert head + rig.run(rest)[0] == tokens


@given(schema=SCHEMAS, job=JOBS, share=st.floats(0, 1))
@law(300)
def test_answers_follow_their_schema_however_they_were_computed(
    rig: Rig, schema: Schema, job: DecodeJob, share: float
):
    job = replace(job, grammar=grammar_of(schema), max_tokens=120)
    tokens, done = rig.run(job)
    if done.reason is StopReason.STOP_TOKEN:
        jsonschema.validate(json.loads(TEXTS.decode(tokens[:-1])), schema)
    drafted, usage = rig.run(replace(job, draft_sources=NGRAM))
    assert (drafted, usage.reason) == (tokens, done.reason)
    forced = usage.usage.sources[-1]
    assert forced.source == "grammar"
    assert forced.accepted == forced.verified
    cut = min(len(tokens) - 1, round(share * len(tokens)))
    if cut:
        rest, last = rig.run(replace(continued(job, tokens[:cut]), draft_sources=NGRAM))
        assert (rest, last.reason) == (tokens[cut:], done.reason)


@given(
    todo=st.lists(st.tuples(JOBS, st.sampled_from([(), NGRAM])), min_size=2, max_size=5),
    schemas=st.lists(SCHEMAS, max_size=2),
)
@law(60)
def test_rows_with_and_without_processors_share_forwards(rig: Rig, todo, schemas) -> None:
    jobs = [replace(job, draft_sources=sources) for job, sources in todo]
    jobs.append(DecodeJob(token_ids=[5, 300], max_tokens=30))
    for at, schema in enumerate(schemas[: len(jobs)]):
        jobs[at] = replace(jobs[at], grammar=grammar_of(schema))
    alone = [rig.run(job)[0] for job in jobs]
    answers = run_together(rig, rig.model, jobs)
    assert [answer.tokens for answer in answers] == alone


@own_arithmetic
@given(
    job=JOBS,
    schema=st.none() | SCHEMAS,
    top=st.sampled_from([0, 1, 20]),
    others=st.lists(JOBS, max_size=2),
)
@law(60)
def test_log_probabilities_are_the_models_own_however_they_were_computed(
    rig: Rig, job: DecodeJob, schema: Schema | None, top: int, others: list[DecodeJob]
):
    job = replace(job, top_logprobs=top, grammar="" if schema is None else grammar_of(schema))
    grammar = matcher_of(rig.tools, job)
    told = logprobs_in(SequenceRun(rig.model, rig.tools, job, grammar))
    tokens, _ = rig.run(job)
    assert len(told) == len(tokens)
    drafted = replace(job, draft_sources=NGRAM)
    grammar = matcher_of(rig.tools, job)
    assert logprobs_in(SequenceRun(rig.model, rig.tools, drafted, grammar)) == told
    first, *_ = run_together(rig, rig.model, [job, *others])
    assert first.logprobs == told
    state = rig.model.open()
    logits = state.step(mx.array([job.token_ids[0]]))
    for token in [*job.token_ids[1:], *tokens]:
        logits = mx.concatenate([logits, state.step(mx.array([token]))])
    logs = np.array(logits.astype(mx.float32))[len(job.token_ids) - 1 : -1]
    logs = logs - np.log(np.exp(logs).sum(axis=-1, keepdims=True))
    for row, token, each in zip(logs, tokens, told, strict=True):
        assert each.logprob == pytest.approx(row[token], abs=1e-3)
        assert [value for _, value in each.top] == pytest.approx(np.sort(row)[::-1][:top], abs=1e-3)
        assert all(row[token] == pytest.approx(value, abs=1e-3) for token, value in each.top)


@given(job=JOBS, schema=st.none() | SCHEMAS)
@law(60)
def test_a_first_token_from_known_logits_is_the_same(rig: Rig, job: DecodeJob, schema):
    grammar = "" if schema is None else grammar_of(schema)
    job = replace(job, top_logprobs=2, grammar=grammar, offer=KvOffer(wants_logits=True))

    def frames(job: DecodeJob) -> list[EngineFrame]:
        run = SequenceRun(rig.model, rig.tools, job, matcher_of(rig.tools, job))
        return [frame for frame in run.frames() if isinstance(frame, Tokens | HistoryLogits)]

    first, *others = frames(job)
    [logits] = [frame.logits for frame in others if isinstance(frame, HistoryLogits)]
    others = [frame for frame in others if isinstance(frame, Tokens)]
    assert frames(replace(job, offer=KvOffer(logits=logits))) == [first, *others]


def test_penalties_and_biases_change_the_answer(rig: Rig) -> None:
    job = DecodeJob(token_ids=[5, 300, 301], max_tokens=24)
    plain, _ = rig.run(job)
    banned = Sampling(logit_bias=((plain[0], -100.0),))
    assert plain[0] not in rig.run(replace(job, sampling=banned))[0]
    forced = Sampling(logit_bias=((7, 100.0),))
    assert rig.run(replace(job, sampling=forced))[0] == [7] * 24
    both = Sampling(logit_bias=((7, 100.0), (8, 100.0)), frequency_penalty=2.0)
    assert set(rig.run(replace(job, sampling=both))[0]) == {7, 8}
