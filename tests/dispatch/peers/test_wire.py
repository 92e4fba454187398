"""Quotes, manifests and waits come whole from node to node, those of other builds too."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.dispatch.peers import wire
from kakeya.dispatch.peers.quote import AnswerOrigin, Quote
from kakeya.generation.facts import PromptsAlike, RequestLoad
from kakeya.generation.manifest import NO_MANIFEST, GivenTemplate, Manifest
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.v1 import serving_pb2 as pb
from tests.generation.test_engine_wire import WHOLE, WORDS, drawn, through

SECONDS = st.floats(1e-6, 1e6)
QUOTES = drawn(
    Quote,
    load_s=st.none() | st.just(0.0) | SECONDS,
    batch_rows=st.integers(1, 64),
    load=drawn(RequestLoad),
    alike=drawn(PromptsAlike),
    origin=drawn(AnswerOrigin),
    kv_rates=st.none() | st.dictionaries(WORDS, st.floats(1e-3, 1e12), max_size=4),
)
MANIFESTS = st.builds(
    Manifest,
    template=st.none() | st.text(min_size=1, max_size=9).map(lambda said: GivenTemplate(said, "")),
    thinking=st.sampled_from(["on", "off", "auto"]),
    temperature=st.none() | st.floats(0, 100),
    top_p=st.none() | st.floats(0, 1),
    max_tokens=st.none() | WHOLE,
)
WAITS = st.builds(
    RequestWait,
    reason=st.sampled_from(WaitReason),
    model_id=st.just("m"),
    position=st.none() | st.integers(1, 2**32 - 1),
    seconds=st.none() | SECONDS,
    progress=WORDS,
)


@given(QUOTES)
def test_a_quote_comes_whole(quote: Quote) -> None:
    assert wire.quote_from_wire(through(wire.quote_to_wire(quote))) == quote


@given(MANIFESTS)
def test_what_a_manifest_says_of_requests_comes_whole(manifest: Manifest) -> None:
    assert wire.manifest_from_wire(through(wire.manifest_to_wire(manifest))) == manifest


@given(WAITS)
def test_a_wait_comes_whole(wait: RequestWait) -> None:
    message = wire.wait_to_wire(wait)
    assert message is not None
    assert wire.wait_from_wire(through(message), "m") == wait


def test_a_request_that_does_not_wait_has_no_message_of_a_wait() -> None:
    assert wire.wait_to_wire(None) is None


def test_the_reason_of_a_newer_build_is_no_wait() -> None:
    assert wire.wait_from_wire(pb.RoutedWait(reason="a new moon"), "m") is None


def test_an_empty_manifest_says_nothing() -> None:
    assert wire.manifest_from_wire(pb.ServedManifest()) == NO_MANIFEST


def test_the_thinking_of_a_newer_build_is_left_to_the_template() -> None:
    assert wire.manifest_from_wire(pb.ServedManifest(thinking="sometimes")).thinking == "auto"


@pytest.mark.parametrize("wrong", [math.nan, -5.0, -math.inf])
def test_figures_that_no_node_can_have_are_not_known(wrong: float) -> None:
    message = pb.QuoteResponse(
        load_seconds=wrong,
        prefill_tokens_per_second=wrong,
        tokens_per_second=wrong,
        prompts_per_second=wrong,
        busy_share=wrong,
    )
    quote = wire.quote_from_wire(through(message))
    assert (quote.load_s, quote.prefill_tokens_per_s, quote.tokens_per_s) == (None, 0.0, 0.0)
    assert quote.batch_rows == 1
    assert (quote.load.prompts_per_s, quote.load.busy_share) == (0.0, 0.0)


def test_rates_that_no_node_can_have_are_bounded() -> None:
    message = pb.QuoteResponse(prompts_per_second=math.inf, busy_share=7.0)
    load = wire.quote_from_wire(through(message)).load
    assert (load.prompts_per_s, load.busy_share) == (1000.0, 1.0)
