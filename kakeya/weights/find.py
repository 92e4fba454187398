"""What a pull is of: the peers are asked for the model of a name, until one tells its manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound
from kakeya.weights.choice import ChosenModel, choose, sources_of
from kakeya.weights.manifest import WeightsManifest
from kakeya.weights.peers import WeightsOffer, WeightsPeer, WeightsPeers

SILENT_S = 10.0
"""A peer that does not answer may have the model: it is asked again for so long."""
LOOK_S = 2.0
_MOST_ASKED = 32
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+\Z", re.ASCII)


class ModelSearch:
    """The search for one model; `from_node` names the only peer to ask, "" = all. `tell` hears what
    is waited for."""

    def __init__(
        self,
        name: str,
        from_node: str,
        peers: WeightsPeers,
        clock: Clock,
        tell: Callable[[str], None],
        *,
        may_use_hub: bool = True,
    ) -> None:
        self._name = name
        self._from = from_node
        self._peers = peers
        self._clock = clock
        self._tell = tell
        self._is_of_hub = may_use_hub and not from_node and bool(_HUB_NAME.match(name))

    def asked(self) -> tuple[WeightsPeer, ...]:
        """The peers that are asked. Raises NotFound where the named one is not there."""
        if self._from:
            return (self._peers.named(self._from),)
        return self._peers.all()[:_MOST_ASKED]

    async def find(
        self, *, may_be_ahead: bool = True
    ) -> tuple[WeightsManifest, WeightsPeer] | None:
        """The manifest of the model that is meant, and the peer that told it; None = no peer has
        it, but the hub may. A peer that downloads it from there is waited for, unless this node is
        about to, too, and goes first: not `may_be_ahead`, the peer has not begun, and the own id
        is lower.

        Raises NotFound, and InvalidArgument for unlike models of the name.
        """
        silent_until = self._clock.mono() + SILENT_S
        while True:
            offers, silent = await self._peers.offers(self.asked())
            chosen = choose(self._name, offers)
            found, why = await self._manifest(chosen, offers)
            if found is not None:
                return found
            own_id = self._peers.own_id
            ahead = [
                peer
                for peer, is_begun in chosen.coming.items()
                if may_be_ahead or is_begun or peer.node_id < own_id
            ]
            if ahead:
                at = ", ".join(peer.label for peer in ahead)
                self._tell(f"{at} downloads it from the hub")
            elif silent and may_be_ahead and self._clock.mono() < silent_until:
                self._tell(f"{', '.join(silent)} does not answer")
            else:
                break
            await self._clock.sleep(LOOK_S)
        self._tell("")
        if self._is_of_hub and not why:
            return None
        why = why or [f"{label} did not answer: {one}" for label, one in silent.items()]
        raise NotFound(
            f"no peer has {self._name[:80]!r}" + "".join(f"; {one}" for one in why) + "; "
            "`kakeya models list` shows what there is"
        )

    async def _manifest(
        self, chosen: ChosenModel, offers: Mapping[WeightsPeer, Sequence[WeightsOffer]]
    ) -> tuple[tuple[WeightsManifest, WeightsPeer] | None, list[str]]:
        """The manifest of a chosen model, or why no peer told it."""
        why = []
        sources = sources_of(chosen.digest, offers) if chosen.digest else {}
        for peer in sorted(sources, key=lambda peer: not sources[peer]) or chosen.unhashed:
            self._tell("" if chosen.digest else f"{peer.label} reads its files")
            try:
                told = await self._peers.manifest(peer, self._name, chosen.digest)
            except KakeyaError as failure:
                why.append(failure.message)
            else:
                self._tell("")
                return (told, peer), []
        return None, why
