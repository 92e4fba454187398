"""Each value of a generation has one spelling, and comes whole through EngineService.

The values are drawn by the types of their fields: a field that engine.proto lacks, or that is not
converted, fails here as soon as it is added.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.generation import engine_wire as wire
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import (
    Done,
    EngineFrame,
    HistoryLogits,
    KvExported,
    KvImported,
    KvPark,
    Progress,
    QueuePlace,
    SourceUsage,
    StopReason,
    TokenLogprob,
    Tokens,
    Usage,
)
from kakeya.generation.kv import NO_HOLDER, KvOffer, KvPages, PageRef
from kakeya.generation.request import DecodeJob, DraftSource, GenerationPriority, Sampling
from kakeya.v1 import engine_pb2 as pb

WHOLE = st.integers(0, 2**32 - 1)
WORDS = st.text(max_size=6)
LOGS = st.floats(max_value=0, width=32)
UNKNOWN_FIELD = b"\xfa\x7f\x03new"
"""Number 2047, a text."""


def tuples(values: st.SearchStrategy, least: int = 0) -> st.SearchStrategy:
    return st.lists(values, min_size=least, max_size=3).map(tuple)


def drawn(value: type, **others: st.SearchStrategy) -> st.SearchStrategy:
    """Values of a dataclass, each field drawn by its type or as given."""
    named = {field.name: others.get(field.name, BY_TYPE.get(field.type)) for field in fields(value)}
    missing = [name for name, values in named.items() if values is None]
    assert not missing, f"{value.__name__}.{missing[0]}: say here how it is drawn"
    return st.builds(value, **named)


BY_TYPE: dict[str, st.SearchStrategy] = {
    "int": WHOLE,
    "float": st.floats(0, 1),
    "str": WORDS,
    "bool": st.booleans(),
    "bytes": st.binary(max_size=8),
    "Sequence[int]": st.lists(WHOLE, max_size=9),
    "frozenset[int]": st.frozensets(WHOLE, max_size=3),
    "tuple[int, ...]": tuples(WHOLE),
    "tuple[str, ...]": tuples(WORDS),
    "tuple[tuple[int, int], ...]": tuples(st.tuples(WHOLE, WHOLE)),
    "Mapping[int, float]": st.dictionaries(WHOLE, st.floats(0, 1), max_size=3),
    "dict[str, int]": st.dictionaries(WORDS, WHOLE, max_size=3),
    "GenerationPriority": st.sampled_from(GenerationPriority),
    "StopReason": st.sampled_from(StopReason),
}
BY_TYPE["PageRef"] = drawn(PageRef)
BY_TYPE["tuple[KvPages, ...]"] = tuples(drawn(KvPages))
BY_TYPE["KvOffer"] = drawn(KvOffer)
BY_TYPE["Sampling"] = drawn(
    Sampling,
    top_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0, 3, exclude_min=True),
    logit_bias=st.dictionaries(WHOLE, st.floats(-100, 100), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
)
BY_TYPE["tuple[DraftSource, ...]"] = tuples(
    drawn(DraftSource, kind=st.sampled_from(["ngram", "remote"]))
)
BY_TYPE["tuple[SourceUsage, ...]"] = tuples(drawn(SourceUsage))
BY_TYPE["Usage"] = drawn(Usage)
BY_TYPE["Footprint | None"] = st.none() | drawn(Footprint)
JOBS = drawn(
    DecodeJob,
    deadline_s=st.none() | st.floats(1e-6, 1e6),
    frame_s=st.integers(0, 10_000).map(lambda milliseconds: milliseconds / 1000),
    top_logprobs=st.none() | st.integers(0, 20),
    wait=st.none(),
    kv_holder=st.just(NO_HOLDER),
    kv=st.none(),  # these stay in the agent
    kv_retention=st.just(DecodeJob(token_ids=(), max_tokens=0).kv_retention),
    stay_warm_s=st.just(0.0),
    draft_policy=st.just(""),
)
FRAMES = st.one_of(
    st.lists(
        st.tuples(WHOLE, drawn(TokenLogprob, logprob=LOGS, top=tuples(st.tuples(WHOLE, LOGS))))
    )
    .filter(bool)
    .map(
        lambda pairs: Tokens(
            token_ids=tuple(each for each, _ in pairs), logprobs=tuple(each for _, each in pairs)
        )
    ),
    drawn(Tokens, token_ids=tuples(WHOLE, least=1), logprobs=st.just(())),
    *map(drawn, (Progress, Done, KvImported, KvExported, KvPark, QueuePlace, HistoryLogits)),
)


def through(message: Message) -> Message:
    """A message as it arrives: from its bytes, with a field that this build does not know."""
    return type(message).FromString(message.SerializeToString() + UNKNOWN_FIELD)


@given(JOBS)
def test_a_job_comes_whole_to_its_engine(job: DecodeJob) -> None:
    message = wire.job_to_wire(job, job.offer, job.park_id, job.after_load)
    assert wire.job_from_wire(through(message)) == job


@given(st.lists(FRAMES, min_size=1, max_size=5))
def test_the_frames_of_one_message_come_whole_and_in_order(frames: list[EngineFrame]) -> None:
    assert list(wire.frames_from_wire(through(wire.frames_to_wire(frames)))) == frames


@given(drawn(ModelFacts, batch_rows=st.integers(1, 64)))
def test_the_facts_of_a_model_come_whole(facts: ModelFacts) -> None:
    assert wire.facts_from_wire(through(wire.facts_to_wire(facts))) == facts


@given(drawn(EngineStats))
def test_live_numbers_come_whole(stats: EngineStats) -> None:
    assert wire.stats_from_wire(through(wire.stats_to_wire(stats))) == stats


@given(drawn(Footprint))
def test_a_footprint_comes_whole(footprint: Footprint) -> None:
    assert wire.footprint_from_wire(through(wire.footprint_to_wire(footprint))) == footprint


@given(drawn(PageRef))
def test_a_page_reference_comes_whole(ref: PageRef) -> None:
    assert wire.page_ref_from_wire(through(wire.page_ref_to_wire(ref))) == ref


def test_an_empty_request_has_the_defaults_of_a_job() -> None:
    job = wire.job_from_wire(pb.DecodeRequest())
    assert (job.sampling, job.deadline_s, job.offer) == (Sampling(), None, KvOffer())


def test_a_deadline_that_is_over_still_is_one() -> None:
    job = DecodeJob(token_ids=[1], max_tokens=1, deadline_s=0.0)
    deadline_s = wire.job_from_wire(wire.job_to_wire(job, job.offer)).deadline_s
    assert deadline_s is not None
    assert deadline_s < 0.001


def test_a_priority_of_a_newer_build_is_the_least_urgent() -> None:
    assert wire.job_from_wire(pb.DecodeRequest(priority=9)).priority is max(GenerationPriority)


def test_frames_without_content_are_passed_over() -> None:
    message = pb.DecodeResponse(
        tokens=pb.CommittedTokens(),
        following=[
            pb.DecodeResponse(),
            pb.DecodeResponse(tokens=pb.CommittedTokens(token_ids=[7])),
        ],
    )
    assert list(wire.frames_from_wire(message)) == [Tokens(token_ids=(7,))]


def test_torn_token_ids_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="5 bytes is no multiple of 4"):
        wire.job_from_wire(pb.DecodeRequest(token_ids_le32=b"12345"))


def test_an_unknown_end_of_a_decode_is_a_broken_protocol() -> None:
    unknown = pb.DecodeResponse(done=pb.DecodeDone())
    with pytest.raises(PeerProtocol, match="unknown reason 0"):
        list(wire.frames_from_wire(unknown))
