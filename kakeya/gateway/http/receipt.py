"""What an answer's headers tell of its request, beside the account in its body.

x-kakeya-moved     the kinds of lines that were taken out of the way of the prefix cache, as
                   "billing_header, date"
x-kakeya-warning   what the answer does not have of what was asked, in sentences
x-kakeya-ignored   the names of unknown parameters that it was answered without, each
                   percent-encoded: those that begin with x_, and others only where the setting
                   `http.unknown` is "warn"
x-kakeya-task      of a request that names a task: the model that it got and its numbers, as
                   "titles; model=small; step=1; loaded=1; tokens_per_second=210.5", and why
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from starlette.types import Scope

from kakeya.dispatch.tasks import TaskChoice
from kakeya.gateway.recent import RequestRecord
from kakeya.wire.request_log import GenerationLine

_MOVED = "kakeya.moved"
_LEFT_OUT = "kakeya.left_out"
_IGNORED = "kakeya.ignored"
_TASK = "kakeya.task"
_DEFAULTS = "kakeya.defaults"
_RECORD = "kakeya.record"
_MOST_CHARS = 2000
"""Of a header: clients and proxies bound all headers together."""


def note_moved(scope: Scope, kinds: Sequence[str]) -> None:
    """Note the kinds of lines that were moved."""
    scope[_MOVED] = tuple(str(kind) for kind in kinds)


def moved_of(scope: Scope) -> tuple[str, ...]:
    """The kinds of lines that were moved; () = none."""
    found: tuple[str, ...] = scope.get(_MOVED, ())
    return found


def note_left_out(scope: Scope, sentences: Sequence[str]) -> None:
    """Note what an answer will not have."""
    # Sentences quote requests: no character of theirs may end the header.
    scope[_LEFT_OUT] = "; ".join(sentences).encode("unicode_escape").decode()


def note_ignored(scope: Scope, names: Iterable[str]) -> None:
    """Note the parameters that a request is answered without."""
    scope[_IGNORED] = (*scope.get(_IGNORED, ()), *names)


def note_task(scope: Scope, choice: TaskChoice) -> None:
    """Note the model that a task chose."""
    scope[_TASK] = choice


def task_of(scope: Scope) -> TaskChoice | None:
    """The model that a task chose; None = the request names a model."""
    found: TaskChoice | None = scope.get(_TASK)
    return found


def note_defaults(scope: Scope, used: Mapping[str, object], origin: str) -> None:
    """Note what a request got that does not say it, by the table of the file that says it."""
    told = {name: {"value": value, "from": origin} for name, value in used.items()}
    scope[_DEFAULTS] = {**scope.get(_DEFAULTS, {}), **told}


def defaults_of(scope: Scope) -> Mapping[str, Mapping[str, object]]:
    """What a request got that does not say it: its `value`, and the table that it is `from`."""
    found: Mapping[str, Mapping[str, object]] = scope.get(_DEFAULTS, {})
    return found


def note_record(scope: Scope, record: RequestRecord) -> None:
    """Note the record of the generation that a request began."""
    scope[_RECORD] = record


def generation_line(scope: Scope) -> GenerationLine | None:
    """What the log says of the generation that a request made; None = it made none."""
    record: RequestRecord | None = scope.get(_RECORD)
    if record is None:
        return None
    return GenerationLine(
        model=record.model_id,
        node=record.node or record.relay,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        tokens=record.completion_tokens,
        first_token_s=record.first_token_s,
        prefill_s=record.prefill_s,
    )


def _task_header(choice: TaskChoice | None) -> str:
    if choice is None:
        return ""
    best = choice.ranked[0]
    said = (
        f"{choice.task}; model={best.model_id}; step={best.step}; loaded={best.is_loaded:d}; "
        f"tokens_per_second={best.tokens_per_second:.1f}; reason={choice.reason}"
    )
    return said.encode("unicode_escape").decode()  # a folder's name may be any text


def receipt_headers(scope: Scope) -> dict[str, str]:
    """The headers of an answer."""
    told = {
        "x-kakeya-moved": ", ".join(moved_of(scope)),
        "x-kakeya-warning": scope.get(_LEFT_OUT, ""),
        "x-kakeya-ignored": ", ".join(
            quote(name, safe="", errors="replace") for name in scope.get(_IGNORED, ())
        ),
        "x-kakeya-task": _task_header(task_of(scope)),
    }
    return {name: said[:_MOST_CHARS] for name, said in told.items() if said}
