"""A cut is a part of the text: what was cut otherwise has another name, and serves up to there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.units import pack_ids
from kakeya.decoding.draft.acceptance import agreeing
from kakeya.generation.cuts import MARK, is_cut, last_place, marked, unmarked, usable
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.names.pieces import longest_at, path_to, pieces_of

SIZE = 8
CHAIN = BlockChain(bytes(32), SIZE)
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
CUTS = st.lists(st.integers(-2, 45), max_size=5, unique=True).map(sorted)


@given(TOKENS, CUTS)
def test_a_marked_text_tells_its_tokens_and_its_cuts(tokens: list[int], cuts: list[int]) -> None:
    text = marked(tokens, cuts)
    inner = [cut for cut in cuts if 0 < cut < len(tokens)]
    assert unmarked(text) == (tokens, tuple(inner))
    assert [at for at in range(1, 50) if is_cut(pack_ids(text), at)] == inner
    assert (text == tokens) == (not inner)


def ends(tokens: list[int], cuts: list[int], grain: int) -> set[int]:
    """Where pieces of a text end, as prefill cuts it."""
    return {*range(0, len(tokens) + 1, grain), len(tokens), *cuts} & set(range(len(tokens) + 1))


@given(TOKENS, TOKENS, CUTS, CUTS, st.sampled_from((1, 2, 4, 8)), st.integers(0, 30))
def test_kv_serves_up_to_where_both_texts_were_cut_and_alike_before(
    one: list[int], other: list[int], cuts: list[int], others: list[int], grain: int, same: int
) -> None:
    one = other[:same] + one
    if same % 2:
        others = [cut for cut in cuts if cut < 20]
    ours, theirs = marked(one, cuts), marked(other, others)
    found = usable(pack_ids(ours), pack_ids(theirs), agreeing(ours, theirs), grain)
    mine, its = ends(one, cuts, grain), ends(other, others, grain)
    serving = [
        place
        for place in sorted(mine & its)
        if one[:place] == other[:place]
        and {end for end in cuts if 0 < end < place} == {end for end in others if 0 < end < place}
    ]
    assert found == max(serving)
    assert {end for end in mine if end < found} == {end for end in its if end < found}
    assert last_place(pack_ids(ours), found, grain) == found


@given(TOKENS, CUTS, CUTS)
def test_blocks_have_equal_names_only_where_their_texts_were_cut_alike(
    tokens: list[int], cuts: list[int], others: list[int]
) -> None:
    total = len(tokens) - 1
    one, other = pieces_of(CHAIN, tokens, cuts), pieces_of(CHAIN, tokens, others)
    for index, (mine, its) in enumerate(zip(one, other, strict=True)):
        before = min((index + 1) * SIZE, total)
        parting = {cut for cut in set(cuts) ^ set(others) if 0 < cut < before and cut % SIZE}
        assert (mine.id == its.id) == (not parting)


@given(TOKENS, CUTS, st.data())
def test_pieces_are_the_history_and_what_ends_at_a_cut(
    tokens: list[int], cuts: list[int], data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(cuts))) if cuts else set()
    pieces, total = pieces_of(CHAIN, tokens, cuts, chosen), len(tokens) - 1
    main = [piece for i, piece in enumerate(pieces) if piece.index == i][: -(-total // SIZE)]
    assert [token & ~MARK for piece in main for token in piece.tokens] == tokens[:-1]
    whole = [piece for piece in pieces if not piece.is_tail]
    assert list(pieces[: len(whole)]) == whole
    # What ends at a cut is called as the tail of a history that ends there.
    inner = sorted(cut for cut in chosen if 0 < cut < total and cut % SIZE)
    assert [piece.id for piece in pieces[len(main) :]] == [
        pieces_of(CHAIN, [*tokens[:cut], 0], cuts)[-1].id for cut in inner
    ]
    for piece in pieces:
        longest = longest_at(pieces, piece.index)
        assert longest is not None
        assert longest.packed.startswith(piece.packed)
        path = path_to(pieces, piece)
        assert path[:-1] == [one.id for one in whole[: piece.index]]
        assert piece.parent == (path[-2] if len(path) > 1 else None)
    assert longest_at(pieces, len(main)) is None
    at_blocks = [piece.is_end for piece in whole if (piece.index + 1) * SIZE in chosen]
    assert all(at_blocks)
