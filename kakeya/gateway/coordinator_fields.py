"""What a body of any dialect says to the node that orders requests, and not to the model.

x_priority     urgent, high, normal, low, batch; wins over a dialect's own parameters, and over the
               headers x-priority and x-kakeya-priority, which count where a body says nothing
x_client_id    the caller's name, for fair shares; of a caller that has one, by its key or the
               header x-kakeya-client, the user that it asks for
x_stay_warm    seconds for which the model stays warm after the request, at least
x_cooldown     seconds after the request in which further generations of its client are refused,
               where it has a name

Other fields that begin with x_ are left out, and named by x-kakeya-ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Receive, Scope

from kakeya.backends.request import Request
from kakeya.dispatch.clients import MOST_COOLDOWN_S
from kakeya.dispatch.profiles import ClientProfile
from kakeya.dispatch.tasks import TaskSpec
from kakeya.gateway.http.body import Parsed
from kakeya.gateway.http.connection import HttpLimits, read_request
from kakeya.gateway.http.fields import number_field, table, text_field
from kakeya.gateway.http.receipt import note_defaults, note_ignored
from kakeya.gateway.openai.share_params import name_of, priority_field
from kakeya.gateway.prompts import with_thinking
from kakeya.generation.caller import PRIORITY, priority_of
from kakeya.generation.request import GenerationPriority
from kakeya.wire.security import CLIENT_NAME

_FIRST = "x_"
_CLIENT_ID = text_field("x_client_id")
_PRIORITY = priority_field("x_priority")
MOST_WARM_S = 3600.0
_STAY_WARM = number_field("x_stay_warm", 0, MOST_WARM_S)
_COOLDOWN = number_field("x_cooldown", 0, MOST_COOLDOWN_S)
_OWN_PRIORITY = ("priority", "service_tier")
"""The parameters of dialects that say a priority."""
_PRIORITY_HEADERS = ("x-priority", PRIORITY)
COORDINATOR_FIELDS = table(_CLIENT_ID, _PRIORITY, _STAY_WARM, _COOLDOWN)


@dataclass(frozen=True, slots=True)
class CoordinatorFields:
    """The fields of one request, and the names of those that mean nothing here."""

    priority: GenerationPriority | None
    client: str
    stay_warm_s: float
    cooldown_s: float
    ignored: tuple[str, ...]
    has_own_priority: bool
    """Whether a parameter of the dialect says the priority, be it the usual one."""

    def applied(self, asked: Request, scope: Scope) -> Request:
        """A request with its fields. Raises InvalidArgument for a wrong header."""
        params = replace(asked.params, stay_warm_s=self.stay_warm_s, cooldown_s=self.cooldown_s)
        headers = Headers(scope=scope)
        if (priority := self.urgency(scope)) is not None:
            params = replace(params, priority=priority)
        if self.client and not headers.get(CLIENT_NAME):
            MutableHeaders(scope=scope)[CLIENT_NAME] = self.client
        elif self.client and not params.user:
            params = replace(params, user=self.client)
        ignored = self.ignored
        if self.cooldown_s and not headers.get(CLIENT_NAME) and not self.client:
            # Programs without a name share that of their machine.
            params, ignored = replace(params, cooldown_s=0.0), (*ignored, "x_cooldown")
        if ignored:
            note_ignored(scope, ignored)
        return replace(asked, params=params)

    def named(self, scope: Scope, *, has_priority: bool = False) -> str:
        """The caller of a request that begins no generation: its share is all that counts, and its
        priority where it has one, so the other fields are left out."""
        said = {
            "x_priority": self.priority is not None and not has_priority,
            "x_stay_warm": self.stay_warm_s,
            "x_cooldown": self.cooldown_s,
        }
        if ignored := (*self.ignored, *(name for name, is_said in said.items() if is_said)):
            note_ignored(scope, ignored)
        return Headers(scope=scope).get(CLIENT_NAME, "") or self.client

    def urgency(self, scope: Scope) -> GenerationPriority | None:
        """The priority that the fields say, or else the headers, where no parameter of the dialect
        does; None = none is said. Raises InvalidArgument for a wrong header."""
        if self.priority is not None or self.has_own_priority:
            return self.priority
        said = ((name, Headers(scope=scope).get(name)) for name in _PRIORITY_HEADERS)
        return next((priority_of(word, name) for name, word in said if word), None)

    def under_profile(self, asked: Request, profile: ClientProfile, scope: Scope) -> Request:
        """A request whose fields are applied, with what the profile of its client says where it
        says nothing."""
        asked, used = with_thinking(asked, profile.spec.thinking)
        priority = profile.spec.priority
        if priority is not None and not self._says_priority(scope):
            asked = replace(asked, params=replace(asked.params, priority=priority))
            used = {**used, "priority": priority.name.lower()}
        note_defaults(scope, used, f"profiles.{profile.name}")
        return asked

    def _says_priority(self, scope: Scope) -> bool:
        return self.has_own_priority or self.urgency(scope) is not None

    def under_task(self, asked: Request, task: TaskSpec, scope: Scope) -> Request:
        """A request whose fields are applied, with what its task says of it where it says
        nothing."""
        params = asked.params
        params = replace(params, stay_warm_s=max(params.stay_warm_s, task.keep_alive_s))
        if task.priority is not None and not self._says_priority(scope):
            params = replace(params, priority=task.priority)
        if params.deadline_s is None:
            params = replace(params, deadline_s=task.budget_s)
        return replace(asked, params=params)


def take_fields(
    body: Mapping[str, object],
) -> tuple[Mapping[str, object], CoordinatorFields]:
    """Part a body from the fields of the node. Raises InvalidArgument naming the field."""
    given = {name: value for name, value in body.items() if name.startswith(_FIRST)}
    fields = CoordinatorFields(
        _PRIORITY.read(given),
        _header_safe(_CLIENT_ID.read(given)),
        _STAY_WARM.read(given) or 0.0,
        _COOLDOWN.read(given) or 0.0,
        tuple(sorted(given.keys() - COORDINATOR_FIELDS.keys())),
        any(body.get(name) not in (None, "auto") for name in _OWN_PRIORITY),
    )
    return {name: value for name, value in body.items() if not name.startswith(_FIRST)}, fields


async def read_with_fields(
    scope: Scope,
    receive: Receive,
    limits: HttpLimits,
    parse: Callable[[Mapping[str, object]], Parsed],
) -> tuple[Parsed, CoordinatorFields]:
    """Read what a request asks for, and its fields. Raises as `read_request`."""

    def read(whole: Mapping[str, object]) -> tuple[Parsed, CoordinatorFields]:
        body, fields = take_fields(whole)
        return parse(body), fields

    return await read_request(scope, receive, limits, read)


def _header_safe(name: str) -> str:
    """A client's name as a header can hold it: its digest where it has other characters."""
    is_plain = name.isascii() and name.isprintable() and name == name.strip()
    return name_of(name) if is_plain else sha256(name.encode()).hexdigest()
