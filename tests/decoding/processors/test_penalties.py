"""Penalties and biases: those of mlx-lm, whole, and a function of the tokens before a position."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from kakeya.decoding.processors.edits import LogitEdit, edited
from kakeya.decoding.processors.penalties import Penalties
from kakeya.decoding.processors.processors import processors_of
from kakeya.generation.request import DecodeRequest, Sampling

VOCABULARY = 40
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=150)
PENALTY = st.sampled_from([0.0, -2.0, 0.3, 1.5])
SAMPLINGS = st.builds(
    Sampling,
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=5
    ).map(lambda biases: tuple(biases.items())),
)
LOGITS = np.linspace(-3, 3, VOCABULARY, dtype=np.float32)


def after(penalties: Penalties) -> np.ndarray:
    return edited(LOGITS, LogitEdit(tokens=penalties.edits()[0]))


@given(sampling=SAMPLINGS, prompt=TOKENS, answer=TOKENS)
def test_logits_are_those_of_mlx_lm(sampling, prompt, answer):
    penalties = Penalties(sampling, prompt)
    penalties.extend(answer)
    whole = {"repetition_context_size": 999, "presence_context_size": 999}
    bias = {"logit_bias": dict(sampling.logit_bias)}
    repetition = make_logits_processors(
        **bias, repetition_penalty=sampling.repetition_penalty, **whole
    )
    others = make_logits_processors(
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        frequency_context_size=999,
        **whole,
    )
    wanted = mx.array(LOGITS)[None]
    for processor in repetition:
        wanted = processor(mx.array(prompt + answer), wanted)
    for processor in others:
        wanted = processor(mx.array(answer), wanted)
    assert np.allclose(after(penalties), np.array(wanted[0]), rtol=1e-4, atol=1e-3)


@given(sampling=SAMPLINGS, prompt=TOKENS, answer=TOKENS, ahead=TOKENS)
def test_an_edit_is_a_function_of_the_tokens_before_its_position(sampling, prompt, answer, ahead):
    penalties = Penalties(sampling, prompt)
    penalties.extend(answer)
    for _ in range(2):  # what was ahead once leaves no trace
        found = [edited(LOGITS, LogitEdit(tokens=each)) for each in penalties.edits(ahead)]
        for at, logits in enumerate(found):
            fresh = Penalties(sampling, prompt)
            fresh.extend([*answer, *ahead[:at]])
            assert logits.tobytes() == after(fresh).tobytes()


@given(sampling=SAMPLINGS, prompt=TOKENS.filter(bool), answer=TOKENS)
def test_a_continuation_counts_as_the_lost_sequence_did(sampling, prompt, answer):
    request = DecodeRequest(token_ids=prompt, max_tokens=9, sampling=sampling)
    whole, rest = (
        processors_of(request),
        processors_of(replace(request, token_ids=prompt + answer, prompt_tokens=len(prompt))),
    )
    assert (whole is None) == (rest is None) == (sampling == Sampling())
    if whole and rest:
        whole.extend(answer)
        first, second = whole.edits()[0], rest.edits()[0]
        assert edited(LOGITS, first).tobytes() == edited(LOGITS, second).tobytes()
