"""A request on its way through the fleet: whatever is lost, the same tokens, each once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import (
    Conflict,
    DeadlineExceeded,
    Denied,
    InvalidArgument,
    KakeyaError,
    LoadFailed,
    ModelLoading,
    NotFound,
    PeerProtocol,
    PeerUnavailable,
    QueueFull,
    UnknownMethod,
)
from kakeya.dispatch.peers.neighbours import LATE
from kakeya.dispatch.routed.route import RESUME_S
from kakeya.dispatch.routing.decision import NoRoute
from kakeya.generation.facts import ModelState, RequestLoad
from kakeya.generation.frames import Done, Frame, Progress, StopReason, Tokens
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.request import DecodeRequest, DraftSource, GenerationPriority, Sampling
from kakeya.generation.waiting import RequestWait, WaitReason
from tests.dispatch.peers.world import QuotedToy, facts_of
from tests.dispatch.routed.world import BEFORE_ALL, BEFORE_END, OWN, Loss, Shelf, ToyNode
from tests.laws import law
from tests.sessions.toy import expected
from tests.waiting import until

PROMPT = [5, 6, 7]
FOR_GOOD = math.inf
PLACES = st.sampled_from([BEFORE_ALL, BEFORE_END]) | st.integers(0, 12)
LOSSES = st.builds(
    Loss,
    PLACES,
    st.sampled_from([0.0, 0.3, 7.0]),
    st.builds(
        lambda kind: kind("as if it were lost"),
        st.sampled_from([PeerUnavailable, PeerProtocol, UnknownMethod]),
    ),
)


def asked(max_tokens: int = 9, **others: object) -> DecodeRequest:
    return DecodeRequest(token_ids=PROMPT, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


async def frames_of(shelf: Shelf, request: DecodeRequest) -> list[Frame]:
    model = shelf.routed()
    await model.ready(1.0)
    return [frame async for frame in model.decode(request)]


def ids(frames: Sequence[Frame]) -> list[int]:
    return [token for frame in frames if isinstance(frame, Tokens) for token in frame.token_ids]


async def lost_with(shelf: Shelf, request: DecodeRequest) -> tuple[KakeyaError, list[int], float]:
    """The error that ends a request, its tokens, and the seconds that it took."""
    model, got, began = shelf.routed(), list[Frame](), shelf.clock.mono()
    await model.ready(1.0)
    with pytest.raises(KakeyaError) as caught:  # noqa: PT012 - the tokens before it count
        async for frame in model.decode(request):
            got.append(frame)
    return caught.value, ids(got), shelf.clock.mono() - began


# --- the law


@given(
    names=st.sampled_from([("left",), ("left", "right"), ("a", "b", "c")]),
    own=st.booleans(),
    losses=st.lists(LOSSES, max_size=5),
    max_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    stop=st.frozensets(st.integers(0, 96), max_size=12),
    context=st.sampled_from([8, 10_000]),
    step=st.integers(1, 3),
)
@law(1500)
def test_any_losses_of_nodes_give_the_tokens_of_an_undisturbed_run_and_none_twice(
    names, own, losses, max_tokens, seed, stop, context, step
):
    sampling = Sampling(temperature=1.0, seed=seed)
    wanted, reason = expected(PROMPT, max_tokens, sampling=sampling, stop=stop, context=context)
    request = asked(max_tokens, sampling=sampling, stop_token_ids=stop)
    shelf = Shelf(names, own=own)
    models = [node.model for node in shelf.fleet.nodes.values()]
    for model in (*models, *([shelf.own] if shelf.own else [])):
        model.context, model.tokens_per_step = context, step
        model.facts = facts_of(context_tokens=context)
    shelf.lose(*losses)
    frames = asyncio.run(frames_of(shelf, request))
    assert ids(frames) == wanted
    *others, done = frames
    assert isinstance(done, Done)
    assert done.reason is reason
    assert not any(isinstance(frame, Done) for frame in others)
    assert shelf.left_over() == 0


async def test_nothing_follows_a_stop_token_though_its_node_is_lost_before_the_end() -> None:
    """The node that told the facts of the model is no longer there to tell them."""
    shelf = Shelf()
    wanted = expected(PROMPT, 5)[0]
    shelf.lose(Loss(BEFORE_END, FOR_GOOD))
    *others, done = await frames_of(shelf, asked(stop_token_ids=frozenset({wanted[-1]})))
    assert (ids(others), shelf.fleet.tries) == (wanted, ["left"])
    assert isinstance(done, Done)
    assert done.reason is StopReason.STOP_TOKEN


# --- which node may go on


async def test_a_node_says_with_its_first_token_what_weights_it_loaded_for_the_request() -> None:
    shelf = Shelf(("left", "right", "third"))
    shelf.node("left").model.facts = None
    shelf.told("right", base_fingerprint="others")
    shelf.node("right").model.load_s = shelf.node("third").model.load_s = 60.0
    shelf.lose(Loss(4, FOR_GOOD))
    frames = await frames_of(shelf, asked())
    assert ids(frames) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == ["left", "third"]


async def test_a_node_that_never_loaded_the_model_loads_it_to_go_on() -> None:
    shelf = Shelf()
    shelf.node("right").model.facts = None
    shelf.lose(Loss(4, FOR_GOOD))
    frames = await frames_of(shelf, asked())
    assert ids(frames) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == ["left", "right"]


async def test_an_answer_goes_on_with_the_same_adapter_only() -> None:
    """Nodes have unlike adapters by one name."""
    shelf = Shelf(("left", "right", "third"))
    for name, digest in (("left", "one"), ("right", "other"), ("third", "one")):
        shelf.node(name).model.adapter_digest = digest
    shelf.lose(Loss(4, FOR_GOOD))
    model = shelf.routed("toy:french")
    await model.ready(1.0)
    frames = [frame async for frame in model.decode(asked())]
    assert ids(frames) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == ["left", "third"]


async def test_an_adapter_of_this_node_is_not_exchanged_for_another_one_of_its_name() -> None:
    shelf = Shelf(own=True)
    assert shelf.own is not None
    shelf.own.adapter_digest = "one"
    shelf.own.load = RequestLoad(answers=(0,) * 8)
    shelf.node("left").model.adapter_digest = "other"
    shelf.node("right").model.adapter_digest = "one"
    model = shelf.routed("toy:french")
    assert [frame async for frame in model.decode(asked())]
    assert shelf.fleet.tries == ["right"]
    (decision,) = model.decisions
    assert dict(decision.unfit) == {
        "left": "its adapter of this name, or the model, is another one"
    }


@pytest.mark.parametrize(("numerics", "is_mixed"), [("numerics", False), ("others", True)])
async def test_the_last_frame_says_that_another_arithmetic_went_on(
    numerics: str, is_mixed: bool
) -> None:
    shelf = Shelf()
    shelf.told("right", kv_exactness=numerics)
    shelf.lose(Loss(4, FOR_GOOD))
    *_, done = await frames_of(shelf, asked())
    assert isinstance(done, Done)
    assert done.usage.mixed_numerics is is_mixed
    undisturbed = await frames_of(shelf, asked())
    assert isinstance(undisturbed[-1], Done)
    assert not undisturbed[-1].usage.mixed_numerics


async def test_the_next_node_gets_the_committed_tokens_and_the_same_seed() -> None:
    shelf = Shelf()
    shelf.lose(Loss(4, FOR_GOOD))
    request = asked(
        9,
        sampling=Sampling(temperature=1.0, seed=3),
        kv_key="c1",
        client="a machine",
        deadline_s=60.0,
        draft_sources=(DraftSource(kind="ngram"),),
    )
    frames = await frames_of(shelf, request)
    wanted = expected(PROMPT, 9, sampling=request.sampling)[0]
    assert ids(frames) == wanted
    assert shelf.fleet.tries == ["left", "right"]
    ((name, client, rest, policy),) = shelf.node("right").asked
    assert (name, client, policy) == ("toy", "owner", "auto")
    assert list(rest.token_ids) == PROMPT + wanted[:4]
    assert (rest.prompt_tokens, rest.max_tokens, rest.deadline_s) == (3, 5, None)
    assert (rest.sampling, rest.kv_key, rest.client) == (
        request.sampling,
        "front/c1",
        "a machine",
    )
    assert rest.draft_sources == (), "the other node finds its own"
    assert shelf.node("right").quoted == ["owner", "owner"]
    assert [name for name, _ in shelf.fleet.failures] == ["left"]


async def test_a_request_without_drafts_gets_none_elsewhere() -> None:
    shelf = Shelf()
    await frames_of(shelf, asked())
    assert shelf.node("left").asked[0][3] == "off"


@pytest.mark.parametrize(
    ("policy", "sources", "sent"),
    [
        ("peer", (), "peer"),  # it may be the node that asks, which finds no other one itself
        ("ngram", (DraftSource(kind="ngram"),), "ngram"),
        ("auto", (DraftSource(kind="ngram"),), "auto"),
        ("m@10.0.0.1:1", (DraftSource(kind="remote"),), "auto"),
        ("off", (), "off"),
    ],
)
async def test_the_draft_policy_is_that_of_the_caller_elsewhere_too(policy, sources, sent) -> None:
    shelf = Shelf()
    await frames_of(shelf, asked(draft_policy=policy, draft_sources=sources))
    assert shelf.node("left").asked[0][3] == sent


async def test_a_node_with_other_weights_does_not_go_on() -> None:
    shelf = Shelf()
    shelf.told("right", base_fingerprint="another quantization")
    shelf.lose(Loss(3, FOR_GOOD))
    failure, got, took_s = await lost_with(shelf, asked())
    assert str(failure) == "the node is lost"
    assert got == expected(PROMPT, 3)[0]
    assert RESUME_S <= took_s < RESUME_S + 1
    assert shelf.node("right").asked == []
    assert shelf.left_over() == 0


async def test_before_the_first_token_any_weights_will_do() -> None:
    shelf = Shelf()
    shelf.told("right", base_fingerprint="another quantization")
    shelf.lose(Loss(0, FOR_GOOD))
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == ["left", "right"]


async def test_an_answer_binds_no_other_one_of_its_request_to_its_weights() -> None:
    shelf = Shelf(["left"])
    model = shelf.routed()
    assert ids([frame async for frame in model.decode(asked())]) == expected(PROMPT, 9)[0]
    shelf.told("left", base_fingerprint="another quantization")
    assert ids([frame async for frame in model.decode(asked())]) == expected(PROMPT, 9)[0]


async def test_a_node_with_other_numerics_goes_on() -> None:
    shelf = Shelf()
    shelf.told("right", kv_exactness="another processor", mlx_version="9")
    shelf.lose(Loss(3, FOR_GOOD))
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == ["left", "right"]


async def test_a_node_with_another_vocabulary_is_never_asked() -> None:
    """The prompt was written in the ids of the first one."""
    shelf = Shelf()
    shelf.node("right").vocabulary_digest = "other words"
    shelf.told("right", vocabulary_digest="other words")
    shelf.lose(Loss(BEFORE_ALL, FOR_GOOD))
    failure, _, _ = await lost_with(shelf, asked())
    assert isinstance(failure, PeerUnavailable)
    assert shelf.node("right").quoted == shelf.node("right").asked == []


@pytest.mark.parametrize("kind", [InvalidArgument, Denied, DeadlineExceeded])
async def test_what_is_wrong_anywhere_ends_the_request_at_once(kind: type[KakeyaError]) -> None:
    shelf = Shelf()
    shelf.lose(Loss(BEFORE_ALL, 0.0, kind("wrong everywhere")))
    failure, got, took_s = await lost_with(shelf, asked())
    assert (type(failure), got, took_s) == (kind, [], 0.0)
    assert shelf.fleet.tries == ["left"]
    assert shelf.left_over() == 0


@pytest.mark.parametrize("kind", [QueueFull, Conflict, LoadFailed, ModelLoading, NotFound, NoRoute])
async def test_what_is_wrong_at_one_node_is_tried_at_the_next(kind: type[KakeyaError]) -> None:
    shelf = Shelf()
    failure = NoRoute([]) if kind is NoRoute else kind("wrong here")
    shelf.lose(Loss(BEFORE_ALL, 0.0, failure))
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == ["left", "right"]


async def test_a_peer_that_commits_too_much_is_lost_and_nothing_of_that_counts() -> None:
    class Endless(QuotedToy):
        async def decode(self, request):
            yield Tokens(token_ids=(1,) * (request.max_tokens + 1))

    shelf = Shelf()
    shelf.fleet.nodes["left"] = ToyNode("left", Endless())
    assert ids(await frames_of(shelf, asked(4))) == expected(PROMPT, 4)[0]
    assert shelf.fleet.tries == ["left", "right"]


# --- where no node is left


async def test_without_a_node_a_new_request_is_refused_at_once() -> None:
    shelf = Shelf()
    model = shelf.routed()
    await model.ready(1.0)
    for node in shelf.fleet.nodes.values():
        node.away_until_mono = FOR_GOOD
    with pytest.raises(NoRoute, match="no node has the model"):
        await anext(model.decode(asked()))
    assert shelf.clock.mono() == 1000.0


@pytest.mark.parametrize("place", [BEFORE_ALL, 0, 5])
async def test_a_request_that_lost_its_node_waits_for_one_and_then_tells_the_failure(
    place: int,
) -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(place, FOR_GOOD))
    failure, got, took_s = await lost_with(shelf, asked())
    assert str(failure) == "the node is lost"
    assert got == expected(PROMPT, max(0, place))[0]
    assert RESUME_S <= took_s < RESUME_S + 1
    assert shelf.left_over() == 0


@pytest.mark.parametrize("place", [BEFORE_ALL, 0, 5, BEFORE_END])
async def test_a_node_that_comes_back_in_time_goes_on(place: int) -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(place, RESUME_S - 1))
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]
    assert shelf.left_over() == 0


async def test_a_refusal_is_not_waited_out_before_the_first_token() -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(BEFORE_ALL, 0.0, QueueFull("too many wait")))
    failure, _, took_s = await lost_with(shelf, asked())
    assert (type(failure), took_s) == (QueueFull, 0.0)


async def test_a_load_that_goes_on_is_waited_for_where_no_other_node_has_the_model() -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(BEFORE_ALL, 0.0, ModelLoading("it loads", retry_after_s=12.0)))
    began_mono = shelf.clock.mono()
    assert ids(await frames_of(shelf, asked(deadline_s=20.0))) == expected(PROMPT, 9)[0]
    assert shelf.clock.mono() - began_mono == 12.0
    assert shelf.fleet.tries == ["left", "left"]


async def test_a_load_beyond_the_deadline_ends_the_request_at_once() -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(BEFORE_ALL, 0.0, ModelLoading("it loads", retry_after_s=40.0)))
    failure, _, took_s = await lost_with(shelf, asked(deadline_s=20.0))
    assert (type(failure), failure.retry_after_s, took_s) == (ModelLoading, 40.0, 0.0)


async def test_losses_in_a_row_end_a_request_and_a_token_between_them_does_not() -> None:
    shelf = Shelf(["left"])
    shelf.lose(*[Loss(0)] * 20)
    failure, _, took_s = await lost_with(shelf, asked())
    assert isinstance(failure, PeerUnavailable)
    assert len(shelf.fleet.tries) == 6
    assert took_s < RESUME_S
    shelf = Shelf(["left"])
    shelf.lose(*[Loss(1)] * 8)
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]


@pytest.mark.parametrize("place", [0, 5])
async def test_tries_at_nodes_that_cannot_be_reached_do_not_end_a_request_before_its_time(
    place: int,
) -> None:
    """Links are lost for a while: no node quotes, and each call fails at once."""
    shelf = Shelf()
    for node in shelf.fleet.nodes.values():
        node.quote_fails = LATE
    shelf.lose(Loss(place), *[Loss(BEFORE_ALL)] * 1000)

    async def heal() -> None:
        await shelf.clock.sleep(RESUME_S - 5)
        shelf.fleet.losses.clear()

    healing = asyncio.create_task(heal())
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]
    await healing
    assert len(shelf.fleet.tries) > 6
    assert shelf.left_over() == 0


async def test_a_request_ends_in_time_where_no_node_can_be_reached_though_all_are_tried() -> None:
    shelf = Shelf()
    shelf.lose(Loss(0), *[Loss(BEFORE_ALL)] * 1000)
    for node in shelf.fleet.nodes.values():
        node.quote_fails = LATE
    failure, _, took_s = await lost_with(shelf, asked())
    assert isinstance(failure, PeerUnavailable)
    assert RESUME_S <= took_s < RESUME_S + 1


# --- deadlines


async def test_a_deadline_ends_the_wait_for_a_node() -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(BEFORE_ALL, FOR_GOOD))
    failure, _, took_s = await lost_with(shelf, asked(deadline_s=4.0))
    assert isinstance(failure, PeerUnavailable)
    assert 4.0 <= took_s < 5.0


async def test_the_next_node_gets_what_is_left_of_the_deadline() -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(BEFORE_ALL, 3.0))
    await frames_of(shelf, asked(deadline_s=10.0))
    first, second = (request.deadline_s for _, _, request, _ in shelf.node("left").asked)
    assert first == 10.0
    assert second == pytest.approx(7.0, abs=0.51)


async def test_an_answer_that_has_begun_has_no_deadline() -> None:
    shelf = Shelf(["left"])
    shelf.lose(Loss(2, 20.0))
    assert ids(await frames_of(shelf, asked(deadline_s=1.0))) == expected(PROMPT, 9)[0]


# --- the ledger, the history and the usage


async def test_a_conversation_stays_where_it_was() -> None:
    shelf = Shelf()
    shelf.node("left").model.load = RequestLoad(answers=(0,) * 8)
    await frames_of(shelf, asked(kv_key="c1"))
    shelf.node("left").model.load = RequestLoad()
    await frames_of(shelf, asked(kv_key="c1"))
    await frames_of(shelf, asked(kv_key="c2"))
    assert shelf.fleet.tries == ["right", "right", "left"]
    shelf.node("right").model.load = RequestLoad(waiting=9, waiting_tokens=90_000)
    await frames_of(shelf, asked(kv_key="c1"))
    assert shelf.fleet.tries[-1] == "left", "but not at any price"
    assert shelf.history.last_node("c1") == "left"


async def test_a_request_that_moves_is_counted_once_for_each_other_node() -> None:
    shelf = Shelf()
    await frames_of(shelf, asked())
    assert shelf.history.status() == {"moved": 0, "by_node": {"left": 1}}
    shelf = Shelf()
    shelf.lose(Loss(2, 1.0), Loss(2, FOR_GOOD))
    await frames_of(shelf, asked())
    assert shelf.history.status() == {"moved": 2, "by_node": {"left": 2, "right": 1}}
    lonely = Shelf(["left"])
    lonely.lose(Loss(2, 1.0), Loss(2, FOR_GOOD))
    await lost_with(lonely, asked())
    assert lonely.history.moved == 0


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_caller_that_closes_ends_the_work_at_once(has_begun: bool) -> None:
    shelf = Shelf(["left"])
    toy = shelf.node("left").model
    toy.gate = asyncio.Event()
    frames = shelf.routed().decode(asked())
    await anext(frames)
    if has_begun:
        toy.gate.set()
        await anext(frames)
    await frames.aclose()
    assert toy.closed_early == 1
    assert shelf.left_over() == 0


@pytest.mark.parametrize("place", ["waits", "begun", "lost"])
async def test_a_caller_that_is_cancelled_leaves_nothing_in_the_ledger(place: str) -> None:
    shelf = Shelf(["left"])
    toy = shelf.node("left").model
    toy.gate = asyncio.Event()
    if place == "lost":
        shelf.lose(Loss(1, FOR_GOOD))
    reading = asyncio.ensure_future(frames_of(shelf, asked()))
    await until(lambda: toy.requests)
    while place != "waits" and not toy.steps:
        toy.gate.set()
        await asyncio.sleep(0)
    while place == "lost" and not shelf.fleet.failures:
        toy.gate.set()
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert toy.closed_early == 1
    assert shelf.left_over() == 0


async def test_the_usage_of_an_undisturbed_answer_is_that_of_its_node() -> None:
    shelf = Shelf()
    *_, done = await frames_of(shelf, asked())
    assert isinstance(done, Done)
    assert (done.usage.drafted, done.usage.verified, done.usage.accepted) == (3, 2, 1)
    assert done.usage.total_s == 0.02


async def test_the_usage_of_an_answer_of_two_nodes_counts_each_token_once() -> None:
    shelf = Shelf()
    for node in shelf.fleet.nodes.values():
        node.model.tokens_per_step = 3
    shelf.lose(Loss(6, FOR_GOOD))
    *_, done = await frames_of(shelf, asked(12, kv_key="c"))
    assert isinstance(done, Done)
    assert done.reason is StopReason.MAX_TOKENS
    assert done.usage.forwards == 4
    assert done.usage.accepted == 12 - 4
    assert done.usage.cached_tokens <= len(PROMPT) - 1


async def test_the_decisions_of_a_request_are_kept_for_its_receipt() -> None:
    shelf = Shelf()
    shelf.lose(Loss(2, FOR_GOOD))
    model = shelf.routed()
    _ = [frame async for frame in model.decode(asked())]
    assert [decision.node_id for decision in model.decisions] == ["left", "right"]
    assert dict(model.decisions[1].unfit) == {"left": "the node is lost"}


async def test_progress_of_a_second_node_is_not_told_again_behind_tokens() -> None:
    shelf = Shelf()
    shelf.lose(Loss(2, FOR_GOOD))
    frames = await frames_of(shelf, asked())
    assert [isinstance(frame, Progress) for frame in frames].count(True) == 1


# --- the own model among the others


async def test_the_own_node_is_first_among_equals_and_goes_on_for_a_lost_peer() -> None:
    shelf = Shelf(own=True)
    await frames_of(shelf, asked())
    assert shelf.fleet.tries == [OWN]
    assert shelf.own is not None
    shelf.own.load = RequestLoad(answers=(0,) * 8)
    shelf.lose(Loss(2, FOR_GOOD), Loss(2, FOR_GOOD))
    request = asked(kv_key="c1", draft_sources=(DraftSource(kind="ngram"),))
    assert ids(await frames_of(shelf, request)) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == [OWN, "left", "right", OWN]
    last = shelf.own.requests[-1]
    assert (last.kv_key, last.draft_sources) == ("c1", request.draft_sources)


async def test_where_all_would_refuse_now_the_request_waits_as_at_a_node_alone() -> None:
    """A quote says that there is no room: the model waits for it, and is served then."""
    shelf = Shelf(["left"], own=True)
    assert shelf.own is not None
    shelf.own.refusal = "there is no room for toy now"
    shelf.node("left").quote_fails = "left: it drains"
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == [OWN]
    shelf = Shelf()
    for node in shelf.fleet.nodes.values():
        node.model.refusal = "there is no room for toy now"
    shelf.lose(Loss(BEFORE_ALL, 0.0, QueueFull("no room indeed")))
    assert ids(await frames_of(shelf, asked())) == expected(PROMPT, 9)[0]
    assert shelf.fleet.tries == ["left", "right"]
    shelf.lose(*[Loss(BEFORE_ALL, 0.0, QueueFull("no room indeed"))] * 2)
    assert isinstance((await lost_with(shelf, asked()))[0], QueueFull)
    shelf.node("right").model.refusal = ""
    await frames_of(shelf, asked())
    assert shelf.fleet.tries[-1] == "right", "a node that would not refuse comes first"


async def test_nothing_loads_here_where_a_peer_serves_the_model() -> None:
    shelf = Shelf(own=True)
    assert shelf.own is not None
    shelf.own.facts, shelf.own.state = None, ModelState.UNLOADED
    model = shelf.routed()
    assert model.state is ModelState.READY
    assert model.facts is None
    assert await model.ready(1.0) == facts_of()
    assert shelf.own.loads == []
    assert model.facts == facts_of()
    for node in shelf.fleet.nodes.values():
        node.model.fails = PeerUnavailable("lost")
    assert await shelf.routed().ready(2.0, GenerationPriority.HIGH) == facts_of()
    assert shelf.own.loads == [(2.0, GenerationPriority.HIGH)]


@pytest.mark.parametrize("peers", [[], ["left"]], ids=["alone", "a peer never loaded it either"])
async def test_the_own_model_loads_where_no_peer_has_it(peers: list[str]) -> None:
    shelf = Shelf(peers, own=True)
    for name in peers:
        shelf.node(name).vocabulary_digest = ""
    assert shelf.own is not None
    shelf.own.facts, shelf.own.state = None, ModelState.UNLOADED
    shelf.own.waits = RequestWait(reason=WaitReason.LOAD, model_id="toy")
    shelf.own.last_error = "it broke"
    model = shelf.routed()
    assert (model.state, model.last_error) == (ModelState.UNLOADED, "it broke")
    assert model.waits_for() == shelf.own.waits
    await model.ready(1.0)
    assert len(shelf.own.loads) == 1


async def test_a_model_of_peers_alone_has_what_they_tell() -> None:
    shelf = Shelf()
    model = shelf.routed()
    shelf.node("left").model.manifest = Manifest(temperature=0.5)
    assert (model.model_id, model.manifest, model.folder) == ("toy", NO_MANIFEST, None)
    assert (model.state, model.last_error, model.waits_for()) == (ModelState.READY, "", None)
    assert (await model.stats()).running == 0
    await model.ready(1.0)
    assert model.manifest == Manifest(temperature=0.5)
    for node in shelf.fleet.nodes.values():
        node.away_until_mono = FOR_GOOD
    assert model.state is ModelState.UNLOADED
    assert model.facts == facts_of(), "as its caller was told"
    with pytest.raises(NotFound):
        await shelf.routed().ready(1.0)


async def test_kv_is_released_where_the_conversation_was_last() -> None:
    shelf = Shelf(own=True)
    assert shelf.own is not None
    shelf.own.load = RequestLoad(answers=(0,) * 8)
    await frames_of(shelf, asked(kv_key="c1"))
    model = shelf.routed()
    await model.release("c1")
    assert shelf.own.released == ["c1"]
    assert shelf.node("left").released == [("toy", "owner", "front/c1")]
    assert shelf.node("right").released == []
    shelf.node("left").model.fails = PeerUnavailable("lost")
    await model.release("c1")
    assert len(shelf.fleet.failures) == 1
