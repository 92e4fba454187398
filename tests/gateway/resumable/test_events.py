"""Events by number: none is lost and none comes twice, wherever a client was cut off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from starlette.requests import Request

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.openai.reply import comment
from kakeya.gateway.resumable.events import LastEvent, NumberedEvents, asked_after, last_event
from tests.laws import law

EVENT = st.sampled_from([b"data: {}", b"event: a\ndata: {}", b"data: [DONE]", b'data: "\\n\\n"'])
PIECES = st.lists(st.lists(EVENT, max_size=3).map(lambda one: b"".join(e + b"\n\n" for e in one)))


def request(query: str = "", **headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), said.encode()) for name, said in headers.items()]
    return Request({"type": "http", "headers": named, "query_string": query.encode()})


def written(pieces: list[bytes], after: int) -> list[bytes]:
    events = NumberedEvents("msg_1", after)
    return b"".join(events.write(piece) for piece in pieces).split(b"\n\n")[:-1]


@given(PIECES, PIECES, st.integers(-1, 12))
@law(900)
def test_what_a_client_has_and_what_it_gets_are_the_whole(
    pieces: list[bytes], cut_otherwise: list[bytes], last: int
) -> None:
    whole = written(pieces, -1)
    assert whole == written([b"".join(pieces)], -1), "however the events are cut into pieces"
    assert whole[: last + 1] + written(pieces, last) == whole
    assert [one.split(b"\n")[0] for one in whole] == [
        b"id: msg_1:%d" % n for n in range(len(whole))
    ]


@given(st.from_regex(r"[a-z]+[_-][a-z0-9:]{1,20}", fullmatch=True), st.integers(0, 10**8))
@law(450)
def test_the_id_of_an_event_is_read_again(answer_id: str, number: int) -> None:
    scope = request(last_event_id=f"{answer_id}:{number}").scope
    assert last_event(scope) == LastEvent(answer_id, number)


@pytest.mark.parametrize("said", ["msg_1", "msg_1:", ":3", "msg_1:-1", "msg_1:x", "msg_1:²"])
def test_what_is_no_id_of_an_event_is_refused(said: str) -> None:
    asked = Request({"type": "http", "headers": [(b"last-event-id", said.encode("latin-1"))]})
    with pytest.raises(InvalidArgument, match="Last-Event-ID"):
        last_event(asked.scope)


def test_a_get_says_in_one_of_two_ways_what_it_has() -> None:
    assert asked_after(request(), "msg_1") is None
    assert asked_after(request("stream=true"), "msg_1") == -1
    assert asked_after(request("stream=true&starting_after=7"), "msg_1") == 7
    assert asked_after(request(last_event_id="msg_1:7"), "msg_1") == 7
    with pytest.raises(InvalidArgument, match="the path names"):
        asked_after(request(last_event_id="msg_2:7"), "msg_1")
    with pytest.raises(InvalidArgument, match="starting_after"):
        asked_after(request("stream=true&starting_after=x"), "msg_1")


def test_a_comment_behind_an_event_with_an_id_is_no_event_to_the_client_of_openai() -> None:
    numbered = NumberedEvents("chatcmpl-1")
    stream = numbered.write(b'data: {"a":1}\n\n') + comment("") + comment("loading toy")
    stream += numbered.write(b"data: [DONE]\n\n")
    got = [event.data for event in SSEDecoder().iter_bytes(iter([stream]))]
    assert got == ['{"a":1}', "[DONE]"]
