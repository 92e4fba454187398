"""The clients of a node: what each has asked for, and how long it is told to stay away.

One client is the name of a caller and that of a user within it, as fair shares count them. It is
remembered while it has a request here, and for `FORGET_S` after its last one; beyond `MOST_CLIENTS`
the idle one that was away for longest is forgotten first, and its cooldown with it.

Times are monotonic seconds of the injected clock. Nothing here awaits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kakeya.core.errors import Refused
from kakeya.core.figures import Figure, Json, gauge
from kakeya.generation.waiting import RequestWait, WaitTeller

MOST_CLIENTS = 1024
FORGET_S = 3600.0
ID_CHARS = 24
"""At the end of a request's id: the same with any prefix."""
MOST_COOLDOWN_S = 600.0
"""The longest cooldown; shorter than `FORGET_S`, so that none is forgotten before its end."""


class CoolingDown(Refused):
    """The client asked for a pause after an earlier request, and it is not over."""

    code = "cooling_down"


@dataclass(slots=True)
class _Client:
    requests: int = 0
    refused: int = 0
    waiting: int = 0
    running: int = 0
    used_mono: float = 0.0
    cooldown_mono: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLabel:
    """What is told of a request while it is here; `wait` tells for what it waits."""

    request_id: str
    model_id: str
    priority: str
    wait: WaitTeller


class ClientRequest:
    """One request of a client, which waits until its answer begins."""

    def __init__(
        self, client: _Client, cooldown_s: float, label: RequestLabel | None, now: float
    ) -> None:
        self._client = client
        self.began_mono = now
        self.label = label
        self.cooldown_s = cooldown_s
        """Seconds of cooldown after it, if its answer began."""
        self.has_begun = False
        client.requests += 1
        client.waiting += 1

    def begin(self) -> None:
        """Note that its answer begins. Later calls do nothing."""
        if not self.has_begun:
            self.has_begun = True
            self._client.waiting -= 1
            self._client.running += 1

    @property
    def wait(self) -> RequestWait | None:
        """For what it waits; None = its answer has begun, or nothing is told of it."""
        return None if self.has_begun or self.label is None else self.label.wait.ask()

    def as_json(self, now: float) -> Json:
        """For status and `kakeya explain`."""
        label = self.label
        if label is None:
            return {}
        wait = self.wait
        return {
            "id": label.request_id,
            "model": label.model_id,
            "priority": label.priority,
            "state": "answering" if self.has_begun else "waiting",
            "seconds": round(now - self.began_mono, 1),
            "waits_for": wait and wait.as_json(),
        }

    def end(self, now: float) -> None:
        """Note that it has ended."""
        client = self._client
        client.used_mono = now
        if not self.has_begun:
            client.waiting -= 1
            return
        client.running -= 1
        if self.cooldown_s:
            client.cooldown_mono = max(client.cooldown_mono, now + self.cooldown_s)


class Clients:
    """The registry: the one owner of what is known of clients."""

    def __init__(self, mono: Callable[[], float]) -> None:
        self._mono = mono
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()
        """In the order of their last requests, the oldest first."""
        self._requests: set[ClientRequest] = set()
        self._inside: dict[str, tuple[str, str, ClientRequest]] = {}
        """The requests that are here, with client and user, by the end of their id."""

    @contextmanager
    def request(
        self,
        client: str,
        user: str = "",
        cooldown_s: float = 0.0,
        label: RequestLabel | None = None,
    ) -> Iterator[ClientRequest]:
        """Count a request for the `with`; one with a label can be looked at meanwhile. Raises
        CoolingDown while the client is to stay away."""
        now = self._mono()
        found = self._find((client, user), now)
        left_s = found.cooldown_mono - now
        if left_s > 0:
            found.refused += 1
            raise CoolingDown(
                f"{user or client} asked for a cooldown, of which {left_s:.3g} s are left; ask "
                "again then",
                retry_after_s=left_s,
            )
        request = ClientRequest(found, min(cooldown_s, MOST_COOLDOWN_S), label, now)
        self._requests.add(request)
        name = label.request_id[-ID_CHARS:] if label else ""
        if name:
            self._inside[name] = client, user, request
        try:
            yield request
        finally:
            self._inside.pop(name, None)
            self._requests.discard(request)
            request.end(self._mono())
            self._clients.move_to_end((client, user))

    def begun_by(self, mono: float) -> int:
        """How many of the requests that run or wait came at this moment or before."""
        return sum(request.began_mono <= mono for request in self._requests)

    def find(self, request_id: str) -> tuple[str, Json] | None:
        """A request that is here, by its id with any prefix: its client, and what is told of it."""
        found = self._inside.get(request_id[-ID_CHARS:])
        return None if found is None else (found[0], found[2].as_json(self._mono()))

    def wait_of(self, request_id: str) -> RequestWait | None:
        """For what a request that is here waits, by its id with any prefix; None = for nothing."""
        found = self._inside.get(request_id[-ID_CHARS:])
        return None if found is None else found[2].wait

    def waiting(self) -> Sequence[Json]:
        """The requests with a label that wait for their answer to begin, the oldest first."""
        now = self._mono()
        return [
            {"client": client, "user": user, **request.as_json(now)}
            for client, user, request in self._inside.values()
            if not request.has_begun
        ]

    def _find(self, name: tuple[str, str], now: float) -> _Client:
        found = self._clients.setdefault(name, _Client())
        found.used_mono = now
        self._clients.move_to_end(name)
        for other in tuple(self._clients):
            one = self._clients[other]
            is_past = now - one.used_mono >= FORGET_S
            if not (is_past or len(self._clients) > MOST_CLIENTS):
                break
            if one.is_idle and one is not found:
                del self._clients[other]
        return found

    def figures(self) -> Iterator[Figure]:
        """Requests by state, and the clients that cool down."""
        now, clients = self._mono(), self._clients.values()
        requests = {
            "waiting": sum(one.waiting for one in clients),
            "answering": sum(one.running for one in clients),
        }
        yield gauge("kakeya_requests{state}", "Requests that are here, of all interfaces", requests)
        cooling = sum(one.cooldown_mono > now for one in clients)
        yield gauge("kakeya_clients_cooling_down", "Clients that are told to stay away", cooling)

    def status(self) -> Sequence[Json]:
        """The clients as JSON, the last that asked first."""
        now = self._mono()
        return [
            {
                "client": client,
                "user": user,
                "requests": one.requests,
                "refused": one.refused,
                "running": one.running,
                "waiting": one.waiting,
                "idle_s": round(now - one.used_mono, 1) if one.is_idle else 0.0,
                "cooldown_s": round(max(0.0, one.cooldown_mono - now), 1),
            }
            for (client, user), one in reversed(self._clients.items())
        ]
