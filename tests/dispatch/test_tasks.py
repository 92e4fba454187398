"""The ladder of a task: which model it gives, and what it never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import ConfigError
from kakeya.dispatch.tasks import LadderModel, TaskChoice, TaskSpec, check_tasks, choose, guarded
from tests.laws import law

PLAIN, PINNED = TaskSpec(), TaskSpec(pin_primary=True)


@st.composite
def ladders(draw: st.DrawFn) -> list[LadderModel]:
    """Candidates as they may be at a moment, in steps of one or more."""
    kinds = draw(st.lists(st.sampled_from(["", "cloud:", "claude:"]), min_size=1, max_size=6))
    step, found = 0, []
    for at, kind in enumerate(kinds):
        step += bool(at) and draw(st.booleans())
        is_loaded, has_failed = draw(
            st.sampled_from([(False, False), (True, False), (False, True)])
        )
        found.append(
            LadderModel(
                model_id=f"{kind}{at}",
                step=step,
                is_loaded=is_loaded and not kind,
                has_failed=has_failed and not kind,
                tokens_per_second=draw(st.sampled_from([0.0, 10.0, 200.0])),
            )
        )
    return found


@given(ladders(), st.booleans(), st.booleans())
@law(1200)
def test_a_ladder_is_never_empty_and_keeps_its_first_model(
    ladder: list[LadderModel], allows_cloud: bool, is_pinned: bool
) -> None:
    choice = choose("t", PINNED if is_pinned else PLAIN, ladder, allows_cloud=allows_cloud)
    assert ladder[0] in choice.ranked
    assert set(choice.ranked) <= set(ladder)
    assert len(set(choice.ranked)) == len(choice.ranked)
    if is_pinned:
        assert choice.model_id == ladder[0].model_id


@given(ladders())
@law(1200)
def test_the_guard_takes_out_all_clouds_behind_the_first_and_nothing_else(
    ladder: list[LadderModel],
) -> None:
    assert guarded(ladder, allows_cloud=True) == tuple(ladder)
    kept = guarded(ladder, allows_cloud=False)
    assert kept == tuple(one for one in ladder if one is ladder[0] or not one.is_cloud)


@given(ladders())
@law(1200)
def test_what_is_chosen_is_loaded_if_any_is_and_of_the_first_step_that_can_be(
    ladder: list[LadderModel],
) -> None:
    best = choose("t", PLAIN, ladder, allows_cloud=True).ranked[0]
    if loaded := [one for one in ladder if one.is_loaded]:
        assert best.is_loaded
        usable = loaded
    else:
        usable = [one for one in ladder if not one.has_failed] or ladder
    assert best.step == min(one.step for one in usable)
    equals = [one for one in usable if one.step == best.step]
    assert best.tokens_per_second == max(one.tokens_per_second for one in equals)


@given(ladders())
@law(600)
def test_models_that_are_alike_stay_in_the_order_of_the_file(ladder: list[LadderModel]) -> None:
    alike = [LadderModel(model_id=one.model_id, step=0) for one in ladder]
    assert choose("t", PLAIN, alike, allows_cloud=True).ranked == tuple(alike)


def test_a_choice_says_why() -> None:
    def reason(*ladder: LadderModel, spec: TaskSpec = PLAIN) -> str:
        return chosen(*ladder, spec=spec).reason

    def chosen(*ladder: LadderModel, spec: TaskSpec = PLAIN) -> TaskChoice:
        return choose("t", spec, ladder, allows_cloud=True)

    big = LadderModel(model_id="big", step=0)
    loaded = LadderModel(model_id="small", step=1, is_loaded=True)
    assert reason(big, loaded) == "it is loaded, and big is not"
    assert reason(big, loaded, spec=PINNED) == "the primary is pinned"
    assert reason(big) == "the first of the ladder"
    failed = LadderModel(model_id="big", step=0, has_failed=True)
    assert reason(failed, LadderModel(model_id="cloud:x", step=1)) == "big cannot be loaded now"
    equal = LadderModel(model_id="fast", step=0, tokens_per_second=9)
    assert reason(big, equal) == "as good as big, and faster"
    assert chosen(big, loaded).describe()["model"] == "small"


@pytest.mark.parametrize(
    ("name", "candidates", "says"),
    [
        ("t", ("smal",), r"f: \[tasks.t\]: smal is none .*, small, other; did you mean small\?"),
        ("t", ("small", "cloud:x"), "cloud:x cannot be served"),
        (
            "t",
            ("small", "claude:sonnet"),
            "claude:sonnet cannot be served, as this node reaches no",
        ),
        ("t", (), "no candidates"),
        ("small", ("other",), "a model has this name too"),
        ("a:b", ("small",), "letters, digits"),
    ],
)
def test_a_task_that_cannot_be_is_refused_with_a_sentence(name, candidates, says) -> None:
    spec = TaskSpec(candidates=tuple((one,) for one in candidates))
    with pytest.raises(ConfigError, match=says):
        check_tasks({name: spec}, ["small", "other"], "f")
