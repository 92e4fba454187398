"""How far a download of Hugging Face is, told in the place of the bar that it would show."""

from __future__ import annotations

import io
from collections.abc import Callable

from huggingface_hub.utils.tqdm import tqdm

from kakeya.generation.progress import LoadPhase

Told = Callable[[LoadPhase, int, int], None]
"""Hears how far a load is: the phase, the bytes that are done, and all bytes."""
_BYTES = "B"
"""The unit of the bar that counts them; another one counts files."""


def untold(phase: LoadPhase, done_bytes: int, total_bytes: int) -> None:
    """Tell nothing."""


def progress_bar(told: Told) -> type[tqdm]:
    """The class of a bar that tells and shows nothing."""

    class DownloadBar(tqdm):
        def __init__(self, *args: object, **options: object) -> None:
            shown = {**options, "file": io.StringIO(), "disable": False}
            super().__init__(*args, **shown)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == _BYTES:
                told(LoadPhase.DOWNLOAD, int(self.n), int(self.total or 0))
            return shown

    return DownloadBar
