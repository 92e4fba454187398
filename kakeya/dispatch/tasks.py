"""Tasks: names that requests give as their model, each with a ladder of models that can do it.

    [tasks.titles]
    candidates = ["big", ["small", "other-small"]]    models of one step are equals

The choice among them is pure: models that are loaded come first, then the earlier step, then the
measured speed, then the order of the file; a model that cannot be loaded comes last. With
`pin_primary` it is always the first one.

A candidate that begins with `cloud:` or `claude:` is another service's model, which is never loaded
here. Where clouds may not stand in for local models, such candidates are left out but for the first
of all, which its owner chose. So no ladder is ever empty. A request that names a model itself is a
ladder of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kakeya.core.errors import ConfigError
from kakeya.core.figures import Json
from kakeya.core.settings import Illegal, nearest, number, one_of, setting, switch, text
from kakeya.generation.caller import PRIORITIES
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.request import GenerationPriority

MOST_S = 86_400.0
_CLOUDS = ("cloud:", "claude:")
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*\Z", re.ASCII)
Ladder = tuple[tuple[str, ...], ...]
"""The models of each step, the best step first."""


def _ladder(raw: object) -> Ladder:
    wanted = "give a list of models, the best first; a list within it holds equals"
    if not isinstance(raw, list) or not raw:
        raise Illegal(f"{raw!r} is no ladder; {wanted}")
    steps = [step if isinstance(step, list) else [step] for step in raw]
    if not all(steps):
        raise Illegal(f"{raw!r} has an empty step; {wanted}")
    ladder = tuple(tuple(text(name) for name in step) for step in steps)
    names = [name for step in ladder for name in step]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise Illegal(f"{twice} stands twice in the ladder; name a model once")
    return ladder


def priority_word(raw: object) -> GenerationPriority:
    """Accept the name of a priority."""
    return PRIORITIES[one_of(*PRIORITIES)(raw)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task, as its owner declares it."""

    candidates: Ladder = setting("the models that can do it, the best first", _ladder, ())
    budget_s: float | None = setting(
        "the deadline of its requests that bring none", number(0.1, MOST_S, "seconds"), None
    )
    keep_alive_s: float = setting(
        "how long its model stays warm after a request, at least", number(0, MOST_S, "seconds"), 0.0
    )
    pin_primary: bool = setting("only the first model answers, loaded or not", switch, False)
    priority: GenerationPriority | None = setting(
        "the priority of its requests that ask for none", priority_word, None
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The models of the ladder, in its order."""
        return tuple(name for step in self.candidates for name in step)

    def describe(self) -> Json:
        """The task as JSON."""
        return {
            "candidates": [list(step) if len(step) > 1 else step[0] for step in self.candidates],
            "budget_s": self.budget_s,
            "keep_alive_s": self.keep_alive_s,
            "pin_primary": self.pin_primary,
            "priority": self.priority and self.priority.name.lower(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderModel:
    """A model of a ladder at the moment of a choice. `step` counts from 0; `tokens_per_second` was
    measured, 0 = not yet."""

    model_id: str
    step: int
    is_loaded: bool = False
    has_failed: bool = False
    tokens_per_second: float = 0.0

    @property
    def is_cloud(self) -> bool:
        """Whether it is a model of another service."""
        return self.model_id.startswith(_CLOUDS)

    def describe(self) -> Json:
        """The numbers of the choice as JSON."""
        return {
            "model": self.model_id,
            "step": self.step,
            "loaded": self.is_loaded,
            "failed": self.has_failed,
            "tokens_per_second": round(self.tokens_per_second, 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """The model that a task's request gets: the first of the `ranked` candidates, and why."""

    task: str
    spec: TaskSpec
    ranked: tuple[LadderModel, ...]
    reason: str

    @property
    def model_id(self) -> str:
        """The model."""
        return self.ranked[0].model_id

    def describe(self) -> Json:
        """The choice as JSON."""
        return {
            "name": self.task,
            "model": self.model_id,
            "reason": self.reason,
            "candidates": [one.describe() for one in self.ranked],
        }


class TaskCandidate(Protocol):
    """What a choice looks at of a model, be it of this node or of a backend."""

    @property
    def state(self) -> ModelState:
        """State of the model."""
        ...

    @property
    def facts(self) -> ModelFacts | None:
        """As of a `LoadableModel`."""
        ...


def observe(name: str, step: int, model: TaskCandidate | None) -> LadderModel:
    """A candidate as its model is at this moment; None = there is none."""
    if model is None:
        return LadderModel(model_id=name, step=step)
    return LadderModel(
        model_id=name,
        step=step,
        is_loaded=model.state is ModelState.READY and not name.startswith(_CLOUDS),
        has_failed=model.state in (ModelState.FAILED, ModelState.STOPPED),
        tokens_per_second=0.0 if model.facts is None else model.facts.tokens_per_second,
    )


def guarded(candidates: Sequence[LadderModel], *, allows_cloud: bool) -> tuple[LadderModel, ...]:
    """The candidates that may answer: all, or without those of clouds behind the first."""
    first, *others = candidates
    return (first, *(one for one in others if allows_cloud or not one.is_cloud))


def choose(
    task: str, spec: TaskSpec, candidates: Sequence[LadderModel], *, allows_cloud: bool
) -> TaskChoice:
    """Choose among the candidates of a task, which are at least one, in the order of the ladder."""
    allowed = guarded(candidates, allows_cloud=allows_cloud)
    if spec.pin_primary:
        return TaskChoice(task=task, spec=spec, ranked=allowed, reason="the primary is pinned")
    ranked = tuple(sorted(allowed, key=_rank))
    return TaskChoice(task=task, spec=spec, ranked=ranked, reason=_reason(ranked, allowed[0]))


def _rank(one: LadderModel) -> tuple[bool, bool, int, float]:
    return one.has_failed, not one.is_loaded, one.step, -one.tokens_per_second


def _reason(ranked: Sequence[LadderModel], primary: LadderModel) -> str:
    best = ranked[0]
    if best is primary:
        return "the first of the ladder" + (", which is loaded" if best.is_loaded else "")
    if best.step == primary.step and _rank(best)[:2] == _rank(primary)[:2]:
        return f"as good as {primary.model_id}, and faster"
    if primary.has_failed:
        return f"{primary.model_id} cannot be {'reached' if primary.is_cloud else 'loaded'} now"
    return f"it is loaded, and {primary.model_id} is not"


def check_tasks(
    tasks: Mapping[str, TaskSpec],
    served: Collection[str],
    origin: str,
    *,
    reaches: Callable[[str], bool] = lambda _: False,
    clouds: Collection[str] = (),
) -> Mapping[str, TaskSpec]:
    """The tasks of a node that writes text with the `served` models, and with those that it
    `reaches` by backends, its `clouds` among them. Raises ConfigError, which begins with the
    `origin`."""
    for name, spec in tasks.items():
        where = f"{origin}: [tasks.{name}]"
        if not _NAME.match(name):
            raise ConfigError(f"{where}: a name of a task has letters, digits, and . _ - /")
        if name in served:
            raise ConfigError(f"{where}: a model has this name too; give the task another")
        if not spec.candidates:
            raise ConfigError(f"{where} has no candidates; give at least one model")
        for candidate in spec.names:
            if not reaches(candidate):
                _check_candidate(candidate, served, clouds, where)
    return tasks


def _check_candidate(
    candidate: str, served: Collection[str], clouds: Collection[str], where: str
) -> None:
    if candidate in served:
        return
    if candidate.startswith(_CLOUDS) and clouds:
        raise ConfigError(
            f"{where}: {candidate} is of no cloud here, or of none that may be asked for "
            f"it; write cloud:NAME/MODEL, with NAME one of {', '.join(clouds)}"
        )
    if candidate.startswith(_CLOUDS):
        raise ConfigError(
            f"{where}: {candidate} cannot be served, as this node reaches no cloud; leave it out"
        )
    raise ConfigError(
        f"{where}: {candidate} is none of the models that this node writes text with, "
        f"{', '.join(served) or 'which are none'}{nearest(candidate, served)}"
    )
