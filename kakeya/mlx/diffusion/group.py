"""Drafts between two processes of one mlx.distributed group: tokens and hidden states go to the
drafter, and the draft comes back, by send and recv.

    verifier's rank    HEADER, then the tokens and the states that it announces
    drafter's rank     [count, tokens ...], as long as the size that was asked for

States go as they are, float16, once for each committed token. Both ranks are programs of this
package, at the same version, on machines that trust each other: that is what a group means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import mlx.core as mx
import numpy as np

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.draft.proposer import Draft, ProposerStats
from kakeya.decoding.draft.states import VALUE_BYTES, HiddenStates
from kakeya.mlx.kept_prefix import shared_head

_HEADER = 7
"""int32: size (0 = the end), steps, tokens kept, tokens that follow, first state, rows, width."""


class StatesDrafter(Protocol):
    """What drafts at the other rank."""

    def draft(
        self,
        prefix: Sequence[int],
        size: int,
        seed: int | None,
        temperature: float,
        steps: int,
        states: HiddenStates | None,
    ) -> Draft:
        """Draft at most `size` tokens after `prefix`."""
        ...


class GroupProposer:
    """Implements `Proposer` at the verifier's rank; belongs to the thread that made it."""

    def __init__(
        self,
        name: str,
        group: mx.distributed.Group,
        rank: int,
        states: Callable[[int, int], HiddenStates | None] = lambda first, end: None,
    ) -> None:
        """`rank` is that of the drafter; `states` gives those of the tokens from one to another."""
        self.name = name
        self.stats = ProposerStats()
        self.sent_bytes = 0
        self._group, self._rank = group, rank
        self._states = states
        self._told: list[int] = []
        self._stated = 0

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        """Draft at most `size` tokens, greedily. Raises InvalidArgument."""
        if not prefix or size < 1 or num_steps < 1:
            raise InvalidArgument(
                f"a prefix of {len(prefix)} tokens, block size {size}, num_steps {num_steps}: each "
                "must be at least 1"
            )
        self.stats.calls += 1
        wanted = list(prefix)
        keep = shared_head(self._told, wanted)
        self._stated = min(self._stated, keep)
        states = self._states(self._stated, len(wanted) - 1)
        rows = width = first = 0
        if states is not None:
            first, rows, width = states.first, states.end - states.first, states.width
            self._stated = states.end
        self._send(np.array([size, num_steps, keep, len(wanted) - keep, first, rows, width], "i4"))
        if wanted[keep:]:
            self._send(np.array(wanted[keep:], "i4"))
        if states is not None:
            self._send(np.frombuffer(states.data, "<f2").reshape(rows, width))
        self._told = wanted
        count, passes, peak, *tokens = _received((3 + size,), mx.int32, self._rank, self._group)
        draft = Draft(
            source=self.name,
            tokens=tuple(tokens[:count]),
            forward_passes=passes,
            diffusion_steps=passes,
            peak_activation_bytes=peak << 10,
        )
        self.stats.count(draft)
        return draft

    def close(self) -> None:
        """Let the drafter's rank end."""
        self._send(np.zeros(_HEADER, "i4"))

    def _send(self, array: np.ndarray) -> None:
        self.sent_bytes += array.nbytes
        mx.eval(mx.distributed.send(mx.array(array), self._rank, group=self._group))


def serve_group(drafter: StatesDrafter, name: str, group: mx.distributed.Group, rank: int) -> int:
    """Draft for the verifier at `rank` until it closes; returns how many drafts were made.

    `name` is the fingerprint of the drafter's weights.
    """
    tokens: list[int] = []
    states: HiddenStates | None = None
    drafts = 0
    while True:
        header = _received((_HEADER,), mx.int32, rank, group)
        size, steps, keep, more, first, rows, width = header
        if not size:
            return drafts
        tokens = tokens[:keep]
        states = states.between(0, keep) if states is not None else None
        if more:
            tokens += _received((more,), mx.int32, rank, group)
        if rows:
            array = mx.distributed.recv((rows, width), mx.float16, rank, group=group)
            data = np.array(array).astype("<f2", copy=False).tobytes()
            assert len(data) == rows * width * VALUE_BYTES
            told = HiddenStates(drafter=name, first=first, width=width, data=data)
            states = told if states is None else states.followed_by(told)
        draft = drafter.draft(tokens, size, None, 0.0, steps, states)
        drafts += 1
        found = [*draft.tokens, *([0] * (size - len(draft.tokens)))]
        peak = draft.peak_activation_bytes >> 10  # KiB: the bytes may not fit
        answer = mx.array([len(draft.tokens), draft.forward_passes, peak, *found], dtype=mx.int32)
        mx.eval(mx.distributed.send(answer, rank, group=group))


def _received(
    shape: tuple[int, ...], kind: mx.Dtype, rank: int, group: mx.distributed.Group
) -> list[int]:
    return cast("list[int]", mx.distributed.recv(shape, kind, rank, group=group).tolist())
