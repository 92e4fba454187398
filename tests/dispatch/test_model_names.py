"""The names by which requests find their models."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.backends.relay.relays import Relays
from kakeya.backends.request import ModelNotFound
from kakeya.core.clock import SystemClock
from kakeya.dispatch.model_names import ModelNames
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.tasks import TaskSpec
from tests.gateway.toy import Directory, ToyModel, make_folder


@pytest.fixture
def names(tmp_path: Path) -> ModelNames:
    folder = make_folder(tmp_path / "toy")
    models = (ToyModel(folder, "big"), ToyModel(folder, "small"))
    tasks = TaskRegistry({"titles": TaskSpec(candidates=(("small",),))})
    return ModelNames(Directory(*models), tasks, Relays({}, SystemClock()))


def test_a_model_is_found_by_its_own_name_and_by_that_of_a_task(names: ModelNames) -> None:
    model, choice = names.choose("big")
    assert (model.model_id, choice) == ("big", None)
    model, choice = names.choose("titles")
    assert model.model_id == "small"
    assert choice is not None
    assert choice.model_id == "small"
    assert names.find("titles") is model


def test_an_unknown_name_is_told_with_those_that_are_served(names: ModelNames) -> None:
    for name in ("bigg", ""):
        with pytest.raises(ModelNotFound, match="served: big, small, titles"):
            names.choose(name)
    with pytest.raises(ModelNotFound, match="no model small:poet"):  # of the adapters' owner
        names.choose("small:poet")


def test_another_name_is_meant_only_where_none_of_the_given_one_is_served(
    names: ModelNames,
) -> None:
    assert names.meant("claude-sonnet", "titles") == "titles"
    assert names.meant("claude-sonnet", "") == "claude-sonnet"
    for known in ("big", "titles", "small:poet"):
        assert names.meant(known, "titles") == known
