"""Prompts that the configuration declares are warm: after each load of their model, and anew where
their text is another by now, for their files or for the date that a template writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kakeya.core.errors import ConfigError, InvalidArgument, KakeyaError
from kakeya.core.units import pack_ids
from kakeya.generation.facts import ModelFacts
from kakeya.generation.manifest import Manifest
from kakeya.generation.model import ModelDirectory
from kakeya.generation.retention import BlockClass
from kakeya.prefix.names.keys import SYSTEM_PREFIX
from kakeya.prefix.seam import AT_HAND_S, WarmReport, facts_at_hand
from kakeya.prefix.warm.declared_prompts import DeclaredPrompt
from kakeya.prefix.warm.prewarm import Prewarmer
from kakeya.prefix.warm.warming import Kind, Prefix
from kakeya.text.changing_lines import ChangingLine, move_changing_lines
from kakeya.text.chat import Chat
from kakeya.text.prefix import encode_ahead
from kakeya.text.prompt import most_prompt_tokens
from kakeya.text.text import Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredText:
    """A declared prompt as it was rendered: marked tokens, and their digest with the model."""

    model_id: str
    digest: bytes
    tokens: Sequence[int] = field(compare=False, repr=False)

    @classmethod
    def of(cls, model_id: str, tokens: Sequence[int]) -> DeclaredText:
        """The text of a model with these tokens."""
        digest = hashlib.sha256(model_id.encode() + b"\0" + pack_ids(tokens)).digest()
        return cls(model_id=model_id, digest=digest, tokens=array("I", tokens))


class DeclaredPrompts:
    """See the module."""

    def __init__(
        self,
        prompts: Sequence[DeclaredPrompt],
        models: ModelDirectory,
        texts: Texts,
        prewarmer: Prewarmer,
        *,
        moved_kinds: Collection[ChangingLine],
    ) -> None:
        self._prompts = prompts
        self._models = models
        self._texts = texts
        self._prewarmer = prewarmer
        self._moved_kinds = moved_kinds
        self._rendered: dict[int, DeclaredText | None] = {}
        """The last rendered texts; None = they could not be rendered."""
        self.changed: Callable[[], None] = lambda: None
        """Is called after a text was rendered that is another one."""

    @property
    def count(self) -> int:
        """How many prompts are declared."""
        return len(self._prompts)

    @property
    def texts(self) -> tuple[DeclaredText, ...]:
        """The texts as they were rendered last; those that never were are left out."""
        return tuple(text for text in self._rendered.values() if text is not None)

    def key_of(self, digest: bytes) -> str:
        """The key of the declared prompt with this text; "" = none has it."""
        found = (i for i, text in self._rendered.items() if text and text.digest == digest)
        return next((_key(index) for index in found), "")

    def check(self) -> None:
        """Read all files. Blocks. Raises ConfigError for files or a model that cannot be used."""
        served = {model.model_id for model in self._models.verifiers()}
        for index, prompt in enumerate(self._prompts):
            named = self._named(prompt)
            if named not in served and named.rpartition(":")[0] not in served:
                known = ", ".join(sorted(served)) or "none"
                raise ConfigError(
                    f"precache.prompts: prompt {index} is for model {named!r}, which this node "
                    f"does not decode with; it has {known}"
                )
            prompt.read()

    def warm(self, model_id: str) -> None:
        """Warm the prompts of a model, and of its adapters."""
        for index, prompt in enumerate(self._prompts):
            named = self._named(prompt)
            if model_id in (named, named.rpartition(":")[0]):
                self._submit(index, prompt)

    async def renew(self) -> None:
        """Warm prompts anew that have another text by now."""
        for index, prompt in enumerate(self._prompts):
            # One that cannot be read is perhaps being written; its next load tells.
            with contextlib.suppress(KakeyaError):
                if index in self._rendered and await self._is_another(index, prompt):
                    self._submit(index, prompt)

    def _submit(self, index: int, prompt: DeclaredPrompt) -> None:
        prefix = Prefix(
            key=_key(index),
            model_id=self._named(prompt),
            tokens=functools.partial(self._tokens, index, prompt),
            block_class=BlockClass.SYSTEM,
            is_kept=True,
        )
        self._prewarmer.submit(prefix, Kind.KEPT)

    async def _tokens(self, index: int, prompt: DeclaredPrompt) -> Sequence[int]:
        """Render a declared prompt as it stands on disk now."""
        before = self._rendered.get(index)
        self._rendered[index] = None
        model = self._models.get(self._named(prompt))
        tokens = await self._render(prompt, await model.ready(AT_HAND_S), model.manifest)
        text = DeclaredText.of(self._named(prompt), tokens)
        self._rendered[index] = text
        if text != before:
            self.changed()
        return tokens

    async def _render(
        self, prompt: DeclaredPrompt, facts: ModelFacts, manifest: Manifest
    ) -> Sequence[int]:
        said = await asyncio.to_thread(prompt.read)
        text = await self._texts.get(facts.model_path, manifest.template)
        messages = tuple({"role": role, "content": content} for role, content in said.messages)
        at_most = most_prompt_tokens(facts)
        chat = Chat(messages=messages, tools=tuple(said.tools), kwargs=manifest.template_args)
        chat, _ = move_changing_lines(chat, self._moved_kinds, is_prefix=True)
        tokens = await encode_ahead(text, chat, at_most=at_most)
        if len(tokens) > at_most:
            raise InvalidArgument(
                f"the declared prompt has {len(tokens)} tokens; {facts.model_id} takes {at_most}"
            )
        return tokens

    def _named(self, prompt: DeclaredPrompt) -> str:
        verifiers = self._models.verifiers()
        return prompt.model or (verifiers[0].model_id if verifiers else "")

    async def _is_another(self, index: int, prompt: DeclaredPrompt) -> bool:
        """Whether a declared prompt has another text by now; False for a model that is not loaded:
        its load warms anew."""
        model = self._models.get(self._named(prompt))
        facts = await facts_at_hand(model)
        if isinstance(facts, WarmReport):
            return False
        tokens = await self._render(prompt, facts, model.manifest)
        return DeclaredText.of(self._named(prompt), tokens) != self._rendered[index]


def _key(index: int) -> str:
    return f"{SYSTEM_PREFIX}/{index}"
