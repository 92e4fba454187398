"""One process of a ring group, from the launch to its end.

launch     mlx.launch starts the same command for each rank, and the ring connects them
join       rank 0 listens for control connections; a sum over the ring tells where
load       each rank its share
check      all ranks at once; equal weights and equal versions first
serve      rank 0; the others repeat its calls
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import NoReturn, cast

import mlx.core as mx

from kakeya.core.errors import ConfigError, KakeyaError
from kakeya.core.log import event
from kakeya.engine.ring.follower import RingFollower
from kakeya.engine.ring.leader import RingLeader
from kakeya.engine.ring.progress import LOAD_STUCK_S
from kakeya.fleet.placement.ring import RingEnvironment, RingSplit
from kakeya.generation.progress import LoadPhase, LoadTeller
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.model import MlxModel
from kakeya.mlx.ring.follower import FollowerModel
from kakeya.mlx.ring.leader import RingModel
from kakeya.mlx.ring.share import RingShare

_log = logging.getLogger(__name__)
_TOKEN_BYTES = 16
Lost = Callable[[str], None]


class RingRank:
    """This process as a rank. `lost` ends it, from any thread."""

    def __init__(self, ring: RingEnvironment, options: Namespace, lost: Lost) -> None:
        """Join the ring and the control connections. Blocks until all ranks did.

        Raises ConfigError, PeerUnavailable.
        """
        self._options = options
        try:
            group = mx.distributed.init(strict=True, backend=ring.backend)
        except RuntimeError as failure:
            raise ConfigError(f"the ring cannot be joined: {failure}") from failure
        self._share = share = RingShare(group, RingSplit(options.ring), options.layers)
        event(
            _log,
            "in the ring",
            backend=ring.backend,
            rank=share.rank,
            ranks=share.size,
            split=share.split,
            pid=os.getpid(),
        )
        self._leader: RingLeader | None = None
        self._follower: RingFollower | None = None
        token = secrets.token_hex(_TOKEN_BYTES)
        if self._share.rank == 0:
            self._leader = RingLeader(ring.leader_host, self._share.size, token, lost)
            _told(self._share, [self._leader.port, *bytes.fromhex(token)])
            self._leader.gather()
        else:
            port, *secret = _told(self._share, [0] * (1 + _TOKEN_BYTES))
            rank, token = self._share.rank, bytes(secret).hex()
            self._follower = RingFollower.connect(ring.leader_host, port, rank, token, lost)

    @property
    def leads(self) -> bool:
        """Whether it is rank 0."""
        return self._leader is not None

    def lead(self, fast: bool, told: LoadTeller) -> RingModel:
        """Load at rank 0. Raises ConfigError where a rank cannot, or holds other weights."""
        leader = self._leader
        if leader is None:
            raise ConfigError(f"rank {self._share.rank} of a ring serves nothing")
        began_s = time.perf_counter()
        loaded = self._load(told)
        own = _facts(loaded)
        for rank, facts in enumerate(leader.facts(), start=1):
            _compare(rank, facts, own)
        told(LoadPhase.CHECK)
        leader.tell(("check",), limit_s=LOAD_STUCK_S)
        with leader.working(limit_s=LOAD_STUCK_S):
            return RingModel(loaded, time.perf_counter() - began_s, fast, leader)

    def follow(self, fast: bool, told: LoadTeller) -> NoReturn:
        """Load at another rank, and repeat calls until `lost` ends the process."""
        follower = self._follower
        if follower is None:
            raise ConfigError("rank 0 of a ring follows no other")
        try:
            loaded = self._load(told)
            follower.ready(_facts(loaded))
            calls = follower.commands()
            next(calls)  # the check
            own = MlxModel(loaded, 0.0, fast)
            own.limit(self._options.memory_bytes or None, None)
            model = FollowerModel(own)
            while True:
                model.repeat(next(calls))
        except Exception as failure:
            said = failure.message if isinstance(failure, KakeyaError) else repr(failure)
            follower.failed(said)
            raise

    def _load(self, told: LoadTeller) -> LoadedModel:
        options = self._options
        return load(
            options.model,
            options.model_id,
            blas_threads=options.blas_threads,
            told=told,
            ring=self._share,
        )


def _told(share: RingShare, values: list[int]) -> list[int]:
    """Rank 0's values, at all ranks."""
    found = share.agreed(mx.array(values, dtype=mx.int32))
    return cast("list[int]", found.tolist())


def _facts(loaded: LoadedModel) -> dict[str, object]:
    return {
        "weights": loaded.fingerprint,
        "vocabulary": loaded.vocabulary_digest,
        "dtype": loaded.dtype,
        "device": str(mx.default_device().type),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "kakeya": version("kakeya"),
    }


def _compare(rank: int, facts: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Raises ConfigError where a rank would compute something else than rank 0."""
    for name, value in own.items():
        if facts.get(name) != value:
            raise ConfigError(
                f"rank {rank} has {name} {facts.get(name)!r}, and rank 0 {value!r}: "
                "all ranks of a group need the same"
            )
