"""Limits of pace: so many actions in an interval, and a pause between two for one node."""

from __future__ import annotations


class Allowance:
    """At most `limit` actions in an interval."""

    def __init__(self, limit: int, interval_s: float) -> None:
        self.limit, self.interval_s = limit, interval_s
        self._taken, self._since_mono = 0, float("-inf")

    def take(self, mono: float) -> bool:
        """Take one action, if one is left."""
        if mono - self._since_mono >= self.interval_s:
            self._taken, self._since_mono = 0, mono
        if self._taken >= self.limit:
            return False
        self._taken += 1
        return True

    def fine(self, count: int) -> None:
        """Take `count` more actions, left or not, for an action in vain."""
        self._taken += count


class Shares:
    """At most `limit` actions in an interval, a share of them for one name; "" = no name."""

    def __init__(self, limit: int, interval_s: float, *, share: int) -> None:
        self.limit, self.interval_s, self._share = limit, interval_s, share
        self._all = Allowance(limit, interval_s)
        self._each: dict[str, Allowance] = {}
        self._since_mono = float("-inf")

    def take(self, name: str, mono: float) -> bool:
        """Take one action for a name, if its share and the whole limit allow it."""
        if mono - self._since_mono >= self.interval_s:
            self._each, self._since_mono = {}, mono
        return (not name or self._of(name).take(mono)) and self._all.take(mono)

    def fine(self, name: str, count: int) -> None:
        """Take `count` more actions, left or not, for an action in vain."""
        self._all.fine(count)
        if name:
            self._of(name).fine(count)

    def _of(self, name: str) -> Allowance:
        return self._each.setdefault(name, Allowance(self._share, self.interval_s))


class Moments:
    """The time of the last action for each node; old entries are forgotten."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._done_mono: dict[str, float] = {}

    def is_due(self, node_id: str, mono: float, spacing_s: float) -> bool:
        """Whether the last action for a node was long enough ago."""
        done_mono = self._done_mono.get(node_id)
        return done_mono is None or mono - done_mono >= spacing_s

    def note(self, node_id: str, mono: float) -> None:
        """Note an action for a node."""
        oldest_mono = mono - self._keep_s
        self._done_mono = {n: at for n, at in self._done_mono.items() if at > oldest_mono}
        self._done_mono[node_id] = mono
