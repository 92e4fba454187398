"""Client profiles: what requests of some clients get where they do not say it themselves.

    [profiles.coder]
    agents = ["claude-cli/"]      by the beginning of their User-Agent, or
    clients = ["build-server"]    by name: of their API key, or the one that they give themselves
    model = "big"                 for names of models that this node does not serve
    embedder = "bge"              the same where embeddings are asked for

The first profile of the file that fits counts. What a request says wins, then its task, then the
profile, then the manifest of its model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kakeya.core.errors import ConfigError
from kakeya.core.figures import Json
from kakeya.core.settings import Several, nearest, one_of, setting, switch, text
from kakeya.dispatch.tasks import priority_word
from kakeya.generation.manifest import Thinking
from kakeya.generation.request import GenerationPriority


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """One profile, as the owner of the node declares it."""

    clients: tuple[str, ...] = setting("names of its clients", Several(text), ())
    agents: tuple[str, ...] = setting(
        "what the User-Agent of its clients begins with", Several(text), ()
    )
    model: str = setting(
        "the model or task for names of models that this node does not serve", text, ""
    )
    embedder: str = setting(
        "the embedder for names of embedders that this node does not serve", text, ""
    )
    priority: GenerationPriority | None = setting(
        "the priority of requests that ask for none", priority_word, None
    )
    thinking: Thinking = setting(
        "whether the model thinks where a request does not say; auto: as its manifest says",
        one_of("on", "off", "auto"),
        "auto",
    )
    resumable: bool = setting(
        "whether other nodes hold copies of its answers in memory, to go on with them", switch, True
    )

    def fits(self, client: str, agent: str) -> bool:
        """Whether a client, "" = it has no name, is one of its own."""
        return client in self.clients or any(agent.startswith(one) for one in self.agents)

    def describe(self) -> Json:
        """The profile as JSON."""
        return {
            "clients": list(self.clients),
            "agents": list(self.agents),
            "model": self.model or None,
            "embedder": self.embedder or None,
            "priority": self.priority and self.priority.name.lower(),
            "thinking": None if self.thinking == "auto" else self.thinking,
            "resumable": self.resumable,
        }


class ClientProfile(NamedTuple):
    """The profile of a request's client; one without a name says nothing."""

    name: str = ""
    spec: ProfileSpec = ProfileSpec()


NO_PROFILE = ClientProfile()


def check_profiles(
    profiles: Mapping[str, ProfileSpec],
    served: Collection[str],
    embedders: Collection[str],
    origin: str,
) -> Mapping[str, ProfileSpec]:
    """The profiles of a node that writes text by the names that it has `served`, tasks among
    them, and has these `embedders`. Raises ConfigError, which begins with the `origin`."""
    taken: dict[str, str] = {}
    for name, spec in profiles.items():
        where = f"{origin}: [profiles.{name}]"
        if not spec.clients and not spec.agents:
            raise ConfigError(f"{where} is of no client; give clients or agents")
        for one in (*spec.clients, *spec.agents):
            if (other := taken.setdefault(one, name)) != name:
                raise ConfigError(f"{where}: {one} stands in [profiles.{other}] too")
        if spec.embedder not in ("", *embedders):
            raise ConfigError(
                f"{where}: {spec.embedder} is none of the embedders of this node, "
                f"{', '.join(embedders) or 'which are none'}{nearest(spec.embedder, embedders)}"
            )
        if spec.model in ("", *served) or spec.model.rpartition(":")[0] in served:
            continue
        raise ConfigError(
            f"{where}: {spec.model} is none of the models and tasks that this node writes text "
            f"with, {', '.join(served) or 'which are none'}{nearest(spec.model, served)}"
        )
    return profiles
