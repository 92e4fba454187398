"""The groups of other leaders in which this node had a rank, and those of them that were ended here
while their leader was away: its wish is refused a rank when it is back, and is gone then.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from kakeya.core.errors import Conflict
from kakeya.core.files import write_atomically
from kakeya.core.log import event

_log = logging.getLogger(__name__)
FILE = "ring-members.json"
"""In the data directory."""
MOST = 64
"""Groups, and ended wishes, that are remembered: the latest."""


class GroupEnded(Conflict):
    """A member ended the group while its leader was away."""

    code = "group_ended"


class Memberships:
    """See the module. A wish is the id that its leader gave to a group when it was brought up."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._hosted: dict[tuple[str, str], str] = {}
        """The wish by the name of the group and its leader: two may lead groups of one name."""
        self._ended: list[str] = []
        self._saving = asyncio.Lock()

    async def restore(self) -> None:
        """Read what earlier runs knew."""
        try:
            told = json.loads(await asyncio.to_thread(self._file.read_bytes))
            hosted = {(str(name), str(one)): str(wish) for name, (one, wish) in told["hosted"]}
            self._hosted, self._ended = hosted, list(map(str, told["ended"]))
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as fault:
            event(_log, "memberships not read", level=logging.WARNING, fault=repr(fault))

    def leaders(self, name: str) -> list[str]:
        """The nodes that led groups of this name, the latest first."""
        return [leader for one, leader in reversed(self._hosted) if one == name]

    def is_ended(self, wish: str) -> bool:
        """Whether a wish was ended here."""
        return wish in self._ended

    async def note(self, name: str, leader: str, wish: str) -> None:
        """Note a group in which this node has a rank; one without a wish cannot be ended here."""
        if self._hosted.get((name, leader)) == wish:
            return
        self._hosted.pop((name, leader), None)
        if not wish:  # a leader of an older build gives none
            return
        self._hosted[name, leader] = wish
        while len(self._hosted) > MOST:
            del self._hosted[next(iter(self._hosted))]
        await self._save()

    async def end(self, name: str, leader: str) -> None:
        """Refuse the latest wish for a group from now on, unless another call did or forgot it."""
        if wish := self._hosted.pop((name, leader), ""):
            self._ended = [*self._ended, wish][-MOST:]
            await self._save()

    async def forget(self, name: str, leader: str) -> None:
        """Forget a group that its leader has ended."""
        if self._hosted.pop((name, leader), None) is not None:
            await self._save()

    async def _save(self) -> None:
        """Write it down. A full disk costs a restart what is new."""
        try:
            async with self._saving:  # the latest state last
                hosted = [(name, (leader, wish)) for (name, leader), wish in self._hosted.items()]
                told = {"hosted": hosted, "ended": self._ended}
                await asyncio.to_thread(write_atomically, self._file, json.dumps(told).encode())
        except OSError as problem:
            event(_log, "memberships not saved", level=logging.WARNING, problem=problem)
