"""A model from the hub: downloaded by huggingface_hub in a child process, and compared with the
digests that the hub told. The library is slow to import, and a child can be ended at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from kakeya.core.errors import Denied, InvalidArgument, KakeyaError, NotFound, PeerUnavailable
from kakeya.core.process import signal_group
from kakeya.weights.found import PullRecord, write_record
from kakeya.weights.manifest import WeightsManifest
from kakeya.weights.partial import PULLS, DiskRefused, disk_bytes

_TELL_S = 0.5
_MOST_LINE_BYTES = 8 << 20
_KINDS: dict[str, type[KakeyaError]] = {
    "denied": Denied,
    "missing": NotFound,
    "unsuitable": InvalidArgument,
    "full": DiskRefused,
}


class HubDownload:
    """One download into a hidden folder of the models folder, where a later one goes on."""

    def __init__(self, name: str, models: Path) -> None:
        self.name = name
        key = hashlib.sha256(name.encode()).hexdigest()[:32]
        self.folder = models / PULLS / f"hub-{key}"
        self._sha256s: dict[str, str] = {}

    def open(self, record: PullRecord) -> None:
        """Make the folder. Blocks. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(self.folder, record)

    async def run(
        self, sized: Callable[[int], Awaitable[None]], told: Callable[[int], None]
    ) -> None:
        """Download it; `sized` hears how large it is before a byte comes, `told` how much is here.

        Raises NotFound where the hub has no such model, Denied where it does not give it,
        InvalidArgument for one that no node loads, DiskRefused, PeerUnavailable where the hub
        cannot be reached, and OSError.
        """
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kakeya.weights.hub_child", self.name, str(self.folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MOST_LINE_BYTES,
            start_new_session=True,
        )
        watch = asyncio.create_task(self._watch(told))
        said: dict[str, str] = {}
        try:
            async for line in _lines(child):
                if isinstance(files := line.get("files"), dict):
                    self._sha256s = {name: sha256 for name, (_, sha256) in files.items()}
                    await sized(sum(size for size, _ in files.values()))
                    _let_go_on(child)
                said = {key: str(line[key]) for key in ("error", "message") if key in line}
            status = await child.wait()
        finally:
            watch.cancel()
            signal_group(child.pid)
            await asyncio.shield(child.wait())
        if status or said:
            raise self._error(said)

    def check(self, manifest: WeightsManifest) -> None:
        """Remove files that are not those of the hub; raise PeerUnavailable for them. Blocks."""
        for file in manifest.files:
            told = self._sha256s.get(file.name, "")
            if told and told != file.sha256.hex():
                (self.folder / file.name).unlink()
        # An index of weights may name not all that were downloaded; the rest goes.
        missing = {name for name in self._sha256s if not (self.folder / name).is_file()}
        if missing:
            names = ", ".join(sorted(missing))
            raise PeerUnavailable(
                f"{names} of {self.name} came from the hub damaged or not at all; pull it again"
            )

    def _error(self, said: dict[str, str]) -> KakeyaError:
        kind, message = said.get("error", ""), said.get("message", "the download ended early")
        if kind in _KINDS:
            return _KINDS[kind](f"{self.name} at the hub: {message}")
        return PeerUnavailable(
            f"no peer has {self.name}, and the hub cannot be reached: {message}; connect this node "
            "to the internet, or pull on a node that has the model"
        )

    async def _watch(self, told: Callable[[int], None]) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            told(await asyncio.to_thread(disk_bytes, self.folder))


def _let_go_on(child: asyncio.subprocess.Process) -> None:
    """There is room for what the child told: it may fetch it."""
    if child.stdin is not None:
        child.stdin.write(b"\n")


async def _lines(child: asyncio.subprocess.Process) -> AsyncIterator[dict[str, object]]:
    """The JSON objects that a child writes."""
    if child.stdout is None:
        return
    async for raw in child.stdout:
        with contextlib.suppress(ValueError):
            line = json.loads(raw)
            if isinstance(line, dict):
                yield line
